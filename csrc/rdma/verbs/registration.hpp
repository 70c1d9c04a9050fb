// Memory that an RDMA device may read and write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "csrc/rdma/verbs/device.hpp"
#include "csrc/support/unique_fd.hpp"

struct ibv_mr;

namespace deep_ep::rdma::verbs {

/// How the device reaches the memory.
enum class RegistrationPath : std::uint8_t {
  host,         ///< ordinary memory, pinned
  dma_buf,      ///< GPU memory that its driver exported as a dma-buf
  peer_memory,  ///< GPU memory by its address, through nvidia-peermem
};
std::string_view to_string(RegistrationPath path);

struct MemoryRange {
  void* address = nullptr;
  std::size_t bytes = 0;
  /// The address that work requests use for the first byte. A heap registered with 0 is addressed by offsets; without
  /// a value the address itself counts. Congruent to `address` modulo the page size.
  std::optional<std::uint64_t> first_address = {};
  /// PCIe may bring bytes in any order (relaxed ordering). Nothing is added then: the device refuses signals by this
  /// key.
  bool any_order = false;
};

/// Makes a descriptor of the dma-buf that covers exactly the given bytes of GPU memory, or throws saying why it cannot.
using DmaBufExporter = std::function<UniqueFd(void* address, std::size_t bytes)>;
/// Exports the range and calls `use` with the descriptor, which says why the device refuses, or nothing. Returns why
/// the device has not got the memory so; empty: it has.
std::string by_dma_buf(const MemoryRange& range, const DmaBufExporter& exporter,
                       const std::function<std::string(int descriptor)>& use);

/// Destroying it unregisters the memory, which must still exist. What is written or added by a key of strict ordering
/// is seen after all that was written before it, by whatever key.
class Registration {
 public:
  /// CPU memory. SystemError names device, bytes and the kernel's answer.
  static Registration of_host_memory(std::shared_ptr<Device> device, const MemoryRange& range);

  /// GPU memory: as a dma-buf, else as peer memory.
  /// SystemError says what was tried and how each attempt failed. An empty exporter counts as a failed attempt.
  static Registration of_gpu_memory(std::shared_ptr<Device> device, const MemoryRange& range,
                                    const DmaBufExporter& exporter);

  std::uint32_t local_key() const;
  std::uint32_t remote_key() const;
  /// What work requests use for the first byte.
  std::uint64_t first_address() const { return first_address_; }
  RegistrationPath path() const { return path_; }

 private:
  Registration(std::shared_ptr<Device> device, ibv_mr* region, const MemoryRange& range, RegistrationPath path);

  std::shared_ptr<ibv_mr> region_;  ///< keeps the device open
  std::uint64_t first_address_ = 0;
  RegistrationPath path_ = RegistrationPath::host;
};

}  // namespace deep_ep::rdma::verbs
