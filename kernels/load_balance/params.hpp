// Arguments of the kernel that moves replicas of experts: weights to the ranks that hold them, gradients back. Plain
// data: host code fills it, the kernel reads it. deep_ep/load_balance.hpp describes the tensors.
#pragma once

#include <cstdint>

#include "kernels/normal/node.hpp"

namespace deep_ep {

constexpr int kMostPayloads = 16;

/// One of the tensors that an expert is made of.
struct ExpertPayload {
  std::byte* own;             ///< this rank's experts, each of `bytes`
  std::uint64_t slots_at;     ///< where the replicas begin in every rank's heap
  std::uint32_t bytes;        ///< of an expert
  std::uint32_t first_piece;  ///< of an expert's pieces
};

struct LoadBalanceParams {
  static constexpr std::uint32_t kPieceBytes = 4096;  ///< what a warp moves at once

  IntranodeParams common;  ///< of the node: as if there were no other ranks
  int first_rank;          ///< of the node, among all ranks
  bool reduces;            ///< gradients are added up; else weights are copied
  std::uint32_t shape;     ///< a number made of all that must agree: `reduces`, numbers, where slots lie

  const std::int32_t* mapping;  ///< [ranks of the node, num_slots]: the expert of each slot
  int num_slots;                ///< of a rank
  int num_local_experts;

  ExpertPayload payloads[kMostPayloads];
  int num_payloads;
  std::uint32_t num_pieces;  ///< of an expert
};

}  // namespace deep_ep
