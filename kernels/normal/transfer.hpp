// Shared by dispatch and combine: warps that work off the chunks or rows of all nodes, rings between ranks of a node,
// posters to the rails, and the steps of a call.
#pragma once

#include "kernels/common/messages.hpp"
#include "kernels/common/row_copy.hpp"
#include "kernels/common/wait.hpp"
#include "kernels/normal/meet.hpp"
#include "kernels/normal/params.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/rdma/port_channel.hpp"

namespace deep_ep::device::normal {

/// A word in this rank's memory that it waits for; nullptr: for nothing.
struct AwaitedWord {
  Awaited awaited{0, Wanted::nothing, 0};
  const std::uint64_t* word = nullptr;

  DEEP_EP_DEVICE bool is_reached() const {
    return word == nullptr || load_acquire<Scope::system>(word) >= awaited.expected;
  }
  /// Itself, or nothing once it is reached.
  DEEP_EP_DEVICE AwaitedWord missing() const { return is_reached() ? AwaitedWord{} : *this; }
  /// False after a fault.
  template <class Group = OneThread>
  DEEP_EP_DEVICE bool await(const ReportLate& policy) const {
    return word == nullptr || wait_signal<Group>(policy, word, awaited);
  }
};

// A local ring: rows of a call, numbered from 0, pass from one rank of a node to another.
//
//   writer                                     reader
//   await: `released` of the slot, if it has had a row
//   stores row n
//   publish: `published` of the slot, there    await: `published` of the slot
//                                              reads row n
//                                              release: `released` of the slot, there
//
// Each slot has its words, so that several warps may write and read rows of one ring at once.

/// One end of a ring.
struct TokenRing {
  const TransferParams& params;
  std::uint64_t epoch;
  int peer;         ///< the rank at the other end
  int here, there;  ///< the ring's number at this end, and at the other

  DEEP_EP_DEVICE const LocalRings& rings() const { return params.local; }
  /// How far a slot has come with row `n`.
  DEEP_EP_DEVICE std::uint64_t through(std::int32_t n) const {
    return Progress::at(epoch, static_cast<std::uint32_t>(n) + 1);
  }

  // The writer's end.

  /// The word that must come before row `n` may be stored.
  DEEP_EP_DEVICE AwaitedWord room(std::int32_t n) const {
    if (n < rings().slots) return {};
    return {{peer, rings().room, through(n - rings().slots)},
            rings().words.released.in(params.common.own_heap()) + rings().slot_of(here, n)};
  }
  DEEP_EP_DEVICE std::byte* slot_there(std::int32_t n) const {
    return rings().slot(there, n).in(params.common.heaps[peer]);
  }
  /// By a whole warp, which has stored row `n`.
  DEEP_EP_DEVICE void publish(std::int32_t n) const {
    warp::sync();  // the lanes' stores come before the word
    if (lane_index() != 0) return;
    store_release<Scope::system>(rings().words.published.in(params.common.heaps[peer]) + rings().slot_of(there, n),
                                 through(n));
  }

  // The reader's end.

  DEEP_EP_DEVICE AwaitedWord row(std::int32_t n) const {
    return {{peer, rings().row, through(n)},
            rings().words.published.in(params.common.own_heap()) + rings().slot_of(here, n)};
  }
  DEEP_EP_DEVICE std::byte* slot(std::int32_t n) const { return rings().slot(here, n).in(params.common.own_heap()); }
  /// By one lane, when the whole warp has read row `n`.
  DEEP_EP_DEVICE void release(std::int32_t n) const {
    store_release<Scope::system>(rings().words.released.in(params.common.heaps[peer]) + rings().slot_of(there, n),
                                 through(n));
  }
};

/// A call of dispatch or combine, as its warps know it. Between nodes: other nodes are meant by number.
struct Transfer {
  const TransferParams& transfer;
  std::uint64_t epoch;
  std::int32_t* next_part;  ///< of the warp, shared: a word for each node or ring that it serves
  bool by_rings = false;    ///< rows of some rank of this node go by its local rings

  DEEP_EP_DEVICE ReportLate policy() const { return {transfer.common.wait}; }
  DEEP_EP_DEVICE const Rings& rings() const { return transfer.rings; }
  DEEP_EP_DEVICE const NodeGrid& nodes() const { return transfer.common.grid; }
  DEEP_EP_DEVICE std::byte* own_heap() const { return transfer.common.own_heap(); }
  /// As rails count calls: from 0.
  DEEP_EP_DEVICE std::uint64_t call() const { return epoch - 1; }
  /// The local ring between this rank and rank `index` of its node for rows of `node`: in dispatch those of the
  /// writer's rail there, in combine those of the reader's. There is one for each, so that no node waits for another,
  /// and rows are read in their order.
  template <bool kRails>
  DEEP_EP_DEVICE TokenRing ring(int index, int node) const {
    decltype(auto) grid = grid_of<kRails>(transfer.common);
    return {transfer, epoch, grid.first_of_node() + index, node * grid.width + index, node * grid.width + grid.index()};
  }
  /// For rows of a source, which is the ring's number here.
  template <bool kRails>
  DEEP_EP_DEVICE TokenRing ring_of(int source) const {
    return ring<kRails>(source % nodes().width, source / nodes().width);
  }
  /// Rows of a source on this rank, of the first `room` rows. They follow each other, by token.
  DEEP_EP_DEVICE std::int32_t rows_of(int source, std::int64_t room) const {
    const auto clip = [&](std::int64_t end) { return static_cast<std::int32_t>(end < room ? end : room); };
    return clip(transfer.end_of(source, nodes().index())) - clip(transfer.first_row_of(source, nodes().index()));
  }
  /// The number of a warp among the same ones of all blocks.
  DEEP_EP_DEVICE static int number_in_grid(int warp) { return warp * grid_blocks() + block_index(); }

  /// By a whole warp, which has its share of every node's parts and takes any that it can work on: to wait for one node
  /// would hold up the others, and in a circle of nodes all of them. False after a fault.
  ///   warp, warps             of a block's warps that do this: each of n works on every n-th part of each node (or
  ///                           whatever else has parts), in their order
  ///   parts(number)           how many there are
  ///   missing(number, part)   the AwaitedWord that the part still waits for, which is put on record if it is late
  ///   work(number, part)      false after a fault
  template <class Parts, class Missing, class Work>
  DEEP_EP_DEVICE bool serve(int others, int warp, int warps, Parts parts, Missing missing, Work work) const {
    // A lane looks after the nodes of its index and multiples of 32 behind.
    for (int number = lane_index(); number < others; number += kWarpSize) next_part[number] = number_in_grid(warp);
    int group = 0;  // of 32 nodes
    // Where in it the warp looks first: no node is served twice in a row while others wait. Ranks of a node begin with
    // different ones of their local rings.
    int turn = transfer.common.rank % kWarpSize;
    for (;;) {
      std::uint32_t found = 0;
      bool left = true;
      const auto some = [&](Poll&) {
        left = false;
        for (int groups = 0; groups < others; groups += kWarpSize) {
          group = group + kWarpSize < others ? group + kWarpSize : 0;
          const int number = group + lane_index();
          const bool wants = number < others && next_part[number] < parts(number);
          found = warp::ballot(wants && missing(number, next_part[number]).word == nullptr);
          left = warp::any(wants) || left;
          if (found != 0) return true;
        }
        return !left;
      };
      const auto gives_up = [&](Poll& poll) {
        // A warp that left without a record would leave the others waiting.
        const bool over = warp::any(policy().called_off({}));
        if (over) return true;
        if (!warp::any(may_be_late(poll.begin))) return false;
        bool reported = false;
        for (int number = lane_index(); number < others; number += kWarpSize) {
          if (next_part[number] >= parts(number)) continue;
          const AwaitedWord part = missing(number, next_part[number]);
          if (part.word == nullptr) continue;
          poll.seen = load_relaxed<Scope::system>(part.word);
          reported = policy().ends(part.awaited, poll) || reported;
        }
        return warp::any(reported);
      };
      if (!poll_until(some, gives_up)) return false;
      if (found == 0) return true;
      const std::uint32_t behind = found & ~((1u << turn) - 1);
      const int lane = lowest_bit(behind != 0 ? behind : found);
      turn = (lane + 1) % kWarpSize;
      const int number = group + lane;
      warp::sync();  // what the lane acquired, the others may use
      const std::int32_t part = warp::shuffle(lane == lane_index() ? next_part[number] : 0, lane);
      if (lane == lane_index()) next_part[number] += warps * grid_blocks();
      if (!work(number, part)) return false;
    }
  }

  /// Which of a rail's words says that the chunk has landed. A lane alone brings chunks in their order, and one word
  /// tells of all of them: a NIC may have several additions to it under way.
  DEEP_EP_DEVICE int landed_word(int chunk) const { return transfer.common.lanes == 1 ? 0 : chunk % rings().chunks; }
  /// The word that says that the chunk of row `row` from a node has landed.
  DEEP_EP_DEVICE AwaitedWord landed(int number, int row) const {
    const int node = nodes().other(number), chunk = rings().chunk_of(row);
    return {{nodes().rail_in(node), Wanted::internode_rows, Rings::through(call(), chunk)},
            transfer.common.control.landed(node, landed_word(chunk)).in(own_heap())};
  }
  /// The word that says that a chunk may be staged for a node. The poster, which raises it, knows for which rank it
  /// waits.
  DEEP_EP_DEVICE AwaitedWord stageable(int number, int chunk) const {
    if (chunk < rings().chunks) return {};
    return {{0, Wanted::nothing, rings().room_for(call(), chunk)}, &transfer.chunk_state(number, chunk).sent};
  }
  /// A row is staged, or a landed one read: counts it in its chunk.
  DEEP_EP_DEVICE void count_staged(int number, int row) const {
    add_release<Scope::gpu>(&transfer.chunk_state(number, rings().chunk_of(row)).staged, std::uint32_t{1});
  }
  DEEP_EP_DEVICE void count_read(int number, int row) const {
    add_release<Scope::gpu>(&transfer.chunk_state(number, rings().chunk_of(row)).read, std::uint32_t{1});
  }
  /// The number of a row for, or from, a node among all rows that cross the network, which `rows_of_node` counts.
  DEEP_EP_DEVICE std::int64_t relayed(const std::int32_t* rows_of_node, int number, int row) const {
    std::int64_t before = 0;
    for (int node = 0; node < nodes().other(number); ++node) {
      if (node != nodes().node()) before += rows_of_node[node];
    }
    return before + row;
  }

  /// The word that the ends of a rail compare: the same at both, unless the ranks disagree. It is a progress word whose
  /// position stands for the rows, for those to the higher of two nodes first.
  DEEP_EP_DEVICE std::uint64_t rail_shape(int number) const {
    const int node = nodes().other(number), to = transfer.counts.to_node[node], from = transfer.counts.from_node[node];
    const bool up = nodes().node() < node;
    const std::uint32_t rows = combine_shapes(transfer.shape, static_cast<std::uint32_t>(up ? to : from));
    const std::uint32_t shape = combine_shapes(rows, static_cast<std::uint32_t>(up ? from : to));
    return Progress::at(epoch, shape >> (32 - Progress::kPositionBits));
  }
  /// The word that the rail in a node sends by each lane ahead of its rows.
  DEEP_EP_DEVICE const std::uint64_t* shape_from(int number, int lane) const {
    return transfer.common.control.rail_word(ControlWindow::shape, nodes().other(number), lane).in(own_heap());
  }
  /// Does the rail mean the same call? Asked when its word has come. A word of a later call agrees: a rail that has
  /// ended this call has compared, too.
  DEEP_EP_DEVICE static bool shapes_agree(std::uint64_t expected, std::uint64_t theirs) {
    return Progress::call_of(theirs) != Progress::call_of(expected) || theirs == expected;
  }
};

// The posters: each thread serves one lane to one rail, the rank with our index in another node. It sends chunks that
// other warps have staged, and the first lane's gives the rail the credit that it needs in the call.
//
//   this rank                                              the rail
//   1. signal: shape of the rows of this call              compare
//   2. warps stage the rows of a chunk, count them
//   3. the chunk is whole, and there is room (head):
//      put the chunk; signal: landed                       4. warps that see it read the chunk, count its rows
//   5. the NIC has read it: it may be staged again         6. all chunks up to it are read; signal: head
//
// A poster gives the rail the credit that it needs for all rows of the call; what is read behind that the block that
// ends the call credits, when no warp reads any more. So no poster waits for the last rows.
//
// Lanes are not ordered among each other, so each sends the shape ahead of its rows. A network may carry one lane
// slower than the others. So a lane takes the next chunk only while it has few under way: a slow one takes few. That
// also bounds the bytes under way to a rail, which many others may send to at the same time.

/// One lane to a rail in one call, by one thread. A fault that it meets is on record, and gives_up() finds it there.
class RailPoster : Transfer {
 public:
  /// `pairs` stay where they are.
  DEEP_EP_DEVICE RailPoster(const Transfer& of_call, int number, int lane, RailPairs& pairs)
      : Transfer(of_call), number_(number), lane_(lane), pairs_(pairs) {}

  /// Sends the rail the shape, ahead of all rows. False after a fault.
  DEEP_EP_DEVICE bool send_shape() {
    const Place word = transfer.common.control.rail_word(ControlWindow::shape, nodes().node(), lane_);
    if (!rows_.signal(word, state_.shape[lane_], rail_shape(number_))) return false;
    first_entry_ = rows_.posted();
    rows_.flush();
    chunk_ = take_chunk();
    return true;
  }
  /// All is sent and its memory free again, and the rail has room for all that it sends.
  DEEP_EP_DEVICE bool ended() const { return compared_ && chunk_ >= chunks_out_ && sent_ == posted_ && credit_came_; }
  /// Does what can be done now. True if there was something.
  DEEP_EP_DEVICE bool step() {
    bool did = !compared_ && !differs_ && may_look() && compare();
    if (differs_) return false;  // no row of this shape goes; the next look ends the call
    while (post_chunk()) did = true;
    rows_.flush();
    did = free_chunks() || did;
    return give_credit() || did;
  }

  /// Asked now and then while nothing happens. It does nothing that only a step may do: a poster that had ended here
  /// would make no step that says so.
  DEEP_EP_DEVICE bool gives_up(Poll& poll) {
    // Puts a failure on record, which no other look would find before the end.
    if (!credit_came_) credit_.reached(credit_.posted());
    if (policy().called_off({})) return true;
    if (!may_be_late(poll.begin)) return false;
    Awaited missing{nodes().rail_in(node_), Wanted::nothing, 0};
    poll.seen = 0;
    if (sent_ < posted_) {
      missing.wanted = Wanted::rdma_completion, missing.expected = entries_through(sent_);
    } else if (is_staged()) {
      if (has_room()) return false;  // it has come meanwhile
      missing.wanted = Wanted::internode_credit, missing.expected = rings().room_for(call(), chunk_);
      poll.seen = seen_head_;
    } else if (!compared_) {
      missing.wanted = Wanted::internode_rows, missing.expected = Progress::at(epoch);
      if (shape_here() >= missing.expected) return false;  // the next step that may look compares it
    } else if (!credit_came_ && head_ >= last_credit_) {
      missing.wanted = Wanted::rdma_completion, missing.expected = credit_.posted();
    }
    // Without a missing word other warps of this rank are late, and say for which rank.
    return policy().ends(missing, poll);
  }
  /// Gives the queue pairs back. False where one has failed.
  DEEP_EP_DEVICE bool close() {
    const bool rows_closed = rows_.close();
    return (lane_ != 0 || credit_.close()) && rows_closed;
  }

 private:
  static constexpr int kRungTogether = 4;                ///< chunks
  static constexpr std::uint32_t kMostBytes = 2u << 20;  ///< under way to a rail: what 50 GB/s carry in 42 us

  DEEP_EP_DEVICE bool is_alone() const { return transfer.common.lanes == 1; }
  DEEP_EP_DEVICE int most_under_way() const {
    if (is_alone()) return rings().chunks;  // no other lane could take them
    const std::uint32_t bytes = rings().slot_bytes * static_cast<std::uint32_t>(rings().chunk_rows);
    const auto fit = static_cast<int>(kMostBytes / static_cast<std::uint32_t>(transfer.common.lanes) / bytes);
    return fit < 2 ? 2 : fit < RailPairs::kMostUnderWay ? fit : RailPairs::kMostUnderWay;
  }
  /// The next chunk that no lane has taken; there may be none.
  DEEP_EP_DEVICE int take_chunk() {
    if (is_alone()) return posted_;
    return static_cast<int>(fetch_add_relaxed<Scope::gpu>(&state_.next_chunk, std::uint32_t{1}));
  }

  /// The first chunk waits for nothing that the rail does in this call, and each look costs it time.
  DEEP_EP_DEVICE bool may_look() const { return posted_ != 0 || chunk_ >= chunks_out_; }
  DEEP_EP_DEVICE std::uint64_t shape_here() const { return load_acquire<Scope::system>(shape_from(number_, lane_)); }
  /// Has the shape come, and is it the same? A fault if it differs.
  DEEP_EP_DEVICE bool compare() {
    const std::uint64_t theirs = shape_here();
    const std::uint64_t expected = rail_shape(number_);
    if (Progress::call_of(theirs) < epoch) return false;
    compared_ = shapes_agree(expected, theirs);
    differs_ = !compared_;
    if (differs_) {
      report_fault(transfer.common.wait, FaultKind::mismatch, Wanted::internode_rows, nodes().rail_in(node_), 0,
                   expected, theirs);
    }
    return compared_;
  }

  /// The lane's chunk `at`, which has been posted, and whose memory has not been given back before this step.
  DEEP_EP_DEVICE int chunk_under_way(int at) const {
    return is_alone() ? at : pairs_.under_way[at % RailPairs::kMostUnderWay];
  }
  DEEP_EP_DEVICE ChunkState& state_of(int chunk) const { return transfer.chunk_state(number_, chunk); }
  /// The next chunk is staged. What the lane that had the place before has stored of it, it stored before it raised
  /// `sent`, which this acquires: one lane at a time uses the place's words. The place must be free: until then the
  /// counter is that of the chunk before. A lane alone frees all places itself, and has no more under way than the ring
  /// holds.
  DEEP_EP_DEVICE bool is_staged() const {
    return chunk_ < chunks_out_ && (is_alone() || stageable(number_, chunk_).is_reached()) &&
           load_acquire<Scope::gpu>(&state_of(chunk_).staged) == rings().rows_in(chunk_, rows_out_);
  }
  /// The rail has read what is in the place of the next chunk, and all of the calls before.
  DEEP_EP_DEVICE bool has_room() {
    const std::uint64_t needed = rings().room_for(call(), chunk_);
    const Place head = transfer.common.control.rail_word(ControlWindow::head, node_);
    if (seen_head_ < needed) seen_head_ = load_acquire<Scope::system>(head.in(own_heap()));
    return seen_head_ >= needed;
  }
  /// Rings now and then: a doorbell takes as long as a chunk, and a chunk that waits for the next ones comes late.
  DEEP_EP_DEVICE bool post_chunk() {
    if (posted_ - sent_ == most_under_way_) return false;
    // Room first: it is there long before the rows are, and is looked for once.
    if (chunk_ >= chunks_out_ || !has_room() || !is_staged()) return false;
    const int row = chunk_ * rings().chunk_rows, word = landed_word(chunk_);
    const int number_there = nodes().others() - 1 - number_;  // of this node: both count from the next one on
    if (!rows_.put(rings().landing(number_there, row).offset, rings().staging(number_, row).offset,
                   rings().rows_in(chunk_, rows_out_) * rings().slot_bytes) ||
        !rows_.signal(transfer.common.control.landed(nodes().node(), word), state_.landed[word],
                      Rings::through(call(), chunk_))) {
      return false;
    }
    if (!is_alone()) pairs_.under_way[posted_ % RailPairs::kMostUnderWay] = chunk_;
    ++posted_;
    chunk_ = take_chunk();
    const bool busy = posted_ - sent_ > 2;  // the NIC has something to do, as far as is known
    if (!busy || posted_ % kRungTogether == 0) rows_.flush();
    return true;
  }

  /// Entries of the queue pair, with those of the lane's chunk `at`: a write and an addition for each.
  DEEP_EP_DEVICE std::uint64_t entries_through(int at) const {
    return first_entry_ + 2 * static_cast<std::uint64_t>(at + 1);
  }
  /// Chunks whose writes are complete may be staged again.
  DEEP_EP_DEVICE bool free_chunks() {
    const int before = sent_;
    for (; sent_ < posted_ && rows_.reached(entries_through(sent_)); ++sent_) {
      store_relaxed<Scope::gpu>(&state_of(chunk_under_way(sent_)).staged, 0);
    }
    if (sent_ == before) return false;
    fence<Scope::gpu>();  // one release for all: each takes as long as a chunk on the wire
    for (int at = before; at < sent_; ++at) {
      const int chunk = chunk_under_way(at);
      store_relaxed<Scope::gpu>(&state_of(chunk).sent, Rings::through(call(), chunk));
    }
    return true;
  }

  /// Gives the rail credit, for a quarter of the ring at once, up to what it needs for its last chunk. Then waits until
  /// all of it, with what the call before has given, has come: nobody else would find that it fails.
  DEEP_EP_DEVICE bool give_credit() {
    if (credit_came_) return false;
    if (head_ >= last_credit_) return credit_came_ = may_look() && credit_.reached(credit_.posted());
    for (; credited_ < chunks_in_; ++credited_) {
      std::uint32_t* const read = &state_of(credited_).read;
      if (load_acquire<Scope::gpu>(read) != rings().rows_in(credited_, rows_in_)) break;
      store_relaxed<Scope::gpu>(read, 0);
    }
    const std::uint64_t head = Progress::at(call(), static_cast<std::uint32_t>(credited_));
    if (head < head_ + static_cast<std::uint64_t>((rings().chunks + 3) / 4) && head < last_credit_) return false;
    const Place word = transfer.common.control.rail_word(ControlWindow::head, nodes().node());
    if (!credit_.signal(word, state_.head, head)) return false;
    head_ = head;
    credit_.flush();
    return true;
  }

  const int number_, lane_;
  RailPairs& pairs_;
  RailState& state_ = transfer.common.rails[number_];
  const int node_ = nodes().other(number_);
  const int rows_out_ = transfer.counts.to_node[node_], rows_in_ = transfer.counts.from_node[node_];
  const int chunks_out_ = rings().chunks_for(rows_out_), chunks_in_ = rings().chunks_for(rows_in_);
  const int most_under_way_ = most_under_way();
  /// That the rail needs in this call.
  const std::uint64_t last_credit_ = rows_in_ == 0 ? 0 : rings().room_for(call(), chunks_in_ - 1);
  std::uint64_t head_ = Progress::at(call());  ///< credit that the rail has got
  std::uint64_t seen_head_ = 0;                ///< credit that the rail has given, as last looked at
  rdma::PortChannel<OneThread> rows_{pairs_.rows, transfer.common.wait};
  rdma::PortChannel<OneThread> credit_{pairs_.credit, transfer.common.wait};
  std::uint64_t first_entry_ = 0;  ///< of the chunks
  int chunk_ = 0;                  ///< that it has taken, to be posted next
  int posted_ = 0;                 ///< chunks of the lane
  int sent_ = 0;                   ///< of these, whose staging memory is free again
  int credited_ = 0;               ///< landed chunks that are read
  bool credit_came_ = lane_ != 0;  ///< the first lane gives it
  bool compared_ = false, differs_ = false;
};

/// By the posting warps of all blocks: a thread for each lane to a rail, all blocks in turn. The threads of a warp go
/// round together: one that waited by itself could keep the others from what its rail waits for. `pairs`: in shared
/// memory, for each thread of this block. False after a fault.
DEEP_EP_DEVICE bool post_all(const Transfer& call, int poster_warp, RailPairs* pairs) {
  const NormalParams& common = call.transfer.common;
  const int all = common.grid.others() * common.lanes;
  const int first = poster_warp * kWarpSize * grid_blocks() + block_index();
  if (first >= all) return true;
  const int served = first + lane_index() * grid_blocks();
  const bool mine = served < all;
  const int number = served % common.grid.others();
  const int lane = served / common.grid.others();
  RailPairs* const own = pairs + poster_warp * kWarpSize + (mine ? lane_index() : 0);
  if (mine) {
    const int node = common.grid.other(number);
    own->rows = common.queue_pair(InternodeChannel::rows, node, lane);
    // One lane gives credit. In the others their own queue pair takes that place, and is not looked at there.
    own->credit = lane == 0 ? common.queue_pair(InternodeChannel::credit, node) : own->rows;
  }
  warp::sync();
  // (A thread without a lane only looks on.)
  RailPoster poster(call, number, mine ? lane : 0, *own);
  bool good = warp::agree(!mine || poster.send_shape());
  while (good && warp::any(mine && !poster.ended())) {
    // A new wait after each step: the time runs while nothing happens.
    good = poll_until([&](Poll&) { return warp::any(mine && !poster.ended() && poster.step()); },
                      [&](Poll& poll) { return warp::any(mine && !poster.ended() && poster.gives_up(poll)); });
  }
  const bool closed = !mine || poster.close();
  return warp::agree(good && closed);
}

/// The kernel of dispatch or combine, by all threads of all blocks. `work` has the parts in which they differ:
///   ours(index)          where our rows are, or are to go: a message to a rank of this node
///   rows_by_ring(source) how many rows a rank with local warps reads from, or writes to, that source's local ring
///   prepare()            while messages are under way
///   learn(index)         waits for the message of such a rank. False after a fault
///   word_of(ring, row), local(ring, row)   the word that such a row awaits, and the work of a local warp with it
///   first(helps), second(warp)   roles of warps: see TransferParams; false after a fault. A local warp that has done
///                        its work helps those of the first role
///   finish()             by the last block, when all ranks of this node have ended the call
template <bool kRails, class Work>
DEEP_EP_DEVICE void transfer_rows(Work& work, const Call& call, const Meeting& meeting) {
  const TransferParams& params = work.transfer;
  const NormalParams& common = params.common;
  decltype(auto) grid = grid_of<kRails>(common);
  bool good = call.begun;
  if (good) {
    // 1. Ranks of this node meet. That this kernel runs says that no earlier work uses the memory, the window included.
    if (block_index() == 0) {
      block::each(grid.width, [&](int index) { meeting.tell(grid.first_of_node() + index, work.ours(index)); });
    }
    block::each(grid.num_ranks, [&](int at) {
      const Divisor& width = work.nodes().width;
      work.shared.first_rows[at] = params.first_row_of(work.nodes().rail_in(at / width), at % width);
    });
    block::each(work.shared.local_rings,
                [&](int source) { work.shared.local_rows[source] = work.rows_by_ring(source); });
    work.prepare();
    block::each(grid.width, [&](int index) { good = work.learn(meeting, index) && good; });
    good = block::all(good);
    work.by_rings = !block::all(!work.by_rings);
  }
  // 2. Each warp does what its role is.
  if (good) {
    const int second_warp = warp_index() - params.first_warps, local_warp = warp_index() - params.moving_warps();
    const auto local = [&] {
      return work.serve(
          grid.num_ranks, local_warp, params.local_warps, [&](int source) { return work.shared.local_rows[source]; },
          [&](int source, std::int32_t n) { return work.word_of(work.template ring_of<kRails>(source), n).missing(); },
          [&](int source, std::int32_t n) { return work.local(work.template ring_of<kRails>(source), n); });
    };
    const auto first = [&] { return (second_warp < 0 || local()) && work.first(second_warp >= 0); };
    if constexpr (kRails) {
      good = local_warp >= params.local_warps     ? post_all(work, local_warp - params.local_warps, work.shared.pairs)
             : second_warp < 0 || local_warp >= 0 ? first()
                                                  : work.second(second_warp);
    } else {
      good = first();
    }
    good = block::all(good);
  }
  // 3. The last block tells the ranks of this node, and waits until they say the same: their rows are here, and ours
  // are read. It gives the rails the credit for all of the call that they have not got. After a fault in any block no
  // rank may take our rows for stored.
  call.end([&] {
    if (!good || aborted(common.wait)) return;
    const std::uint64_t ended = Progress::at(call.epoch, 1);
    block::each(grid.width, [&](int index) {
      store_release<Scope::system>(common.signal_to(grid.first_of_node() + index, Work::kSignal), ended);
    });
    // Behind the signals, which would wait for these stores.
    if (thread_index() == 0) store_relaxed<Scope::gpu>(&common.state->pieces_drawn, std::uint32_t{0});
    block::each(grid.num_ranks,
                [&](int ring) { store_relaxed<Scope::gpu>(common.state->local_tickets + ring, std::uint32_t{0}); });
    if constexpr (kRails) {
      // By threads that wait for no rank below.
      for (int number = block_threads() - 1 - thread_index(); number < grid.others(); number += block_threads()) {
        store_relaxed<Scope::gpu>(&common.rails[number].next_chunk, std::uint32_t{0});
        rdma::PortChannel<OneThread> credit(common.queue_pair(InternodeChannel::credit, common.grid.other(number)),
                                            common.wait);
        credit.signal(common.control.rail_word(ControlWindow::head, grid.node()), common.rails[number].head,
                      Progress::at(call.epoch));
        credit.close();
      }
      const Divisor& places = params.rings.chunks;
      block::each(grid.others() * places, [&](int at) {
        store_relaxed<Scope::gpu>(&params.chunk_state(at / places, at).read, std::uint32_t{0});
      });
    }
    block::each(grid.width, [&](int index) {
      const int peer = grid.first_of_node() + index;
      wait_signal(common.wait, common.signal_from(peer, Work::kSignal), {peer, Work::kEnd, ended});
    });
    work.finish();
  });
}

}  // namespace deep_ep::device::normal
