// Runs a function on several ranks: as threads of this process, or as processes of their own, on CPU or GPUs.
//
//   run_cluster({.ranks = 3, .where = where}, [&](Rank& rank) { Buffer buffer = rank.buffer(...); ... });
//
// The function reports failure by throwing (`require`, `require_same`), which works in every placement; what the ranks
// threw is gathered into one exception. No run of processes outlives its deadline.
//
// Processes are made by starting this test program again with the same test: the child repeats the test's body up to
// the same call of run_cluster and becomes one rank there. So no closure has to travel, and no process is forked after
// threads were started or CUDA was touched; only the body before the call must be deterministic.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "deep_ep/buffer.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::test {

enum class Target : std::uint8_t { host, cuda };
enum class Placement : std::uint8_t { threads, processes };
/// How low-latency calls reach other ranks: all by NVLink, all by RDMA, or half of them (an odd number: all) by each,
/// directly in two_nodes and by rails in rails, so neither is left to the model. A test may override this, and also how
/// many ranks make a node.
enum class Topology : std::uint8_t { one_node, only_rdma, two_nodes, rails };
/// Ranks of a node, if there are several nodes; else 0.
int ranks_per_node_of(Topology topology, int ranks);

/// Where the ranks of a test live: the parameter of the tests.
struct Where {
  Target target = Target::host;
  Placement placement = Placement::threads;
  Topology topology = Topology::one_node;
};
std::string to_string(const Where& where);

struct ClusterOptions {
  int ranks = 2;
  Where where = {};
  /// How the CPU executor behaves; with seed 0 the environment's DEEP_EP_HOST_SEED counts.
  HostExecutorOptions host = {};
  /// Time that the bootstrap and, unless a test says otherwise, the buffers allow. 0 is patience(), and three times as
  /// long on GPUs, where ranks also make their contexts meanwhile.
  double timeout_s = 0;
  /// A rank waits in the bootstrap while others go through deadlines: there long_patience() is allowed.
  bool sits_out = false;
  /// These ranks are meant to disappear; how their processes end does not matter.
  std::set<int> lost_ranks = {};
};

/// What the function gets: one rank, with memory and buffers that live until all ranks have returned.
class Rank {
 public:
  Rank(int rank, const ClusterOptions& options, std::shared_ptr<Bootstrap> bootstrap,
       std::shared_ptr<Executor> executor);
  ~Rank();
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  int rank() const { return rank_; }
  int size() const { return options_.ranks; }
  const std::shared_ptr<Bootstrap>& bootstrap() const { return bootstrap_; }
  const std::shared_ptr<Executor>& executor() const { return executor_; }
  StreamHandle stream() const { return stream_; }
  CallOptions call() const { return {.stream = stream_, .previous_event = {}, .async_finish = false}; }

  /// A buffer with small memory and the cluster's time-out; the options change what a test cares about. It lives until
  /// every rank has ended, so that a rank that fails does not take memory away from those that go on.
  Buffer& buffer(const BufferOptions& options = {.heap_bytes = std::size_t{64} << 20});
  /// The same, for tests of a buffer's end.
  Buffer own_buffer(BufferOptions options = {.heap_bytes = std::size_t{64} << 20}) const;

  /// Device memory with undefined contents.
  void* allocate(std::size_t bytes);
  /// A contiguous tensor of the rank's device, filled with `data` (whose size must be the tensor's).
  TensorView upload_bytes(std::span<const std::byte> data, DType dtype, std::initializer_list<std::int64_t> shape);
  template <class T>
  TensorView upload(const std::vector<T>& data, DType dtype, std::initializer_list<std::int64_t> shape) {
    return upload_bytes(std::as_bytes(std::span<const T>(data)), dtype, shape);
  }
  /// Indices as int64 or int32, as `dtype` says; and from either.
  TensorView upload_indices(const std::vector<std::int64_t>& data, DType dtype,
                            std::initializer_list<std::int64_t> shape) {
    if (dtype == DType::int64) return upload(data, dtype, shape);
    return upload(std::vector<std::int32_t>(data.begin(), data.end()), dtype, shape);
  }
  std::vector<std::int64_t> download_indices(const TensorView& view) {
    if (view.dtype == DType::int64) return download<std::int64_t>(view);
    const auto narrow = download<std::int32_t>(view);
    return {narrow.begin(), narrow.end()};
  }
  /// Overwrites the first bytes of an existing tensor.
  void write(const TensorView& to, std::span<const std::byte> data);

  /// The contents of a contiguous tensor, after everything on the stream.
  std::vector<std::byte> download_bytes(const TensorView& view);
  template <class T>
  std::vector<T> download(const TensorView& view) {
    const std::vector<std::byte> bytes = download_bytes(view);
    std::vector<T> result(bytes.size() / sizeof(T));
    if (!bytes.empty()) std::memcpy(result.data(), bytes.data(), result.size() * sizeof(T));
    return result;
  }

  /// Frees what allocate and upload returned; nothing may use it any more.
  void release();

 private:
  int rank_;
  ClusterOptions options_;
  std::shared_ptr<Bootstrap> bootstrap_;
  std::shared_ptr<Executor> executor_;
  StreamHandle stream_;
  std::vector<void*> memory_;
  std::deque<Buffer> buffers_;
};

using RankFunction = std::function<void(Rank&)>;

/// Throws one exception that says what every rank threw. Where so many ranks cannot run, the test is skipped.
void run_cluster(const ClusterOptions& options, const RankFunction& function);

/// The same, where each rank has such a buffer, which it destroys behind the function.
using BufferFunction = std::function<void(Rank&, Buffer&)>;
void run_with_buffers(const ClusterOptions& options, const BufferOptions& buffer, const BufferFunction& function);
inline void run_with_buffers(const ClusterOptions& options, const BufferFunction& function) {
  run_with_buffers(options, {.heap_bytes = std::size_t{64} << 20}, function);
}

/// Why `ranks` ranks cannot run there, or an empty string when they can. With DEEP_EP_TEST_RANKS_PER_GPU=N, N ranks may
/// share a GPU (CUDA MPS); then they are processes also where a test says threads.
std::string missing(const Where& where, int ranks);

/// Whether ranks there are processes.
bool are_processes(const Where& where);

struct CheckFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void require(bool holds, const std::string& what);

std::string hex(std::span<const std::byte> value);

/// Element by element, bit by bit; names the first difference by row and column.
template <class T>
void require_same(const std::vector<T>& expected, const std::vector<T>& seen, const std::string& what,
                  std::int64_t row_width = 1) {
  require(expected.size() == seen.size(),
          what + ": expected " + std::to_string(expected.size()) + " elements, got " + std::to_string(seen.size()));
  std::size_t differing = 0;
  std::size_t first = 0;
  for (std::size_t i = expected.size(); i-- > 0;) {
    if (std::memcmp(&expected[i], &seen[i], sizeof(T)) == 0) continue;
    ++differing;
    first = i;
  }
  if (differing == 0) return;
  const auto width = static_cast<std::size_t>(row_width > 0 ? row_width : 1);
  throw CheckFailure(what + ": " + std::to_string(differing) + " of " + std::to_string(expected.size()) +
                     " elements differ, first at row " + std::to_string(first / width) + " column " +
                     std::to_string(first % width) + ": expected " +
                     hex(std::as_bytes(std::span<const T>(&expected[first], 1))) + ", got " +
                     hex(std::as_bytes(std::span<const T>(&seen[first], 1))));
}

/// Calls `function`, which must throw an E whose text contains every one of `words`. Returns the text.
template <class E, class Function>
std::string require_throws(Function&& function, const std::vector<std::string>& words, const std::string& what) {
  try {
    function();
  } catch (const E& error) {
    const std::string text = error.what();
    for (const auto& word : words) {
      require(text.find(word) != std::string::npos, what + ": the message should contain '" + word + "': " + text);
    }
    return text;
  } catch (const std::exception& error) {
    throw CheckFailure(what + ": threw another exception: " + error.what());
  }
  throw CheckFailure(what + ": threw nothing");
}

}  // namespace deep_ep::test
