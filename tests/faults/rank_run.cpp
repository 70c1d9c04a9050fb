#include "tests/faults/rank_run.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "csrc/support/format.hpp"
#include "tests/cluster/exchange.hpp"

namespace deep_ep::faults {
namespace {

using test::Rank;
using test::require;
using Kind = Step::Kind;

oracle::Masks masks_of(int ranks, int rank, const std::vector<int>& masked) {
  if (masked.empty()) return {};
  oracle::Masks masks(static_cast<std::size_t>(ranks * ranks), 0);
  for (const int peer : masked) masks[static_cast<std::size_t>(rank * ranks + peer)] = 1;
  return masks;
}

}  // namespace

/// The calls of a plan, on one buffer.
struct RankRun::Calls {
  Calls(RankRun& its_run, Rank& its_rank) : run(its_run), plan(its_run.plan_), rank(its_rank) {
    BufferOptions options = test::low_latency_options(plan.ranks, 8, 256);
    options.low_latency.masking = plan.masking;
    // So that rows between nodes wait for credit.
    if (plan.ranks_per_node() != 0) options.window_bytes = std::size_t{4} << 10;
    buffer = &rank.buffer(options);
  }

  const test::LowLatencyCombineCase& low_latency(const Step& step) const { return run.data_.low_latency[step.data]; }

  /// The call of a step, and everything about its result.
  void make(const Step& step) {
    switch (step.kind) {
      case Kind::dispatch:
        return dispatch(step);
      case Kind::cached:
        return cached(step);
      case Kind::combine:
        return combine(step);
      case Kind::low_latency_dispatch:
        return dispatch_low_latency(step);
      case Kind::low_latency_combine:
        return combine_low_latency(step);
    }
  }

  void dispatch(const Step& step) {
    const test::Case& one = run.data_.normal[step.data];
    const test::Inputs inputs = upload_inputs(rank, one);
    begin_call();
    dispatched = buffer->dispatch(inputs.dispatch, rank.call());
    end_call();
    check_dispatch(rank, one, dispatched);
  }

  void cached(const Step& step) {
    const test::Case& one = run.data_.normal[step.data];
    const test::Inputs inputs = upload_inputs(rank, one);
    begin_call();
    const DispatchResult result = buffer->dispatch({.x = inputs.dispatch.x, .handle = &dispatched.handle}, rank.call());
    end_call();
    check_dispatch(rank, one, result, {.cached = true});
  }

  void combine(const Step& step) {
    const test::Case& one = run.data_.normal[step.data];
    const test::Returned returned = upload_returned(rank, *buffer, one, dispatched.handle, step.heap);
    begin_call();
    const CombineResult result = buffer->combine(returned.combine, rank.call());
    end_call();
    check_combine(rank, one, result);
  }

  void dispatch_low_latency(const Step& step) {
    const test::LowLatencyCombineCase& one = low_latency(step);
    LowLatencyDispatchArguments arguments = upload_arguments(rank, one.before);
    arguments.return_recv_hook = step.hook;
    begin_call();
    LowLatencyDispatchResult result = buffer->low_latency_dispatch(arguments, rank.call());
    if (step.hook) result.hook();
    end_call();
    const std::vector<int> before = masked;
    look_at_masks();
    handle = result.handle;
    const auto check = [&](const std::vector<int>& left_out) {
      check_low_latency_dispatch(rank, with_masks(one.before, masks_of(plan.ranks, rank.rank(), left_out)), result);
    };
    masked_at_dispatch = check_with_some(before, check);
  }

  void combine_low_latency(const Step& step) {
    // What this rank's experts got depends on who was left out; so does what the others' got, which fill_by_token()
    // makes irrelevant.
    test::LowLatencyCombineCase one = low_latency(step);
    if (!masked_at_dispatch.empty()) {
      const auto options = one.options;
      one = make_combine_case_after(with_masks(one.before, masks_of(plan.ranks, rank.rank(), masked_at_dispatch)));
      one.options = options;
      fill_by_token(one);
    }
    LowLatencyCombineArguments arguments = upload_combine(rank, one, handle);
    arguments.return_recv_hook = step.hook;
    begin_call();
    const LowLatencyCombineResult result = buffer->low_latency_combine(arguments, rank.call());
    if (step.hook) result.hook();
    end_call();
    const std::vector<int> before = masked;
    look_at_masks();
    const auto check = [&](const std::vector<int>& left_out) {
      one.options.masks = masks_of(plan.ranks, rank.rank(), left_out);
      check_low_latency_combine(rank, one, one.expected(), result.combined_x.view());
    };
    check_with_some(before, check);
  }

  /// Everything is uploaded: from here on the fault may strike.
  void begin_call() {
    began = FaultTime::Clock::now();
    if (!due) return;
    due = false;
    FaultyExecutor& executor = *run.parts_.executor;
    const bool whole_call = plan.event == 0;
    const auto strike = [this] {
      run.parts_.time->now();
      if (run.parts_.strike) run.parts_.strike();
    };
    switch (plan.fault) {
      case Fault::kill:
      case Fault::suspend:
        if (whole_call) {
          outcome.reached = true;
          strike();
          break;
        }
        [[fallthrough]];
      case Fault::delay:
      case Fault::freeze:
      case Fault::pause:
        executor.freezer->arm(plan.event, hold(), strike);
        break;
      case Fault::memory:
        executor.failing_allocation = plan.event;
        break;
      case Fault::nic: {
        const Step& step = plan.steps[static_cast<std::size_t>(plan.step)];
        if (step.low_latency()) {
          const bool combines = step.kind == Kind::low_latency_combine;
          outcome.reached = executor.break_key(combines ? LowLatencyKind::combine : LowLatencyKind::dispatch, plan.peer,
                                               rank.stream());
        } else {
          outcome.reached = executor.break_key(plan.credit ? InternodeChannel::credit : InternodeChannel::rows,
                                               plan.peer, rank.stream());
        }
        run.parts_.time->now();
        break;
      }
      default:
        break;
    }
  }

  /// A process is stopped by a signal, which the thread that sends it does not notice.
  double hold() const { return plan.fault == Fault::suspend ? 1e-6 : plan.hold * run.deadline_s_; }

  void end_call() {
    buffer->check();
    run.parts_.executor->failing_allocation = 0;
  }

  /// A rank may have received all of the call when it hears from another rank, or from its NIC, that the peer is lost;
  /// and it may hear of two, one behind the other. Returns the masks with which the result is right: those of `before`
  /// and some of the new ones. Throws what is wrong with all of them where none are.
  template <class Check>
  std::vector<int> check_with_some(const std::vector<int>& before, Check check) const {
    std::vector<int> fresh;
    std::set_difference(masked.begin(), masked.end(), before.begin(), before.end(), std::back_inserter(fresh));
    for (unsigned left = 1; left < 1u << fresh.size(); ++left) {  // bits of those of which it heard too late
      std::vector<int> some;
      std::copy_if(masked.begin(), masked.end(), std::back_inserter(some), [&](int rank) {
        const auto at = std::find(fresh.begin(), fresh.end(), rank) - fresh.begin();
        return at == static_cast<std::ptrdiff_t>(fresh.size()) || (left >> at & 1) == 0;
      });
      try {
        check(some);
        return some;
      } catch (const test::CheckFailure&) {
      }
    }
    check(masked);
    return masked;
  }

  void look_at_masks() {
    if (!plan.masking) return;
    const auto seen = query_masks(rank, *buffer);
    masked.clear();
    for (int r = 0; r < plan.ranks; ++r) {
      if (seen[static_cast<std::size_t>(r)] != 0) masked.push_back(r);
    }
  }

  /// After a rank was away: everybody comes back, and calls are as before.
  void resume() {
    buffer->low_latency_resume();
    make({.kind = Kind::low_latency_dispatch});
    require(masked.empty(), "low_latency_resume left a rank masked");
    make({.kind = Kind::low_latency_combine});
  }

  RankRun& run;
  const Plan& plan;
  Rank& rank;
  Buffer* buffer = nullptr;
  bool due = false;  ///< the fault strikes in the next call
  FaultTime::Clock::time_point began = FaultTime::Clock::now();
  Outcome outcome;
  DispatchResult dispatched;
  LowLatencyHandle handle;
  std::vector<int> masked, masked_at_dispatch;
};

RankRun::RankRun(const Plan& plan, const Data& data, RankParts parts, double deadline_s)
    : plan_(plan), data_(data), parts_(std::move(parts)), deadline_s_(deadline_s) {}

RankRun::~RankRun() { drop_buffer(); }

void RankRun::drop_buffer() {
  calls_.reset();
  rank_.reset();
}

Outcome RankRun::run() {
  const bool own = parts_.rank == plan_.rank;
  Outcome outcome;
  FaultTime::Clock::time_point began = FaultTime::Clock::now();
  const auto note_error = [&](const std::exception& error) {
    const auto since = calls_ ? calls_->began : began;
    if (calls_) outcome.reached = calls_->outcome.reached;
    outcome.error = class_of(error);
    outcome.text = error.what();
    outcome.waited = parts_.time->seconds_since(since);
  };
  try {
    const test::ClusterOptions cluster{
        .ranks = plan_.ranks, .where = {.topology = plan_.topology}, .host = plan_.host, .timeout_s = deadline_s_};
    rank_ = std::make_unique<Rank>(parts_.rank, cluster, parts_.bootstrap, parts_.executor);
    if (own && plan_.fault == Fault::bootstrap) parts_.bootstrap->lost_message = plan_.event;
    if (own && plan_.fault == Fault::set_up) parts_.executor->failing_allocation = plan_.event;
    calls_ = std::make_unique<Calls>(*this, *rank_);
    parts_.executor->failing_allocation = 0;
    parts_.bootstrap->lost_message = 0;
    keeps_heap_ = calls_->buffer->allocate_tensor(DType::uint8, {1}, calls_->buffer->comm_stream());
    for (int i = 0; i < static_cast<int>(plan_.steps.size()); ++i) {
      const Step& step = plan_.steps[static_cast<std::size_t>(i)];
      outcome.step = i;
      const bool here = own && i == plan_.step;
      if (here && plan_.fault == Fault::stop) {
        outcome.reached = true;
        parts_.time->now();
        return outcome;
      }
      calls_->due = here;
      try {
        calls_->make(step);
      } catch (const TimeoutError& error) {
        // Given up by the others: it comes back with them.
        const bool comes_back = own && plan_.masking && plan_.fault == Fault::pause;
        if (!comes_back || std::string(error.what()).find("low_latency_resume") == std::string::npos) throw;
        parts_.executor->freezer->disarm();
        break;
      }
      parts_.executor->freezer->disarm();
    }
    if (plan_.masking && plan_.fault == Fault::pause) calls_->resume();
    for (int i = 0; plan_.looks_for_survivors() && i < 2; ++i) calls_->make({.kind = Kind::low_latency_dispatch});
    outcome.completed = true;
  } catch (const test::CheckFailure& failure) {
    outcome.wrong = failure.what();
  } catch (const std::exception& error) {
    note_error(error);
  }
  parts_.executor->failing_allocation = 0;
  if (calls_) {
    outcome.masked = calls_->masked;
    outcome.reached |= calls_->outcome.reached;
  }
  const bool lost = plan_.fault == Fault::bootstrap && parts_.bootstrap->lost();
  outcome.reached |= own && (parts_.executor->freezer->reached() || lost || outcome.error == "OutOfMemory");
  return outcome;
}

void run_clean_round(const std::shared_ptr<Bootstrap>& bootstrap, const std::shared_ptr<Executor>& executor) {
  Plan plan{.seed = 1, .ranks = bootstrap->size()};
  const Data data = make_data(plan);
  Rank rank(bootstrap->rank(), {.ranks = plan.ranks}, bootstrap, executor);
  Buffer& buffer = rank.buffer(test::low_latency_options(plan.ranks, 8, 256));
  run_round(rank, buffer, data.normal[0]);
  const LowLatencyHandle handle = dispatch_and_check(rank, buffer, data.low_latency[0].before).handle;
  const LowLatencyCombineResult result =
      buffer.low_latency_combine(upload_combine(rank, data.low_latency[0], handle), rank.call());
  check_low_latency_combine(rank, data.low_latency[0], data.low_latency[0].expected(), result.combined_x.view());
  buffer.check();
  buffer.destroy();
}

}  // namespace deep_ep::faults
