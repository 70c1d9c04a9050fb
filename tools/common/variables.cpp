#include "tools/common/variables.hpp"

#include "csrc/bootstrap/interfaces.hpp"
#include "csrc/rdma/discovery/settings.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/support/logging.hpp"

namespace deep_ep::tools {

void check_environment() {
  environment::Reader reader;
  for (const environment::Variable& variable : environment::variables()) reader.value(variable.name());
  // Texts, which those who read them judge.
  read_socket_choice();
  rdma::read_settings();
  for (const environment::Unknown& unknown : environment::unknown_of(environment::names_of_process())) {
    log::warn("{} is set, but there is no such variable: did you mean {}?", unknown.name, unknown.nearest);
  }
}

}  // namespace deep_ep::tools
