#include "csrc/rdma/ring/cpu_nic_handler.hpp"

#include <algorithm>
#include <chrono>
#include <exception>

#include "csrc/rdma/ring/entry_decoder.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma {

using device::rdma::CompletionEntry;

struct CpuNicHandler::Ring {
  HandledRing memory;
  std::uint64_t taken;        ///< entries decoded
  std::uint64_t completed;    ///< entries that the completion entry spoke of
  bool failed = false;        ///< the error entry is written; nothing is done any more
  std::uint64_t mistake = 0;  ///< index of an entry that cannot be executed, where `refusal` is not empty
  std::string refusal;
  std::vector<WireOperation> waiting;  ///< decoded, not yet taken by the wire: what is full holds up nobody else

  const device::rdma::WorkQueueEntry& entry(std::uint64_t index) const {
    return memory.ring[index & (memory.depth - 1)];
  }
  std::uint32_t opcode(std::uint64_t index) const {
    return device::rdma::swap32(entry(index).segment[0].word[0]) & 0xffu;
  }
};

namespace {

constexpr std::size_t kCompletionsAtOnce = 64;
constexpr std::size_t kMostOperationsWaiting = 256;  ///< a wire that is full is not flooded

/// The last word of a completion entry tells that it is there.
void publish(CompletionEntry& entry, std::uint64_t index, std::uint32_t opcode) {
  __atomic_store_n(&entry.tail, device::rdma::tail_word(index, opcode), __ATOMIC_RELEASE);
}

}  // namespace

CpuNicHandler::CpuNicHandler(std::unique_ptr<Wire> wire, bool start_thread)
    : wire_(std::move(wire)), completions_(kCompletionsAtOnce) {
  if (start_thread) thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
}

CpuNicHandler::~CpuNicHandler() = default;

void CpuNicHandler::add(const HandledRing& ring) {
  waiting_.fetch_add(1);
  const std::lock_guard lock(mutex_);
  waiting_.fetch_sub(1);
  if (find(ring.number) != nullptr) {
    fail<InvalidArgument>("queue pair {:#x} is served already; allowed: a number that no other ring has", ring.number);
  }
  rings_.push_back(std::make_unique<Ring>(Ring{ring, ring.first_index, ring.first_index}));
  by_number_[ring.number] = rings_.back().get();
}

void CpuNicHandler::remove(std::uint32_t number) noexcept {
  waiting_.fetch_add(1);
  const std::lock_guard lock(mutex_);
  waiting_.fetch_sub(1);
  by_number_.erase(number);
  std::erase_if(rings_, [&](const auto& ring) { return ring->memory.number == number; });
}

std::optional<Failure> CpuNicHandler::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

bool CpuNicHandler::idle() const {
  waiting_.fetch_add(1);
  const std::lock_guard lock(mutex_);
  waiting_.fetch_sub(1);
  return std::all_of(rings_.begin(), rings_.end(), [](const auto& ring) {
    return ring->failed || ring->completed == __atomic_load_n(ring->memory.producer_index, __ATOMIC_ACQUIRE);
  });
}

CpuNicHandler::Ring* CpuNicHandler::find(std::uint32_t number) {
  const auto found = by_number_.find(number);
  return found == by_number_.end() ? nullptr : found->second;
}

void CpuNicHandler::run(const std::stop_token& stop) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kSpin = std::chrono::microseconds(200);  // a call's next rows are expected within that
  constexpr auto kSleep = std::chrono::microseconds(50);
  Clock::time_point last_work = Clock::now();
  while (!stop.stop_requested()) {
    if (step()) {
      last_work = Clock::now();
    } else if (Clock::now() - last_work > kSpin) {
      std::this_thread::sleep_for(kSleep);
    } else {
      std::this_thread::yield();
    }
    while (waiting_.load() != 0) std::this_thread::yield();  // mutexes are not fair
  }
}

bool CpuNicHandler::step() {
  const std::lock_guard lock(mutex_);
  try {
    bool worked = false;
    for (const auto& ring : rings_) {
      worked |= take_entries(*ring);
      worked |= post(*ring);
    }
    worked |= complete();
    return worked;
  } catch (const std::exception& e) {
    const std::string why = fmt::format("the wire '{}' threw: {}", wire_->name(), e.what());
    bool worked = false;
    for (const auto& ring : rings_) {
      worked |= !ring->failed;
      ring->waiting.clear();
      fail_ring(*ring, {.index = ring->completed, .detail = why});
    }
    return worked;  // a wire that is broken throws each time
  }
}

bool CpuNicHandler::take_entries(Ring& ring) {
  if (ring.failed || !ring.refusal.empty()) return false;
  const std::uint64_t end = __atomic_load_n(ring.memory.producer_index, __ATOMIC_ACQUIRE);
  if (end == ring.taken) return false;
  if (end - ring.completed > ring.memory.depth) {
    fail_ring(ring, {.index = ring.taken,
                     .detail = fmt::format("the producer index is {}, at most {} is possible", end,
                                           ring.completed + ring.memory.depth)});
    return true;
  }
  bool worked = false;
  while (ring.taken != end && ring.refusal.empty() && ring.waiting.size() < kMostOperationsWaiting) {
    DecodedEntry decoded = decode_entry(ring.entry(ring.taken), ring.taken, ring.memory.number);
    if (!decoded.mistake.empty()) {
      // Its place is taken by an operation that does nothing: what was before it completes first.
      ring.mistake = ring.taken;
      ring.refusal = std::move(decoded.mistake);
    }
    ring.waiting.push_back(decoded.operation);
    ++ring.taken;
    worked = true;
  }
  return worked;
}

bool CpuNicHandler::post(Ring& ring) {
  if (ring.waiting.empty()) return false;
  const std::size_t taken = wire_->post(ring.waiting);
  ring.waiting.erase(ring.waiting.begin(), ring.waiting.begin() + static_cast<std::ptrdiff_t>(taken));
  return taken != 0;
}

bool CpuNicHandler::complete() {
  const std::size_t count = wire_->poll(completions_);
  for (std::size_t i = 0; i < count; ++i) apply(completions_[i]);
  return count != 0;
}

void CpuNicHandler::apply(const WireCompletion& completion) {
  Ring* ring = find(completion.queue_pair);
  if (ring == nullptr || ring->failed) return;  // removed meanwhile, or flushed behind the failure that is known
  if (completion.syndrome != Syndrome::none) {
    fail_ring(*ring,
              {.index = completion.id, .syndrome = completion.syndrome, .vendor_syndrome = completion.vendor_syndrome});
  } else if (!ring->refusal.empty() && completion.id == ring->mistake) {
    fail_ring(*ring, {.index = completion.id, .syndrome = Syndrome::local_queue_pair, .detail = ring->refusal});
  } else {
    ring->completed = completion.id + 1;
    publish(*ring->memory.completion, completion.id, device::rdma::kCompletionOk);
  }
}

void CpuNicHandler::fail_ring(Ring& ring, Failure failure) {
  if (ring.failed) return;
  ring.failed = true;
  failure.peer = ring.memory.peer;
  failure.device = ring.memory.device;
  failure.queue_pair = ring.memory.number;
  // An entry that the kernel has not rung may be in the making.
  failure.opcode = failure.index < ring.taken ? ring.opcode(failure.index) : device::rdma::kOpcodeNop;
  CompletionEntry& entry = *ring.memory.completion;
  const bool is_completion = failure.syndrome != Syndrome::none;
  entry.vendor_syndrome = failure.vendor_syndrome;
  entry.syndrome = static_cast<std::uint8_t>(is_completion ? failure.syndrome : Syndrome::local_queue_pair);
  entry.opcode_number = device::rdma::swap32(failure.opcode << 24 | ring.memory.number);
  publish(entry, failure.index, device::rdma::kCompletionError);
  log::error("{}", describe(failure));
  if (!failure_) failure_ = std::move(failure);
}

}  // namespace deep_ep::rdma
