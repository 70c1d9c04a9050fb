// The adding warps of combine. Each takes the next of this rank's tokens and adds, in fp32 and in this order: the
// biases; then node by node, for this node the rows that its ranks hold, by rank, and for another one the sum that has
// landed from there. Rounded once more at the end.
//
// Tokens are taken in order, and a rail stages the rows of its node in the same order. So the oldest token that waits
// for a row waits for one that there is room for.
#pragma once

#include "kernels/common/tickets.hpp"
#include "kernels/internode/combine_rows.hpp"

namespace deep_ep::device::internode {

struct CombineAdder {
  const LocalRows& local;

  DEEP_EP_DEVICE const InternodeCombineParams& params() const { return local.params; }
  DEEP_EP_DEVICE const TransferParams& transfer() const { return local.params.transfer; }
  DEEP_EP_DEVICE const NodeGrid& grid() const { return local.grid(); }
  DEEP_EP_DEVICE const Rings& rings() const { return transfer().rings; }

  // Contributions to a token, in the order in which they are added: a node's sum each, for this node its ranks' rows.

  DEEP_EP_DEVICE int contributions() const { return grid().others() + grid().width; }
  DEEP_EP_DEVICE int index_of(int at) const { return at - grid().node(); }  ///< of a rank of this node
  DEEP_EP_DEVICE bool is_local(int at) const { return index_of(at) >= 0 && index_of(at) < grid().width; }
  DEEP_EP_DEVICE int node_of(int at) const { return at < grid().node() ? at : at - grid().width + 1; }

  /// A token, and the lane's contribution to it: looked up once, as each look takes as long as loading a row.
  struct Token {
    int number;
    std::int32_t place;
  };

  /// The rank's row, or the number of the landed row; -1: none.
  DEEP_EP_DEVICE std::int32_t place_at(const Token& token, int at) const {
    return at < kWarpSize ? token.place : look_up(token.number, at);
  }
  DEEP_EP_DEVICE std::int32_t look_up(int token, int at) const {
    if (at >= contributions()) return -1;
    if (!is_local(at)) return load_stream(transfer().node_row + std::int64_t{token} * grid().nodes() + node_of(at));
    return load_stream(transfer().destination_row + std::int64_t{token} * grid().num_ranks + grid().first_of_node() +
                       index_of(at));
  }

  /// Waits until all that other nodes have of the token has landed, and all that is pushed is there. `landed`: how far
  /// the lane knows that its node's chunks have come. False after a fault.
  DEEP_EP_DEVICE bool await(const Token& token, std::uint64_t& landed) const {
    bool good = true;
    for (int at = lane_index(); at < contributions(); at += kWarpSize) {
      const std::int32_t place = place_at(token, at);
      if (place < 0) continue;
      const bool here = is_local(at);
      const AwaitedWord part =
          here ? local.awaited(index_of(at), grid().node(), place)
               : landed_through(transfer(), local.call, grid().number_of(node_of(at)), rings().chunk_of(place));
      if (part.word == nullptr || part.awaited.expected <= landed) continue;
      good = part.await(transfer().wait) && good;
      // The same lane asks for the same node again.
      if (!here && rings().lanes == 1 && contributions() <= kWarpSize) landed = load_acquire<Scope::system>(part.word);
    }
    return warp::agree(good);
  }

  /// The row of a bias that begins `at` bytes into it; nullptr: there is none.
  DEEP_EP_DEVICE const std::byte* bias_of(int number, std::int64_t at) const {
    return params().bias[number] == nullptr ? nullptr : params().bias[number] + at;
  }

  DEEP_EP_DEVICE void add(const Token& token) const {
    const auto find = [&](int at) {
      const std::int32_t place = place_at(token, at);
      if (place < 0) return FoundRow{};
      if (is_local(at)) return local.find(index_of(at), grid().node(), place);
      const Place landed = rings().landing(grid().number_of(node_of(at)), place);
      return local.in_slot(landed.in(transfer().common.own_heap()));
    };
    const std::int64_t at = std::int64_t{token.number} * params().row_bytes;
    const RowReduction reduction(contributions(), find, bias_of(0, at), bias_of(1, at));
    reduction.add(params().combined_x + at, params().row_bytes, {});
    if (params().combined_weights == nullptr) return;
    reduction.add_weights(params().combined_weights + std::int64_t{token.number} * params().num_topk,
                          params().num_topk);
  }

  /// The token's rows are read: counts those that have landed in their chunks, and releases those that were pushed.
  DEEP_EP_DEVICE void count_read(const Token& token) const {
    warp::sync();  // by all lanes
    for (int at = lane_index(); at < contributions(); at += kWarpSize) {
      const std::int32_t place = place_at(token, at);
      if (place < 0) continue;
      if (is_local(at)) {
        local.release(index_of(at), grid().node(), place);
        continue;
      }
      const int counter = rings().counter(grid().number_of(node_of(at)), rings().chunk_of(place));
      add_release<Scope::gpu>(transfer().common.read + counter, std::uint32_t{1});
    }
  }

  /// Adds tokens until none is left. False after a fault.
  DEEP_EP_DEVICE bool add_all() const {
    std::uint64_t landed = 0;
    for (;;) {
      const auto number = static_cast<int>(take_next(&transfer().common.state->next_token));
      if (number >= transfer().num_tokens) return true;
      const Token token{number, look_up(number, lane_index())};
      if (!await(token, landed)) return false;
      add(token);
      count_read(token);
    }
  }
};

}  // namespace deep_ep::device::internode
