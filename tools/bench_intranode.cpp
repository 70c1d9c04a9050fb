#include "tools/bench_intranode.hpp"

#include <fmt/format.h>

#include <optional>

#include "deep_ep/buffer.hpp"
#include "tools/bench_check.hpp"
#include "tools/bench_peers.hpp"
#include "tools/ranks.hpp"

namespace deep_ep::tools {
namespace {

/// One rank's part in the measurements for one number of tokens.
class RankBench {
 public:
  RankBench(const IntranodeOptions& options, const WorkloadShape& shape, const Routes& routes,
            const std::shared_ptr<Bootstrap>& bootstrap, const std::shared_ptr<Executor>& executor,
            const std::function<void(const Measurement&)>& report)
      : options_(options),
        shape_(shape),
        routes_(routes),
        bootstrap_(*bootstrap),
        executor_(*executor),
        rank_(bootstrap->rank()),
        report_(report),
        stream_(*executor),
        call_{stream_, {}, false},
        meter_(*bootstrap, *executor, stream_),
        buffer_(bootstrap, executor, buffer_options(shape)),
        x_bf16_(*executor, DType::bfloat16, {shape.tokens, shape.hidden}),
        x_8bit_(*executor, DType::float8_e4m3, {shape.tokens, shape.hidden}),
        scales_(*executor, DType::float32, {shape.tokens, shape.scales()}),
        selection_(*executor, DType::int64, {shape.tokens, shape.topk}),
        weights_(*executor, DType::float32, {shape.tokens, shape.topk}) {
    fill_inputs();
  }

  void run() {
    const bool as_8bit = options_.dtype != "bf16";
    const bool as_bf16 = options_.dtype != "fp8";
    DispatchLayout layout = buffer_.get_dispatch_layout(selection_.view(), shape_.experts, call_);
    handle_ = exchange(layout, false, Config{}).handle;
    if (options_.uncached) {
      const auto call = [&] { layout = buffer_.get_dispatch_layout(selection_.view(), shape_.experts, call_); };
      add({.operation = "layout", .dtype = "-", .mode = "-"}, meter_.measure(options_.rounds, call));
    }
    for (const int sms : options_.sms) {
      const Config config{.num_sms = sms};
      for (const bool bits8 : {true, false}) {
        if (bits8 ? !as_8bit : !as_bf16) continue;
        measure_dispatch(bits8, false, config);
        if (options_.uncached) measure_dispatch(bits8, true, config);
      }
      if (options_.mode != "push") measure_combine(CombineMode::pull, config);
      if (options_.mode != "pull") measure_combine(CombineMode::push, config);
    }
    if (options_.peers) {
      measure_transport(make_nccl_transport(bootstrap_, executor_));
      measure_transport(make_copy_engine_transport(bootstrap_, executor_));
    }
    handle_ = {};
    buffer_.destroy();
  }

 private:
  static BufferOptions buffer_options(const WorkloadShape& shape) {
    BufferOptions options;
    // Results of one round may still be held while the next one is made.
    options.heap_bytes = 3 * Buffer::heap_bytes_hint(shape.ranks, shape.tokens, shape.row_bytes_bf16(), shape.topk);
    return options;
  }

  void fill_inputs() {
    const auto tokens = static_cast<std::size_t>(shape_.tokens);
    const auto hidden = static_cast<std::size_t>(shape_.hidden);
    const auto blocks = static_cast<std::size_t>(shape_.scales());
    std::vector<std::uint16_t> bf16(tokens * hidden);
    std::vector<std::uint8_t> bits8(tokens * hidden);
    std::vector<float> scales(tokens * blocks);
    for (std::size_t token = 0; token < tokens; ++token) {
      const auto at = static_cast<std::int64_t>(token);
      fill_row_bf16(shape_, rank_, at, std::span(bf16).subspan(token * hidden, hidden));
      fill_row_8bit(shape_, rank_, at, std::span(bits8).subspan(token * hidden, hidden));
      fill_scales(shape_, rank_, at, std::span(scales).subspan(token * blocks, blocks));
    }
    x_bf16_.upload(bf16.data(), stream_);
    x_8bit_.upload(bits8.data(), stream_);
    scales_.upload(scales.data(), stream_);
    selection_.upload(make_selection(shape_, rank_).data(), stream_);
    const std::vector<float> weights(tokens * static_cast<std::size_t>(shape_.topk),
                                     1.0f / static_cast<float>(shape_.topk));
    weights_.upload(weights.data(), stream_);
  }

  DispatchArguments rows(bool bits8, const Config& config) const {
    DispatchArguments arguments;
    arguments.x = bits8 ? x_8bit_.view() : x_bf16_.view();
    if (bits8) arguments.x_scales = scales_.view();
    arguments.config = config;
    return arguments;
  }

  /// Dispatch along known routes.
  DispatchResult cached(bool bits8, const Config& config) {
    DispatchArguments arguments = rows(bits8, config);
    arguments.handle = &handle_;
    return buffer_.dispatch(arguments, call_);
  }

  /// Dispatch that exchanges counts and waits for them.
  DispatchResult exchange(const DispatchLayout& layout, bool bits8, const Config& config) {
    DispatchArguments arguments = rows(bits8, config);
    arguments.use(layout);
    arguments.topk_idx = selection_.view();
    arguments.topk_weights = weights_.view();
    return buffer_.dispatch(arguments, call_);
  }

  void measure_dispatch(bool bits8, bool with_exchange, const Config& config) {
    DispatchResult result;
    const auto call = [&] {
      result = {};  // a round's rows are given back before the next ones are asked for
      if (with_exchange) {
        const DispatchLayout layout = buffer_.get_dispatch_layout(selection_.view(), shape_.experts, call_);
        result = exchange(layout, bits8, config);
      } else {
        result = cached(bits8, config);
      }
    };
    const Timing timing = meter_.measure(options_.rounds, call);
    buffer_.check();
    if (options_.check) {
      const auto check = bits8 ? check_dispatched_8bit : check_dispatched_bf16;
      check(executor_, stream_, shape_, routes_, rank_, result);
    }
    Measurement measurement{.operation = with_exchange ? "layout+notify+dispatch" : "dispatch",
                            .dtype = bits8 ? "fp8" : "bf16",
                            .mode = with_exchange ? "exchange" : "cached"};
    measurement.sms = config.num_sms != 0 ? config.num_sms : Config::dispatch_default(shape_.ranks).num_sms;
    set_bytes(measurement, bits8 ? shape_.row_bytes_8bit() : shape_.row_bytes_bf16());
    add(measurement, timing);
  }

  void measure_combine(CombineMode mode, const Config& config) {
    const DispatchResult received = cached(false, Config{});
    CombineArguments arguments;
    arguments.handle = &handle_;
    arguments.mode = mode;
    arguments.config = config;
    arguments.x = received.recv_x.view();
    // What is pushed lies in ordinary memory, as the output of experts that do not know of the heap does.
    std::optional<DeviceTensor> ordinary;
    if (mode == CombineMode::push) {
      ordinary.emplace(executor_, DType::bfloat16,
                       std::initializer_list<std::int64_t>{routes_.received(rank_), shape_.hidden});
      executor_.copy(ordinary->view().data, received.recv_x.data(), ordinary->view().bytes(), stream_);
      arguments.x = ordinary->view();
    }
    CombineResult result;
    const auto call = [&] {
      result = {};
      result = buffer_.combine(arguments, call_);
    };
    const Timing timing = meter_.measure(options_.rounds, call);
    buffer_.check();
    if (options_.check) check_combined(executor_, stream_, shape_, routes_, rank_, result);
    Measurement measurement{
        .operation = "combine", .dtype = "bf16", .mode = mode == CombineMode::pull ? "pull" : "push"};
    measurement.sms = config.num_sms != 0 ? config.num_sms : Config::combine_default(shape_.ranks).num_sms;
    set_bytes(measurement, shape_.row_bytes_bf16());
    add(measurement, timing);
  }

  void measure_transport(std::unique_ptr<PeerTransport> transport) {
    if (transport == nullptr) return;
    for (const bool back : {false, true}) {
      for (const bool bits8 : {true, false}) {
        if (back && bits8) continue;
        if (!back && (bits8 ? options_.dtype == "bf16" : options_.dtype == "fp8")) continue;
        const std::int64_t row_bytes = bits8 ? shape_.row_bytes_8bit() : shape_.row_bytes_bf16();
        std::vector<std::int64_t> send;
        std::vector<std::int64_t> receive;
        for (int peer = 0; peer < shape_.ranks; ++peer) {
          send.push_back(routes_.rows(rank_, peer) * row_bytes);
          receive.push_back(routes_.rows(peer, rank_) * row_bytes);
        }
        if (back) std::swap(send, receive);
        transport->prepare(send, receive);
        const Timing timing = meter_.measure(options_.rounds, [&] { transport->enqueue(stream_); });
        Measurement measurement{.operation = back ? "combine" : "dispatch",
                                .dtype = bits8 ? "fp8" : "bf16",
                                .mode = "same bytes",
                                .transport = transport->name(),
                                .sms = transport->num_sms()};
        set_bytes(measurement, row_bytes);
        add(measurement, timing);
      }
    }
  }

  void set_bytes(Measurement& measurement, std::int64_t row_bytes) const {
    std::int64_t all = 0;
    std::int64_t own = 0;
    for (int rank = 0; rank < shape_.ranks; ++rank) {
      all += routes_.received(rank);
      own += routes_.rows(rank, rank);
    }
    const double bytes_a_rank = static_cast<double>(row_bytes) / shape_.ranks;
    measurement.logical_bytes = static_cast<double>(all) * bytes_a_rank;
    measurement.wire_bytes = static_cast<double>(all - own) * bytes_a_rank;
  }

  void add(Measurement measurement, const Timing& timing) {
    if (measurement.transport.empty()) measurement.transport = "deep_ep";
    measurement.tokens = shape_.tokens;
    measurement.timing = timing;
    if (rank_ == 0) report_(measurement);
  }

  const IntranodeOptions& options_;
  const WorkloadShape& shape_;
  const Routes& routes_;
  Bootstrap& bootstrap_;
  Executor& executor_;
  int rank_;
  const std::function<void(const Measurement&)>& report_;
  Stream stream_;
  CallOptions call_;
  Meter meter_;
  Buffer buffer_;
  DeviceTensor x_bf16_;
  DeviceTensor x_8bit_;
  DeviceTensor scales_;
  DeviceTensor selection_;
  DeviceTensor weights_;
  DispatchHandle handle_;
};

}  // namespace

void run_intranode(const IntranodeOptions& options, const World& world, Device::Kind device,
                   const std::function<void(const Measurement&)>& report) {
  std::vector<WorkloadShape> shapes;
  std::vector<Routes> routes;
  for (const std::int64_t tokens : options.tokens) {
    shapes.push_back({world.size, tokens, options.hidden, options.topk, options.experts});
    routes.emplace_back(shapes.back());
  }
  run_ranks(world.local_ranks(), [&](int local) {
    const auto& bootstrap = world.bootstraps[static_cast<std::size_t>(local)];
    const auto executor = make_executor(device, device == Device::Kind::cuda ? world.device_of(local) : 0);
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      if (bootstrap->rank() == 0)
        show_progress(fmt::format("[{}/{}] {} tokens a rank", i + 1, shapes.size(), shapes[i].tokens));
      RankBench(options, shapes[i], routes[i], bootstrap, executor, report).run();
    }
  });
  clear_progress();
}

}  // namespace deep_ep::tools
