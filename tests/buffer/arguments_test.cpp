// Every wrong argument is refused by name before anything is sent, and the buffer works afterwards.
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

Device other_device(const ConstTensorView& view) {
  return view.device.kind == Device::Kind::cpu ? Device{Device::Kind::cuda, 0} : Device{Device::Kind::cpu, 0};
}

// Ways to spoil a tensor. None reads memory, so the data need not fit.
using Spoil = void (*)(ConstTensorView&);
void one_row_less(ConstTensorView& view) { --view.shape[0]; }
void one_dimension_more(ConstTensorView& view) { view.dims = 3, view.shape[2] = 1, view.strides[2] = 1; }
void one_dimension_less(ConstTensorView& view) { --view.dims; }
void negative_dimensions(ConstTensorView& view) { view.dims = -1; }
void dimensions_beyond_all(ConstTensorView& view) { view.dims = 1 << 30; }
void elements_beyond_all(ConstTensorView& view) { view.shape[0] = view.shape[1] = std::int64_t{1} << 32; }
void rows_apart(ConstTensorView& view) { view.strides[0] += 16; }
void columns_apart(ConstTensorView& view) { view.strides[view.dims == 1 ? 0 : 1] = 2; }
void elsewhere(ConstTensorView& view) { view.device = other_device(view); }
void no_memory(ConstTensorView& view) { view.data = nullptr; }
template <DType dtype>
void of_type(ConstTensorView& view) {
  view.dtype = dtype;
}
template <int dim, std::int64_t size>
void sized(ConstTensorView& view) {
  view = ConstTensorView::contiguous(view.data, view.dtype,
                                     {dim == 0 ? size : view.shape[0], dim == 1 ? size : view.shape[1]}, view.device);
}
template <std::int64_t size>
void long_as(ConstTensorView& view) {
  view.shape[0] = size;
}

struct Wrong {
  const char* argument;  ///< what the message must name
  const char* what;
  void (*apply)(DispatchArguments&);
};

template <class Member, Member DispatchArguments::*member, Spoil spoil>
void with(DispatchArguments& arguments) {
  if constexpr (std::is_same_v<Member, ConstTensorView>) {
    spoil(arguments.*member);
  } else {
    spoil(*(arguments.*member));
  }
}
using Optional = std::optional<ConstTensorView>;

#define DEEP_EP_WRONG(member, spoil) \
  { #member, #spoil, with < decltype(DispatchArguments::member), &DispatchArguments::member, spoil> }

const Wrong kWrongDispatch[] = {
    DEEP_EP_WRONG(x, one_dimension_less),
    DEEP_EP_WRONG(x, one_dimension_more),
    DEEP_EP_WRONG(x, negative_dimensions),
    DEEP_EP_WRONG(x, dimensions_beyond_all),
    DEEP_EP_WRONG(x, elements_beyond_all),
    DEEP_EP_WRONG(num_tokens_per_rank, dimensions_beyond_all),
    DEEP_EP_WRONG(topk_idx, negative_dimensions),
    DEEP_EP_WRONG(x_scales, dimensions_beyond_all),
    DEEP_EP_WRONG(x, rows_apart),
    DEEP_EP_WRONG(x, columns_apart),
    DEEP_EP_WRONG(x, elsewhere),
    DEEP_EP_WRONG(x, no_memory),
    {"x", "rows of 56 bytes", with<ConstTensorView, &DispatchArguments::x, sized<1, 56>>},
    {"x", "rows of 0 bytes", with<ConstTensorView, &DispatchArguments::x, sized<1, 0>>},
    DEEP_EP_WRONG(x_scales, one_row_less),
    DEEP_EP_WRONG(x_scales, one_dimension_less),
    DEEP_EP_WRONG(x_scales, of_type<DType::bfloat16>),
    DEEP_EP_WRONG(x_scales, of_type<DType::int64>),
    DEEP_EP_WRONG(x_scales, elsewhere),
    DEEP_EP_WRONG(x_scales, no_memory),
    {"num_tokens_per_rank", "missing", [](DispatchArguments& a) { a.num_tokens_per_rank = {}; }},
    {"num_tokens_per_rank", "of 3", with<ConstTensorView, &DispatchArguments::num_tokens_per_rank, long_as<3>>},
    DEEP_EP_WRONG(num_tokens_per_rank, of_type<DType::int64>),
    DEEP_EP_WRONG(num_tokens_per_rank, columns_apart),
    DEEP_EP_WRONG(num_tokens_per_rank, elsewhere),
    {"is_token_in_rank", "missing", [](DispatchArguments& a) { a.is_token_in_rank = {}; }},
    DEEP_EP_WRONG(is_token_in_rank, one_row_less),
    {"is_token_in_rank", "3 wide", with<ConstTensorView, &DispatchArguments::is_token_in_rank, sized<1, 3>>},
    DEEP_EP_WRONG(is_token_in_rank, of_type<DType::int32>),
    DEEP_EP_WRONG(is_token_in_rank, rows_apart),
    DEEP_EP_WRONG(is_token_in_rank, elsewhere),
    {"num_tokens_per_expert", "missing", [](DispatchArguments& a) { a.num_tokens_per_expert = {}; }},
    {"num_tokens_per_expert", "of 7", with<ConstTensorView, &DispatchArguments::num_tokens_per_expert, long_as<7>>},
    {"num_tokens_per_expert", "of 0", with<ConstTensorView, &DispatchArguments::num_tokens_per_expert, long_as<0>>},
    DEEP_EP_WRONG(num_tokens_per_expert, of_type<DType::int64>),
    DEEP_EP_WRONG(num_tokens_per_expert, elsewhere),
    {"topk_idx", "missing", [](DispatchArguments& a) { a.topk_idx.reset(); }},
    DEEP_EP_WRONG(topk_idx, one_row_less),
    DEEP_EP_WRONG(topk_idx, of_type<DType::float32>),
    DEEP_EP_WRONG(topk_idx, rows_apart),
    DEEP_EP_WRONG(topk_idx, elsewhere),
    {"topk_idx", "33 wide", with<Optional, &DispatchArguments::topk_idx, sized<1, 33>>},
    DEEP_EP_WRONG(topk_weights, one_row_less),
    DEEP_EP_WRONG(topk_weights, of_type<DType::bfloat16>),
    DEEP_EP_WRONG(topk_weights, rows_apart),
    DEEP_EP_WRONG(topk_weights, elsewhere),
    {"topk_weights", "another width", with<Optional, &DispatchArguments::topk_weights, sized<1, 3>>},
    {"expert_alignment", "0", [](DispatchArguments& a) { a.expert_alignment = 0; }},
    {"expert_alignment", "-4", [](DispatchArguments& a) { a.expert_alignment = -4; }},
    {"num_worst_tokens", "-1", [](DispatchArguments& a) { a.num_worst_tokens = -1; }},
    {"num_sms", "-1", [](DispatchArguments& a) { a.config.num_sms = -1; }},
    {"warps_per_block", "-1", [](DispatchArguments& a) { a.config.warps_per_block = -1; }},
};

TEST_P(ArgumentsTest, Dispatch) {
  DEEP_EP_NEEDS_RANKS(kRanks);
  run_cluster(cluster(kRanks), [&](Rank& rank) {
    Buffer& buffer = rank.buffer();
    const Inputs inputs = upload_inputs(rank, one_);
    for (const Wrong& wrong : kWrongDispatch) {
      DispatchArguments arguments = inputs.dispatch;
      wrong.apply(arguments);
      require_throws<InvalidArgument>([&] { buffer.dispatch(arguments, rank.call()); }, {wrong.argument},
                                      std::string("dispatch, ") + wrong.argument + " " + wrong.what);
    }
    run_round(rank, buffer, one_);
    buffer.destroy();
  });
}

TEST_P(ArgumentsTest, CachedDispatch) {
  DEEP_EP_NEEDS_RANKS(kRanks);
  run_cluster(cluster(kRanks), [&](Rank& rank) {
    Buffer& buffer = rank.buffer();
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
    one_row_less(bad.x);
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
    buffer.destroy();
  });
}

TEST_P(ArgumentsTest, Combine) {
  DEEP_EP_NEEDS_RANKS(kRanks);
  run_cluster(cluster(kRanks), [&](Rank& rank) {
    Buffer& buffer = rank.buffer();
    const DispatchResult result = buffer.dispatch(upload_inputs(rank, one_).dispatch, rank.call());
    const Returned good = upload_returned(rank, buffer, one_, result.handle, false);
    const auto refuses = [&](const char* name, const char* what, auto&& spoil) {
      CombineArguments arguments = good.combine;
      spoil(arguments);
      require_throws<InvalidArgument>([&] { buffer.combine(arguments, rank.call()); }, {name},
                                      std::string("combine, ") + name + " " + what);
    };
    using Arguments = CombineArguments;
    refuses("x", "type", [](Arguments& a) { a.x.dtype = DType::float32; });
    refuses("x", "rows", [](Arguments& a) { one_row_less(a.x); });
    refuses("x", "dimensions", [](Arguments& a) { one_dimension_less(a.x); });
    refuses("x", "strides", [](Arguments& a) { rows_apart(a.x); });
    refuses("x", "device", [](Arguments& a) { elsewhere(a.x); });
    refuses("x", "memory", [](Arguments& a) { no_memory(a.x); });
    refuses("x", "width", [](Arguments& a) { sized<1, 31>(a.x); });
    refuses("handle", "missing", [](Arguments& a) { a.handle = nullptr; });
    static const DispatchHandle empty;
    refuses("handle", "empty", [](Arguments& a) { a.handle = &empty; });
    refuses("topk_weights", "type", [](Arguments& a) { a.topk_weights->dtype = DType::bfloat16; });
    refuses("topk_weights", "rows", [](Arguments& a) { one_row_less(*a.topk_weights); });
    refuses("topk_weights", "width", [](Arguments& a) { sized<1, 33>(*a.topk_weights); });
    refuses("topk_weights", "strides", [](Arguments& a) { rows_apart(*a.topk_weights); });
    refuses("topk_weights", "device", [](Arguments& a) { elsewhere(*a.topk_weights); });
    refuses("bias_0", "type", [](Arguments& a) { a.bias_0->dtype = DType::float32; });
    refuses("bias_0", "rows", [](Arguments& a) { one_row_less(*a.bias_0); });
    refuses("bias_0", "width", [](Arguments& a) { sized<1, 24>(*a.bias_0); });
    refuses("bias_0", "device", [](Arguments& a) { elsewhere(*a.bias_0); });
    refuses("bias_1", "strides", [](Arguments& a) { rows_apart(*a.bias_1); });
    refuses("bias_1", "dimensions", [](Arguments& a) { one_dimension_less(*a.bias_1); });
    refuses("num_sms", "-1", [](Arguments& a) { a.config.num_sms = -1; });
    check_combine(rank, one_, buffer.combine(good.combine, rank.call()));
    buffer.destroy();
  });
}

TEST_P(ArgumentsTest, Layout) {
  DEEP_EP_NEEDS_RANKS(kRanks);
  run_cluster(cluster(kRanks), [&](Rank& rank) {
    Buffer& buffer = rank.buffer();
    const ConstTensorView good = upload_inputs(rank, one_).topk_idx;
    const auto refuses = [&](const char* name, const char* what, Spoil spoil, int experts) {
      ConstTensorView bad = good;
      spoil(bad);
      require_throws<InvalidArgument>([&] { buffer.get_dispatch_layout(bad, experts, rank.call()); }, {name},
                                      std::string("get_dispatch_layout, ") + name + " " + what);
    };
    const Spoil unspoiled = [](ConstTensorView&) {};
    refuses("topk_idx", "type", of_type<DType::float32>, 8);
    refuses("topk_idx", "dimensions", one_dimension_less, 8);
    refuses("topk_idx", "-1 dimensions", negative_dimensions, 8);
    refuses("topk_idx", "2^30 dimensions", dimensions_beyond_all, 8);
    refuses("topk_idx", "too many elements", elements_beyond_all, 8);
    refuses("topk_idx", "strides", rows_apart, 8);
    refuses("topk_idx", "device", elsewhere, 8);
    refuses("topk_idx", "memory", no_memory, 8);
    refuses("num_experts", "0", unspoiled, 0);
    refuses("num_experts", "-8", unspoiled, -8);
    refuses("num_experts", "not a multiple of the ranks", unspoiled, 7);
    check_layout(rank, one_, buffer.get_dispatch_layout(good, one_.shape.experts(), rank.call()));
    buffer.destroy();
  });
}

TEST_P(ArgumentsTest, TooManyExpertsForTheBuffer) {
  DEEP_EP_NEEDS_RANKS(kRanks);
  const Case fits = make_case({.tokens = {4, 4}, .local_experts = 3, .topk = 2});
  const Case large = make_case({.tokens = {4, 4}, .local_experts = 4, .topk = 2});
  run_cluster(cluster(kRanks), [&](Rank& rank) {
    Buffer& buffer = rank.buffer({.heap_bytes = std::size_t{16} << 20, .max_local_experts = 3});
    const Inputs inputs = upload_inputs(rank, large);
    require_throws<Error>([&] { buffer.dispatch(inputs.dispatch, rank.call()); }, {"num_tokens_per_expert", "8", "3"},
                          "dispatch with 4 experts a rank");
    run_round(rank, buffer, fits);
    buffer.destroy();
  });
}

}  // namespace
}  // namespace deep_ep::test
