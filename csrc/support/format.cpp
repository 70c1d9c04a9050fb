#include "csrc/support/format.hpp"

#include <bit>
#include <cmath>
#include <system_error>

namespace deep_ep {

std::string format_bytes(std::uint64_t bytes) {
  const int power = (static_cast<int>(std::bit_width(bytes)) - 1) / 10;  // of 1024
  if (power <= 0) return fmt::format("{} bytes", bytes);
  return fmt::format("{:.2f} {}iB", std::ldexp(static_cast<double>(bytes), -10 * power), "KMGTPE"[power - 1]);
}

std::string format_ranks(std::span<const int> ranks) {
  if (ranks.empty()) return "nobody";
  if (ranks.size() == 1) return fmt::format("rank {}", ranks[0]);
  return fmt::format("ranks {} and {}", fmt::join(ranks.first(ranks.size() - 1), ", "), ranks.back());
}

std::string errno_text(int error) {
  return fmt::format("{} (errno {})", std::generic_category().message(error), error);
}

}  // namespace deep_ep
