#include "csrc/buffer/low_latency/low_latency.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/buffer/low_latency/ending.hpp"
#include "csrc/buffer/low_latency/plan_parts.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "kernels/low_latency/transport/watch.hpp"

namespace deep_ep {

namespace {

/// Collective.
std::string ask_why_own_masks(Runtime& runtime) {
  const std::vector<DeviceIdentity> devices = all_gather_values(runtime.bootstrap(), runtime.executor()->identity());
  MaskingRank mine{.process = this_process()};
  agree(runtime.bootstrap(), "asking whether ranks can agree on who is lost",
        [&] { mine.reaches_board = runtime.executor()->exchanges_with(devices[0]); });
  return why_own_masks(all_gather_values(runtime.bootstrap(), mine));
}

}  // namespace

LowLatency::LowLatency(Runtime& runtime) : runtime_(runtime) {
  Executor& executor = *runtime.executor();
  agree(runtime.bootstrap(), "allocating memory for low-latency calls", [&] {
    state_ = device_memory<LowLatencyState>(runtime.executor());
    LowLatencyState initial{};
    initial.one = 1;
    initial.watch.timeout_ns = runtime.faults().wait_context().timeout_ns;
    executor.copy(state_.get(), &initial, sizeof initial, runtime.comm_stream());
    executor.synchronize(runtime.comm_stream());
    runtime.faults().add_abort_word(&state_->abort);
    if (runtime.options().low_latency.masking) masks_.emplace(runtime, state_.get());
  });
  if (!runtime.low_latency_reach().far.empty()) links_.emplace(runtime);
  queues_ = {std::make_shared<HookQueue>("low_latency_dispatch", runtime.one_thread()),
             std::make_shared<HookQueue>("low_latency_combine", runtime.one_thread())};

  setup_.device = runtime.device();
  setup_.policy = runtime.policy();
  setup_.max_local_experts = runtime.options().max_local_experts;
  setup_.reject_unknown_experts = runtime.options().reject_unknown_experts;
  setup_.low_latency_bytes = runtime.options().low_latency.bytes;
  setup_.rail_width = runtime.low_latency_reach().rail_width;
  setup_.rails_always = runtime.low_latency_reach().rails_always;
  if (runtime.rank() == 0 && setup_.rails_always && setup_.rail_width == 0) {
    log::info("low latency: rails are asked for always, but rows go {}", runtime.low_latency_reach().describe_rails());
  }
  if (setup_.hooks_by_rails()) {  // the same on all ranks
    agree(runtime.bootstrap(), "making streams for what low-latency calls hand on", [&] {
      for (std::optional<OwnStream>& relays : relays_) relays.emplace(executor);
    });
  }
  LowLatencyParams& common = setup_.common;
  common.rank = runtime.rank();
  common.num_ranks = runtime.num_ranks();
  common.local = runtime.heap()->local();
  common.heaps = links_ ? links_->heaps() : runtime.heap()->device_peers();
  common.window = runtime.layout().low_latency;
  common.state = state_.get();
  common.wait = runtime.faults().wait_context();
  common.wait.abort = &state_->abort;
  if (masks_) {
    common.wait.lost = nullptr;  // ranks that are lost are masked, and the call goes on
    common.mask = masks_->mask();
    common.masked = masks_->records();
  }
  if (links_) links_->add_to(common);
  if (masks_ && !links_) {
    const std::string why = ask_why_own_masks(runtime);
    setup_.own_masks = !why.empty();
    if (runtime.rank() == 0 && !why.empty()) log::info("low latency: each rank has masks of its own, as {}", why);
  }
  if (setup_.watched()) {
    constexpr std::uint64_t kDeadlines = device::low_latency::Watcher::kWaitDeadlines;
    std::uint64_t& timeout = common.wait.timeout_ns;  // whoever watches ends waits before that
    timeout = std::min(timeout, ~std::uint64_t{0} / kDeadlines) * kDeadlines;
    masks_->agree_by([this](int rank, bool masked, StreamHandle stream) {
      // A rank that has been told that it is masked cannot undo that.
      if (!masked) runtime_.faults().raise();
      change_masks(rank, masked ? LowLatencyMasksStep::mask : LowLatencyMasksStep::unmask, stream);
    });
  }
}

void LowLatency::change_masks(int rank, LowLatencyMasksStep step, StreamHandle stream, std::uint64_t ending) {
  CallScope scope(runtime_.calls(), {.stream = stream});
  const LowLatencyMasksParams params{.common = setup_.common, .rank = rank, .step = step, .ending = ending};
  runtime_.executor()->kernels().change_masks_low_latency_watched(params, LaunchShape{1, 32, watching_bytes(setup_)},
                                                                  scope.stream());
  scope.finish();
}

TensorView LowLatency::memory() {
  shown_ = true;
  const LowLatencyWindow& window = runtime_.layout().low_latency;
  return TensorView::contiguous(window.of_calls().in(runtime_.heap()->local()), DType::uint8,
                                {static_cast<std::int64_t>(window.bytes_of_calls())}, runtime_.device());
}

LowLatencyStats LowLatency::stats(LowLatencyStatsThen then, StreamHandle stream) {
  look_after_earlier_calls();
  runtime_.executor()->make_current();
  if (runtime_.executor()->is_capturing(stream)) {
    throw InvalidArgument(
        "low_latency_stats: the stream is being recorded into a CUDA graph, and the host waits for it");
  }
  if (!waits_) waits_.emplace(runtime_, setup_);
  const bool begins = !setup_.measured;
  LowLatencyStats seen = waits_->read(stream, begins || then != LowLatencyStatsThen::go_on);
  setup_.measured = then != LowLatencyStatsThen::stop;
  if (!begins) return seen;
  for (LowLatencyWaitTimes* times : {&seen.dispatch, &seen.combine}) {
    std::fill(times->calls.begin(), times->calls.end(), 0);
    std::fill(times->total_us.begin(), times->total_us.end(), 0);
    std::fill(times->longest_us.begin(), times->longest_us.end(), 0);
  }
  return seen;
}

RankMasks& LowLatency::masks(const char* call) {
  if (!masks_) fail<InvalidArgument>("{}: the buffer was made without low_latency.masking", call);
  return *masks_;
}

void LowLatency::look_after_earlier_calls() {
  runtime_.faults().raise();
  if (masks_) masks_->log_new();
}

void LowLatency::make_way(LowLatencyKind kind, bool hook) {
  if (hook) {
    queue(kind).require_room();
  } else {
    queue(kind).receive_all();
  }
}

bool LowLatency::beside_relay(LowLatencyKind kind, bool hook, StreamHandle stream) const {
  if (!setup_.hooks_by_rails()) return false;
  // A recorded call may be replayed while any other waits for its hook.
  if (runtime_.executor()->is_capturing(stream)) return true;
  const bool combine_waits = !queue(LowLatencyKind::combine).empty();
  if (kind == LowLatencyKind::dispatch) return combine_waits;
  return !queue(LowLatencyKind::dispatch).empty() || (hook && combine_waits);
}

void LowLatency::clean(StreamHandle stream) {
  look_after_earlier_calls();
  if (shown_) {  // what waits for its hook lies in the memory that is cleaned
    for (const auto& queue : queues_) queue->receive_all();
  }
  CallScope scope(runtime_.calls(), {.stream = stream});
  const auto barrier = [&](bool drains) {
    const KernelTable& kernels = runtime_.executor()->kernels();
    const Launcher<LowLatencyBarrierParams> launch =
        setup_.watched() ? kernels.barrier_low_latency_watched : kernels.barrier_low_latency;
    LowLatencyBarrierParams params{.common = setup_.common, .drains = drains};
    params.common.working_blocks = 1;
    launch(params, LaunchShape{1 + watching_blocks(setup_), 64, watching_bytes(setup_)}, scope.stream());
  };
  // Memory is cleaned behind a barrier, as peers may still write what this rank did not wait for (selections of tokens
  // that have no expert here), and before another one, behind which they send rows of later calls. Every rank
  // makes both, also if its program has not asked for the memory. Relays have nothing under way: all hooks were called.
  barrier(true);
  if (shown_) {
    const LowLatencyWindow& window = setup_.common.window;
    runtime_.executor()->fill(window.of_calls().in(setup_.common.local), 0, window.bytes_of_calls(), scope.stream());
  }
  barrier(false);
  scope.finish();
}

void LowLatency::check() const {
  if (links_ && !masks_) links_->check();
}

std::optional<int> LowLatency::cut_off_from() const {
  return links_ && !masks_ ? links_->cut_off_from() : std::nullopt;
}

void LowLatency::drain() noexcept {
  for (const std::optional<OwnStream>& relays : relays_) {
    if (!relays) continue;
    try {
      runtime_.executor()->synchronize(relays->get());
    } catch (const std::exception& error) {
      log::warn("buffer: rank {} has not handed on all rows: {}", runtime_.rank(), error.what());
    }
  }
  if (links_) links_->drain();
}

void LowLatency::show_ending(LowLatencyEnding ending) {
  if (ending == ending_) return;
  const auto value = static_cast<std::uint64_t>(ending);
  LowLatencySigns& own = *setup_.common.window.signs().in(runtime_.heap()->local());
  if (runtime_.device().kind == Device::Kind::cpu) {
    __atomic_store_n(&own.ending, value, __ATOMIC_RELEASE);
  } else {
    runtime_.executor()->copy(&own.ending, &value, sizeof value, runtime_.comm_stream());
  }
  if (links_ && links_->connected()) {
    change_masks(runtime_.rank(), LowLatencyMasksStep::tell_ending, runtime_.comm_stream(),
                 value - static_cast<std::uint64_t>(ending_));
  }
  ending_ = ending;
  runtime_.calls().settle();
}

LowLatencyEnding LowLatency::ending_of(int rank) const {
  const LowLatencyParams& common = setup_.common;
  const bool is_far = device::Reach<true>{common}.is_far(rank);
  std::byte* const heap = is_far ? common.local : runtime_.heap()->peers()[static_cast<std::size_t>(rank)];
  const std::uint64_t& shown =
      is_far ? *common.window.far_ending(rank).in(heap) : common.window.signs().in(heap)->ending;
  std::uint64_t ending = 0;
  if (runtime_.device().kind == Device::Kind::cpu) {
    ending = __atomic_load_n(&shown, __ATOMIC_ACQUIRE);
  } else {
    runtime_.executor()->copy(&ending, &shown, sizeof ending, runtime_.comm_stream());
    runtime_.executor()->synchronize(runtime_.comm_stream());
  }
  return static_cast<LowLatencyEnding>(ending);
}

std::vector<std::int32_t> LowLatency::masks_now() const {
  std::vector<std::int32_t> masks(static_cast<std::size_t>(runtime_.num_ranks()));
  runtime_.executor()->copy(masks.data(), masks_->mask(), masks.size() * sizeof masks[0], runtime_.comm_stream());
  runtime_.executor()->synchronize(runtime_.comm_stream());
  return masks;
}

bool LowLatency::meet_at_end() {
  if (!setup_.watched()) return true;
  // Whoever waits in a call for a rank that is lost finds that out within a quarter more than a time-out, and comes.
  const double most_s = 2 * runtime_.timeout_s();
  auto begin = std::chrono::steady_clock::now();
  for (auto nap = std::chrono::milliseconds(1);; nap = std::min(2 * nap, std::chrono::milliseconds(20))) {
    // What others show comes first: who shows that it is here has told before of all whom it has masked.
    std::vector<LowLatencyEnding> shown;
    shown.reserve(static_cast<std::size_t>(runtime_.num_ranks()));
    for (int rank = 0; rank < runtime_.num_ranks(); ++rank) shown.push_back(ending_of(rank));
    change_masks(-1, LowLatencyMasksStep::hear, runtime_.comm_stream());
    runtime_.calls().settle();
    if (runtime_.faults().met()) return false;
    masks_->log_new();
    const std::vector<std::int32_t> masks = masks_now();
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
    const bool late = most_s != 0 && waited.count() > most_s;
    const bool masks_one = std::ranges::any_of(masks, [](std::int32_t mask) { return mask != 0; });
    const LowLatencyEnding next = next_ending(shown, masks_one, late, runtime_.rank());
    if (next == LowLatencyEnding::meets && next != ending_) begin = std::chrono::steady_clock::now();
    show_ending(next);
    if (most_s == 0) return next != LowLatencyEnding::goes_alone;  // waits for ever are the bootstrap's
    if (next == LowLatencyEnding::meets) {
      // Who does not show the same within the time in which it would lose its patience is met by the bootstrap's.
      if (all_meet(shown, runtime_.rank()) || waited.count() > 2 * most_s) return true;
      std::this_thread::sleep_for(nap);
      continue;
    }
    // A rank that goes alone stays until all that go on have ended their calls: what they post to it must not fail.
    std::vector<int> lacking;
    for (int rank = 0; rank < runtime_.num_ranks(); ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      if (rank != runtime_.rank() && shown[r] == LowLatencyEnding::no && masks[r] == 0) lacking.push_back(rank);
    }
    if (lacking.empty()) return false;
    if (late) {
      log::warn("buffer: rank {} waited {} s for {} to destroy the buffer, too, and goes alone", runtime_.rank(),
                most_s, format_ranks(lacking));
      return false;
    }
    std::this_thread::sleep_for(nap);
  }
}

void LowLatency::go_alone() noexcept {
  if (!setup_.watched()) return;
  try {
    show_ending(LowLatencyEnding::goes_alone);
  } catch (const std::exception& error) {
    log::warn("buffer: rank {} could not tell the others that it leaves: {}", runtime_.rank(), error.what());
  }
}

LowLatencyCounts LowLatency::count_together() {
  // Everybody goes on from the largest count, so that no signal of an earlier call can be taken for a later one's.
  Executor& executor = *runtime_.executor();
  LowLatencyState state;
  executor.copy(&state, state_.get(), sizeof state, runtime_.comm_stream());
  executor.synchronize(runtime_.comm_stream());
  LowLatencyCounts counts{.barriers = state.barriers.calls};
  for (std::size_t kind = 0; kind < counts.calls.size(); ++kind) {
    counts.calls[kind] = std::max(state.counters[kind].sent.calls, state.counters[kind].received.calls);
  }
  for (const LowLatencyCounts& theirs : all_gather_values(runtime_.bootstrap(), counts)) {
    counts.barriers = std::max(counts.barriers, theirs.barriers);
    for (std::size_t kind = 0; kind < counts.calls.size(); ++kind) {
      counts.calls[kind] = std::max(counts.calls[kind], theirs.calls[kind]);
    }
  }
  state.barriers.calls = counts.barriers;
  for (std::size_t kind = 0; kind < counts.calls.size(); ++kind) {
    state.counters[kind].sent.calls = state.counters[kind].received.calls = counts.calls[kind];
  }
  state.watch.read = 0;
  state.watch.agreed = state.mask_version;
  state.looking = 0;
  executor.copy(state_.get(), &state, sizeof state, runtime_.comm_stream());
  executor.synchronize(runtime_.comm_stream());
  return counts;
}

void LowLatency::resume() {
  RankMasks& to_clear = masks("low_latency_resume");
  runtime_.executor()->make_current();
  runtime_.calls().settle();
  runtime_.faults().come_back();
  look_after_earlier_calls();
  for (const auto& queue : queues_) queue->drop_all();
  runtime_.bootstrap().begin(Purpose::resuming);
  try {
    resume_together(to_clear);
  } catch (const PeerLeft& left) {
    runtime_.faults().break_by_rdma(left.what());
    throw;
  }
}

void LowLatency::resume_together(RankMasks& to_clear) {
  const LowLatencyCounts counts = count_together();
  if (links_) {
    try {
      links_->resume(counts);
    } catch (const Error& error) {
      // The old queue pairs are gone, and kernels would write where they were.
      runtime_.faults().break_by_rdma(fmt::format("low_latency_resume made no new RDMA connections: {}", error.what()));
      throw;
    }
  }
  to_clear.clear_now();
  const LowLatencyWindow& window = setup_.common.window;
  runtime_.executor()->fill(window.accusation(0).in(setup_.common.local), 0, kMostAccusations * sizeof(std::uint64_t),
                            runtime_.comm_stream());
  runtime_.executor()->fill(window.news(0).in(setup_.common.local), 0,
                            static_cast<std::size_t>(runtime_.num_ranks()) * sizeof(LowLatencyNews),
                            runtime_.comm_stream());
  runtime_.executor()->synchronize(runtime_.comm_stream());
  runtime_.bootstrap().barrier();
}

}  // namespace deep_ep
