// The part of every rank's heap that peers signal in: ranks of its node, and its rails, ranks in other nodes, whose
// NICs write and add. It starts the heap and has the same layout on every rank, so an address on a peer is the peer's
// heap base plus the offset computed here.
//
// All of it is zero when the buffer is made and never reset: signals only grow. In a call everything has one writer and
// one reader.
#pragma once

#include <cstdint>

#include "kernels/common/carver.hpp"
#include "kernels/common/messages.hpp"
#include "kernels/primitives/cell.hpp"
#include "kernels/primitives/divisor.hpp"

namespace deep_ep {

/// Nodes of equally many consecutive ranks, as one rank sees them. A rank's rails are the ranks with its index.
struct NodeGrid {
  int rank = 0;
  int num_ranks = 0;
  Divisor width = 1;  ///< ranks of a node

  DEEP_EP_HOST_DEVICE int nodes() const { return num_ranks / width; }
  DEEP_EP_HOST_DEVICE int node() const { return rank / width; }
  DEEP_EP_HOST_DEVICE int index() const { return rank % width; }
  DEEP_EP_HOST_DEVICE int first_of_node() const { return rank - index(); }
  DEEP_EP_HOST_DEVICE int rail_in(int node) const { return node * width + index(); }

  // The other nodes are numbered from the next one on, so that not all ranks begin with the same.
  DEEP_EP_HOST_DEVICE int others() const { return nodes() - 1; }
  DEEP_EP_HOST_DEVICE int other(int number) const { return around(node() + 1 + number); }
  DEEP_EP_HOST_DEVICE int number_of(int other) const { return around(other - node() - 1 + nodes()); }

  /// `node`, below twice as many as there are, modulo the nodes.
  DEEP_EP_HOST_DEVICE int around(int node) const {
    const int all = nodes();
    return node < all ? node : node - all;
  }
};

/// All ranks in one node: the same members, as far as code that both share names them.
struct OneNode {
  int rank, num_ranks, width;

  DEEP_EP_HOST_DEVICE static constexpr int nodes() { return 1; }
  DEEP_EP_HOST_DEVICE static constexpr int node() { return 0; }
  DEEP_EP_HOST_DEVICE int index() const { return rank; }
  DEEP_EP_HOST_DEVICE static constexpr int first_of_node() { return 0; }
  DEEP_EP_HOST_DEVICE static constexpr int others() { return 0; }
};

/// A message between ranks of a node, in cells: each says to which call it belongs, so no fence is behind them. See
/// kernels/normal/meet.hpp.
struct alignas(kLine) Mailbox {
  Cell cells[kLine / sizeof(Cell)];
};

/// A source's counts of its tokens, as a message to one rank.
struct SourceCounts {
  Carver carver;
  int width, experts;  ///< ranks of the node, experts of the rank
  CallShape* shape = carver.take<CallShape>();
  std::int32_t* tokens_for_node = carver.take<std::int32_t>();  ///< between nodes: for the rank's node
  std::int32_t* tokens_per_rank = carver.take<std::int32_t>(width);
  std::int32_t* tokens_per_expert = carver.take<std::int32_t>(experts, kLine);  ///< entries that name each expert
  std::size_t bytes = align_to_line(carver.bytes());
};

/// Plain signals, one per source and purpose.
enum class IntranodeSignal : int { notify, selections, dispatch_rows, combine_done, barrier, load_balance_done, count };

/// Calls at which ranks meet. Each kind has two mailboxes in turn: a source may be one call ahead, never two.
enum class MeetingKind : int { dispatch, combine, load_balance, count };

/// The words of the slots of local rings (LocalRings): for each slot that a rank reads how far the rows stored in it
/// have come, for each slot that it writes how far the rows read from it have.
struct RingWords {
  Place<std::uint64_t> published, released;
  int slots;  ///< that there are words for, for each rank

  DEEP_EP_HOST_DEVICE static RingWords place(Carver& carver, int num_ranks, int slots) {
    const auto words = static_cast<std::size_t>(num_ranks * slots);
    return {{carver.place<std::uint64_t>(words, kLine)}, {carver.place<std::uint64_t>(words, kLine)}, slots};
  }
};

/// A lane is a queue pair for rows to a rail. The next chunk of a call goes by a lane that has few bytes under way.
constexpr int kMostInternodeLanes = 4;

struct ControlWindow {
  static constexpr int kMostChunks = 256;   ///< of a ring between nodes
  static constexpr int kFetchedSlots = 32;  ///< of a dispatch's local rings: few bytes are enough under way
  /// Room for what all sources tell of so many selections in a dispatch of the second interface: twice, by the epoch's
  /// parity.
  static constexpr int kFewSelections = 16384;
  static constexpr std::size_t kFewSelectionsBytes = kFewSelections * sizeof(std::int32_t);
  struct alignas(kLine) Line {
    std::uint64_t signal;
  };
  enum RailWord : int { notified, head, shape };  ///< a shape for each lane
  static constexpr int kRailWords = shape + kMostInternodeLanes;

  NodeGrid grid;
  int max_local_experts = 0;
  int max_window_tokens = 0;  ///< rows of a source that fit the window for pushed rows at once; each has a word
  Carver carver = Carver::without_memory();
  Place<Mailbox> mailboxes{carver.place<Mailbox>(2 * static_cast<int>(MeetingKind::count) * grid.num_ranks)};
  Place<Line> signals{carver.place<Line>(static_cast<int>(IntranodeSignal::count) * grid.num_ranks)};
  std::size_t counts_bytes = SourceCounts{Carver::without_memory(), grid.width, max_local_experts}.bytes;
  Place<std::byte> all_counts{carver.place<std::byte>(5 * grid.num_ranks * counts_bytes, kLine)};
  RingWords fetched_rows = RingWords::place(carver, grid.num_ranks, kFetchedSlots);     ///< of a dispatch's local rings
  RingWords pushed_rows = RingWords::place(carver, grid.num_ranks, max_window_tokens);  ///< of a combine's
  Place<std::byte> few_selections{carver.place<std::byte>(2 * kFewSelectionsBytes, kLine)};
  Place<Line> rail_words{carver.place<Line>(kRailWords * grid.nodes())};
  Place<std::uint64_t> landed_words{carver.place<std::uint64_t>(kMostChunks * grid.nodes(), kLine)};
  std::size_t bytes = align_to_line(carver.bytes());

  ControlWindow() = default;
  ControlWindow(const NodeGrid& nodes, int local_experts, int window_tokens)
      : grid(nodes), max_local_experts(local_experts), max_window_tokens(window_tokens) {}

  // Written by peer `source` of the node, in the heap that begins at `heap`.

  DEEP_EP_DEVICE Mailbox& mailbox(std::byte* heap, MeetingKind kind, std::uint64_t epoch, int source) const {
    const int box = 2 * static_cast<int>(kind) + static_cast<int>(epoch & 1);
    return mailboxes.in(heap)[box * grid.num_ranks + source];
  }
  DEEP_EP_DEVICE std::uint64_t* signal(std::byte* heap, IntranodeSignal kind, int source) const {
    return &signals.in(heap)[static_cast<int>(kind) * grid.num_ranks + source].signal;
  }
  /// The counts of `source` in call `epoch`. Two in turn: a source may be one call ahead, never two.
  DEEP_EP_DEVICE Place<std::byte> counts(std::uint64_t epoch, int source) const { return counts_at(epoch & 1, source); }
  DEEP_EP_DEVICE std::uint64_t* pushed_flag(std::byte* heap, int source, int slot) const {
    return pushed_rows.published.in(heap) + (std::int64_t{source} * pushed_rows.slots + slot);
  }

  // Written by this rank's rail in node `node`.

  DEEP_EP_DEVICE Place<std::uint64_t> rail_word(RailWord which, int node, int lane = 0) const {
    return {rail_words.offset + static_cast<std::size_t>(node * kRailWords + which + lane) * sizeof(Line)};
  }
  /// Rings::through() of the last chunk that has landed in a place of the ring from that node, or of a lane alone.
  DEEP_EP_DEVICE Place<std::uint64_t> landed(int node, int place) const {
    return {landed_words.offset + static_cast<std::size_t>(node * kMostChunks + place) * sizeof(std::uint64_t)};
  }
  /// The counts of the rail for rank i of this node, at `at` = first rank of the rail's node + i; and this rank's own
  /// for any rank, which its NIC reads.
  DEEP_EP_DEVICE Place<std::byte> landed_counts(std::uint64_t epoch, int at) const {
    return counts_at(2 + (epoch & 1), at);
  }
  DEEP_EP_DEVICE Place<std::byte> staged_counts(int rank) const { return counts_at(4, rank); }
  DEEP_EP_DEVICE Place<std::byte> counts_at(std::uint64_t table, int rank) const {
    const std::size_t number = table * static_cast<std::size_t>(grid.num_ranks) + static_cast<std::size_t>(rank);
    return {all_counts.offset + number * counts_bytes};
  }
  /// What lies at one of these places.
  DEEP_EP_DEVICE SourceCounts counts_in(std::byte* heap, Place<std::byte> place) const {
    return {Carver(place.in(heap)), grid.width, max_local_experts};
  }
};

}  // namespace deep_ep
