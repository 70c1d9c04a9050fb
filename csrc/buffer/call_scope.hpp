// One call on the host: one thread at a time makes it, from the choice of its stream to its end. All work that a buffer
// enqueues for callers is enqueued inside such a scope.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "csrc/memory/storage.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/buffer.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/result_tensors.hpp"

namespace deep_ep {

/// Which thread is in a call. Two at once would put the calls of ranks into different orders: an error here names that,
/// where the peers would only see calls that never come.
class OneThread {
 public:
  /// A call of a buffer, from its begin to its end. A call that a call makes is part of it.
  class Use {
   public:
    /// @param call for messages; a literal. @param while_suspended the call may come then. @throws Error where another
    /// thread is in a call, InvalidArgument while the buffer is suspended.
    Use(OneThread& owner, const char* call, bool while_suspended = false) : owner_(owner) {
      if (owner.thread_.load(std::memory_order_relaxed) == std::this_thread::get_id()) return;
      const char* other = nullptr;
      if (!owner.call_.compare_exchange_strong(other, call, std::memory_order_acquire)) {
        fail<Error>("{}: the buffer is in use by another thread, which is in {}, allowed: one thread at a time", call,
                    other);
      }
      if (owner.suspended && !while_suspended) {
        owner.call_.store(nullptr, std::memory_order_release);
        fail<InvalidArgument>("{}: the buffer is suspended, allowed: resume, check and destroy", call);
      }
      owner.thread_.store(std::this_thread::get_id(), std::memory_order_relaxed);
      outermost_ = true;
    }
    ~Use() {
      if (!outermost_) return;
      owner_.thread_.store(std::thread::id(), std::memory_order_relaxed);
      owner_.call_.store(nullptr, std::memory_order_release);
    }
    /// Not a call within another one, made by a handler of signals, say.
    bool outermost() const { return outermost_; }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    OneThread& owner_;
    bool outermost_ = false;
  };

  bool suspended = false;  ///< calls are refused; of the thread that is in one

 private:
  std::atomic<const char*> call_ = nullptr;  ///< of the thread that is in one; nullptr: none is
  std::atomic<std::thread::id> thread_ = std::thread::id();
};

/// What all calls of a buffer share: their order, the communication stream, the memory for their results.
struct CallContext {
  std::shared_ptr<Executor> executor;
  StreamHandle comm_stream;
  std::shared_ptr<Arena> arena;
  std::shared_ptr<ResultTensors> result_tensors = {};  ///< see BufferOptions
  /// The calls, as their memory sees them.
  std::shared_ptr<HomeStream> home = std::make_shared<HomeStream>(executor, comm_stream);
  std::shared_ptr<MemoryCache> cache = std::make_shared<MemoryCache>(home);

  /// The host waits for all calls so far.
  void settle() const;
};

/// A call that is under way; a context has one at a time. It ends with `finish`, or, if an exception comes first, with
/// the scope: later calls, and CallContext::settle, come after whatever it has enqueued. While a graph is recorded, the
/// caller's stream does, too.
class CallScope {
 public:
  /// Chooses the stream, which waits for what the call comes after and for the call before it. Throws before anything
  /// has changed.
  CallScope(const CallContext& context, const CallOptions& call);
  ~CallScope();
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;

  /// Where the call's work is to be enqueued: the caller's stream or the communication stream.
  StreamHandle stream() const { return stream_; }
  /// Is the call being recorded into a graph?
  bool recording() const { return graph_ != 0; }

  /// Tensors of these types and shapes in the heap, in one piece of memory that lives as long as any of them. Nothing
  /// if they do not fit, or the call is being recorded.
  std::optional<std::vector<Tensor>> try_heap_tensors(std::span<const TensorView> wanted) const;
  /// The same from the cache. Throws OutOfMemory.
  std::vector<Tensor> pool_tensors(std::span<const TensorView> wanted) const;
  Tensor pool_tensor(const TensorView& wanted) const { return pool_tensors({&wanted, 1}).front(); }

  /// Tensors that share a piece of the library's memory. What a call gets for all pieces stands in one row.
  using Pieces = std::span<const std::vector<TensorView>>;
  /// Tensors that the call returns, handed out: of the program's framework, which is asked once for all, or
  /// pool_tensors; behind them those of its handle, which are pool_tensors, in one piece with the last ones where these
  /// are.
  std::vector<Tensor> result_tensors(Pieces wanted, std::span<const TensorView> of_handle = {}) const;
  /// Results that peers write if all of them fit the heap, piece by piece; nothing if they do not.
  std::optional<std::vector<Tensor>> try_heap_results(Pieces wanted) const;

  /// Tensors that `work` makes do not leave the call, so they are made without the program's framework, and not handed
  /// out.
  template <class Work>
  auto inside(const Work& work) {
    inside_ = true;
    auto made = work();
    inside_ = false;
    return made;
  }

  /// The caller's stream will use the tensor, too: its memory is not reused before that work ends. One of several
  /// tensors that share their memory is enough.
  void hand_out(const Tensor& tensor) const;

  /// No event is recorded behind the call if it runs on the default stream: one that leaves that stream later waits for
  /// all that the stream holds then. For calls of a few microseconds.
  void without_event() { without_event_ = true; }

  /// The caller's stream waits for the call; with async_finish the returned event stands for it instead.
  EventHandle finish();
  /// Ends a call that has not finished; the destructor does it, too.
  void abandon() noexcept;

 private:
  bool by_framework() const { return context_.result_tensors != nullptr && !inside_; }
  ResultTensors::Order result_order() const;
  /// Results of the program's framework; with `in_heap` there, or none. The executor is then this call's again, and its
  /// stream comes behind what was enqueued for the memory of the tensors.
  std::vector<Tensor> of_framework(Pieces wanted, bool in_heap) const;
  /// Behind all that the call has enqueued; kDefaultStream where it runs there, in place, without an event.
  EventHandle event_behind() const;

  const CallContext& context_;
  StreamHandle caller_stream_;
  StreamHandle stream_;
  bool async_finish_;
  bool after_caller_;        ///< the call comes after what the caller's stream has been given so far
  std::uint64_t graph_ = 0;  ///< the recording of a graph that the call is a part of; 0: none
  bool inside_ = false;
  bool without_event_ = false;
  bool ended_ = false;
};

/// A type and a shape, without memory.
inline TensorView unplaced(const Device& device, DType dtype, std::initializer_list<std::int64_t> shape) {
  return TensorView::contiguous(nullptr, dtype, shape, device);
}

/// nullptr: the tensor is not given.
template <class T, class View>
auto memory_of(const std::optional<View>& tensor) {
  return tensor ? tensor->template as<T>() : nullptr;
}

/// Tensors that a call wants, and where they go when they are made.
class WantedTensors {
 public:
  explicit WantedTensors(const Device& device, std::size_t pieces = 1) : device_(device), pieces_(pieces) {}
  /// `piece`: that of the last one, or a later one.
  void add(Tensor& place, DType dtype, std::initializer_list<std::int64_t> shape, std::size_t piece = 0) {
    pieces_[piece].push_back(unplaced(device_, dtype, shape));
    places_.push_back(&place);
  }
  CallScope::Pieces pieces() const { return pieces_; }
  void place(std::vector<Tensor> made) const {
    for (std::size_t i = 0; i < places_.size(); ++i) *places_[i] = std::move(made[i]);
  }
  void place_in_pool(const CallScope& scope) const { place(scope.pool_tensors(pieces_.front())); }

 private:
  Device device_;
  std::vector<std::vector<TensorView>> pieces_;
  std::vector<Tensor*> places_;
};

}  // namespace deep_ep
