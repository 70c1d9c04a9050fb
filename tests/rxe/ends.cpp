#include "tests/rxe/ends.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "csrc/support/deadline.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::rdma::verbs::test {

PathOptions patient_path(int gid_index) {
  PathOptions path;
  path.gid_index = gid_index;
  path.ack_timeout = 16;
  path.retry_count = 7;
  return path;
}

PathOptions quick_path(int gid_index) {
  PathOptions path = patient_path(gid_index);
  path.retry_count = 6;
  return path;
}

void End::FreeMemory::operator()(std::byte* memory) const { std::free(memory); }

End::End(const std::string& device, std::size_t bytes, int queue_pairs, std::uint32_t depth, const PathOptions& path)
    : device_(Device::open(device)),
      bytes_(bytes),
      memory_(static_cast<std::byte*>(std::aligned_alloc(4096, bytes))),
      wire_(std::make_unique<VerbsWire>(device_, depth * static_cast<std::uint32_t>(queue_pairs))) {
  std::memset(memory_.get(), 0, bytes_);
  registration_ = std::make_unique<Registration>(
      Registration::of_host_memory(device_, {.address = memory_.get(), .bytes = bytes_, .first_address = 0}));
  for (int i = 0; i < queue_pairs; ++i) pairs_.push_back(&wire_->add_queue_pair({.send_depth = depth}, path));
}

std::uint64_t End::word(std::size_t offset) const {
  auto* word = reinterpret_cast<std::uint64_t*>(memory_.get() + offset);
  return std::atomic_ref<std::uint64_t>(*word).load(std::memory_order_acquire);
}

Ends::Ends(const PathOptions& path)
    : first("rxe0", std::size_t{4} << 20, 1, 64, path), second("rxe1", std::size_t{4} << 20, 1, 64, path) {
  first.pair(0).connect(second.pair(0).address());
  second.pair(0).connect(first.pair(0).address());
}

WireOperation Ends::write(std::uint64_t id, std::uint64_t from, std::uint64_t to, std::uint32_t bytes) {
  return {.queue_pair = first.pair(0).number(),
          .id = id,
          .kind = WireOperationKind::write,
          .signalled = true,
          .length = bytes,
          .local_key = first.local_key(),
          .remote_key = second.remote_key(),
          .local_address = from,
          .remote_address = to};
}

std::vector<WireCompletion> run(Wire& wire, std::span<const WireOperation> operations, std::size_t completions) {
  const Deadline deadline(deep_ep::test::long_patience());
  std::vector<WireCompletion> result;
  std::size_t posted = 0;
  while (posted < operations.size() || result.size() < completions) {
    if (posted < operations.size()) posted += wire.post(operations.subspan(posted));
    std::array<WireCompletion, 16> polled;
    const std::size_t count = wire.poll(polled);
    result.insert(result.end(), polled.begin(), polled.begin() + count);
    if (deadline.expired()) {
      throw std::runtime_error(fmt::format("after {} s: {} of {} posted, {} of {} completions", deadline.seconds(),
                                           posted, operations.size(), result.size(), completions));
    }
    // The emulated network card is a thread of the kernel that needs a processor.
    if (count == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return result;
}

void fill_pattern(std::span<std::byte> memory, std::uint64_t seed) {
  std::uint64_t state = seed * 0x9e3779b97f4a7c15ULL + 1;
  for (std::byte& byte : memory) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    byte = static_cast<std::byte>(state >> 56);
  }
}

}  // namespace deep_ep::rdma::verbs::test
