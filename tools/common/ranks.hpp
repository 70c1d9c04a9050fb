// Ranks as threads of this process or as processes of their own, and the device memory they use.
#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "csrc/executor/own_stream.hpp"
#include "deep_ep/executor.hpp"
#include "deep_ep/tensor.hpp"

namespace deep_ep::tools {

/// Runs `body(i)` for 0 <= i < count, each on a thread of its own (a single one on the calling thread), and rethrows
/// the failure that came first. Peers of a failed rank would wait for it until their deadline: if they do not end soon,
/// the error is printed and the process exits.
void run_ranks(int count, const std::function<void(int)>& body);

/// Which node of a run this is.
struct Place {
  int node = 0;
  int nodes = 1;
  std::string master = "127.0.0.1";  ///< by which the nodes reach the first one
  int port = 0;
  std::string job = {};  ///< DEEP_EP_JOB_TOKEN; empty: as this process has it
};

/// `command` as a rank, which learns which one it is by the variables that torchrun sets. `ranks`: of each node.
std::vector<std::string> command_of_rank(const Place& place, int local_rank, int ranks,
                                         std::span<const std::string> command);

/// For MASTER_PORT: nothing listens just now on the port of this host behind it, where `bench` meets.
int free_master_port();

/// The device words of the command line: "cpu", "cuda", or "auto": GPUs when there are `ranks` of them.
Device::Kind choose_device(const std::string& word, int ranks);

const char* name_of(Device::Kind device);  ///< "cuda" or "cpu"

/// An executor for a rank: the GPU with that ordinal, or the CPU.
std::shared_ptr<Executor> make_executor(Device::Kind kind, int device);

/// A contiguous tensor in ordinary device memory.
class DeviceTensor {
 public:
  DeviceTensor(Executor& executor, DType dtype, std::initializer_list<std::int64_t> shape);
  ~DeviceTensor();
  DeviceTensor(const DeviceTensor&) = delete;
  DeviceTensor& operator=(const DeviceTensor&) = delete;

  const TensorView& view() const { return view_; }
  /// Copies view().bytes() from the host and waits.
  void upload(const void* source, StreamHandle stream);

 private:
  Executor* executor_;
  TensorView view_;
};

/// Copy between a contiguous tensor and the host; wait until done.
void upload(Executor& executor, const TensorView& tensor, const void* source, StreamHandle stream);
void download(Executor& executor, const TensorView& tensor, void* destination, StreamHandle stream);

/// The tensor's values on the host.
template <class T>
std::vector<T> to_host(Executor& executor, const TensorView& tensor, StreamHandle stream) {
  std::vector<T> values(tensor.bytes() / sizeof(T));
  download(executor, tensor, values.data(), stream);
  return values;
}

/// One line on the terminal that shows progress; nothing if stderr is not a terminal.
void show_progress(const std::string& text);
/// Removes that line.
void clear_progress();

}  // namespace deep_ep::tools
