// Every wrong argument is refused by name before anything is sent, and the buffer works afterwards.
#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "tests/cluster/fixture.hpp"

namespace deep_ep::test {
namespace {

constexpr int kRanks = 2;

class ArgumentsTest : public ClusterTest {
 protected:
  const Case one_ = make_case({.tokens = {10, 10},
                               .dtype = DType::float8_e4m3,
                               .hidden = 64,
                               .scales = 4,
                               .combine_hidden = 32,
                               .bias_0 = true,
                               .bias_1 = true});
};
DEEP_EP_ON_THREADS(ArgumentsTest);

using View = ConstTensorView;

/// Ways to spoil any tensor. None reads memory, so the data need not fit.
struct Spoil {
  const char* what;
  void (*apply)(View&);
};
/// Another type of the same width, where the library knows one.
void of_other_type(View& view) {
  constexpr std::pair<DType, DType> kTwins[] = {{DType::int32, DType::float32},
                                                {DType::float32, DType::int32},
                                                {DType::bfloat16, DType::float16},
                                                {DType::float16, DType::bfloat16}};
  const auto* twin = std::ranges::find(kTwins, view.dtype, &std::pair<DType, DType>::first);
  view.dtype = twin == std::end(kTwins) ? DType::float8_e5m2 : twin->second;
}
template <int dim, std::int64_t size>
void sized(View& view) {
  view = View::contiguous(view.data, view.dtype, {dim == 0 ? size : view.shape[0], dim == 1 ? size : view.shape[1]},
                          view.device);
}
constexpr Spoil kSpoils[] = {
    {"type", of_other_type},
    {"a row less", [](View& view) { --view.shape[0]; }},
    {"dimension more", [](View& view) { view.dims = 3, view.shape[2] = 1, view.strides[2] = 1; }},
    {"dimension less", [](View& view) { --view.dims; }},
    {"-1 dimensions", [](View& view) { view.dims = -1; }},
    {"2^30 dimensions", [](View& view) { view.dims = 1 << 30; }},
    {"2^64 elements", [](View& view) { view.shape[0] = view.shape[1] = std::int64_t{1} << 32; }},
    {"rows apart", [](View& view) { view.strides[0] += 16; }},
    {"columns apart", [](View& view) { view.strides[view.dims == 1 ? 0 : 1] = 2; }},
    {"device",
     [](View& view) {
       const bool cpu = view.device.kind == Device::Kind::cpu;
       view.device = {cpu ? Device::Kind::cuda : Device::Kind::cpu, 0};
     }},
    {"no memory", [](View& view) { view.data = nullptr; }},
};

/// Refuses each of these tensors of a call, spoiled in each way but those that it may have.
template <class Arguments>
struct Argument {
  const char* name;
  View& (*of)(Arguments&);
  const char* may_have = "";  ///< the ways, one behind the other
};
template <class Arguments, class Call>
void refuse_spoiled(const Arguments& good, const std::vector<Argument<Arguments>>& tensors, const Call& call) {
  for (const Argument<Arguments>& tensor : tensors) {
    for (const Spoil& spoil : kSpoils) {
      if (std::string_view(tensor.may_have).find(spoil.what) != std::string_view::npos) continue;
      Arguments bad = good;
      spoil.apply(tensor.of(bad));
      require_throws<InvalidArgument>([&] { call(bad); }, {tensor.name}, std::string(tensor.name) + ", " + spoil.what);
    }
  }
}

TEST_P(ArgumentsTest, Dispatch) {
  run_with_buffers(cluster(kRanks), [&](Rank& rank, Buffer& buffer) {
    using Arguments = DispatchArguments;
    const Arguments good = upload_inputs(rank, one_).dispatch;
    const auto call = [&](const Arguments& arguments) { buffer.dispatch(arguments, rank.call()); };
    refuse_spoiled<Arguments>(
        good,
        {{"x", [](Arguments& a) -> View& { return a.x; }, "type, a row less"},
         {"x_scales", [](Arguments& a) -> View& { return *a.x_scales; }, "type, rows apart, columns apart"},
         {"is_token_in_rank", [](Arguments& a) -> View& { return a.is_token_in_rank; }},
         {"num_tokens_per_expert", [](Arguments& a) -> View& { return a.num_tokens_per_expert; }},
         {"topk_idx", [](Arguments& a) -> View& { return *a.topk_idx; }},
         {"topk_weights", [](Arguments& a) -> View& { return *a.topk_weights; }}},
        call);
    const auto refuses = [&](const char* name, const char* what, auto&& spoil) {
      Arguments bad = good;
      spoil(bad);
      require_throws<InvalidArgument>([&] { call(bad); }, {name}, std::string(name) + " " + what);
    };
    refuses("x", "rows of 56 bytes", [](Arguments& a) { sized<1, 56>(a.x); });
    refuses("x", "rows of 0 bytes", [](Arguments& a) { sized<1, 0>(a.x); });
    refuses("number of tokens is 16777216, allowed: 0 to 16777215", "more than positions",
            [](Arguments& a) { sized<0, 1 << 24>(a.x); });
    refuses("is_token_in_rank", "missing", [](Arguments& a) { a.is_token_in_rank = {}; });
    refuses("is_token_in_rank", "3 wide", [](Arguments& a) { sized<1, 3>(a.is_token_in_rank); });
    refuses("num_tokens_per_expert", "missing", [](Arguments& a) { a.num_tokens_per_expert = {}; });
    refuses("num_tokens_per_expert", "of 0", [](Arguments& a) { a.num_tokens_per_expert.shape[0] = 0; });
    refuses("x_scales", "of 1 byte", [](Arguments& a) { a.x_scales->dtype = DType::uint8; });
    refuses("topk_idx", "missing", [](Arguments& a) { a.topk_idx.reset(); });
    refuses("topk_idx", "33 wide", [](Arguments& a) { sized<1, 33>(*a.topk_idx); });
    refuses("topk_weights", "3 wide", [](Arguments& a) { sized<1, 3>(*a.topk_weights); });
    refuses("expert_alignment", "0", [](Arguments& a) { a.expert_alignment = 0; });
    refuses("num_worst_tokens", "-1", [](Arguments& a) { a.num_worst_tokens = -1; });
    refuses("num_sms", "-1", [](Arguments& a) { a.num_sms = -1; });
    run_round(rank, buffer, one_);
  });
}

TEST_P(ArgumentsTest, CachedDispatch) {
  run_with_buffers(cluster(kRanks), [&](Rank& rank, Buffer& buffer) {
    const Inputs inputs = upload_inputs(rank, one_);
    const DispatchResult result = buffer.dispatch(inputs.dispatch, rank.call());
    const auto refuses = [&](const char* name, const DispatchArguments& arguments) {
      require_throws<InvalidArgument>([&] { buffer.dispatch(arguments, rank.call()); }, {name},
                                      std::string("cached dispatch, ") + name);
    };
    DispatchArguments good;
    good.x = inputs.dispatch.x;
    good.handle = &result.handle;
    DispatchArguments bad = good;
    --bad.x.shape[0];
    refuses("x", bad);
    const DispatchHandle empty;
    bad = good;
    bad.handle = &empty;
    refuses("handle", bad);
    check_dispatch(rank, make_case([&] {
                     Shape shape = one_.shape;
                     shape.scales = 0;
                     return shape;
                   }()),
                   buffer.dispatch(good, rank.call()), {.cached = true});
  });
}

TEST_P(ArgumentsTest, Combine) {
  run_with_buffers(cluster(kRanks), [&](Rank& rank, Buffer& buffer) {
    const DispatchResult result = buffer.dispatch(upload_inputs(rank, one_).dispatch, rank.call());
    const Returned good = upload_returned(rank, buffer, one_, result.handle, false);
    using Arguments = CombineArguments;
    const auto call = [&](const Arguments& arguments) { buffer.combine(arguments, rank.call()); };
    refuse_spoiled<Arguments>(good.combine,
                              {{"x", [](Arguments& a) -> View& { return a.x; }},
                               {"topk_weights", [](Arguments& a) -> View& { return *a.topk_weights; }},
                               {"bias_0", [](Arguments& a) -> View& { return *a.bias_0; }},
                               {"bias_1", [](Arguments& a) -> View& { return *a.bias_1; }}},
                              call);
    const auto refuses = [&](const char* name, const char* what, auto&& spoil) {
      Arguments bad = good.combine;
      spoil(bad);
      require_throws<InvalidArgument>([&] { call(bad); }, {name}, std::string(name) + " " + what);
    };
    refuses("x", "width", [](Arguments& a) { sized<1, 31>(a.x); });
    refuses("handle", "missing", [](Arguments& a) { a.handle = nullptr; });
    static const DispatchHandle empty;
    refuses("handle", "empty", [](Arguments& a) { a.handle = &empty; });
    refuses("topk_weights", "width", [](Arguments& a) { sized<1, 33>(*a.topk_weights); });
    refuses("bias_0", "width", [](Arguments& a) { sized<1, 24>(*a.bias_0); });
    refuses("num_sms", "-1", [](Arguments& a) { a.num_sms = -1; });
    check_combine(rank, one_, buffer.combine(good.combine, rank.call()));
  });
}

TEST_P(ArgumentsTest, Layout) {
  run_with_buffers(cluster(kRanks), [&](Rank& rank, Buffer& buffer) {
    const View good = upload_inputs(rank, one_).topk_idx;
    const int experts = one_.shape.experts();
    refuse_spoiled<View>(good, {{"topk_idx", [](View& view) -> View& { return view; }, "a row less"}},
                         [&](const View& view) { buffer.get_dispatch_layout(view, experts, rank.call()); });
    for (const int wrong : {0, -8, 7}) {  // 7: not a multiple of the ranks
      require_throws<InvalidArgument>([&] { buffer.get_dispatch_layout(good, wrong, rank.call()); }, {"num_experts"},
                                      "get_dispatch_layout of " + std::to_string(wrong) + " experts");
    }
    check_layout(rank, one_, buffer.get_dispatch_layout(good, experts, rank.call()));
  });
}

TEST_P(ArgumentsTest, TooManyExpertsForTheBuffer) {
  const Case fits = make_case({.tokens = {4, 4}, .local_experts = 3, .topk = 2});
  const Case large = make_case({.tokens = {4, 4}, .local_experts = 4, .topk = 2});
  run_with_buffers(cluster(kRanks), {.heap_bytes = std::size_t{16} << 20, .max_local_experts = 3},
                   [&](Rank& rank, Buffer& buffer) {
                     const Inputs inputs = upload_inputs(rank, large);
                     require_throws<Error>([&] { buffer.dispatch(inputs.dispatch, rank.call()); },
                                           {"num_tokens_per_expert", "8", "3"}, "dispatch with 4 experts a rank");
                     run_round(rank, buffer, fits);
                   });
}

}  // namespace
}  // namespace deep_ep::test
