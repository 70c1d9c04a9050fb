#include "tools/common/ranks.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/support/format.hpp"
#include "csrc/support/unique_fd.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::tools {

void run_ranks(int count, const std::function<void(int)>& body) {
  if (count == 1) return body(0);

  std::mutex mutex;
  std::condition_variable changed;
  std::exception_ptr failure;
  int running = count;
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      std::exception_ptr error;
      try {
        body(i);
      } catch (...) {
        error = std::current_exception();
      }
      // Notified under the lock: the condition variable lives only until the last rank is counted.
      const std::lock_guard lock(mutex);
      --running;
      if (error && !failure) failure = error;
      changed.notify_all();
    });
  }

  {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return running == 0 || failure; });
    constexpr auto kPatience = std::chrono::seconds(3);
    if (!changed.wait_for(lock, kPatience, [&] { return running == 0; })) {
      try {
        std::rethrow_exception(failure);
      } catch (const std::exception& error) {
        clear_progress();
        fmt::print(stderr, "deep_ep: {}\n", error.what());
      }
      std::fflush(nullptr);
      std::_Exit(1);
    }
  }
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
}

std::vector<std::pair<std::string, std::string>> variables_of_rank(const Place& place, int local_rank, int ranks) {
  std::vector<std::pair<std::string, std::string>> variables = {
      {"RANK", std::to_string(place.node * ranks + local_rank)},
      {"WORLD_SIZE", std::to_string(place.nodes * ranks)},
      {"LOCAL_RANK", std::to_string(local_rank)},
      {"LOCAL_WORLD_SIZE", std::to_string(ranks)},
      {"MASTER_ADDR", place.master},
      {"MASTER_PORT", std::to_string(place.port)}};
  if (!place.job.empty()) variables.emplace_back("DEEP_EP_JOB_TOKEN", place.job);
  return variables;
}

int free_master_port() {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  socklen_t size = sizeof address;
  const bool known = ::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                     ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0;
  if (!known) throw SystemError("there is no free TCP port on this host");
  return ntohs(address.sin_port) - 1;
}

Device::Kind choose_device(const std::string& word, int ranks) {
  if (word == "cpu") return Device::Kind::cpu;
  const int devices = cuda_device_count();
  if (word == "cuda" && devices < ranks) {
    fail<InvalidArgument>("--device cuda: {} ranks need as many GPUs, {} usable here", ranks, devices);
  }
  return ranks <= devices ? Device::Kind::cuda : Device::Kind::cpu;
}

const char* name_of(Device::Kind device) { return device == Device::Kind::cuda ? "cuda" : "cpu"; }

std::shared_ptr<Executor> make_executor(Device::Kind kind, int device) {
  auto executor = kind == Device::Kind::cuda ? make_cuda_executor(device) : make_host_executor();
  executor->make_current();
  return executor;
}

DeviceTensor::DeviceTensor(Executor& executor, DType dtype, std::initializer_list<std::int64_t> shape)
    : executor_(&executor), view_(TensorView::contiguous(nullptr, dtype, shape, executor.device())) {
  // Never nullptr, so that an empty tensor is a valid argument too.
  view_.data = executor.allocate(std::max<std::size_t>(view_.bytes(), 16));
}

DeviceTensor::~DeviceTensor() { executor_->free(view_.data); }

void DeviceTensor::upload(const void* source, StreamHandle stream) { tools::upload(*executor_, view_, source, stream); }

void upload(Executor& executor, const TensorView& tensor, const void* source, StreamHandle stream) {
  if (tensor.bytes() == 0) return;
  executor.copy(tensor.data, source, tensor.bytes(), stream);
  executor.synchronize(stream);
}

void download(Executor& executor, const TensorView& tensor, void* destination, StreamHandle stream) {
  if (tensor.bytes() == 0) return;
  executor.copy(destination, tensor.data, tensor.bytes(), stream);
  executor.synchronize(stream);
}

void show_progress(const std::string& text) {
  if (isatty(STDERR_FILENO) == 0) return;
  fmt::print(stderr, "\r\033[K{}", text);
  std::fflush(stderr);
}

void clear_progress() {
  if (isatty(STDERR_FILENO) != 0) fmt::print(stderr, "\r\033[K");
}

}  // namespace deep_ep::tools
