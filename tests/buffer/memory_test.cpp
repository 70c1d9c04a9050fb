// Too little memory, and more than 32 bits can count: windows with credits, received tensors outside the heap, offsets
// beyond 4 GiB.
#include "tests/cluster/fixture.hpp"
#include "tests/support/bytes.hpp"

namespace deep_ep::test {
namespace {

class MemoryTest : public ClusterTest {};
DEEP_EP_ON_THREADS(MemoryTest);
class MemoryProcessesTest : public ClusterTest {};
DEEP_EP_ON_PROCESSES(MemoryProcessesTest);

/// Rounds whose received rows are several times what the windows below hold.
std::vector<Shape> large_rounds() {
  const std::int64_t less = under_thread_sanitizer() ? 3 : 1;  // still several windows
  std::vector<Shape> shapes;
  for (const auto routing :
       {oracle::Routing::uniform, oracle::Routing::one_hot_expert, oracle::Routing::some_dropped}) {
    if (under_thread_sanitizer() && routing != oracle::Routing::uniform) continue;  // the same threads
    shapes.push_back({.tokens = {150 / less, 0, 97 / less},
                      .local_experts = 3,
                      .routing = routing,
                      .hidden = 1024,
                      .combine_hidden = 1024,
                      .bias_0 = true,
                      .seed = shapes.size() + 1});
    shapes.push_back({.tokens = {120 / less, 64 / less, 3},
                      .local_experts = 3,
                      .routing = routing,
                      .dtype = DType::float8_e4m3,
                      .hidden = 2048,
                      .scales = 16,
                      .scale_layout = ScaleLayout::column_major,
                      .combine_hidden = 512,
                      .seed = shapes.size() + 1});
  }
  return shapes;
}

void receive_with_full_heaps(const ClusterOptions& cluster) {
  std::vector<Case> cases;
  for (const Shape& shape : large_rounds()) cases.push_back(make_case(shape));
  run_with_buffers(cluster, {.heap_bytes = 8 * kMiB, .window_bytes = 128 * kKiB}, [&](Rank& rank, Buffer& buffer) {
    std::vector<Tensor> hoard = take_whole_heap(rank, buffer);
    for (const Case& one : cases) {
      const DispatchResult result = buffer.dispatch(upload_inputs(rank, one).dispatch, rank.call());
      check_dispatch(rank, one, result);
      require(one.rows(rank.rank()) == 0 || !buffer.in_heap(result.recv_x.view()), "recv_x cannot lie in a full heap");
      Returned returned = upload_returned(rank, buffer, one, result.handle, false);
      check_combine(rank, one, buffer.combine(returned.combine, rank.call()));
      rank.release();
    }
    hoard.clear();
    // Once the memory is back, rows go straight to their tensors again.
    const DispatchResult result = buffer.dispatch(upload_inputs(rank, cases[0]).dispatch, rank.call());
    check_dispatch(rank, cases[0], result);
    require(buffer.in_heap(result.recv_x.view()), "recv_x lies in the heap once there is room");
  });
}

TEST_P(MemoryTest, ReceivesThroughTheWindowWhenTheHeapIsFull) { receive_with_full_heaps(cluster(3)); }

/// An address outside the heap means something else in each process.
TEST_P(MemoryProcessesTest, ReceivesThroughTheWindowWhenTheHeapIsFull) { receive_with_full_heaps(cluster(3)); }

TEST_P(MemoryTest, RowsThatTheWindowHoldsAreCopiedFromIt) {
  std::vector<Case> cases;
  for (const Shape& shape : large_rounds()) cases.push_back(make_case(shape));
  run_with_buffers(cluster(3), {.heap_bytes = 8 * kMiB, .window_bytes = 6 * kMiB}, [&](Rank& rank, Buffer& buffer) {
    const std::vector<Tensor> hoard = take_whole_heap(rank, buffer);
    for (const Case& one : cases) {
      for (const std::int64_t worst : {0, 500}) {
        run_round(rank, buffer, one, {.num_sms = 0, .num_worst_tokens = worst, .returned_in_heap = false});
      }
      rank.release();
    }
  });
}

TEST_P(MemoryTest, SmallWindowsAreNamed) {
  const Case one = make_case({.tokens = {9, 4, 7}, .hidden = 2048, .combine_hidden = 4096});
  const Case wide = make_case({.tokens = {9, 4, 7}, .hidden = 4096});
  run_cluster(cluster(3), [&](Rank& rank) {
    Buffer& buffer = rank.buffer({.heap_bytes = 8 * kMiB, .window_bytes = 16 * kKiB});
    const DispatchResult first = buffer.dispatch(upload_inputs(rank, one).dispatch, rank.call());
    const Returned returned = upload_returned(rank, buffer, one, first.handle, false);
    require_throws<OutOfMemory>([&] { buffer.combine(returned.combine, rank.call()); },
                                {"its window of 16.00 KiB", "each of 3 ranks", "window_bytes"}, "combine");
    const std::vector<Tensor> hoard = take_whole_heap(rank, buffer);
    require_throws<OutOfMemory>([&] { buffer.dispatch(upload_inputs(rank, wide).dispatch, rank.call()); },
                                {"its window of 16.00 KiB", "a row of 8.12 KiB from each of 3 ranks"}, "dispatch");
  });
}

TEST_P(MemoryTest, WorstCaseTensorsMayBeLargerThanTheHeap) {
  const std::int64_t worst = under_sanitizer() ? 3500 : 65536;  // rows of 2 KiB
  run_rounds(cluster(3), large_rounds(), {.num_sms = 0, .num_worst_tokens = worst, .returned_in_heap = false},
             {.heap_bytes = 6 * kMiB, .window_bytes = 128 * kKiB});
}

TEST_P(MemoryTest, OffsetsBeyond4GiB) {
  constexpr std::int64_t kPadding = (std::int64_t{4} << 30) + (std::int64_t{512} << 20);
  const Case one = make_case({.tokens = {33, 21},
                              .dtype = DType::float8_e4m3,
                              .hidden = 256,
                              .scales = 3,
                              .combine_hidden = 128,
                              .bias_1 = true});
  run_with_buffers(
      cluster(2), {.heap_bytes = std::size_t{6} << 30, .window_bytes = 4 * kMiB}, [&](Rank& rank, Buffer& buffer) {
        // Not touched, so on the CPU it takes no memory.
        const Tensor padding = buffer.allocate_tensor(DType::uint8, {kPadding}, rank.call().stream);
        const DispatchResult result = buffer.dispatch(upload_inputs(rank, one).dispatch, rank.call());
        const auto distance = static_cast<std::byte*>(result.recv_x.data()) - static_cast<std::byte*>(padding.data());
        require(distance > std::int64_t{1} << 32, "recv_x should lie beyond 4 GiB, is at " + std::to_string(distance));
        check_dispatch(rank, one, result);
        for (const bool heap : {true, false}) {
          Returned returned = upload_returned(rank, buffer, one, result.handle, heap);
          check_combine(rank, one, buffer.combine(returned.combine, rank.call()));
        }
      });
}

TEST_P(MemoryTest, AllocateTensor) {
  run_with_buffers(cluster(1), {.heap_bytes = 16 * kMiB}, [](Rank& rank, Buffer& buffer) {
    const Tensor one = buffer.allocate_tensor(DType::bfloat16, {7, 24}, rank.call().stream);
    const Tensor two = buffer.allocate_tensor(DType::float32, {3}, rank.call().stream);
    require(one.size(0) == 7 && one.size(1) == 24 && one.view().dtype == DType::bfloat16, "shape and type");
    require(buffer.in_heap(one.view()) && buffer.in_heap(two.view()), "in_heap");
    require(reinterpret_cast<std::uintptr_t>(one.data()) % 128 == 0, "aligned to 128 bytes");
    const auto begin = static_cast<std::byte*>(one.data());
    const auto other = static_cast<std::byte*>(two.data());
    require(other + two.view().bytes() <= begin || begin + one.view().bytes() <= other, "tensors must not overlap");
    require(!buffer.in_heap(rank.upload(std::vector<float>(4), DType::float32, {4})), "ordinary memory is not in_heap");
    buffer.allocate_tensor(DType::uint8, {0, 16}, rank.call().stream);
    require_throws<OutOfMemory>(
        [&] { buffer.allocate_tensor(DType::uint8, {std::int64_t{1} << 40}, rank.call().stream); }, {"1099511627776"},
        "allocate_tensor of a tebibyte");
    require_throws<InvalidArgument>(
        [&] {
          buffer.allocate_tensor(DType::uint8, {-1, 4}, rank.call().stream);
        },
        {"shape", "-1"}, "allocate_tensor with a negative size");
    constexpr std::int64_t kHuge = std::int64_t{1} << 32;
    require_throws<InvalidArgument>(
        [&] {
          buffer.allocate_tensor(DType::int64, {kHuge, kHuge}, rank.call().stream);
        },
        {"shape", "4294967296"}, "allocate_tensor of sizes whose product wraps");
  });
}

}  // namespace
}  // namespace deep_ep::test
