// The symmetric heap on GPUs: two ways to share memory.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/executor/cuda/context.hpp"
#include "csrc/memory/cuda_vmm.hpp"
#include "csrc/memory/fd_exchange.hpp"
#include "csrc/memory/heap_choice.hpp"
#include "csrc/memory/symmetric_heap.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/bootstrap.hpp"

namespace deep_ep {
namespace {

using cuda::check;
using cuda::CurrentContext;
using cuda::RelaxedCapture;

/// The facts of all ranks, on which they agree before they make memory.
struct SharingGroup {
  std::vector<HeapCapabilities> ranks;
  HeapPlan plan;
  std::size_t rank;
  double timeout_s;

  bool shares_with(std::size_t peer) const {
    return peer == rank || shares_memory(plan.kind, ranks[rank], ranks[peer]);
  }
};

class CudaHeap final : public SymmetricHeap {
 public:
  /// Collective. The context is current.
  CudaHeap(std::shared_ptr<const cuda::Context> context, SharingGroup group, Bootstrap& bootstrap)
      : context_(std::move(context)), group_(std::move(group)), peers_(group_.ranks.size()) {
    agree(bootstrap, "reserving addresses for the heap", [&] { reserve(); });
    attach(bootstrap);
    agree(bootstrap, "clearing the heap", [&] { fill(); });
  }

  ~CudaHeap() override {
    cuda::quietly([&] {
      const CurrentContext current(*context_);
      const RelaxedCapture relaxed;
      // Unlike cudaFree, unmapping does not wait for kernels, and tensors in the heap may have died a moment ago.
      cudaDeviceSynchronize();
      device_peers_.reset();
      mappings_.clear();
    });
  }

  std::byte* local() const override { return peers_[group_.rank]; }
  std::size_t bytes() const override { return group_.plan.bytes; }
  HeapKind kind() const override { return group_.plan.kind; }
  std::span<std::byte* const> peers() const override { return peers_; }
  std::byte* const* device_peers() const override { return device_peers_.get(); }

  void unmap_peers() noexcept override {
    cuda::quietly([&] {
      const CurrentContext current(*context_);
      const RelaxedCapture relaxed;
      cudaDeviceSynchronize();
      for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
        if (rank == group_.rank) continue;
        mappings_[rank].reset();
        peers_[rank] = nullptr;
      }
    });
  }

  void keep(Bootstrap& bootstrap) override {
    const CurrentContext current(*context_);
    const RelaxedCapture relaxed;
    try {
      agree(bootstrap, "keeping what the heap holds", [&] {
        kept_.reset(new (std::nothrow) std::byte[bytes()]);
        if (kept_ == nullptr) {
          fail<OutOfMemory>("suspend: the host has no {} for what the heap holds", format_bytes(bytes()));
        }
        copy(kept_.get(), local(), cudaMemcpyDeviceToHost);
      });
      bootstrap.barrier();
    } catch (...) {
      kept_.reset();
      throw;
    }
  }

  void release_memory() noexcept override {
    cuda::quietly([&] {
      const CurrentContext current(*context_);
      const RelaxedCapture relaxed;
      detach();
    });
  }

  void resume(Bootstrap& bootstrap) override {
    const CurrentContext current(*context_);
    const RelaxedCapture relaxed;
    try {
      attach(bootstrap);
      agree(bootstrap, "filling the heap again", [&] { copy(local(), kept_.get(), cudaMemcpyHostToDevice); });
      bootstrap.barrier();
    } catch (...) {
      detach();
      throw;
    }
    kept_.reset();
  }

  /// The same exchanges as of make_cuda_heap and attach() with descriptors.
  void admit(Bootstrap& bootstrap, const std::vector<bool>& is_new) override {
    const CurrentContext current(*context_);
    const RelaxedCapture relaxed;
    SharingGroup next = group_;
    next.ranks = all_gather_values(bootstrap, group_.ranks[group_.rank]);
    UniqueFd fd;
    agree(bootstrap, "offering the heap to new processes", [&] {
      const HeapPlan plan = plan_heap(next.ranks, {.bytes = bytes()});
      if (kind() != HeapKind::posix_fd || plan.kind != kind() || plan.bytes != bytes()) {
        fail<Unsupported>("replace_ranks: the heaps of {} are shared by {}, with the new ranks by {}, allowed: {}",
                          format_bytes(bytes()), name_of(kind()), name_of(plan.kind), name_of(HeapKind::posix_fd));
      }
      fd = cuda::VmmMemory::at(*context_, local()).export_fd();
    });
    const std::vector<UniqueFd> fds = exchange_fds(bootstrap, fd.get(), is_new, group_.timeout_s);
    agree(bootstrap, "mapping the heaps of new processes", [&] {
      std::vector<std::optional<cuda::VmmMemory>> imported(peers_.size());  // all before anything is unmapped
      for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
        if (is_new[peer]) imported[peer].emplace(cuda::VmmMemory::import(*context_, fds[peer].get()));
      }
      cudaDeviceSynchronize();
      for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
        if (!imported[peer]) continue;
        mappings_[peer]->detach();
        mappings_[peer]->attach(*imported[peer]);
      }
      group_ = next;
    });
  }

 private:
  void reserve() {
    mappings_.resize(peers_.size());
    for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
      if (!group_.shares_with(peer)) continue;
      mappings_[peer] = std::make_unique<cuda::Mapping>(*context_, bytes());
      peers_[peer] = mappings_[peer]->get();
    }
  }

  /// Collective: new memory of each rank, where all ranks that share it have reserved addresses.
  void attach(Bootstrap& bootstrap) {
    const bool by_fd = kind() == HeapKind::posix_fd;  // else by fabric handles, which other hosts can take
    UniqueFd fd;
    FabricHandle handle{};
    agree(bootstrap, "allocating the heap", [&] {
      const auto type = by_fd ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_FABRIC;
      const auto memory = cuda::VmmMemory::create(*context_, bytes(), type);
      mappings_[group_.rank]->attach(memory);
      if (by_fd) {
        fd = memory.export_fd();
      } else {
        handle = memory.export_fabric();
      }
    });
    std::vector<UniqueFd> fds;
    std::vector<FabricHandle> handles;
    if (by_fd) {
      std::vector<bool> partners;
      for (std::size_t peer = 0; peer < peers_.size(); ++peer) partners.push_back(group_.shares_with(peer));
      fds = exchange_fds(bootstrap, fd.get(), partners, group_.timeout_s);
    } else {
      handles = all_gather_values(bootstrap, handle);
    }
    agree(bootstrap, "mapping the heaps of peers", [&] {
      for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
        if (peer == group_.rank || !group_.shares_with(peer)) continue;
        mappings_[peer]->attach(by_fd ? cuda::VmmMemory::import(*context_, fds[peer].get())
                                      : cuda::VmmMemory::import(*context_, handles[peer]));
      }
    });
  }

  void detach() noexcept {
    cudaDeviceSynchronize();
    for (const auto& mapping : mappings_) {
      if (mapping) mapping->detach();
    }
  }

  /// Zeros the heap and puts the table of peers where kernels can read it.
  void fill() {
    const std::size_t table_bytes = peers_.size() * sizeof(std::byte*);
    void* table = nullptr;
    check(cudaMalloc(&table, table_bytes), context_->device(), "cudaMalloc of {}", format_bytes(table_bytes));
    device_peers_ = {static_cast<std::byte**>(table), [](std::byte** gone) { cudaFree(gone); }};
    on_own_stream([&](cudaStream_t stream) {
      check(cudaMemcpyAsync(table, peers_.data(), table_bytes, cudaMemcpyHostToDevice, stream), context_->device(),
            "cudaMemcpyAsync of {}", format_bytes(table_bytes));
      check(cudaMemsetAsync(local(), 0, bytes(), stream), context_->device(), "cudaMemsetAsync of {}",
            format_bytes(bytes()));
    });
  }

  void copy(void* to, const void* from, cudaMemcpyKind direction) const {
    on_own_stream([&](cudaStream_t stream) {
      check(cudaMemcpyAsync(to, from, bytes(), direction, stream), context_->device(), "cudaMemcpyAsync of {}",
            format_bytes(bytes()));
    });
  }

  /// `enqueue(stream)`, and the host waits. The default stream would wait for, or spoil, what the program does
  /// meanwhile.
  template <class Enqueue>
  void on_own_stream(const Enqueue& enqueue) const {
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), context_->device(), "cudaStreamCreateWithFlags");
    const std::shared_ptr<CUstream_st> owned(stream, [](cudaStream_t gone) {
      cudaStreamSynchronize(gone);
      cudaStreamDestroy(gone);
    });
    enqueue(stream);
    check(cudaStreamSynchronize(stream), context_->device(), "cudaStreamSynchronize");
  }

  std::shared_ptr<const cuda::Context> context_;  // before the memory: it goes last
  SharingGroup group_;
  std::vector<std::unique_ptr<cuda::Mapping>> mappings_;  ///< of each rank; null where this one maps nothing
  std::vector<std::byte*> peers_;
  std::shared_ptr<std::byte*> device_peers_;
  std::unique_ptr<std::byte[]> kept_;  ///< what a suspended heap holds
};

/// `trial`: a small piece of memory with a fabric handle, kept until peers have tried to map it.
HeapCapabilities query(const cuda::Context& context, std::optional<cuda::VmmMemory>& trial) {
  HeapCapabilities mine;
  mine.process = this_process();
  mine.device = context.device();
  mine.posix_fd = cuda::supports_posix_fd(context);
  if (mine.posix_fd) mine.granularity = cuda::granularity(context, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  if (environment::choice("DEEP_EP_MNNVL") != "off") cuda::try_fabric(context, trial, mine.fabric_trial);
  mine.fabric = trial.has_value();
  if (mine.fabric) {
    mine.granularity = std::max(mine.granularity, cuda::granularity(context, CU_MEM_HANDLE_TYPE_FABRIC));
  }
  return mine;
}

/// GPUs that have fabric handles need not be in one NVLink domain: each rank tries the others' small pieces, so that
/// the heap is made once. Ranks that cannot map one count as ranks without a fabric.
void try_pieces_of_peers(const cuda::Context& context, Bootstrap& bootstrap, std::vector<HeapCapabilities>& ranks) {
  std::array<char, 200> mine{};
  try {
    for (std::size_t peer = 0; peer < ranks.size(); ++peer) {
      if (peer == static_cast<std::size_t>(bootstrap.rank())) continue;
      const cuda::VmmMemory memory = cuda::VmmMemory::import(context, ranks[peer].fabric_trial);
    }
  } catch (const Error& error) {
    std::string(error.what()).copy(mine.data(), mine.size() - 1);
  }
  const std::vector<std::array<char, 200>> all = all_gather_values(bootstrap, mine);
  const auto failed = std::ranges::find_if(all, [](const auto& why) { return why[0] != '\0'; });
  if (failed == all.end()) return;
  log::warn("rank {}: not all ranks can map each other's memory, those of other hosts are left to RDMA: {}",
            bootstrap.rank(), failed->data());
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) ranks[rank].fabric = all[rank][0] == '\0';
}

}  // namespace

std::unique_ptr<SymmetricHeap> make_cuda_heap(std::shared_ptr<const cuda::Context> context, Bootstrap& bootstrap,
                                              const HeapOptions& options) {
  const CurrentContext current(*context);
  const RelaxedCapture relaxed;
  HeapCapabilities mine;
  std::optional<cuda::VmmMemory> trial;
  agree(bootstrap, "asking the GPU how it can share memory", [&] { mine = query(*context, trial); });
  std::vector<HeapCapabilities> ranks = all_gather_values(bootstrap, mine);
  HeapPlan plan = plan_heap(ranks, options);
  if (plan.kind == HeapKind::fabric) {
    try_pieces_of_peers(*context, bootstrap, ranks);
    plan = plan_heap(ranks, options);
  }
  const auto rank = static_cast<std::size_t>(bootstrap.rank());
  auto heap = std::make_unique<CudaHeap>(context, SharingGroup{ranks, plan, rank, options.timeout_s}, bootstrap);
  log::info("rank {}: heap of {} on GPU {}, shared by {}", bootstrap.rank(), format_bytes(plan.bytes),
            context->device(), name_of(plan.kind));
  return heap;
}

}  // namespace deep_ep
