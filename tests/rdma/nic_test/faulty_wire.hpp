// A wire between a handler and a good wire that makes one kind of mistake, as a NIC might.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/rdma/ring/wire.hpp"
#include "simulation/kernels/nic_test.hpp"

namespace deep_ep::test {

enum class Mistake {
  none,
  drops_a_write,      ///< but says that it is complete
  drops_an_addition,  ///< to the counter, likewise
  flag_before_data,   ///< additions overtake the writes before them
  wrong_syndrome,     ///< failures look like a peer that does not answer
  takes_any_key,      ///< and writes
  never_completes,    ///< anything
};

class FaultyWire final : public rdma::Wire {
 public:
  FaultyWire(std::unique_ptr<rdma::Wire> wire, Mistake mistake) : wire_(std::move(wire)), mistake_(mistake) {}

  std::string_view name() const override { return "faulty"; }

  std::size_t post(std::span<const rdma::Operation> operations) override {
    for (const rdma::Operation& operation : operations) post(operation);
    return operations.size();
  }

  std::size_t poll(std::span<rdma::WireCompletion> completions) override {
    if (mistake_ == Mistake::never_completes) return 0;
    // Nothing is complete before it is written; a sender waits for that, a receiver only for the flag.
    constexpr auto kLate = std::chrono::milliseconds(100);
    if (!late_.empty() && std::chrono::steady_clock::now() - since_ < kLate) return 0;
    write_late();
    const std::size_t count = wire_->poll(completions);
    // What was written late is complete behind what came after it, which a NIC would not say.
    if (mistake_ == Mistake::flag_before_data) std::sort(completions.begin(), completions.begin() + count, in_order);
    for (rdma::WireCompletion& completion : completions.first(count)) {
      const bool fails = completion.syndrome == rdma::Syndrome::remote_access;
      if (fails && mistake_ == Mistake::wrong_syndrome) {
        completion.syndrome = rdma::Syndrome::transport_retries_exceeded;
      }
    }
    return count;
  }

 private:
  void post(rdma::Operation operation) {
    const bool writes = operation.opcode == device::rdma::kOpcodeWrite;
    const bool adds =
        operation.opcode == device::rdma::kOpcodeFetchAdd && operation.remote.address == nic_test::kCounters;
    const bool sender = operation.queue_pair % 2 == 1;  // numbers begin at 1
    if (!sender) write_late();                          // it has looked, and answers
    if (mistake_ == Mistake::flag_before_data && writes) {
      if (late_.empty()) since_ = std::chrono::steady_clock::now();
      late_.push_back(operation);
      return;
    }
    if (sender &&
        ((mistake_ == Mistake::drops_a_write && writes) || (mistake_ == Mistake::drops_an_addition && adds))) {
      if (++seen_ == 3) {
        operation.opcode = device::rdma::kOpcodeWrite;
        operation.length = 0;
      }
    }
    if (mistake_ == Mistake::takes_any_key && operation.length != 0)
      operation.remote.key = operation.remote.key & ~0x80u;
    wire_->post({&operation, 1});
  }

  static bool in_order(const rdma::WireCompletion& a, const rdma::WireCompletion& b) {
    return std::tie(a.queue_pair, a.index) < std::tie(b.queue_pair, b.index);
  }

  void write_late() {
    for (const rdma::Operation& operation : std::exchange(late_, {})) wire_->post({&operation, 1});
  }

  std::unique_ptr<rdma::Wire> wire_;
  Mistake mistake_;
  int seen_ = 0;
  std::vector<rdma::Operation> late_;
  std::chrono::steady_clock::time_point since_;
};

}  // namespace deep_ep::test
