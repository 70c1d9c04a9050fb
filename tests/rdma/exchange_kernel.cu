#include "kernels/primitives/warp.hpp"
#include "kernels/rdma/port_channel.hpp"
#include "tests/rdma/exchange_kernel.hpp"

namespace deep_ep::device {
namespace {

using test::ExchangeParams;
constexpr int kWords = ExchangeParams::kRowBytes / 4;

DEEP_EP_DEVICE std::uint32_t word_of(int source, int destination, int epoch, int row, int word) {
  return static_cast<std::uint32_t>((source << 28) ^ (destination << 24) ^ (epoch << 16) ^ (row << 8) ^ word);
}

/// All lanes: fills the rows for this peer.
DEEP_EP_DEVICE void fill(const ExchangeParams& p, int peer, int epoch) {
  for (int i = lane_index(); i < p.rows * kWords; i += kWarpSize) {
    const int row = i / kWords;
    auto* words = reinterpret_cast<std::uint32_t*>(p.heap + p.outgoing(peer, epoch, row));
    words[i % kWords] = word_of(p.rank, peer, epoch, row, i % kWords);
  }
  warp::sync();
}

/// All lanes: counts wrong words from this peer.
DEEP_EP_DEVICE void check(const ExchangeParams& p, int peer, int epoch) {
  for (int i = lane_index(); i < p.rows * kWords; i += kWarpSize) {
    const int row = i / kWords;
    const auto* words = reinterpret_cast<const std::uint32_t*>(p.heap + p.incoming(peer, epoch, row));
    if (load_weak(words + i % kWords) != word_of(peer, p.rank, epoch, row, i % kWords)) {
      add_relaxed<Scope::gpu>(p.wrong_words, 1);
    }
  }
  warp::sync();
}

/// Rows, and the signal behind them.
DEEP_EP_DEVICE bool send(const ExchangeParams& p, rdma::PortChannel<WholeWarp>& queue, int peer, int epoch) {
  bool good = true;
  for (int first = 0; first < p.rows; first += kWarpSize) {
    const int row = first + lane_index();
    good = good && queue.put(p.incoming(p.rank, epoch, row) + p.astray, p.outgoing(peer, epoch, row),
                             ExchangeParams::kRowBytes, row < p.rows);
  }
  good = good && queue.signal_add(p.signal(p.rank), 1, lane_index() == 0);
  queue.flush();
  return good;
}

DEEP_EP_DEVICE bool wait_for_peer(const ExchangeParams& p, int peer, int epoch) {
  bool good = true;
  if (lane_index() == 0) {
    good = wait_signal(p.wait, reinterpret_cast<const std::uint64_t*>(p.heap + p.signal(peer)),
                       {peer, Wanted::counts, static_cast<std::uint64_t>(epoch)});
  }
  good = warp::shuffle(good, 0);
  warp::sync();
  return good;
}

DEEP_EP_DEVICE void exchange(const ExchangeParams& p, int peer) {
  rdma::PortChannel<WholeWarp> queue(p.peers[peer], p.wait);
  std::uint64_t tickets[2] = {0, 0};
  for (int epoch = p.first_epoch; epoch < p.first_epoch + p.epochs; ++epoch) {
    if (!queue.wait_for(tickets[epoch % 2])) break;  // the rows of the epoch before last have been sent
    fill(p, peer, epoch);
    if (!send(p, queue, peer, epoch)) break;
    tickets[epoch % 2] = queue.posted();
    if (!wait_for_peer(p, peer, epoch)) break;
    check(p, peer, epoch);
  }
  queue.quiet();
  queue.close();
}

DEEP_EP_DEVICE void exchange_body(const ExchangeParams& p, std::byte*) {
  const int peer = block_index();
  if (peer == p.rank || p.peers[peer].queue.depth == 0) return;
  exchange(p, peer);
}

}  // namespace
}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(rdma_exchange, deep_ep::device::exchange_body)
