#include "tests/rdma/exchange_kernel.hpp"

#include "kernels/primitives/warp.hpp"
#include "kernels/rdma/port_channel.hpp"

namespace deep_ep::device {
namespace {

using test::ExchangeParams;

/// A row, as both of its ranks know it.
struct Row {
  std::uint32_t hash = 0;
  std::uint32_t bytes = 0;
  std::uint32_t from = 0, to = 0;  ///< where it begins in its slot at the sender, at the receiver

  DEEP_EP_DEVICE Row(const ExchangeParams& p, int source, int destination, int epoch, int row)
      : hash(static_cast<std::uint32_t>((source << 28) ^ (destination << 24) ^ (epoch << 8) ^ row) * 0x9e3779b9u),
        bytes(p.rows.slot_bytes()) {
    if (p.rows.seed == 0) return;
    std::uint64_t dice = (hash + p.rows.seed) * 0xff51afd7ed558ccdu;
    dice ^= dice >> 29;
    bytes = static_cast<std::uint32_t>(dice >> 8) % (1u << dice % 15u);  // small ones are as likely as large ones
    from = kAround + static_cast<std::uint32_t>(dice >> 32) % 16u;
    // Half of all can be moved by whole words.
    to = (dice >> 40 & 1u) != 0 ? from : kAround + static_cast<std::uint32_t>(dice >> 41) % 32u;
  }
  DEEP_EP_DEVICE std::byte operator[](std::uint32_t i) const {
    return static_cast<std::byte>((hash ^ i * 0x85ebca6bu) >> 13);
  }

  static constexpr std::uint32_t kAround = 16;  ///< bytes before and behind that must stay 0
};

/// All lanes: fills the rows for this peer.
DEEP_EP_DEVICE void fill(const ExchangeParams& p, int peer, int epoch) {
  for (int row = 0; row < p.rows.count; ++row) {
    const Row sent(p, p.rank, peer, epoch, row);
    std::byte* const bytes = p.heap + p.outgoing(peer, epoch, row) + sent.from;
    for (auto i = static_cast<std::uint32_t>(lane_index()); i < sent.bytes; i += kWarpSize) bytes[i] = sent[i];
  }
  warp::sync();
}

/// All lanes: counts wrong bytes from this peer.
DEEP_EP_DEVICE void check(const ExchangeParams& p, int peer, int epoch) {
  for (int row = 0; row < p.rows.count; ++row) {
    const Row sent(p, peer, p.rank, epoch, row);
    const std::uint32_t around = p.rows.seed == 0 ? 0 : Row::kAround;
    std::byte* const bytes = p.heap + p.incoming(peer, epoch, row) + sent.to - around;
    for (auto i = static_cast<std::uint32_t>(lane_index()); i < sent.bytes + 2 * around; i += kWarpSize) {
      const bool inside = i >= around && i < around + sent.bytes;
      if (bytes[i] != (inside ? sent[i - around] : std::byte{})) add_relaxed<Scope::gpu>(p.wrong_bytes, 1);
      bytes[i] = std::byte{};  // for what comes to this slot next
    }
  }
  warp::sync();
}

/// Rows, and the signal behind them.
DEEP_EP_DEVICE bool send(const ExchangeParams& p, rdma::PortChannel<WholeWarp>& queue, int peer, int epoch) {
  bool good = true;
  for (int first = 0; first < p.rows.count; first += kWarpSize) {
    const int row = first + lane_index();
    const Row sent(p, p.rank, peer, epoch, row);
    good = good && queue.put(p.incoming(p.rank, epoch, row) + sent.to + p.astray,
                             p.outgoing(peer, epoch, row) + sent.from, sent.bytes, row < p.rows.count);
  }
  good = good && queue.signal_add(p.signal(p.rank), 1, lane_index() == 0);
  queue.flush();
  return good;
}

DEEP_EP_DEVICE bool wait_for_peer(const ExchangeParams& p, int peer, int epoch) {
  return wait_signal<WholeWarp>(p.wait, reinterpret_cast<const std::uint64_t*>(p.heap + p.signal(peer)),
                                {peer, Wanted::counts, static_cast<std::uint64_t>(epoch)});
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
  if (peer == p.rank || p.peers[peer].depth == 0) return;
  exchange(p, peer);
}

}  // namespace
}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(rdma_exchange, deep_ep::device::exchange_body)
