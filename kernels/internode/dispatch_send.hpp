// The sending warps of dispatch. Each takes the next token, loads its row once, and stores it to every rank of this
// node that wants it, straight into its final place, and into the staging ring of every other node that does.
//
// Tokens are taken in order, and a ring's chunks are freed in order. So the oldest token that waits for room finds
// some, whatever the others wait for.
#pragma once

#include "kernels/common/tickets.hpp"
#include "kernels/internode/dispatch_spread.hpp"

namespace deep_ep::device::internode {

struct DispatchSender {
  RowSpreader& to;

  DEEP_EP_DEVICE const TransferParams& transfer() const { return to.params.transfer; }

  DEEP_EP_DEVICE TokenRow none() const { return {&to.params, transfer().num_tokens}; }
  DEEP_EP_DEVICE bool is_row(const TokenRow& row) const { return row.token < transfer().num_tokens; }

  /// The next token that any destination wants, or no row.
  DEEP_EP_DEVICE TokenRow take() const {
    for (;;) {
      const std::uint32_t token = take_next(&transfer().common.state->next_token);
      if (token >= static_cast<std::uint32_t>(transfer().num_tokens)) return none();
      TokenRow row{&to.params, static_cast<int>(token)};
      row.place = to.place_at(row, lane_index());
      bool wanted = row.place >= 0;
      for (int at = lane_index() + kWarpSize; at < to.destinations(row); at += kWarpSize) {
        wanted = wanted || to.place_at(row, at) >= 0;
      }
      for (int index = lane_index(); to.by_rings && index < to.grid().width; index += kWarpSize) {
        wanted = wanted || to.place_by_ring(row, index) >= 0;
      }
      if (warp::any(wanted)) return row;
    }
  }

  /// Waits until the row's slots in the staging rings may be written. False after a fault.
  DEEP_EP_DEVICE bool await_room(const TokenRow& row) const {
    bool good = true;
    to.for_each(row, [&](int destination, std::int32_t place) {
      const int chunk = to.rings().chunk_of(place);
      if (!to.is_node(destination) || chunk < to.rings().chunks) return;
      const int number = destination - to.grid().width;
      // The poster knows for which rank it waits.
      good = poll_until([&](Poll&) { return is_stageable(transfer(), to.call, number, chunk); },
                        [&](const Poll&) { return aborted(transfer().wait); }) &&
             good;
      bulk::fence_global();  // what the NIC has read may be overwritten by bulk stores
    });
    return warp::agree(good);
  }

  /// The row is stored, as soon as this warp's bulk stores are complete: counts it in the chunks that it belongs to.
  DEEP_EP_DEVICE void count_staged(TokenRow& row) const {
    if (!is_row(row)) return;
    bulk::wait<0>();
    bulk::fence_global();
    warp::sync();  // what the other lanes have stored comes before, too
    to.for_each(row, [&](int destination, std::int32_t place) {
      if (!to.is_node(destination)) return;
      const int counter = to.rings().counter(destination - to.grid().width, to.rings().chunk_of(place));
      fetch_add_release<Scope::gpu>(transfer().common.staged + counter, std::uint32_t{1});
    });
    row = none();
  }

  /// Sends tokens until none is left. False after a fault.
  DEEP_EP_DEVICE bool send_all() const {
    TokenRow row = take();
    TokenRow stored = none();  // whose last piece may not be complete yet
    if (is_row(row)) to.load(row.x(), 0);
    while (is_row(row)) {
      TokenRow next = none();
      const auto load_next = [&] {
        next = take();
        if (is_row(next)) to.load(next.x(), 0);
      };
      const auto may_store = [&] {
        count_staged(stored);  // before waiting for room: others may wait for this row
        return await_room(row);
      };
      if (!to.spread(row, load_next, may_store)) return false;
      stored = row;
      row = next;
    }
    count_staged(stored);
    return true;
  }
};

}  // namespace deep_ep::device::internode
