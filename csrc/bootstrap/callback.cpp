// Ranks that already have an all-gather: a framework's process group, a store, a pipe.
#include <cstring>

#include "csrc/bootstrap/agreement.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {
namespace {

class CallbackBootstrap final : public Bootstrap {
 public:
  CallbackBootstrap(int rank, int size, AllGatherFunction all_gather)
      : rank_(rank), size_(size), all_gather_(std::move(all_gather)) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  std::vector<std::byte> all_gather(std::span<const std::byte> mine) override {
    // Sizes first: given unequal ones, most transports corrupt memory or hang instead of reporting it.
    const std::uint64_t bytes = mine.size();
    std::vector<std::uint64_t> sizes(static_cast<std::size_t>(size_));
    all_gather_(std::as_bytes(std::span(&bytes, 1)), std::as_writable_bytes(std::span(sizes)));
    require_equal_sizes(sizes);
    std::vector<std::byte> all(mine.size() * sizes.size());
    if (!mine.empty()) all_gather_(mine, all);
    return all;
  }

 private:
  int rank_;
  int size_;
  AllGatherFunction all_gather_;
};

}  // namespace

std::shared_ptr<Bootstrap> make_callback_bootstrap(int rank, int size, AllGatherFunction all_gather) {
  require_rank(rank, size);
  if (!all_gather) throw InvalidArgument("all_gather is an empty function; a callback bootstrap needs one");
  return std::make_shared<CallbackBootstrap>(rank, size, std::move(all_gather));
}

}  // namespace deep_ep
