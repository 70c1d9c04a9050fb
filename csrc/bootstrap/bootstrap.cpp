#include "deep_ep/bootstrap.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/bootstrap/buffer_exchanges.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {

double default_timeout_s() { return timeout_in_effect(std::nullopt); }

void Bootstrap::barrier() {
  const std::byte token{};
  all_gather(std::span<const std::byte>(&token, 1));
}

void require_equal_sizes(std::span<const std::uint64_t> sizes) {
  const auto differs = std::find_if(sizes.begin(), sizes.end(), [&](std::uint64_t size) { return size != sizes[0]; });
  if (differs == sizes.end()) return;
  fail<RankMismatch>("all_gather: rank 0 brought {} bytes and rank {} brought {}; all ranks must bring the same number",
                     sizes[0], differs - sizes.begin(), *differs);
}

void require_rank(int rank, int size) {
  if (size < 1) fail<InvalidArgument>("size is {}, allowed: at least 1", size);
  if (rank < 0 || rank >= size) fail<InvalidArgument>("rank is {}, allowed: 0 to {}", rank, size - 1);
}

void agree(Bootstrap& bootstrap, std::string_view what, const std::function<void()>& step) {
  if (auto* exchanges = dynamic_cast<BufferExchanges*>(&bootstrap)) {
    try {
      step();
    } catch (const std::exception& error) {
      exchanges->tell_failure(what, error.what());
      throw;
    }
    return;
  }
  struct Verdict {
    std::uint32_t failed = 0;
    std::array<char, 508> text{};
  };
  Verdict mine;
  std::exception_ptr failure;
  try {
    step();
  } catch (const std::exception& error) {
    failure = std::current_exception();
    mine.failed = 1;
    const std::string_view text = error.what();
    std::copy_n(text.begin(), std::min(text.size(), mine.text.size() - 1), mine.text.begin());
  }
  std::vector<Verdict> verdicts;
  try {
    verdicts = all_gather_values(bootstrap, mine);
  } catch (...) {
    // The first failure is the cause; that the others could not be told is a consequence.
    if (failure) std::rethrow_exception(failure);
    throw;
  }
  if (failure) std::rethrow_exception(failure);
  for (std::size_t rank = 0; rank < verdicts.size(); ++rank) {
    if (verdicts[rank].failed != 0) {
      fail<SystemError>("{} failed on rank {}: {}", what, rank, verdicts[rank].text.data());
    }
  }
}

}  // namespace deep_ep
