#include "csrc/buffer/low_latency/call_shape.hpp"

#include <array>

#include "csrc/support/format.hpp"
#include "kernels/low_latency/params.hpp"

namespace deep_ep {
namespace {

struct Field {
  const char* name;
  int bits;
  std::array<const char*, 8> values;  ///< none: a number, less one
};

/// From the highest bits below kUnknownExpertShape down.
constexpr std::array kFields = {
    Field{"the number of tokens (rows of x)", 1, {"at most max_tokens", "more than max_tokens"}},
    Field{"the format of rows (use_fp8, round_scale, use_ue8m0, use_nvfp4, align_fp8_quantization)",
          3,
          {"bfloat16", "FP8 with float32 scales", "FP8 with scales of powers of two", "FP8 with UE8M0 scales", "NVFP4",
           "FP8 aligned with training"}},
    Field{"the way between nodes (return_recv_hook)", 1, {"direct", "by rails"}},
    Field{"top-k", 5, {}},
};
constexpr int kBits = 10;
constexpr int kShared = 31;  ///< by the fields and the hash

std::string text_of(const Field& field, std::uint32_t value) {
  return field.values[0] == nullptr ? std::to_string(value + 1) : field.values[value];
}

}  // namespace

std::uint32_t DispatchShape::packed(std::uint32_t hash_of_rest) const {
  const std::array values = {too_many_tokens ? 1 : 0, format, by_rails ? 1 : 0, num_topk - 1};
  std::uint32_t fields = 0;
  for (std::size_t i = 0; i < kFields.size(); ++i)
    fields = fields << kFields[i].bits | static_cast<unsigned>(values[i]);
  return fields << (kShared - kBits) | hash_of_rest >> (32 - kShared + kBits);
}

std::string describe_difference(std::uint32_t ours, int rank, std::uint32_t theirs, int peer) {
  if ((theirs & kUnknownExpertShape) != 0) {
    return fmt::format(
        "low_latency_dispatch: rank {} has ended the call, as its topk_idx names an expert beyond the last one; its "
        "own "
        "error says which. The ranks no longer agree: destroy the buffer",
        peer);
  }
  int shift = kShared;
  for (const Field& field : kFields) {
    shift -= field.bits;
    const std::uint32_t mask = (1u << field.bits) - 1;
    const std::uint32_t here = ours >> shift & mask;
    const std::uint32_t there = theirs >> shift & mask;
    if (here == there) continue;
    return fmt::format(
        "low_latency_dispatch: {} is {} on rank {} but {} on rank {}; it must be equal on all ranks. The ranks no "
        "longer "
        "agree: destroy the buffer",
        field.name, text_of(field, here), rank, text_of(field, there), peer);
  }
  return fmt::format(
      "low_latency_dispatch: ranks {} and {} differ in max_tokens, hidden or num_experts; they must be equal on all "
      "ranks. The ranks no longer agree: destroy the buffer",
      rank, peer);
}

}  // namespace deep_ep
