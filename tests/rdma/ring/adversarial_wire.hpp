// A wire that does whatever an RDMA device is allowed to do, at random but repeatably: reads local bytes late, places
// bytes in any order, delays completions and reports them in bunches.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <random>
#include <vector>

#include "csrc/rdma/ring/wire.hpp"

namespace deep_ep::test {

class AdversarialWire final : public rdma::Wire {
 public:
  explicit AdversarialWire(std::uint64_t seed) : random_(seed) {}

  void add_memory(std::uint32_t key, void* base) { regions_[key] = static_cast<std::byte*>(base); }
  void add_queue_pair(std::uint32_t number) { pairs_[number]; }

  /// Operation `id` of this queue pair will fail, whatever it is.
  void fail_at(std::uint32_t queue_pair, std::uint64_t id, rdma::Syndrome syndrome, std::uint8_t vendor = 0) {
    pairs_[queue_pair].planted = {{0, id, syndrome, vendor}};
  }
  /// From now on this queue pair executes and tells nothing; or, with `silent` false, goes on.
  void silence(std::uint32_t queue_pair, bool silent = true) { pairs_[queue_pair].silent = silent; }
  /// Called when an addition has happened, with its queue pair and the sum.
  std::function<void(std::uint32_t queue_pair, std::uint64_t sum)> on_add;
  bool broken = false;                        ///< as an exception
  std::size_t most = SIZE_MAX;                ///< operations of a ring under way
  std::vector<rdma::WireCompletion> made_up;  ///< that nothing was posted for

  std::uint64_t executed(std::uint32_t queue_pair) { return pairs_[queue_pair].executed; }

  std::size_t depth() const override { return most; }
  void post(std::size_t ring, std::span<const rdma::Operation> operations) override;
  std::size_t poll(std::span<rdma::WireCompletion> completions) override;

  /// Does one thing for one queue pair.
  void advance();
  std::uint64_t below(std::uint64_t bound) {
    return std::uniform_int_distribution<std::uint64_t>(0, bound - 1)(random_);
  }

 private:
  struct Pending {
    rdma::Operation operation;
    std::vector<std::uint32_t> chunks = {};  ///< offsets of pieces that are not yet placed
    bool executed = false;
    rdma::Syndrome syndrome = rdma::Syndrome::none;
    std::uint8_t vendor = 0;
  };
  struct Pair {
    std::size_t ring = 0;
    std::deque<Pending> pending;
    std::deque<rdma::WireCompletion> ready;
    std::vector<rdma::WireCompletion> planted;
    bool failed = false;
    bool silent = false;
    std::uint64_t executed = 0;
  };

  static constexpr std::uint32_t kChunk = 24;

  std::byte* find(const device::rdma::KeyedAddress& place) const;
  rdma::Syndrome validate(Pair& pair, const rdma::Operation& operation, std::uint8_t& vendor);
  void execute_some(Pair& pair);
  void place(const rdma::Operation& operation, std::uint32_t offset);
  void add(const rdma::Operation& operation);
  void retire(Pair& pair);

  std::mt19937_64 random_;
  std::map<std::uint32_t, std::byte*> regions_;
  std::map<std::uint32_t, Pair> pairs_;
};

}  // namespace deep_ep::test
