#include "csrc/buffer/runtime.hpp"

#include <fmt/ranges.h>

#include <exception>
#include <utility>

#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/low_latency/low_latency.hpp"
#include "csrc/buffer/normal_mode.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/interrupt.hpp"

namespace deep_ep {
namespace {

/// Unsupported where kernels of normal mode cannot count at another rank of the node. Low-latency ones need not.
void check_atomics(const Backend& executor, const NodeMembership& nodes, std::span<const DeviceIdentity> devices) {
  const auto name = [](const DeviceIdentity& device) {  // as nvidia-smi -L has it, behind "GPU-"
    std::string digits = fmt::format("{:02x}", fmt::join(device.uuid, ""));
    for (const std::size_t dash : {20, 16, 12, 8}) digits.insert(dash, 1, '-');
    return digits;
  };
  for (std::size_t rank = 0; rank < devices.size(); ++rank) {
    if (!nodes.same_node(static_cast<int>(rank)) || executor.adds_atomically_to(devices[rank])) continue;
    fail<Unsupported>(
        "Buffer: GPU-{} of rank {} cannot add atomically to memory of GPU-{} of rank {}, allowed: GPUs of a node that "
        "are joined by NVLink, or heap_bytes 0 for low-latency calls alone",
        name(executor.identity()), nodes.rank, name(devices[rank]), rank);
  }
}

}  // namespace

Runtime::Runtime(const std::shared_ptr<Bootstrap>& bootstrap, std::shared_ptr<Executor> executor,
                 const BufferOptions& options) {
  if (!bootstrap) throw InvalidArgument("bootstrap is null");
  bootstrap_ = std::make_unique<BufferExchanges>(bootstrap);
  rank_ = bootstrap_->rank();
  num_ranks_ = bootstrap_->size();
  const std::shared_ptr<Backend> backend = backend_of(executor);
  if (num_ranks_ < 1 || num_ranks_ > kMaxRanks || rank_ < 0 || rank_ >= num_ranks_) {
    fail<InvalidArgument>("the bootstrap says rank {} of {}, allowed: at most {} ranks", rank_, num_ranks_, kMaxRanks);
  }
  bootstrap_->limit_making(default_timeout_s());
  bootstrap_->agree("making a Buffer", [&] { make(backend, options); });
}

void Runtime::make(const std::shared_ptr<Backend>& backend, const BufferOptions& asked) {
  const DeviceScope device(*backend);
  check_stream(backend->device(), "comm_stream", asked.comm_stream);
  const DeviceIdentity identity = backend->identity();
  AgreedOptions agreed = agree_on_options(*bootstrap_, asked, identity);
  plan_.options = agreed.options;
  processes_ = std::move(agreed.processes);
  check_range("max_shared_bytes of the executor", static_cast<std::int64_t>(backend->policy().max_shared_bytes),
              1 << 14, INT32_MAX);
  policy_ = share_device(backend->policy(), identity, agreed.devices);

  StreamHandle comm_stream = options().comm_stream;
  executor_ = backend;
  if (comm_stream == nullptr) {
    comm_stream = backend->create_stream();
    // The stream stays as long as anything that recorded work there: tensors may outlive the buffer.
    executor_ = {backend.get(), [backend, comm_stream](Backend*) { backend->destroy_stream(comm_stream); }};
  }
  const auto near_first = [&](const ProcessIdentity& process) { return process.same_network(processes_.front()); };
  control_words_ = pinned_memory<ControlWords>(executor_);
  membership_ = control::Membership::join(control::Plane::of_process(), *bootstrap_, *control_words_,
                                          {.timeout_s = timeout_s(),
                                           .masks = options().low_latency.masking,
                                           .by_tcp = !std::ranges::all_of(processes_, near_first)});
  if (membership_ != nullptr) end_waits_for_the_gone();

  const auto bytes_for = [&](std::span<const int> domains) {
    const int width = agreed.options.ranks_per_node;
    plan_ = BufferPlan::make(agreed.options, NodeMembership::of_domains(rank(), domains, width));
    return layout().bytes();
  };
  heap_ = executor_->create_heap(*bootstrap_, bytes_for);
  if (layout().window_bytes != 0) check_atomics(*executor_, nodes(), agreed.devices);
  if (uses_rdma()) {
    auto wire = rdma::AgreedWire::agree(*bootstrap_, *executor_, processes_);
    plan_.choose_lanes(wire);
    connections_ = rdma::Connections::make(*bootstrap_, executor_, heap_, plan_.connections(), std::move(wire));
  }
  const std::shared_ptr<std::byte> for_tensors(heap_, heap_->local() + layout().arena_at());
  auto arena = std::make_shared<Arena>(executor_, for_tensors, heap_->bytes() - layout().arena_at());
  calls_ = CallContext{.executor = executor_,
                       .comm_stream = comm_stream,
                       .arena = std::move(arena),
                       .result_tensors = options().result_tensors,
                       .num_calls = &control_words_->calls};
  if (num_ranks() > 1) calls_->end_begun_call = [this] { faults_->break_begun_call(); };
  // By then kernels that wait for other ranks have given up, also on a machine so busy that they count half of the
  // time.
  const int timeouts = options().low_latency.masking ? kMostTimeouts : 4;
  calls_->settle_s = timeout_s() == 0 ? 0 : timeouts * timeout_s() + 60;
  faults_.emplace(*calls_, rank(), num_ranks(), timeout_s(), membership_ == nullptr ? nullptr : control_words_,
                  membership_, options().low_latency.masking, [this] { return describe_health(); });
  normal_mode = std::make_unique<NormalMode>(*this);
  if (options().low_latency.bytes != 0) low_latency = std::make_shared<LowLatency>(*this);
  bootstrap_->barrier();  // no rank signals before all ranks are ready
  only_low_latency_ = agreed.replaces_ranks;
  if (only_low_latency_) low_latency->resume_together(*bootstrap_);
  log::info("buffer: {}", fmt::join(split(trim(describe()), '\n'), "; "));
}

Runtime::~Runtime() {
  low_latency.reset();
  normal_mode.reset();
  connections_.clear();
  heap_->unmap_peers();
}

void Runtime::end_waits_for_the_gone() const {
  bootstrap_->end_waits_by([this] {
    const std::vector<int> gone = membership_->gone();
    const std::string why = gone.empty() ? membership_->describe_leaver() : membership_->describe_end(gone.front());
    if (!why.empty()) fail<PeerLeft>("rank {} waits for the other ranks of a buffer, but {}", rank(), why);
  });
}

void Runtime::check(bool wait) {
  const DeviceScope device(*executor_);
  try {
    if (wait) calls_->settle();
  } catch (const Interrupted&) {
    faults_->break_by_interruption();
  }
  faults_->raise();
  for (std::size_t place = 0; place < connections_.size(); ++place) {
    // A rank that low-latency calls cannot reach is masked.
    if (place != BufferPlan::kLowLatency || !options().low_latency.masking) connections(place).check();
  }
}

void Runtime::end(std::unique_ptr<Runtime> runtime) noexcept {
  if (runtime == nullptr) return;
  // A forked child has none of the threads that the end of a buffer waits for, and the memory is its parent's.
  if (runtime->home.left() || !runtime->settle_last_work()) {
    static_cast<void>(runtime.release());
    return;
  }
  runtime->drain();
  if (runtime->membership_) runtime->membership_->leave(control::Goodbye::alone);
}

bool Runtime::in_heap(const ConstTensorView& tensor) const {
  const auto* begin = tensor.as<std::byte>();  // signals and window do not count: peers write there
  return tensor.device == device() && calls_->arena->contains(begin) &&
         calls_->arena->contains(begin + std::max<std::size_t>(1, tensor.bytes()) - 1);
}

std::string Runtime::describe() const {
  std::vector<int> of_node;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    if (nodes().same_node(rank)) of_node.push_back(rank);
  }
  const HeapLayout& layout = this->layout();
  std::string heap = fmt::format("heap of {}", format_bytes(heap_->bytes()));
  if (on_gpu()) heap += fmt::format(", shared by {}", name_of(heap_->kind()));
  heap += fmt::format(": signals {}", format_bytes(layout.control.bytes));
  if (layout.low_latency.bytes != 0) heap += fmt::format(", low latency {}", format_bytes(layout.low_latency.bytes));
  const std::size_t staging = layout.low_latency.staging_bytes;
  if (staging != 0) heap += fmt::format(", for NICs to read {}", format_bytes(staging));
  return fmt::format(
      "rank {} of {} on {}, node {} of {}: {}\n{}, window {}, received tensors {}\n{}\n{}\ntime-out: {}\n", rank(),
      num_ranks(), to_string(device()), nodes().node[static_cast<std::size_t>(rank())], nodes().num_nodes,
      format_ranks(of_node), heap, format_bytes(layout.window_bytes), format_bytes(heap_->bytes() - layout.arena_at()),
      normal_mode->describe(), low_latency ? low_latency->describe() : "low latency: no memory",
      timeout_s() == 0 ? "none" : fmt::format("{} s", timeout_s()));
}

std::string Runtime::describe_health() const {
  if (connections_.empty()) return {};
  const std::string normal = connections(BufferPlan::kNormalMode).health();
  std::string of_low_latency = connections(BufferPlan::kLowLatency).health();
  if (normal.empty() || normal == of_low_latency) return of_low_latency;
  return of_low_latency.empty() ? normal : fmt::format("{}. Low-latency calls: {}", normal, of_low_latency);
}

void Runtime::drain() noexcept {
  for (const auto& connections : connections_) connections->drain(timeout_s());
}

bool Runtime::settle_last_work() noexcept {
  try {
    const DeviceScope device(*executor_);
    calls_->settle();
  } catch (const TimeoutError& error) {
    // To free memory that work may still use would wait for that work, without a deadline.
    log::warn("buffer: rank {} leaves its memory to the process: {}", rank(), error.what());
    if (membership_) membership_->leave(control::Goodbye::alone);
    return false;
  } catch (const std::exception& error) {
    log::warn("buffer: rank {} is destroyed after a failure: {}", rank(), error.what());
  }
  return true;
}

std::vector<bool> Runtime::check_replaced(const Bootstrap& group, std::span<const int> ranks) const {
  if (uses_rdma()) {
    throw Unsupported("replace_ranks: RDMA reaches ranks of this buffer, allowed: ranks of one node");
  }
  if (executor_->is_capturing(comm_stream())) {
    throw InvalidArgument("replace_ranks: calls are being recorded into a CUDA graph, and the host waits for calls");
  }
  if (group.rank() != rank() || group.size() != num_ranks()) {
    fail<InvalidArgument>("replace_ranks: the group says rank {} of {}, allowed: {} of {}, as in the buffer",
                          group.rank(), group.size(), rank(), num_ranks());
  }
  if (ranks.empty()) throw InvalidArgument("replace_ranks: no ranks are given, allowed: at least one");
  std::vector<bool> is_new(static_cast<std::size_t>(num_ranks()));
  for (const int replaced : ranks) {
    check_range("rank", replaced, 0, num_ranks() - 1);
    if (replaced == rank()) fail<InvalidArgument>("replace_ranks: rank {} replaces itself, allowed: others", replaced);
    if (!membership_->await_end(replaced)) {
      fail<InvalidArgument>("replace_ranks: {} lives and is in the buffer, allowed: ranks whose processes have ended",
                            membership_->describe_process(replaced));
    }
    is_new[static_cast<std::size_t>(replaced)] = true;
  }
  return is_new;
}

void Runtime::check_newcomers(const AgreedOptions& agreed, const std::vector<bool>& is_new) const {
  const ProcessIdentity own = this_process();
  for (std::size_t other = 0; other < is_new.size(); ++other) {
    const ProcessIdentity& there = agreed.processes[other];
    if (is_new[other] == processes_[other].same_process(there)) {
      fail<RankMismatch>("replace_ranks: rank {} is {} process, but rank {} replaces {}", other,
                         is_new[other] ? "the old" : "a new", rank(), is_new[other] ? "it" : "others");
    }
    if (!own.same_network(there)) {
      fail<Unsupported>("replace_ranks: rank {} is on host {} or in another network namespace, allowed: one node",
                        other, there.host.data());
    }
  }
  const LaunchPolicy shared = share_device(executor_->policy(), executor_->identity(), agreed.devices);
  if (shared.multiprocessors < policy_.multiprocessors) {
    fail<RankMismatch>("replace_ranks: more ranks than before share the device of rank {}", rank());
  }
}

void Buffer::replace_ranks(const std::shared_ptr<Bootstrap>& group, std::span<const int> ranks) {
  const BufferCall in(runtime_, "replace_ranks");
  LowLatency& mode = in.masking();
  if (!group) throw InvalidArgument("replace_ranks: group is null");
  auto exchanges = std::make_unique<BufferExchanges>(group);
  // By the exchanges of make(), which the new processes are in. In one node a plan has the options that ranks agree on.
  exchanges->agree("replacing ranks", [&] {
    const std::vector<bool> is_new = in->check_replaced(*exchanges, ranks);
    mode.begin_resume();
    const AgreedOptions agreed = agree_on_options(*exchanges, in->options(), in->executor()->identity(), true);
    in->check_newcomers(agreed, is_new);
    in->membership()->replace(*exchanges);
    in->heap()->admit(*exchanges, is_new);
    exchanges->barrier();
    mode.resume_together(*exchanges);
    // Only now: after a failure the same processes may come again.
    in->bootstrap_ = std::move(exchanges);
    in->processes_ = agreed.processes;
    in->only_low_latency_ = true;
    in->end_waits_for_the_gone();
  });
}

}  // namespace deep_ep
