// Several queue pairs of one sender to one receiver, filled by device code, executed by the `cpu` handler on the
// adversarial wire: it reads their producer indices itself, or the software NIC stands before it (doorbell registers,
// stored by the sender, or by a Ringer for it).
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "csrc/rdma/ring/cpu_handler.hpp"
#include "csrc/rdma/ring/ring_memory.hpp"
#include "csrc/rdma/ring/ringer.hpp"
#include "deep_ep/executor.hpp"
#include "kernels/rdma/port_channel.hpp"
#include "tests/rdma/ring/adversarial_wire.hpp"
#include "tests/rdma/ring/simulation.hpp"
#include "tests/rdma/ring/software_nic.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::test {

enum class Behind { software_nic, ringer, cpu_handler };

inline std::string name_of(Behind behind) {
  return behind == Behind::software_nic ? "SoftwareNic" : behind == Behind::ringer ? "Ringer" : "CpuHandler";
}

struct QueueWorldOptions {
  Behind behind = Behind::software_nic;
  std::uint64_t seed = 1;
  int queue_pairs = 1;
  std::uint32_t depth = 128;
  std::uint32_t batch = 32;
  std::uint64_t first_index = 0;
  std::uint64_t timeout_ns = static_cast<std::uint64_t>(patience() * 1e9);
  SoftwareNicOptions nic = {};
};

class QueueWorld {
 public:
  static constexpr std::uint32_t kLocalKey = 0x111;
  static constexpr std::uint32_t kRemoteKey = 0x222;
  static constexpr std::uint32_t kSignalKey = 0x333;  ///< a second copy of the remote memory
  static constexpr std::size_t kHeapBytes = std::size_t{1} << 20;

  using Peer = device::rdma::PortChannel<device::OneThread>;

  explicit QueueWorld(const QueueWorldOptions& options)
      : options_(options),
        executor_(make_host_executor()),
        rings_(
            executor_,
            {.count = static_cast<std::size_t>(options.queue_pairs), .depth = options.depth, .batch = options.batch}),
        local_(kHeapBytes / 8 + 1),
        remote_(kHeapBytes / 8),
        wire_(options.seed),
        handler_(wire_, "adversarial wire"),
        nic_(wire_, rings_, handler_, options.nic),
        doorbells_(rings_.options().count),
        context_(faults_.context(options.timeout_ns)) {
    wire_.add_memory(kLocalKey, local_.data());
    wire_.add_memory(kRemoteKey, remote_.data());
    wire_.add_memory(kSignalKey, remote_.data());
    if (options.behind == Behind::ringer) ringer_.emplace();
    for (std::size_t i = 0; i < rings_.options().count; ++i) add_queue_pair(i);
  }

  std::byte* local(std::uint64_t offset) { return reinterpret_cast<std::byte*>(local_.data()) + offset; }
  std::byte* remote(std::uint64_t offset) { return reinterpret_cast<std::byte*>(remote_.data()) + offset; }

  /// Runs device code with one peer for each queue pair; the device works meanwhile.
  template <class Body>
  void run(Body&& body) {
    Simulation simulation([this](bool waited_for) { work(waited_for); });
    std::vector<std::unique_ptr<Peer>> peers;
    for (const RdmaQueuePair& params : params_) peers.push_back(std::make_unique<Peer>(params, context_));
    body(peers);
    for (auto& peer : peers) peer->close();
  }

  /// Lets the device work alone.
  void settle(int steps = 2000) {
    for (int i = 0; i < steps; ++i) work(true);
  }

  RdmaQueuePair& params(std::size_t queue_pair) { return params_[queue_pair]; }
  rdma::RingMemory& rings() { return rings_; }
  bool idle() const { return std::ranges::all_of(rings_.status(), &rdma::RingStatus::done); }
  AdversarialWire& wire() { return wire_; }
  SoftwareNic& nic() { return nic_; }
  rdma::CpuHandler& handler() { return handler_; }
  /// The last doorbell of this queue pair.
  std::uint64_t doorbell_register(std::size_t queue_pair) const { return doorbells_[queue_pair].word; }
  const FaultRecord& fault() const { return faults_.fault(); }
  const QueueWorldOptions& options() const { return options_; }
  static std::uint32_t number(std::size_t queue_pair) { return 0x100 + static_cast<std::uint32_t>(queue_pair); }

 private:
  void work(bool waited_for) {
    // Sometimes the device only moves when it must, so that rings fill up.
    if (wire_.below(300) == 0) slow_ = !slow_;
    if (slow_ && !waited_for) return;
    if (options_.behind == Behind::cpu_handler) {
      handler_.step();
      return;
    }
    // The thread that rings is now and then away for long.
    if (ringer_ && wire_.below(200) == 0) away_ = !away_;
    if (ringer_ && wire_.below(away_ ? 50 : 2) == 0) ringer_->step();
    nic_.step();
  }

  void add_queue_pair(std::size_t i) {
    RdmaQueuePair peer{.ring = rings_.ring(i),
                       .completion = rings_.completion(i),
                       .doorbell = rings_.producer_index(i),
                       .state = rings_.state(i),
                       .number = number(i),
                       .depth = options_.depth,
                       .batch = options_.batch,
                       .peer = kPeer,
                       .sink = {kHeapBytes, kLocalKey},
                       .local_key = kLocalKey,
                       .remote_key = kRemoteKey,
                       .signal_key = kSignalKey};
    *peer.doorbell = options_.first_index;
    *peer.state = {options_.first_index, options_.first_index, 0};
    handler_.add(peer);
    wire_.add_queue_pair(number(i));
    if (options_.behind != Behind::cpu_handler) {
      RdmaQueuePair of_device = peer;
      of_device.doorbell = &doorbells_[i].word;
      of_device.doorbell_record = &doorbells_[i].record;
      *of_device.doorbell_record = device::rdma::record_word(options_.first_index);
      nic_.add(of_device);
      if (ringer_) {
        peer.doorbell = &doorbells_[i].published;
        ringer_->add(peer, &doorbells_[i].record, &doorbells_[i].word);
      } else {
        peer = of_device;
      }
    }
    params_.push_back(peer);
  }

  static constexpr int kPeer = 7;

  struct Doorbell {
    std::uint64_t word = 0;
    std::uint32_t record = 0;
    std::uint64_t published = 0;  ///< for the thread that rings
  };

  QueueWorldOptions options_;
  std::shared_ptr<Executor> executor_;
  rdma::RingMemory rings_;
  std::vector<std::uint64_t> local_;
  std::vector<std::uint64_t> remote_;
  Faults faults_;
  AdversarialWire wire_;
  rdma::CpuHandler handler_;
  SoftwareNic nic_;
  std::vector<Doorbell> doorbells_;
  std::optional<rdma::Ringer> ringer_;
  WaitContext context_;
  bool slow_ = false;
  bool away_ = false;
  std::vector<RdmaQueuePair> params_;
};

}  // namespace deep_ep::test
