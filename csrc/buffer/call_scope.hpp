// One call on the host, from the choice of its stream to its end. All work that a buffer enqueues for callers is
// enqueued inside such a scope.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "csrc/memory/storage.hpp"
#include "deep_ep/buffer.hpp"
#include "deep_ep/result_tensors.hpp"

namespace deep_ep {

/// What all calls of a buffer share: their order, the communication stream, the memory for their results.
struct CallContext {
  std::shared_ptr<Executor> executor;
  StreamHandle comm_stream;
  std::shared_ptr<Arena> arena;
  std::shared_ptr<ResultTensors> result_tensors = {};  ///< see BufferOptions
  /// The calls, as their memory sees them.
  std::shared_ptr<HomeStream> home = std::make_shared<HomeStream>(executor, comm_stream);
  std::shared_ptr<MemoryCache> cache = std::make_shared<MemoryCache>(home);
  mutable double settle_s = 0;                ///< how long settle() waits; 0: for ever
  std::uint64_t* num_calls = nullptr;         ///< ControlWords::calls
  std::function<void()> end_begun_call = {};  ///< called where a call fails after CallScope::begins()

  /// The host waits for all calls so far. TimeoutError where they, or the work before them, do not end in settle_s.
  void settle() const;
  /// Work has been waited for in vain. From here on settle() waits for a second.
  void settle_soon() const { settle_s = 1; }
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

/// Tensors that a call wants. When they are made, each goes to its place, and its address to the parameters of a
/// kernel.
class WantedTensors {
 public:
  explicit WantedTensors(const Device& device) : device_(device) {}
  /// `pointer`: a pointer that gets the address; nullptr: none does.
  void add(Tensor& place, void* pointer, const TensorView& wanted) {
    views_.at(count_) = wanted;
    places_[count_++] = {&place, pointer, piece_};
  }
  void add(Tensor& place, void* pointer, DType dtype, std::initializer_list<std::int64_t> shape) {
    add(place, pointer, unplaced(device_, dtype, shape));
  }
  /// Those that follow share no piece of the library's memory with those before.
  void begin_piece() { ++piece_; }

  std::span<const TensorView> views() const { return {views_.data(), count_}; }
  /// From `begin` on, those of one piece.
  std::span<const TensorView> piece_from(std::size_t begin) const {
    std::size_t end = begin;
    while (end < count_ && places_[end].piece == places_[begin].piece) ++end;
    return views().subspan(begin, end - begin);
  }
  void place(std::vector<Tensor> made) const {
    for (std::size_t i = 0; i < count_; ++i) {
      void* const address = made[i].data();
      if (places_[i].pointer != nullptr) std::memcpy(places_[i].pointer, &address, sizeof address);
      *places_[i].tensor = std::move(made[i]);
    }
  }

 private:
  struct Place {
    Tensor* tensor;
    void* pointer;
    int piece;
  };
  static constexpr std::size_t kMost = 8;

  Device device_;
  std::array<TensorView, kMost> views_;
  std::array<Place, kMost> places_;
  std::size_t count_ = 0;
  int piece_ = 0;
};

/// A call that is under way; a context has one at a time. It ends with `finish`, or, if an exception comes first, with
/// the scope: later calls, and CallContext::settle, come after whatever it has enqueued. While a graph is recorded, the
/// caller's stream does, too.
class CallScope {
 public:
  /// Chooses the stream, which waits for what the call comes after and for the call before it. Throws before anything
  /// has changed. Without `always_event` no event is recorded behind the call if it runs on the default stream: one
  /// that leaves that stream later waits for all that the stream holds then. For calls of a few microseconds.
  CallScope(const CallContext& context, const CallOptions& call, bool always_event = true);
  ~CallScope();
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;

  /// Where the call's work is to be enqueued: the caller's stream or the communication stream.
  StreamHandle stream() const { return stream_; }
  /// Is the call being recorded into a graph?
  bool recording() const { return graph_ != 0; }
  /// Call this behind the first kernel that exchanges anything with other ranks. From here on, until finish(), they
  /// count on the rest of the call: an exception that ends the scope ends the buffer, and the other ranks are told.
  /// Before, and while a graph is recorded, a call that is refused changes nothing.
  void begins() const;

  /// Tensors of these types and shapes, in one piece of memory that lives as long as any of them: from the cache, which
  /// throws OutOfMemory, or in the heap; none if they do not fit there, or the call is being recorded.
  std::vector<Tensor> tensors(std::span<const TensorView> wanted, bool in_heap = false) const;
  Tensor pool_tensor(const TensorView& wanted) const { return tensors({&wanted, 1}).front(); }
  /// Those of a handle, or for the call alone.
  void make_tables(const WantedTensors& wanted) const { wanted.place(tensors(wanted.views())); }
  /// Makes tensors that the call returns, handed out: of the program's framework, which is asked once for all, or of
  /// the library. With `in_heap` all are in the heap, where peers write them; or none is made, and false returned. Else
  /// the last `of_handle` are of the call's handle, which is the library's in any case.
  bool make_results(const WantedTensors& wanted, bool in_heap = false, std::size_t of_handle = 0) const;

  /// Tensors that `work` makes do not leave the call, so they are made without the program's framework, and not handed
  /// out.
  template <class Work>
  auto inside(Work&& work) {
    inside_ = true;
    auto made = work();
    inside_ = false;
    return made;
  }

  /// The caller's stream will use the tensors, too: their memory is not reused before that work ends. One of several
  /// that share their memory is enough.
  void hand_out(std::initializer_list<const Tensor*> tensors) const;

  /// The caller's stream waits for the call; with async_finish the returned event stands for it instead.
  EventHandle finish();
  /// Ends a call that has not finished; the destructor does it, too.
  void abandon() noexcept;

 private:
  /// Returns an event behind all that the call has enqueued; kDefaultStream where it runs there, in place, without an
  /// event. `joins`: the caller's stream waits for it.
  EventHandle end(bool joins);

  const CallContext& context_;
  const DeviceScope device_;
  StreamHandle caller_stream_;
  StreamHandle stream_;
  bool async_finish_;
  bool after_caller_;        ///< the call comes after what the caller's stream has been given so far
  std::uint64_t graph_ = 0;  ///< the recording of a graph that the call is a part of; 0: none
  bool inside_ = false;
  bool always_event_;
  mutable bool begun_ = false;
  bool ended_ = false;
};

}  // namespace deep_ep
