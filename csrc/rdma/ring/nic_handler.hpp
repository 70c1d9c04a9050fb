// Who carries out what kernels write into their rings.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "csrc/rdma/ring/failure.hpp"
#include "kernels/rdma/formats.hpp"

namespace deep_ep::rdma {

enum class NicHandlerKind : std::uint8_t {
  gpu,  ///< the mlx5 device itself: kernels ring its doorbell register
  cpu,  ///< a thread of this process that executes the entries on a wire
};

std::string_view name_of(NicHandlerKind kind);

/// A ring as its handler sees it; the memory stays valid until the ring is removed.
struct HandledRing {
  std::uint32_t number = 0;  ///< of the queue pair
  std::uint32_t depth = 0;
  const device::rdma::WorkQueueEntry* ring = nullptr;
  device::rdma::CompletionEntry* completion = nullptr;
  const std::uint64_t* producer_index = nullptr;  ///< `cpu` only: entries before it may be read
  std::uint64_t first_index = 0;
  int peer = -1;       ///< rank at the other end, for messages
  std::string device;  ///< NIC and port, or wire, for messages
};

/// Functions may be called from any thread.
class NicHandler {
 public:
  virtual ~NicHandler() = default;

  virtual NicHandlerKind kind() const = 0;

  /// Starts to serve a ring. InvalidArgument: the number is in use.
  virtual void add(const HandledRing& ring) = 0;
  /// When it returns the handler does not touch the ring any more; operations under way may still finish at the peer.
  virtual void remove(std::uint32_t number) noexcept = 0;

  /// The first operation that failed on any ring, if one did.
  virtual std::optional<Failure> failure() const = 0;
  /// Throws SystemError with describe(failure()).
  void check() const;
};

}  // namespace deep_ep::rdma
