#include "csrc/rdma/ring/cpu_handler.hpp"

#include <algorithm>
#include <array>
#include <exception>

#include "csrc/rdma/ring/polling.hpp"
#include "csrc/rdma/ring/wire.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"

namespace deep_ep::rdma {

using device::rdma::CompletionEntry;

namespace {

constexpr auto kRefused = static_cast<std::uint32_t>(Syndrome::local_queue_pair);

/// Only kernels may not write it.
CompletionEntry& completion_of(const RdmaQueuePair& pair) { return const_cast<CompletionEntry&>(*pair.completion); }

/// The last word of a completion entry says that the entry is there.
void publish(const RdmaQueuePair& pair, std::uint64_t index, std::uint32_t opcode) {
  __atomic_store_n(&completion_of(pair).tail, device::rdma::tail_word(index, opcode), __ATOMIC_RELEASE);
}

}  // namespace

void CpuHandler::start(std::vector<int> cpus, bool for_device) {
  thread_ = polling_thread(std::move(cpus), for_device, [this] { return step(); });
}

std::string CpuHandler::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

bool CpuHandler::step() {
  try {
    bool worked = false;
    for (std::size_t i = 0; i < rings_.size(); ++i) worked |= take_entries(i);
    worked |= complete();
    return worked;
  } catch (const std::exception& e) {
    const std::string why = fmt::format("the wire threw: {}", e.what());
    bool worked = false;
    for (Ring& ring : rings_) {
      worked |= !ring.failed;
      fail_ring(ring, ring.completed, {}, why);
    }
    return worked;  // a broken wire throws each time
  }
}

bool CpuHandler::take_entries(std::size_t place) {
  Ring& ring = rings_[place];
  const std::uint64_t end = ring.failed || !ring.refusal.empty() ? ring.taken : ring.rung();
  if (end == ring.taken) return false;
  if (end - ring.completed > ring.pair.depth) {
    fail_ring(ring, ring.taken, {},
              fmt::format("the producer index is {}, at most {} is possible", end, ring.completed + ring.pair.depth));
    return true;
  }
  const std::size_t most = std::min(Wire::kMostAtOnce, wire_.depth() - (ring.taken - ring.completed));
  if (most == 0) return false;
  operations_.clear();
  for (; ring.refusal.empty() && ring.taken != end && operations_.size() < most; ++ring.taken) {
    Operation& entry = operations_.emplace_back(ring.decode(ring.taken));
    if (entry.valid) continue;
    ring.refusal = fmt::format(
        "this library writes no such entry there: number {} of queue pair {:#x}, opcode {:#04x}, modifier {}, {} "
        "segments, data of {} bytes",
        entry.counter, entry.queue_pair, entry.opcode, entry.modifier, entry.segments, entry.length);
    // A write of nothing in its place completes behind the entries before it, and is then the failure.
    entry = {
        .index = ring.taken, .opcode = device::rdma::kOpcodeWrite, .queue_pair = ring.pair.number, .signalled = true};
  }
  wire_.post(place, operations_);
  return true;
}

bool CpuHandler::complete() {
  std::array<WireCompletion, 64> completions;
  const std::size_t count = wire_.poll(completions);
  for (const WireCompletion& completion : std::span(completions).first(count)) {
    Ring& ring = rings_.at(completion.ring);
    if (ring.failed) continue;  // the failure is known
    const std::uint64_t index = ring.completed + static_cast<std::uint32_t>(completion.index - ring.completed);
    if (index >= ring.taken) {
      fail<SystemError>("it completed entry {} of queue pair {:#x}, which was not posted", index, ring.pair.number);
    }
    if (completion.syndrome != Syndrome::none) {
      fail_ring(ring, index, {static_cast<std::uint32_t>(completion.syndrome), completion.vendor_syndrome});
    } else if (!ring.refusal.empty() && index + 1 == ring.taken) {
      fail_ring(ring, index, {kRefused}, ring.refusal);
    } else {
      ring.completed = index + 1;
      publish(ring.pair, index, device::rdma::kCompletionOk);
    }
  }
  return count != 0;
}

void CpuHandler::fail_ring(Ring& ring, std::uint64_t index, RdmaFailure why, const std::string& detail) {
  if (ring.failed) return;
  ring.failed = true;
  // An entry that the kernel has not rung may still be incomplete.
  why.opcode = index < ring.rung() ? ring.decode(index).opcode : device::rdma::kOpcodeNop;
  const std::string text = describe({ring.pair.peer, device_, ring.pair.number, index, why, detail});
  log::error("{}", text);
  {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = text;  // before the entry tells of it
  }
  CompletionEntry& entry = completion_of(ring.pair);
  entry.vendor_syndrome = static_cast<std::uint8_t>(why.vendor_syndrome);
  entry.syndrome = static_cast<std::uint8_t>(why.syndrome != 0 ? why.syndrome : kRefused);
  entry.opcode_number = device::rdma::swap32(why.opcode << 24 | ring.pair.number);
  publish(ring.pair, index, device::rdma::kCompletionError);
}

}  // namespace deep_ep::rdma
