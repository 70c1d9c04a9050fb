// The posters: each thread serves one lane to one rail, the rank with our index in another node. It sends the chunks
// that other warps have staged, in their order, and gives the rail credit for the chunks that other warps have read.
//
//   this rank                                              the rail
//   1. signal: shape of the rows of this call              compare
//   2. warps stage the rows of a chunk, count them
//   3. the chunk is whole, and there is room (head):
//      put the chunk; signal: tail is that chunk           4. warps that see the tail read the chunk, count its rows
//   5. the NIC has read it: it may be staged again         6. the chunk is read; signal: head is that chunk
//
// A signal becomes visible behind the bytes posted before it, and only grows.
//
// Lanes are not ordered among each other. So each has all of these words for itself, counts its own chunks in them, and
// sends the shape ahead of its rows. One thing concerns them all: rows may have another size than in the call before,
// so a lane's first chunks may lie where other lanes' were, and the rail must have read those, too.
#pragma once

#include "kernels/normal/transfer.hpp"
#include "kernels/rdma/port_channel.hpp"

namespace deep_ep::device::normal {

/// The word in which the rail of other node `number` says how much of a lane has been delivered.
DEEP_EP_DEVICE const std::uint64_t* tail_of(const TransferParams& params, int number, int lane) {
  return params.common.window.rail_word(RailWindow::tail, params.common.grid.other(number), lane)
      .in(params.common.own_heap());
}
/// The word that says that a chunk from other node `number` has landed.
DEEP_EP_DEVICE AwaitedWord landed_through(const TransferParams& params, std::uint64_t call, int number, int chunk) {
  const Rings& rings = params.rings;
  const int rail = params.common.grid.rail_in(params.common.grid.other(number));
  return {{rail, Wanted::internode_rows, Rings::through(call, rings.in_lane(chunk))},
          tail_of(params, number, rings.lane_of(chunk))};
}
/// May a chunk be staged for other node `number`?
DEEP_EP_DEVICE bool is_stageable(const TransferParams& params, std::uint64_t call, int number, int chunk) {
  const Rings& rings = params.rings;
  const int at = rings.in_lane(chunk);
  const RailState& rail = params.common.rails[rings.lane_of(chunk) * params.common.grid.others() + number];
  return at < rings.held() || load_acquire<Scope::gpu>(&rail.sent) >= rings.room_for(call, at);
}
/// Rows that cross the network between this rank and the nodes before other node `number`, by nodes: where those of
/// that node begin in relay_rows.
DEEP_EP_DEVICE std::int64_t rows_before(const NodeGrid& grid, const std::int32_t* rows_of_node, int number) {
  std::int64_t before = 0;
  for (int node = 0; node < grid.other(number); ++node) {
    if (node != grid.node()) before += rows_of_node[node];
  }
  return before;
}

/// The word that the ends of a rail compare, for one direction of a call: the same at both, unless the ranks disagree.
/// It is a progress word whose position stands for the rows.
DEEP_EP_DEVICE std::uint64_t rail_shape(const TransferParams& params, std::uint64_t call, int rows_to_rail,
                                        int rows_from_rail) {
  const std::uint32_t rows = combine_shapes(params.shape, static_cast<std::uint32_t>(rows_to_rail));
  return Progress::at(call + 1, combine_shapes(rows, static_cast<std::uint32_t>(rows_from_rail)));
}
/// The word that the rail in other node `number` sends by each lane ahead of its rows, and the value that it must have.
DEEP_EP_DEVICE const std::uint64_t* shape_of(const TransferParams& params, int number, int lane) {
  return params.common.window.rail_word(RailWindow::shape, params.common.grid.other(number), lane)
      .in(params.common.own_heap());
}
DEEP_EP_DEVICE std::uint64_t expected_shape(const TransferParams& params, std::uint64_t call, int number) {
  const int node = params.common.grid.other(number);
  return rail_shape(params, call, params.counts.from_node[node], params.counts.to_node[node]);
}
/// Does the rail mean the same call? Asked when its word has come. A word of a later call agrees: a rail that has ended
/// this call has compared, too.
DEEP_EP_DEVICE bool shapes_agree(std::uint64_t expected, std::uint64_t theirs) {
  return Progress::call_of(theirs) != Progress::call_of(expected) || theirs == expected;
}

/// One lane to a rail in one call, by one thread. Chunks are counted in the lane.
class RailPoster {
 public:
  /// `pairs` stay where they are.
  DEEP_EP_DEVICE RailPoster(const TransferParams& params, std::uint64_t call, int number, int lane,
                            const RailPairs& pairs)
      : params_(params),
        rings_(params.rings),
        state_(params.common.rails[lane * params.common.grid.others() + number]),
        call_(call),
        number_(number),
        lane_(lane),
        node_(params.common.grid.other(number)),
        rows_out_(params.counts.to_node[node_]),
        rows_in_(params.counts.from_node[node_]),
        head_(Progress::at(call)),
        rows_(pairs[InternodeChannel::rows], params.wait),
        credit_(pairs[InternodeChannel::credit], params.wait) {}

  /// Sends the rail the shape, ahead of all rows. False after a fault.
  DEEP_EP_DEVICE bool send_shape() {
    const std::uint64_t ours = rail_shape(params_, call_, rows_out_, rows_in_);
    if (!rows_.signal(word_there(RailWindow::shape), state_.shape, ours)) return false;
    first_entry_ = rows_.posted();
    rows_.flush();
    return true;
  }
  /// Everything is sent and its memory free again, and the rail has credit for everything that came.
  DEEP_EP_DEVICE bool ended() const {
    return compared_ && sent_ == chunks_for(rows_out_) && head_ == Progress::at(call_ + 1);
  }
  /// Does what can be done now. True if there was something.
  DEEP_EP_DEVICE bool step() {
    const bool compared = compare();
    bool posted = false;
    while (!failed_ && post_chunk()) posted = true;
    rows_.flush();
    const bool freed = free_chunks();
    return give_credit() || compared || posted || freed || failed_;
  }
  DEEP_EP_DEVICE bool failed() const { return failed_; }

  /// Asked now and then while nothing happens.
  DEEP_EP_DEVICE bool gives_up(const Poll& poll) {
    const ReportLate policy{params_.wait};
    const int rail = params_.common.grid.rail_in(node_);
    credit_.reached(credit_.posted());  // puts a failure on record, which no other look would find before the end
    if (policy.called_off({})) return true;
    if (!may_be_late(poll.begin)) return false;
    Awaited missing{rail, Wanted::nothing, 0};
    std::uint64_t seen = 0;
    if (is_staged()) {
      int lane = 0;
      while (!begun_ && lane < params_.common.lanes && is_read_before(lane)) ++lane;
      const bool by_all = begun_ || lane == params_.common.lanes;
      missing = {rail, Wanted::internode_credit, by_all ? rings_.room_for(call_, posted_) : Progress::at(call_)};
      seen = load_acquire<Scope::system>(head_of(by_all ? lane_ : lane));
      if (seen >= missing.expected) return false;  // it has come meanwhile
    } else if (sent_ < posted_) {
      missing = {rail, Wanted::rdma_completion, entries_through(sent_)};
    } else if (!compared_) {
      missing = {rail, Wanted::internode_rows, Progress::at(call_ + 1)};
    }
    // Without a missing word other warps of this rank are late, and say for which rank.
    return missing.wanted != Wanted::nothing && policy.ends(missing, poll.begin, seen);
  }
  /// Gives the queue pairs back. False where one has failed.
  DEEP_EP_DEVICE bool close() {
    const bool rows_closed = rows_.close();
    const bool credit_closed = credit_.close();
    return rows_closed && credit_closed;
  }

 private:
  static constexpr int kRungTogether = 4;  ///< chunks

  /// Looks for the rail's shape.
  DEEP_EP_DEVICE bool compare() {
    if (compared_) return false;
    const std::uint64_t theirs = load_acquire<Scope::system>(shape_of(params_, number_, lane_));
    const std::uint64_t expected = expected_shape(params_, call_, number_);
    if (Progress::call_of(theirs) < Progress::call_of(expected)) return false;
    compared_ = true;
    if (!shapes_agree(expected, theirs)) {
      report_fault(params_.wait, FaultKind::mismatch, Wanted::internode_rows, params_.common.grid.rail_in(node_), 0,
                   expected, theirs);
      failed_ = true;
    }
    return true;
  }

  // Chunks by their number in the lane.

  DEEP_EP_DEVICE int chunk(int at) const { return rings_.chunk_in(lane_, at); }
  DEEP_EP_DEVICE int chunks_for(int rows) const { return rings_.chunks_for(rows, lane_); }
  DEEP_EP_DEVICE std::uint32_t rows_in(int at, int rows) const {
    return static_cast<std::uint32_t>(rings_.rows_in(chunk(at), rows));
  }
  DEEP_EP_DEVICE std::uint32_t* staged(int at) const {
    return params_.common.staged + rings_.counter(number_, chunk(at));
  }
  DEEP_EP_DEVICE std::uint32_t* read(int at) const { return params_.common.read + rings_.counter(number_, chunk(at)); }

  DEEP_EP_DEVICE const std::uint64_t* head_of(int lane) const {
    return params_.common.window.rail_word(RailWindow::head, node_, lane).in(params_.common.own_heap());
  }
  /// One at the rail.
  DEEP_EP_DEVICE Place<std::uint64_t> word_there(RailWindow::RailWord which) const {
    return params_.common.window.rail_word(which, params_.common.grid.node(), lane_);
  }
  /// The next chunk is staged. (Until the chunk that had its place is free, the counter is that one's.)
  DEEP_EP_DEVICE bool is_staged() const {
    return posted_ < chunks_for(rows_out_) && posted_ < sent_ + rings_.held() &&
           load_acquire<Scope::gpu>(staged(posted_)) == rows_in(posted_, rows_out_);
  }
  /// The rail has read what is in the place of the next chunk.
  DEEP_EP_DEVICE bool has_room() {
    if (!begun_ && !may_begin()) return false;
    const std::uint64_t needed = rings_.room_for(call_, posted_);
    if (seen_head_ < needed) seen_head_ = load_acquire<Scope::system>(head_of(lane_));
    return seen_head_ >= needed;
  }
  /// The rail has read what came by all lanes in the calls before.
  DEEP_EP_DEVICE bool may_begin() {
    begun_ = true;
    for (int lane = 0; lane < params_.common.lanes; ++lane) begun_ = begun_ && is_read_before(lane);
    return begun_;
  }
  DEEP_EP_DEVICE bool is_read_before(int lane) const {
    return load_acquire<Scope::system>(head_of(lane)) >= Progress::at(call_);
  }
  /// Rings now and then: a doorbell takes as long as a chunk, and a chunk that waits for the next ones comes late.
  DEEP_EP_DEVICE bool post_chunk() {
    if (!is_staged() || !has_room()) return false;
    const NodeGrid& grid = params_.common.grid;
    const int row = chunk(posted_) * rings_.chunk_rows;
    const std::size_t to = rings_.landing(grid.number_at(node_), row).offset;
    const auto bytes = rows_in(posted_, rows_out_) * rings_.slot_bytes;
    if (!rows_.put(to, rings_.staging(number_, row).offset, bytes) ||
        !rows_.signal(word_there(RailWindow::tail), state_.tail, Rings::through(call_, posted_))) {
      failed_ = true;
      return true;
    }
    ++posted_;
    const bool busy = posted_ - sent_ > 2;  // the NIC has something to do, as far as is known
    if (!busy || posted_ % kRungTogether == 0) rows_.flush();
    return true;
  }

  /// Entries of the queue pair, with those of chunk `at`: a write and an addition for each.
  DEEP_EP_DEVICE std::uint64_t entries_through(int at) const {
    return first_entry_ + 2 * static_cast<std::uint64_t>(at + 1);
  }
  /// Chunks whose writes are complete may be staged again.
  DEEP_EP_DEVICE bool free_chunks() {
    const int before = sent_;
    for (; sent_ < posted_ && rows_.reached(entries_through(sent_)); ++sent_) {
      store_relaxed<Scope::gpu>(staged(sent_), 0);
    }
    if (sent_ == before) return false;
    store_release<Scope::gpu>(&state_.sent, Rings::through(call_, sent_ - 1));
    return true;
  }

  /// Gives the rail credit, for a quarter of the ring at once; at the end of the call for all that is still to come.
  DEEP_EP_DEVICE bool give_credit() {
    const int chunks = chunks_for(rows_in_);
    while (credited_ < chunks && load_acquire<Scope::gpu>(read(credited_)) == rows_in(credited_, rows_in_)) {
      store_relaxed<Scope::gpu>(read(credited_), 0);
      ++credited_;
    }
    const bool last = credited_ == chunks;
    const std::uint64_t head =
        last ? Progress::at(call_ + 1) : Progress::at(call_, static_cast<std::uint32_t>(credited_));
    const std::uint64_t step = last ? 1 : static_cast<std::uint64_t>((rings_.held() + 3) / 4);
    if (head < head_ + step) return false;
    if (!credit_.signal(word_there(RailWindow::head), state_.head, head)) {
      failed_ = true;
      return true;
    }
    head_ = head;
    credit_.flush();
    return true;
  }

  const TransferParams& params_;
  const Rings& rings_;
  RailState& state_;
  std::uint64_t call_;
  int number_, lane_, node_;
  int rows_out_, rows_in_;
  std::uint64_t head_;           ///< credit that the rail has got
  std::uint64_t seen_head_ = 0;  ///< credit that the rail has given, as last looked at
  rdma::PortChannel<OneThread> rows_, credit_;
  std::uint64_t first_entry_ = 0;  ///< of the chunks
  int posted_ = 0;                 ///< chunks
  int sent_ = 0;                   ///< of these, whose staging memory is free again
  int credited_ = 0;               ///< landed chunks that are read
  bool compared_ = false;
  bool begun_ = false;  ///< the ring is free of the calls before
  bool failed_ = false;
};

/// By the posting warps of all blocks: a thread for each lane to a rail, all blocks in turn. The threads of a warp go
/// round together: one that waited by itself could keep the others from what its rail waits for. `pairs`: in shared
/// memory, for each thread of this block. False after a fault.
DEEP_EP_DEVICE bool post_all(const TransferParams& params, std::uint64_t call, int poster_warp, RailPairs* pairs) {
  const int others = params.common.grid.others();
  const int all = others * params.common.lanes;
  const int first = poster_warp * kWarpSize * grid_blocks() + block_index();
  if (first >= all) return true;
  const int served = first + lane_index() * grid_blocks();
  const bool mine = served < all;
  const int number = served % others;
  const int lane = served / others;
  RailPairs* const own = pairs + poster_warp * kWarpSize + (mine ? lane_index() : 0);
  for (int channel = 0; mine && channel < static_cast<int>(InternodeChannel::count); ++channel) {
    const int node = params.common.grid.other(number);
    own->channel[channel] = params.common.queue_pair(static_cast<InternodeChannel>(channel), node, lane);
  }
  warp::sync();
  // (A thread without a lane only looks on.)
  RailPoster poster(params, call, number, mine ? lane : 0, *own);
  bool good = warp::agree(!mine || poster.send_shape());
  while (good && warp::any(mine && !poster.ended())) {
    // A new wait after each step: the time runs while nothing happens.
    good = poll_until([&](Poll&) { return warp::any(mine && !poster.ended() && poster.step()); },
                      [&](const Poll& poll) { return warp::any(mine && !poster.ended() && poster.gives_up(poll)); });
    good = warp::agree(good && !(mine && poster.failed()));
  }
  const bool closed = !mine || poster.close();
  return warp::agree(good && closed);
}

/// By all warps of a block: each does what its role is. `first()`, `second(part, parts)`, which share the work among
/// the warps of all blocks, and `local(warp)` return false after a fault.
template <bool kRails, class Rank, class First, class Second, class Local>
DEEP_EP_DEVICE bool do_roles(const TransferParams& params, std::uint64_t call, const TransferShared<Rank>& shared,
                             First first, Second second, Local local) {
  const int second_warp = warp_index() - params.first_warps;
  if (second_warp < 0) return first();
  if constexpr (kRails) {
    const int local_warp = second_warp - params.second_warps;
    const int poster_warp = local_warp - params.local_warps;
    if (local_warp < 0) {
      return second(second_warp * grid_blocks() + block_index(), params.second_warps * grid_blocks());
    }
    return poster_warp < 0 ? local(local_warp) : post_all(params, call, poster_warp, shared.pairs);
  } else {
    return local(second_warp);
  }
}

}  // namespace deep_ep::device::normal
