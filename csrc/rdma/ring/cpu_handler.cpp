#include "csrc/rdma/ring/cpu_handler.hpp"

#include <algorithm>
#include <array>
#include <exception>

#include "csrc/rdma/ring/polling.hpp"
#include "csrc/rdma/ring/wire.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma {

using device::rdma::CompletionEntry;

namespace {

constexpr std::size_t kMostAtOnce = 64;  ///< entries of a ring

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
      fail_ring(ring, {.index = ring.completed, .detail = why});
    }
    return worked;  // a broken wire throws each time
  }
}

bool CpuHandler::take_entries(std::size_t place) {
  Ring& ring = rings_[place];
  const std::uint64_t end = ring.ended ? ring.taken : ring.rung();
  if (end == ring.taken) return false;
  if (end - ring.completed > ring.pair.depth) {
    fail_ring(ring, {.index = ring.taken,
                     .detail = fmt::format("the producer index is {}, at most {} is possible", end,
                                           ring.completed + ring.pair.depth)});
    return true;
  }
  const std::size_t most = std::min(kMostAtOnce, wire_.depth() - (ring.taken - ring.completed));
  if (most == 0) return false;
  operations_.clear();
  bool valid = true;
  for (std::uint64_t index = ring.taken; valid && index != end && operations_.size() < most; ++index) {
    Operation& operation = operations_.emplace_back(ring.decode(index));
    valid = operation.valid;
    if (valid) continue;
    // A write of nothing in its place completes behind the entries before it, and is then the failure.
    operation = {
        .index = index, .opcode = device::rdma::kOpcodeWrite, .queue_pair = ring.pair.number, .signalled = true};
  }
  // Entries that a full queue does not take stay in the ring, and hold up no other.
  const std::size_t taken = wire_.post(place, operations_);
  ring.taken += taken;
  ring.ended = !valid && taken == operations_.size();
  return taken != 0;
}

bool CpuHandler::complete() {
  std::array<WireCompletion, 64> completions;
  const std::size_t count = wire_.poll(completions);
  for (const WireCompletion& completion : std::span(completions).first(count)) {
    if (completion.ring >= rings_.size()) {
      fail<SystemError>("a completion is of ring {}, allowed: one of {}", completion.ring, rings_.size());
    }
    Ring& ring = rings_[completion.ring];
    if (ring.failed) continue;  // the failure is known
    const std::uint64_t index = ring.completed + static_cast<std::uint32_t>(completion.index - ring.completed);
    if (index >= ring.taken) {
      fail<SystemError>("it completed entry {} of queue pair {:#x}, which was not posted", index, ring.pair.number);
    }
    if (completion.syndrome != Syndrome::none) {
      fail_ring(ring, {.index = index, .syndrome = completion.syndrome, .vendor_syndrome = completion.vendor_syndrome});
    } else if (ring.ended && index + 1 == ring.taken) {
      const Operation entry = ring.decode(index);  // a late store may have changed it
      std::string detail = "this library writes no such entry as was there when it was read";
      if (!entry.valid) {
        detail = fmt::format(
            "this library writes no such entry there: number {} of queue pair {:#x}, opcode {:#04x}, modifier {}, {} "
            "segments, data of {} bytes",
            entry.counter, entry.queue_pair, entry.opcode, entry.modifier, entry.segments, entry.length);
      }
      fail_ring(ring, {.index = index, .syndrome = Syndrome::local_queue_pair, .detail = detail});
    } else {
      ring.completed = index + 1;
      publish(ring.pair, index, device::rdma::kCompletionOk);
    }
  }
  return count != 0;
}

void CpuHandler::fail_ring(Ring& ring, Failure failure) {
  if (ring.failed) return;
  ring.failed = ring.ended = true;
  failure.peer = ring.pair.peer;
  failure.device = device_;
  failure.queue_pair = ring.pair.number;
  // An entry that the kernel has not rung may still be incomplete.
  failure.opcode = *failure.index < ring.rung() ? ring.decode(*failure.index).opcode : device::rdma::kOpcodeNop;
  const std::string text = describe(failure);
  log::error("{}", text);
  {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = text;  // before the entry tells of it
  }
  CompletionEntry& entry = completion_of(ring.pair);
  const bool is_completion = failure.syndrome != Syndrome::none;
  entry.vendor_syndrome = failure.vendor_syndrome;
  entry.syndrome = static_cast<std::uint8_t>(is_completion ? failure.syndrome : Syndrome::local_queue_pair);
  entry.opcode_number = device::rdma::swap32(failure.opcode << 24 | ring.pair.number);
  publish(ring.pair, *failure.index, device::rdma::kCompletionError);
}

}  // namespace deep_ep::rdma
