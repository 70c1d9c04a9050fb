#include "tests/faults/faulty_executor.hpp"

#include "csrc/support/format.hpp"

namespace deep_ep::faults {
namespace {

[[noreturn]] void no_memory(std::size_t bytes) { fail<OutOfMemory>("no {} of memory left", format_bytes(bytes)); }

constexpr std::uint32_t kUnknownKey = 0xdead;

}  // namespace

void* FaultyExecutor::allocate(std::size_t bytes) {
  if (fails()) no_memory(bytes);
  ++live_;
  return CountingExecutor::allocate(bytes);
}

void* FaultyExecutor::allocate_pinned(std::size_t bytes) {
  if (fails()) no_memory(bytes);
  ++live_;
  return CountingExecutor::allocate_pinned(bytes);
}

bool FaultyExecutor::break_key(RdmaQueuePair* table, int channel, int peer, StreamHandle stream) {
  if (table == nullptr) return false;
  RdmaQueuePair& params = table[channel * ranks_ + peer];
  if (params.ring == nullptr) return false;
  for (std::uint32_t* key : {&params.remote_key, &params.signal_key}) {
    CountingExecutor::copy(key, &kUnknownKey, sizeof kUnknownKey, stream);
  }
  return true;
}

std::string FaultyExecutor::left_over() const {
  if (live_ == 0 && streams_ == 0) return {};
  return fmt::format("{} pieces of memory and {} streams were not given back", live_.load(), streams_.load());
}

}  // namespace deep_ep::faults
