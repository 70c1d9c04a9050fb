// What other means need to move the same bytes: NCCL, and the copy engines as the floor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep::tools {

/// Moves bytes[r] bytes from this rank to every rank r. Made, called and destroyed collectively.
class PeerTransport {
 public:
  virtual ~PeerTransport() = default;
  virtual std::string name() const = 0;
  /// SMs it occupies, as far as that is known; -1 = it decides by itself.
  virtual int num_sms() const = 0;
  /// Fixes how much goes where; `send[r]` to rank r, `receive[r]` from rank r. Collective.
  virtual void prepare(std::span<const std::int64_t> send, std::span<const std::int64_t> receive) = 0;
  /// Enqueues one exchange on `stream`.
  virtual void enqueue(StreamHandle stream) = 0;
};

/// Each returns nullptr where the build or the executor has no such thing.
std::unique_ptr<PeerTransport> make_nccl_transport(Bootstrap& bootstrap, Executor& executor);
std::unique_ptr<PeerTransport> make_copy_engine_transport(Bootstrap& bootstrap, Executor& executor);

}  // namespace deep_ep::tools
