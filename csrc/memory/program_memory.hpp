// Memory for results from the program's allocator: see deep_ep/result_allocator.hpp.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "csrc/memory/storage.hpp"
#include "deep_ep/result_allocator.hpp"

namespace deep_ep {

/// What a buffer has from the program's allocator. A piece goes back at once where only the stream that it was
/// allocated for has used it, otherwise when the work of the others has ended: as frameworks do it with memory that
/// several streams use. In a recording it goes back at once, too, behind the recorded work of the others.
class ProgramMemory {
 public:
  ProgramMemory(std::shared_ptr<Executor> executor, std::shared_ptr<ResultAllocator> allocator)
      : executor_(std::move(executor)), allocator_(std::move(allocator)) {}
  /// Waits for the work that uses what is still here.
  ~ProgramMemory();
  ProgramMemory(const ProgramMemory&) = delete;
  ProgramMemory& operator=(const ProgramMemory&) = delete;

  ResultAllocator::Memory allocate(std::size_t bytes, StreamHandle stream);

  struct Use {
    StreamHandle stream;                      ///< that it was allocated for
    const std::vector<StreamHandle>& others;  ///< that were named as users
    EventHandle calls;                        ///< behind calls on other streams that may have used it; null: none
    bool of_graph;                            ///< it was allocated while a graph was recorded
  };
  void release(ResultAllocator::Memory memory, const Use& use);

 private:
  struct Kept {
    ResultAllocator::Memory memory;
    std::vector<EventHandle> until;  ///< empty: a graph may use it again, so it goes back with the buffer
  };
  void release_recorded(const Use& use);
  void give_back_what_has_ended();

  std::shared_ptr<Executor> executor_;
  std::shared_ptr<ResultAllocator> allocator_;
  std::mutex mutex_;
  std::vector<Kept> kept_;
};

class ProgramStorage final : public StreamStorage {
 public:
  /// `stream`: the caller's, for which the memory is allocated. The home stream comes after it.
  ProgramStorage(std::shared_ptr<ProgramMemory> memory, std::size_t bytes, StreamHandle stream,
                 const std::shared_ptr<HomeStream>& home, bool recording);
  ~ProgramStorage() override;
  ProgramStorage(const ProgramStorage&) = delete;
  ProgramStorage& operator=(const ProgramStorage&) = delete;

  std::byte* data() const override { return static_cast<std::byte*>(block_.data); }

 private:
  std::shared_ptr<ProgramMemory> memory_;
  StreamHandle stream_;
  bool of_graph_;
  ResultAllocator::Memory block_;
};

}  // namespace deep_ep
