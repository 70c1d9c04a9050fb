#include "deep_ep/bootstrap.hpp"

#include <cxxabi.h>

#include <algorithm>
#include <array>
#include <exception>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"

namespace deep_ep {

double default_timeout_s() { return timeout_in_effect(std::nullopt); }

void Bootstrap::barrier() {
  const std::byte token{};
  all_gather(std::span<const std::byte>(&token, 1));
}

void require_rank(int rank, int size) {
  if (size < 1) fail<InvalidArgument>("size is {}, allowed: at least 1", size);
  if (rank < 0 || rank >= size) fail<InvalidArgument>("rank is {}, allowed: 0 to {}", rank, size - 1);
}

std::optional<FirstFailure> first_failure(Bootstrap& bootstrap, const std::function<void()>& step) {
  std::array<char, 600> why{};
  try {
    step();
  } catch (const std::exception& error) {
    const std::string text = *error.what() != '\0' ? error.what() : "no reason is given";
    text.copy(why.data(), why.size() - 1);
  }
  const auto all = all_gather_values(bootstrap, why);
  const auto failed = std::ranges::find_if(all, [](const auto& one) { return one[0] != '\0'; });
  if (failed == all.end()) return std::nullopt;
  return FirstFailure{failed - all.begin(), failed->data()};
}

// Ranks that already have an all-gather: a framework's process group, a store, a pipe.
namespace {

class CallbackBootstrap final : public Bootstrap {
 public:
  CallbackBootstrap(int rank, int size, AllGatherFunction all_gather)
      : rank_(rank), size_(size), all_gather_(std::move(all_gather)) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  std::vector<std::byte> all_gather(std::span<const std::byte> mine) override {
    std::vector<std::byte> all(mine.size() * static_cast<std::size_t>(size_));
    if (mine.empty()) return all;
    try {
      all_gather_(mine, all);
    } catch (const std::exception&) {
      throw;
    } catch (const abi::__forced_unwind&) {  // the thread is being cancelled
      throw;
    } catch (...) {
      throw SystemError(
          "all_gather must throw a std::exception, got an object of another class: see the program's function");
    }
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
