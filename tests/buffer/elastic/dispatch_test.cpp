// Dispatch for a caller that moves its rows on, and rows of a window that are moved by the call itself.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "csrc/executor/own_stream.hpp"
#include "deep_ep/result_tensors.hpp"
#include "tests/cluster/fixture.hpp"

namespace deep_ep::test {
namespace {

class ElasticDispatchTest : public ClusterTest {};
DEEP_EP_ON_THREADS(ElasticDispatchTest);

Case wide_rows(std::uint64_t seed) {
  return make_case({.tokens = {12, 0, 19}, .dtype = DType::bfloat16, .hidden = 1800, .scales = 3, .seed = seed});
}

TEST_P(ElasticDispatchTest, RowsThatAreMovedOnLieInTheWindow) {
  DEEP_EP_NEEDS_RANKS(3);
  const Case one = wide_rows(3);
  run_cluster(cluster(3), [&](Rank& rank) {
    constexpr std::size_t kWindow = std::size_t{2} << 20;
    Buffer& buffer = rank.buffer({.heap_bytes = std::size_t{8} << 20, .window_bytes = kWindow});
    const auto in_window = [&](const Tensor& tensor) {
      const auto* window = static_cast<const std::byte*>(buffer.local_memory().data);
      const auto* data = static_cast<const std::byte*>(tensor.data());
      return data >= window && data + tensor.view().bytes() <= window + kWindow;
    };
    const std::vector<Tensor> hoard = take_whole_heap(rank, buffer);
    CallOptions call = rank.call();
    call.library_memory = true;
    const Inputs inputs = upload_inputs(rank, one);
    for (const auto& [worst, most] : {std::pair<std::int64_t, std::int64_t>{0, 0}, {0, 60}, {60, 0}}) {
      DispatchArguments arguments = inputs.dispatch;
      arguments.num_worst_tokens = worst;
      arguments.most_rows = most;
      const DispatchResult result = buffer.dispatch(arguments, call);
      require(in_window(result.recv_x) && in_window(*result.recv_x_scales) && in_window(*result.recv_topk_idx),
              "what came lies in the window");
      check_dispatch(rank, one, result, {.num_worst_tokens = worst});
      if (worst != 0) continue;
      CachedDispatchArguments cached;
      cached.x = arguments.x;
      cached.x_scales = arguments.x_scales;
      cached.handle = &result.handle;
      const CachedDispatchResult again = buffer.cached_dispatch(cached, call);
      require(in_window(again.recv_x), "the rows of a cached dispatch lie in the window");
      require_same(rank.download_bytes(result.recv_x.view()), rank.download_bytes(again.recv_x.view()), "rows");
    }
    buffer.destroy();
  });
}

/// A framework whose program has no time to make memory before `may_go`.
class SlowFramework final : public ResultTensors {
 public:
  class Owned final : public Tensor::Storage {
   public:
    explicit Owned(std::size_t bytes) : memory(new std::byte[std::max<std::size_t>(bytes, 1) + kAlignment]) {}
    void record_stream(StreamHandle) override {}
    std::byte* begin() const {
      const auto at = reinterpret_cast<std::uintptr_t>(memory.get());
      return memory.get() + (kAlignment - at % kAlignment);
    }

   private:
    static constexpr std::uintptr_t kAlignment = 128;
    std::unique_ptr<std::byte[]> memory;
  };

  explicit SlowFramework(const std::atomic<bool>& may_go) : may_go_(may_go) {}

  std::vector<Tensor> make(std::span<const TensorView> wanted, const Order&) override {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(patience());
    while (!may_go_ && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    require(may_go_, "the other rank has all its rows before this one has memory for its own");
    std::vector<Tensor> made;
    for (TensorView view : wanted) {
      const auto owner = std::make_shared<Owned>(view.bytes());
      view.data = owner->begin();
      made.emplace_back(view, owner);
    }
    return made;
  }
  std::vector<Tensor> make_in_heap(std::span<const TensorView>, const Order&,
                                   const std::shared_ptr<HeapPieces>&) override {
    return {};
  }

 private:
  const std::atomic<bool>& may_go_;
};

TEST_P(ElasticDispatchTest, RowsTravelBeforeTheHostKnowsHowManyCome) {
  DEEP_EP_NEEDS_RANKS(2);
  if (GetParam().target != Target::host || are_processes(GetParam())) GTEST_SKIP() << "ranks share a flag";
  const Case one = make_case({.tokens = {12, 19}, .dtype = DType::bfloat16, .hidden = 1800, .scales = 3, .seed = 6});
  std::atomic<bool> arrived = false;
  run_cluster(cluster(2), [&](Rank& rank) {
    BufferOptions options{.heap_bytes = std::size_t{8} << 20, .window_bytes = std::size_t{2} << 20};
    const Inputs inputs = upload_inputs(rank, one);
    if (rank.rank() == 1) options.result_tensors = std::make_shared<SlowFramework>(arrived);
    Buffer& buffer = rank.buffer(options);
    DispatchArguments arguments = inputs.dispatch;
    arguments.most_rows = 38;
    const DispatchResult result = buffer.dispatch(arguments, rank.call());
    check_dispatch(rank, one, result);
    arrived = true;
    buffer.destroy();
  });
}

TEST_P(ElasticDispatchTest, MoreRowsThanPromisedAreRefused) {
  DEEP_EP_NEEDS_RANKS(2);
  const Case one = make_case({.tokens = {12, 19}, .dtype = DType::bfloat16, .hidden = 72, .seed = 7});
  run_cluster(cluster(2), [&](Rank& rank) {
    Buffer& buffer = rank.buffer({.heap_bytes = std::size_t{8} << 20});
    DispatchArguments arguments = upload_inputs(rank, one).dispatch;
    arguments.most_rows = rank.rank() == 0 ? 3 : 0;
    if (rank.rank() == 0) {
      require_throws<InvalidArgument>([&] { buffer.dispatch(arguments, rank.call()); },
                                      {"most_rows is 3, but", "rows come"}, "dispatch");
    } else {
      check_dispatch(rank, one, buffer.dispatch(arguments, rank.call()));
    }
    arguments.most_rows = 0;
    check_dispatch(rank, one, buffer.dispatch(arguments, rank.call()));
    buffer.check();
    rank.bootstrap()->barrier();
  });
}

/// The same dispatch, without its layout.
DispatchArguments without_layout(const Case& one, DispatchArguments arguments) {
  arguments.num_tokens_per_rank = arguments.is_token_in_rank = arguments.num_tokens_per_expert = {};
  arguments.num_experts = one.shape.experts();
  return arguments;
}

TEST_P(ElasticDispatchTest, WithoutALayoutSelectionsSayWhereRowsGo) {
  DEEP_EP_NEEDS_RANKS(3);
  std::vector<Case> cases;
  for (const int topk : {1, 8, 11, 32}) {
    for (const auto routing : oracle::kRoutings) {
      cases.push_back(make_case({.tokens = {70, 0, 37},
                                 .local_experts = 12,
                                 .topk = topk,
                                 .idx_dtype = topk == 8 ? DType::int32 : DType::int64,
                                 .routing = routing,
                                 .alignment = 4,
                                 .seed = cases.size() + 1}));
    }
  }
  run_cluster(cluster(3), [&](Rank& rank) {
    Buffer& buffer = rank.buffer({.heap_bytes = std::size_t{8} << 20});
    for (const Case& one : cases) {
      const DispatchArguments arguments = without_layout(one, upload_inputs(rank, one).dispatch);
      check_dispatch(rank, one, buffer.dispatch(arguments, rank.call()));
    }
    DispatchArguments wrong = without_layout(cases[0], upload_inputs(rank, cases[0]).dispatch);
    const auto refused = [&](const std::string& words) {
      require_throws<InvalidArgument>([&] { buffer.dispatch(wrong, rank.call()); }, {words}, words);
    };
    wrong.num_experts = 37;
    refused("num_experts is 37, it must be a multiple of the 3 ranks");
    wrong.num_experts = 36;
    wrong.topk_idx = wrong.topk_weights = {};
    refused("topk_idx is missing: without the layout");
    wrong = upload_inputs(rank, cases[0]).dispatch;
    wrong.num_experts = 36;
    refused("num_tokens_per_rank is given, allowed: only without num_experts");
    buffer.destroy();
  });
}

TEST_P(ElasticDispatchTest, RowsThatTheWindowDoesNotHoldLieInTheHeap) {
  DEEP_EP_NEEDS_RANKS(3);
  const Case one = wide_rows(4);
  run_cluster(cluster(3), [&](Rank& rank) {
    Buffer& buffer = rank.buffer({.heap_bytes = std::size_t{8} << 20, .window_bytes = std::size_t{32} << 10});
    CallOptions call = rank.call();
    call.library_memory = true;
    const DispatchResult result = buffer.dispatch(upload_inputs(rank, one).dispatch, call);
    require(buffer.in_heap(result.recv_x.view()), "there is room in the heap only");
    check_dispatch(rank, one, result);
    buffer.destroy();
  });
}

TEST_P(ElasticDispatchTest, WideRowsThroughTheWindow) {
  DEEP_EP_NEEDS_RANKS(3);
  const Case one = wide_rows(5);
  run_cluster(cluster(3), [&](Rank& rank) {
    Buffer& buffer = rank.buffer({.heap_bytes = std::size_t{8} << 20, .window_bytes = std::size_t{64} << 10});
    const std::vector<Tensor> hoard = take_whole_heap(rank, buffer);
    check_dispatch(rank, one, buffer.dispatch(upload_inputs(rank, one).dispatch, rank.call()));
    buffer.destroy();
  });
}

TEST_P(ElasticDispatchTest, TheNextCallComesBehindSpreadRows) {
  DEEP_EP_NEEDS_RANKS(2);
  if (GetParam().target != Target::host) GTEST_SKIP() << "streams of the CPU executor";
  run_cluster(cluster(2), [&](Rank& rank) {
    Buffer& gate = rank.buffer({.heap_bytes = std::size_t{8} << 20});
    Buffer& buffer = rank.buffer({.heap_bytes = std::size_t{8} << 20});
    if (rank.rank() == 0) {
      // Rows are moved on a stream that stands still until the other rank opens the gate.
      const OwnStream other(*rank.executor());
      gate.barrier({.stream = other.get()});
      const TensorView ends = rank.upload(std::vector<std::int32_t>{1, 1}, DType::int32, {2});
      const TensorView local = rank.upload(std::vector<std::int32_t>{0}, DType::int32, {1, 1});
      const std::vector<std::uint8_t> bytes(16, 7);
      const TensorView rows = rank.upload(bytes, DType::uint8, {1, 16});
      const TensorView moved = rank.upload(std::vector<std::uint8_t>(16), DType::uint8, {1, 16});
      buffer.spread_rows({.source_ends = ends, .local = local, .rows = rows, .spread_rows = moved},
                         {.stream = other.get()});
      buffer.barrier(rank.call());
      require_same(bytes, rank.download<std::uint8_t>(moved), "rows that were moved");
    } else {
      CallOptions asynchronous = rank.call();
      asynchronous.async_finish = true;
      const EventHandle passed = buffer.barrier(asynchronous);
      // Long enough for a barrier that does not come behind; one that does never passes here.
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      require(!rank.executor()->event_done(passed), "the barrier comes behind the rows");
      gate.barrier(rank.call());
      rank.executor()->wait_event(rank.stream(), passed);
    }
    gate.check();
    buffer.check();
    rank.bootstrap()->barrier();
  });
}

}  // namespace
}  // namespace deep_ep::test
