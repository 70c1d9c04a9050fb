#include "csrc/rdma/verbs/devx/port_traits.hpp"

#include <memory>

#include "csrc/rdma/verbs/devx/commands.hpp"
#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/rdma/verbs/queue_pair.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs::devx {
namespace {

/// The kernel gives one to its own queue pairs: a queue pair of verbs is made and asked.
std::uint8_t counter_set(const Context& context, const PathOptions& path) {
  if (context.functions->qp_query == nullptr) throw SystemError("libmlx5 has no mlx5dv_devx_qp_query");
  const QueuePair pair(std::make_shared<CompletionQueue>(context.device, 1), {.send_depth = 1, .inline_bytes = 0},
                       path);
  const Mailbox command = query_queue_pair_command(pair.number());
  Mailbox answer(layout::command::context_bits);
  const int error =
      context.functions->qp_query(pair.get(), command.data(), command.size(), answer.data(), answer.size());
  if (error != 0 || answer.get(layout::answer::status) != 0) {
    fail<SystemError>("mlx5dv_devx_qp_query: {}, syndrome {:#x}", errno_text(error),
                      answer.get(layout::answer::syndrome));
  }
  return static_cast<std::uint8_t>(answer.get(within(layout::queue_pair::context, layout::qpc::counter_set_id)));
}

std::uint8_t bonded_ports(const Context& context) {
  const Mailbox lag = context.run("QUERY_LAG", query_lag_command(), layout::query_lag::bits);
  const bool by_queue = lag.get(layout::query_lag::lag_state) != 0 && lag.get(layout::query_lag::port_select_mode) == 0;
  if (!by_queue) return 0;
  const Mailbox general = context.run("QUERY_HCA_CAP", query_capabilities_command(layout::cmd_hca_cap::op_mod),
                                      layout::answer::capability_bits);
  return static_cast<std::uint8_t>(general.get(within(layout::answer::capability, layout::cmd_hca_cap::num_lag_ports)));
}

}  // namespace

PortTraits port_traits(const Context& context, const PathOptions& path) {
  PortTraits traits;
  try {
    traits.counter_set = counter_set(context, path);
  } catch (const Error& error) {
    log::info("rdma: {}: losses are not counted, because: {}", context.device->name(), error.what());
  }
  try {
    traits.bonded_ports = bonded_ports(context);
  } catch (const Error& error) {
    log::info("rdma: {}: taken for a device without bonded ports, because: {}", context.device->name(), error.what());
  }
  return traits;
}

}  // namespace deep_ep::rdma::verbs::devx
