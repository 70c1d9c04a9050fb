// Cases of load-balance calls: mappings drawn at random, what every rank holds, and what must come of it.
#pragma once

#include <cstdint>
#include <vector>

#include "deep_ep/load_balance.hpp"
#include "oracle/random.hpp"
#include "tests/cluster/cluster.hpp"

namespace deep_ep::test {

struct LoadBalanceShape {
  int ranks = 2;  ///< of a node
  int slots = 4;  ///< of a rank
  int local_experts = 3;
  std::vector<std::int64_t> bytes = {4096};  ///< of an expert, in each tensor; of gradients the first
  double empty = 0.3;
  bool only_first_owner = false;  ///< all slots hold replicas of rank 0's experts
  std::uint64_t seed = 1;
};

struct LoadBalanceCase {
  LoadBalanceShape shape;
  std::vector<std::int32_t> mapping;  ///< [ranks, slots]

  /// The expert of a slot, -1: none.
  int expert(int rank, int slot) const {
    const std::int32_t named = mapping[static_cast<std::size_t>(rank * shape.slots + slot)];
    return named >= 0 && named < shape.ranks * shape.local_experts ? named : -1;
  }
};

inline LoadBalanceCase make_load_balance_case(const LoadBalanceShape& shape) {
  oracle::Random random(shape.seed);
  LoadBalanceCase one{shape, {}};
  const int experts = shape.ranks * shape.local_experts;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    const bool row_is_empty = shape.ranks > 2 && random.chance(0.2);
    for (int slot = 0; slot < shape.slots; ++slot) {
      const int unnamed[] = {-1, INT32_MIN, experts, INT32_MAX};
      const auto expert = static_cast<int>(random.below(shape.only_first_owner ? shape.local_experts : experts));
      const bool empty = row_is_empty || random.chance(shape.empty);
      one.mapping.push_back(empty ? unnamed[random.below(4)] : expert);
    }
  }
  return one;
}

/// Bytes of an expert's weights in one of the tensors: those of no other at any place.
inline std::byte weight_byte(int expert, std::size_t tensor, std::int64_t at) {
  return static_cast<std::byte>((at + 7 * expert + 3 * static_cast<std::int64_t>(tensor)) % 251);
}

/// The elements of a gradient of a slot, or with `slot` -1 - index, of an expert: sums of these are rounded.
inline std::vector<float> make_grads(const LoadBalanceShape& shape, int rank, int slot) {
  oracle::Random random(shape.seed * 1000003 + static_cast<std::uint64_t>(rank * 1009 + slot + 500));
  std::vector<float> grads;
  for (std::int64_t i = 0; i < shape.bytes.front() / 4; ++i) {
    grads.push_back(static_cast<float>((random.unit() - 0.5) * (i % 3 == 0 ? 1e6 : 1.0)));
  }
  return grads;
}

/// A rank's tensors of a case, and its call.
class LoadBalanceRank {
 public:
  static constexpr std::byte kUntouched{0xa5};

  /// Collective: allocates slots in the heap.
  LoadBalanceRank(Rank& rank, Buffer& buffer, const LoadBalanceShape& shape) : rank_(rank), buffer_(buffer) {
    for (const std::int64_t bytes : shape.bytes) {
      slots_.push_back(buffer.allocate_tensor(DType::uint8, {shape.slots, bytes}, rank.stream()));
    }
  }

  /// The call of this case; the slots are untouched from here on.
  WeightPrefetch prepare(const LoadBalanceCase& one, int num_sms = 0) {
    const LoadBalanceShape& shape = one.shape;
    WeightPrefetch call = begin(one, num_sms);
    for (std::size_t i = 0; i < shape.bytes.size(); ++i) {
      std::vector<std::byte> own;
      for (int local = 0; local < shape.local_experts; ++local) {
        for (std::int64_t at = 0; at < shape.bytes[i]; ++at) {
          own.push_back(weight_byte(own_rank(shape) * shape.local_experts + local, i, at));
        }
      }
      call.expert_weights.push_back(rank_.upload(own, DType::uint8, {shape.local_experts, shape.bytes[i]}));
    }
    return call;
  }
  void prefetch(const LoadBalanceCase& one, int num_sms = 0) {
    buffer_.prefetch_weights(prepare(one, num_sms), rank_.call());
    check_slots(one);
  }

  /// All of this rank's slots hold what they must.
  void check_slots(const LoadBalanceCase& one) {
    const LoadBalanceShape& shape = one.shape;
    for (std::size_t i = 0; i < shape.bytes.size(); ++i) {
      std::vector<std::byte> wanted;
      for (int slot = 0; slot < shape.slots; ++slot) {
        const int expert = one.expert(own_rank(shape), slot);
        for (std::int64_t at = 0; at < shape.bytes[i]; ++at) {
          wanted.push_back(expert < 0 ? kUntouched : weight_byte(expert, i, at));
        }
      }
      require_same(wanted, rank_.download_bytes(slots_[i].view()), "slots", shape.bytes[i]);
    }
  }

  void reduce(const LoadBalanceCase& one, int num_sms = 0) {
    const LoadBalanceShape& shape = one.shape;
    const int rank = own_rank(shape);
    std::vector<float> pool, own;
    const auto append = [](std::vector<float>& to, const std::vector<float>& from) {
      to.insert(to.end(), from.begin(), from.end());
    };
    for (int slot = 0; slot < shape.slots; ++slot) append(pool, make_grads(shape, rank, slot));
    for (int local = 0; local < shape.local_experts; ++local) append(own, make_grads(shape, rank, -1 - local));
    rank_.write(slots_.front().view(), std::as_bytes(std::span<const float>(pool)));
    const std::int64_t elements = shape.bytes.front() / 4;
    GradReduction call;
    const TensorView slots = TensorView::contiguous(slots_.front().data(), DType::float32, {shape.slots, elements},
                                                    slots_.front().view().device);
    call.redundant_expert_grads = slots;
    call.expert_grads = rank_.upload(own, DType::float32, {shape.local_experts, elements});
    call.redundancy_mapping = upload_mapping(one);
    call.num_sms = num_sms;
    buffer_.reduce_grads(call, rank_.call());

    for (int peer = 0; peer < shape.ranks; ++peer) {
      for (int slot = 0; slot < shape.slots; ++slot) {
        const int expert = one.expert(peer, slot);
        if (expert < 0 || expert / shape.local_experts != rank) continue;
        const std::vector<float> replica = make_grads(shape, peer, slot);
        for (std::int64_t i = 0; i < elements; ++i) {
          own[static_cast<std::size_t>(expert % shape.local_experts * elements + i)] += replica[std::size_t(i)];
        }
      }
    }
    require_same(own, rank_.download<float>(call.expert_grads), "expert_grads", elements);
    require_same(pool, rank_.download<float>(slots), "redundant_expert_grads", elements);
  }

  /// In its node.
  int own_rank(const LoadBalanceShape& shape) const { return rank_.rank() % shape.ranks; }
  /// The call without weights; slots are untouched.
  WeightPrefetch begin(const LoadBalanceCase& one, int num_sms = 0) {
    WeightPrefetch call;
    for (const Tensor& slots : slots_) {
      rank_.write(slots.view(), std::vector<std::byte>(slots.view().bytes(), kUntouched));
      call.redundant_expert_weights.push_back(slots.view());
    }
    call.redundancy_mapping = upload_mapping(one);
    call.num_sms = num_sms;
    return call;
  }
  const Tensor& slots(std::size_t tensor) const { return slots_[tensor]; }

 private:
  TensorView upload_mapping(const LoadBalanceCase& one) {
    return rank_.upload(one.mapping, DType::int32, {one.shape.ranks, one.shape.slots});
  }

  Rank& rank_;
  Buffer& buffer_;
  std::vector<Tensor> slots_;
};

}  // namespace deep_ep::test
