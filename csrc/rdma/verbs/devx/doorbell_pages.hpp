// Pages of an mlx5 device's doorbell registers (UAR), mapped into a GPU so that kernels can ring them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace deep_ep::rdma {

inline constexpr std::size_t kDoorbellPageBytes = 4096;

/// Who maps a page of registers into a GPU.
class PageRegistrar {
 public:
  virtual ~PageRegistrar() = default;
  /// The address at which kernels reach the page. Throws SystemError: what was refused, and what helps.
  virtual void* register_page(void* page) = 0;
  virtual void unregister_page(void* page) noexcept = 0;
};

/// The CUDA runtime (cudaHostRegister for I/O memory) on one GPU. Throws SystemError in builds without CUDA.
std::unique_ptr<PageRegistrar> make_cuda_page_registrar(int device);

/// Several queue pairs have registers on one page, which may be registered once only: counts its users. Thread-safe.
class DoorbellPages {
 public:
  explicit DoorbellPages(std::unique_ptr<PageRegistrar> registrar);
  ~DoorbellPages();
  DoorbellPages(const DoorbellPages&) = delete;
  DoorbellPages& operator=(const DoorbellPages&) = delete;

  /// A register (8 bytes, aligned) as kernels address it; `reg` is how the host does. Every map() needs an unmap().
  std::uint64_t* map(void* reg);
  void unmap(void* reg) noexcept;

 private:
  struct Page {
    std::byte* device = nullptr;
    int users = 0;
  };

  std::unique_ptr<PageRegistrar> registrar_;
  std::mutex mutex_;
  std::map<std::byte*, Page> pages_;  ///< by the host's address
};

/// Tries to map this register and unmaps it: "" if kernels can ring it, else why not. A trial is the only reliable
/// answer: what is permitted depends on driver options and on privileges together.
std::string why_kernels_cannot_ring(DoorbellPages& pages, void* reg);

}  // namespace deep_ep::rdma
