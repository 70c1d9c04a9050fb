// The kind of heap that a group of ranks gets, on GPUs or the CPU. Plain data and plain rules, so that they are tested
// without a GPU.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "csrc/memory/process_identity.hpp"

namespace deep_ep {

enum class HeapKind : std::uint8_t { posix_fd, fabric };

/// The bytes of a heap, equal on all ranks. `domains`: of each rank the lowest rank that it shares memory with.
using HeapBytes = std::function<std::size_t(std::span<const int> domains)>;

/// A handle by which memory is shared over NVLink across hosts, as the driver exports it.
using FabricHandle = std::array<std::byte, 64>;

/// The abilities of one rank; all-gathered, so that every rank decides on the same facts.
struct HeapCapabilities {
  ProcessIdentity process;
  std::int32_t device = 0;
  bool posix_fd = false;  ///< virtual memory management with file descriptors
  bool fabric = false;    ///< it has fabric handles
  std::uint64_t granularity = 1;
  FabricHandle fabric_trial{};  ///< of a small piece of its memory, where `fabric`
  std::uint64_t heap = 0;       ///< on the CPU: its number in the process, by which threads of the process find it
};

/// For ranks of one host posix_fd where they can reach each other's sockets and their GPUs can, otherwise fabric. For
/// ranks of several hosts fabric, so that all map each other; where that is impossible, the same as for one host, and
/// only ranks of one host map each other. Throws the same SystemError, naming a rank, on every rank if neither can
/// work.
HeapKind choose_heap(std::span<const HeapCapabilities> ranks);

/// Do ranks map each other's memory with this kind of heap?
bool shares_memory(HeapKind kind, const HeapCapabilities& a, const HeapCapabilities& b);

/// What `bytes_for` says, rounded up to every rank's granularity.
std::size_t heap_bytes(HeapKind kind, std::span<const HeapCapabilities> ranks, const HeapBytes& bytes_for);

const char* name_of(HeapKind kind);

}  // namespace deep_ep
