#include "tests/cluster/cluster.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "tests/cluster/meeting_point.hpp"
#include "tests/cluster/processes.hpp"
#include "tests/cluster/rank_processes.hpp"
#include "tests/support/child_process.hpp"

namespace deep_ep::test {
namespace {

/// Before anything calls CUDA: the wire `local` must not run while a kernel is being loaded (docs/how-to/rdma.md).
[[maybe_unused]] const int kLoadKernelsFirst = ::setenv("CUDA_MODULE_LOADING", "EAGER", 0);

/// How many ranks may share a GPU, by CUDA MPS: DEEP_EP_TEST_RANKS_PER_GPU. One if it is not set.
int ranks_per_gpu() {
  const char* const text = std::getenv("DEEP_EP_TEST_RANKS_PER_GPU");
  return text != nullptr ? std::max(1, std::atoi(text)) : 1;
}

std::shared_ptr<Executor> make_executor(const ClusterOptions& options, int rank) {
  if (options.where.target == Target::cuda) return make_cuda_executor(rank % cuda_device_count());
  HostExecutorOptions host = options.host;
  // Each kernel thread takes a megabyte and nine mappings there, of which a process has 65,530, and each
  // synchronisation costs as much as there are such threads. Two blocks of two warps for each rank run beside each
  // other, too; tests of schedules ask for more.
  if (under_thread_sanitizer()) {
    if (host.multiprocessors == 0) host.multiprocessors = 2;
    if (host.warps_per_block == 0) host.warps_per_block = 2;
  }
  return make_host_executor(host);
}

double timeout_of(const ClusterOptions& options) {
  if (options.timeout_s > 0) return options.timeout_s;
  return patience() * (options.where.target == Target::cuda ? 3 : 1);
}

double bootstrap_timeout_of(const ClusterOptions& options) {
  return options.sits_out ? std::max(long_patience(), timeout_of(options)) : timeout_of(options);
}

/// Runs one rank, which stays in `self`, and returns what went wrong, or an empty string.
std::string run_rank(int rank, const ClusterOptions& options, const std::shared_ptr<Bootstrap>& bootstrap,
                     const RankFunction& function, std::unique_ptr<Rank>& self) {
  try {
    self = std::make_unique<Rank>(rank, options, bootstrap, make_executor(options, rank));
    function(*self);
  } catch (const std::exception& error) {
    return std::string("rank ") + std::to_string(rank) + ": " + error.what();
  }
  return {};
}

std::vector<std::string> run_threads(const ClusterOptions& options, const RankFunction& function) {
  const auto ranks = static_cast<std::size_t>(options.ranks);
  const auto bootstraps = make_thread_bootstraps(options.ranks, bootstrap_timeout_of(options));
  std::vector<std::string> failures(ranks);
  std::vector<std::unique_ptr<Rank>> selves(ranks);
  deep_ep::run_threads(options.ranks, [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    failures[r] = run_rank(rank, options, bootstraps[r], function, selves[r]);
  });
  return failures;
}

}  // namespace

int ranks_per_node_of(Topology topology, int ranks) {
  if (topology != Topology::two_nodes && topology != Topology::rails) return 0;
  return ranks % 2 == 0 ? ranks / 2 : 1;
}

std::string to_string(const Where& where) {
  constexpr const char* kTopologies[] = {"", "_only_rdma", "_two_nodes", "_rails"};
  return std::string(where.target == Target::host ? "host" : "cuda") +
         (where.placement == Placement::threads ? "_threads" : "_processes") +
         kTopologies[static_cast<std::size_t>(where.topology)];
}

Rank::Rank(int rank, const ClusterOptions& options, std::shared_ptr<Bootstrap> bootstrap,
           std::shared_ptr<Executor> executor)
    : rank_(rank), options_(options), bootstrap_(std::move(bootstrap)), executor_(std::move(executor)) {
  executor_->make_current();
  stream_ = executor_->create_stream();
}

Rank::~Rank() {
  buffers_.clear();
  try {
    release();
  } catch (const std::exception& error) {
    // Already reported by the exception that brought us here, or by the check that the test makes last.
    std::fprintf(stderr, "rank %d: at the end of the test: %s\n", rank_, error.what());
  }
  executor_->destroy_stream(stream_);
}

Buffer& Rank::buffer(const BufferOptions& options) {
  buffers_.push_back(own_buffer(options));
  return buffers_.back();
}

Buffer Rank::own_buffer(BufferOptions options) const {
  if (!options.timeout_s) options.timeout_s = timeout_of(options_);
  const Topology topology = options_.where.topology;
  const int width = ranks_per_node_of(topology, size());
  if (topology == Topology::two_nodes) options.ranks_per_node = width;
  if (topology == Topology::rails && options.ranks_per_node == 0) options.ranks_per_node = width;
  if (options.low_latency.bytes == 0) return Buffer(bootstrap_, executor_, options);
  if (topology == Topology::only_rdma) options.low_latency.allow_nvlink = false;
  LowLatencyRails& rails = options.low_latency.rails;
  if (rails == LowLatencyRails::automatic) {
    if (topology == Topology::two_nodes) rails = LowLatencyRails::never;
    if (topology == Topology::rails) rails = LowLatencyRails::always;
  }
  return Buffer(bootstrap_, executor_, options);
}

void* Rank::allocate(std::size_t bytes) {
  memory_.push_back(executor_->allocate(bytes > 0 ? bytes : 1));
  return memory_.back();
}

TensorView Rank::upload_bytes(std::span<const std::byte> data, DType dtype, std::initializer_list<std::int64_t> shape) {
  const TensorView view = TensorView::contiguous(allocate(data.size()), dtype, shape, executor_->device());
  require(view.bytes() == data.size(), "upload: " + view.describe() + " does not have the size of its data");
  write(view, data);
  return view;
}

void Rank::write(const TensorView& to, std::span<const std::byte> data) {
  if (data.empty()) return;
  executor_->copy(to.data, data.data(), data.size(), stream_);
  executor_->synchronize(stream_);  // `data` may go away
}

std::vector<std::byte> Rank::download_bytes(const TensorView& view) {
  require(view.is_contiguous(), "download: not contiguous: " + view.describe());
  std::vector<std::byte> result(view.bytes());
  if (!result.empty()) executor_->copy(result.data(), view.data, result.size(), stream_);
  executor_->synchronize(stream_);
  return result;
}

void Rank::release() {
  std::vector<void*> memory;
  memory.swap(memory_);
  try {
    executor_->synchronize(stream_);
  } catch (...) {
    for (void* one : memory) executor_->free(one);
    throw;
  }
  for (void* one : memory) executor_->free(one);
}

void run_cluster(const ClusterOptions& options, const RankFunction& function) {
  if (const std::string reason = missing(options.where, options.ranks); !reason.empty()) GTEST_SKIP() << reason;
  renew_time_factor();
  const bool processes = are_processes(options.where);
  if (is_rank_process()) {
    const RankProcess self = rank_process();
    end_with(self.parent);
    if (!processes || !is_own_cluster()) return;
    const auto bootstrap = meet_at(self.meeting_point, self.rank, options.ranks, bootstrap_timeout_of(options));
    std::unique_ptr<Rank> rank;
    const std::string failure = run_rank(self.rank, options, bootstrap, function, rank);
    rank.reset();
    if (!failure.empty()) std::fprintf(stderr, "%s\n", failure.c_str());
    std::exit(failure.empty() ? kRankSucceeded : 1);
  }
  const std::vector<std::string> failures =
      processes ? run_processes(options.ranks, options.lost_ranks) : run_threads(options, function);
  std::string all;
  int failed = 0;
  for (const auto& failure : failures) {
    if (!failure.empty() && failed++ < 8) all += "\n  " + failure;
  }
  if (failed > 8) all += "\n  and " + std::to_string(failed - 8) + " more";
  if (!all.empty()) {
    throw CheckFailure(std::to_string(options.ranks) + " ranks (" + to_string(options.where) + "):" + all);
  }
}

void run_with_buffers(const ClusterOptions& options, const BufferOptions& buffer_options,
                      const BufferFunction& function) {
  run_cluster(options, [&](Rank& rank) {
    Buffer& buffer = rank.buffer(buffer_options);
    function(rank, buffer);
    buffer.destroy();
  });
}

// What one thread of a process frees or loads waits for the kernels of all others, which may wait for that thread.
bool are_processes(const Where& where) {
  return where.placement == Placement::processes || (where.target == Target::cuda && ranks_per_gpu() > 1);
}

std::string missing(const Where& where, int ranks) {
  if (where.target == Target::host) return {};
  const int found = cuda_device_count();
  if (found * ranks_per_gpu() >= ranks) return {};
  return "needs " + std::to_string(ranks) + " GPUs, found " + std::to_string(found) +
         (found > 0 ? " (DEEP_EP_TEST_RANKS_PER_GPU lets ranks share them by CUDA MPS)" : "");
}

void require(bool holds, const std::string& what) {
  if (!holds) throw CheckFailure(what);
}

std::string hex(std::span<const std::byte> value) {
  static const char digits[] = "0123456789abcdef";
  std::string text = "0x";
  for (std::size_t i = value.size(); i-- > 0;) {  // the most significant byte first
    text += digits[std::to_integer<unsigned>(value[i]) >> 4];
    text += digits[std::to_integer<unsigned>(value[i]) & 15u];
  }
  return text;
}

}  // namespace deep_ep::test
