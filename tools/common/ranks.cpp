#include "tools/common/ranks.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <thread>
#include <vector>

#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/unique_fd.hpp"

namespace deep_ep::tools {

void run_ranks(int count, const std::function<void(int)>& body) {
  if (count == 1) return body(0);

  std::atomic<bool> failed = false;
  std::exception_ptr failure;  // the first
  std::atomic<int> running = count;
  const auto run = [&](int rank) {
    try {
      body(rank);
    } catch (const std::exception& error) {
      const bool first = !failed.exchange(true);
      if (first) failure = std::current_exception();
      const Deadline patience(3);
      while (first && running > 1 && !patience.expired()) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      if (first && running > 1) {
        clear_progress();
        fmt::print(stderr, "deep_ep: {}\n", error.what());
        std::fflush(nullptr);
        std::_Exit(1);
      }
    }
    --running;
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < count; ++rank) threads.emplace_back(run, rank);
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
}

std::vector<std::string> command_of_rank(const Place& place, int local_rank, int ranks,
                                         std::span<const std::string> command) {
  std::vector<std::string> words = {"env",
                                    fmt::format("RANK={}", place.node * ranks + local_rank),
                                    fmt::format("WORLD_SIZE={}", place.nodes * ranks),
                                    fmt::format("LOCAL_RANK={}", local_rank),
                                    fmt::format("LOCAL_WORLD_SIZE={}", ranks),
                                    "MASTER_ADDR=" + place.master,
                                    fmt::format("MASTER_PORT={}", place.port)};
  if (!place.job.empty()) words.push_back("DEEP_EP_JOB_TOKEN=" + place.job);
  words.insert(words.end(), command.begin(), command.end());
  return words;
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
