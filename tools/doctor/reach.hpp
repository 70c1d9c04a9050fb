// Whether a name resolves and a port answers, within a bounded time.
#pragma once

#include <cstdint>
#include <string>

namespace deep_ep::tools {

struct Reach {
  enum class Outcome : std::uint8_t {
    reached,
    refused,       ///< the host answers, nobody listens
    silent,        ///< no answer in time
    unknown_name,  ///< or not resolved in time
  };
  Outcome outcome = Outcome::unknown_name;
  std::string address;  ///< the first that the name stands for
  std::string problem;  ///< of the name
};
Reach try_to_reach(const std::string& host, const std::string& port, double seconds);

}  // namespace deep_ep::tools
