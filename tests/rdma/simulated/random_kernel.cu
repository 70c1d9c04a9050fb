#include "tests/rdma/simulated/random_kernel.hpp"

#include "kernels/primitives/warp.hpp"
#include "kernels/rdma/port_channel.hpp"

namespace deep_ep::device {
namespace {

using rdma::EntryHeader;
using rdma::WorkQueueEntry;
using test::RandomParams;

constexpr std::uint64_t kSignal = 0;
constexpr std::uint64_t kAnswer = 8;
constexpr std::uint64_t kCounters = 64;

DEEP_EP_DEVICE std::uint64_t mixed(std::uint64_t a, std::uint64_t b) {
  std::uint64_t x = a * 0x9e3779b97f4a7c15u + b * 0xd1b54a32d192ed03u + 0x8cb92ba72f3d8dd7u;
  x = (x ^ x >> 31) * 0xff51afd7ed558ccdu;
  return x ^ x >> 29;
}

/// What one lane does in one round; both sides know it.
struct Choice {
  enum Kind { write, add, empty };
  Kind kind;
  std::uint32_t bytes;
  std::uint32_t from;  ///< in the pattern
  std::uint64_t to;    ///< in the area
  std::uint64_t value;

  DEEP_EP_DEVICE Choice(std::uint64_t seed, std::uint64_t round, int slot) {
    const std::uint64_t dice = mixed(seed + round * RandomParams::kSlots, static_cast<std::uint64_t>(slot));
    const auto draw = static_cast<std::uint32_t>(dice & 15u);
    kind = draw < 12 ? write : draw < 14 ? add : empty;
    const std::uint32_t limit = 1u << (dice >> 4) % 15u;  // small sizes are as likely as large ones
    bytes = kind == write ? 1 + static_cast<std::uint32_t>(dice >> 8) % limit : 0;
    from = static_cast<std::uint32_t>(dice >> 24) % (RandomParams::kPattern - RandomParams::kMost);
    // Half of all can be moved by whole words.
    const std::uint32_t shift = static_cast<std::uint32_t>(dice >> 40) % 32u;
    to = RandomParams::kIncoming +
         ((round % 2) * RandomParams::kSlots + static_cast<std::uint64_t>(slot)) * RandomParams::kSlotBytes +
         ((dice >> 50 & 1u) != 0 ? from % 16u : shift);
    value = dice >> 16;
  }
};

/// A warp's side of a queue pair.
struct Side {
  const RandomParams& p;
  const RdmaPeerParams& peer;
  std::uint64_t mine;    ///< area of what comes
  std::uint64_t theirs;  ///< area of what goes, in the peer's heap

  DEEP_EP_DEVICE std::uint64_t counter(std::uint64_t at) const {
    return load_acquire<Scope::system>(reinterpret_cast<const std::uint64_t*>(p.heap + mine + at));
  }
  DEEP_EP_DEVICE bool wait(std::uint64_t at, std::uint64_t value) const {
    return wait_signal<WholeWarp>(p.wait, reinterpret_cast<const std::uint64_t*>(p.heap + mine + at),
                                  {peer.queue.peer, Wanted::counts, value});
  }
  DEEP_EP_DEVICE void count_wrong(bool wrong) const {
    if (wrong) add_relaxed<Scope::system>(p.wrong, 1);
  }
};

DEEP_EP_DEVICE void write_choice(const Side& side, WorkQueueEntry& entry, const EntryHeader& header,
                                 const Choice& choice) {
  switch (choice.kind) {
    case Choice::write:
    case Choice::empty:
      return write_entry(entry, header, {side.theirs + choice.to, side.peer.remote_key},
                         {choice.from, side.peer.local_key}, choice.bytes);
    case Choice::add: {
      const std::uint64_t at = kCounters + 8 * static_cast<std::uint64_t>(lane_index());
      return fetch_add_entry(entry, header, {side.theirs + at, side.peer.signal_key}, side.peer.queue.sink,
                             choice.value);
    }
  }
}

DEEP_EP_DEVICE bool add(const Side& side, rdma::PortChannel<WholeWarp>& queue, std::uint64_t at, std::uint64_t value) {
  return queue.post(lane_index() == 0, [&](WorkQueueEntry& entry, const EntryHeader& header) {
    fetch_add_entry(entry, header, {side.theirs + at, side.peer.signal_key}, side.peer.queue.sink, value);
  });
}

DEEP_EP_DEVICE void send(const Side& side) {
  const RandomParams& p = side.p;
  rdma::PortChannel<WholeWarp> queue(side.peer, p.wait);
  bool good = true;
  for (std::uint64_t round = p.first_round; good && round < p.first_round + p.rounds; ++round) {
    good = round < 3 || side.wait(kAnswer, round - 2);
    const Choice choice(p.seed, round, lane_index());
    good = good && queue.post(true, [&](WorkQueueEntry& entry, const EntryHeader& header) {
      write_choice(side, entry, header, choice);
    });
    if (mixed(p.seed, round) % 4 == 0) queue.flush();
    if (mixed(p.seed, round) % 16 == 0) good = good && queue.quiet();
    good = good && add(side, queue, kSignal, 1);
    queue.flush();
  }
  queue.quiet();
  queue.close();
}

DEEP_EP_DEVICE void check_choice(const Side& side, const Choice& choice) {
  constexpr std::uint32_t kAround = 16;  // bytes before and behind that nobody writes
  std::byte* const begin = side.p.heap + side.mine + choice.to - kAround;
  const std::uint32_t end = kAround + choice.bytes;
  for (std::uint32_t i = static_cast<std::uint32_t>(lane_index()); i < end + kAround; i += kWarpSize) {
    const bool inside = i >= kAround && i < end;
    side.count_wrong(begin[i] != (inside ? side.p.heap[choice.from + i - kAround] : std::byte{}));
    if (inside) begin[i] = std::byte{};  // for what comes to this slot next
  }
}

DEEP_EP_DEVICE void receive(const Side& side) {
  const RandomParams& p = side.p;
  rdma::PortChannel<WholeWarp> queue(side.peer, p.wait);
  const std::uint64_t counter = kCounters + 8 * static_cast<std::uint64_t>(lane_index());
  for (std::uint64_t round = p.first_round; round < p.first_round + p.rounds; ++round) {
    if (!side.wait(kSignal, round)) break;
    for (int slot = 0; slot < static_cast<int>(RandomParams::kSlots); ++slot) {
      check_choice(side, Choice(p.seed, round, slot));
    }
    warp::sync();
    if (!add(side, queue, kAnswer, 1)) break;
    queue.flush();
  }
  // Sums of the lanes' additions: all of them have come.
  std::uint64_t expected = 0;
  for (std::uint64_t round = 1; round < p.first_round + p.rounds; ++round) {
    const Choice choice(p.seed, round, lane_index());
    if (choice.kind == Choice::add) expected += choice.value;
  }
  side.count_wrong(side.counter(counter) != expected);
  queue.quiet();
  queue.close();
}

DEEP_EP_DEVICE void random_body(const RandomParams& p, std::byte*) {
  const int pair = block_index() / p.num_ranks;
  const int other = block_index() % p.num_ranks;
  const int channel = 2 * pair + warp_index();
  const RdmaPeerParams& peer = p.peers[channel * p.num_ranks + other];
  if (other == p.rank || peer.queue.depth == 0) return;
  const Side side{p, peer, p.area(pair, other), p.area(pair, p.rank)};
  if (warp_index() == 0) {
    send(side);
  } else {
    receive(side);
  }
}

}  // namespace
}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(random_operations, deep_ep::device::random_body)
