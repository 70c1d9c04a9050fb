// Ranks that mpirun (or a resource manager) started.
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <memory>
#include <thread>

#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {
namespace {

void check(int result, const char* call) {
  if (result == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(result, text, &length);
  fail<SystemError>("{} failed: {}", call, text);
}

bool finalized() {
  int flag = 0;
  MPI_Finalized(&flag);
  return flag != 0;
}

void initialize_if_needed() {
  int initialized = 0;
  check(MPI_Initialized(&initialized), "MPI_Initialized");
  if (finalized()) throw SystemError("MPI is finalized already; a bootstrap over MPI must be made before MPI_Finalize");
  if (initialized != 0) return;
  int provided = MPI_THREAD_SINGLE;
  check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
  // Whoever starts MPI ends it: without MPI_Finalize the launcher takes a normal exit for a crash.
  std::atexit([] {
    if (!finalized()) MPI_Finalize();
  });
}

class MpiGroup {
 public:
  MpiGroup(MPI_Comm communicator, double timeout_s) : timeout_s_(timeout_s) {
    // A duplicate: our messages never meet the program's, and its error handler stays as it is.
    check(MPI_Comm_dup(communicator, &communicator_), "MPI_Comm_dup");
    MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN);
    check(MPI_Comm_rank(communicator_, &rank_), "MPI_Comm_rank");
    check(MPI_Comm_size(communicator_, &size_), "MPI_Comm_size");
  }
  ~MpiGroup() {
    // With a collective still in flight the communicator has to stay.
    if (!broken_ && !finalized()) MPI_Comm_free(&communicator_);
  }
  MpiGroup(const MpiGroup&) = delete;
  MpiGroup& operator=(const MpiGroup&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) {
    if (broken_) {
      fail<TimeoutError>("bootstrap over MPI: rank {} of {} gave up waiting before; make a new one", rank_, size_);
    }
    if (mine.size() > INT_MAX) {
      fail<InvalidArgument>("all_gather over MPI: {} a rank, allowed: below 2 GiB", format_bytes(mine.size()));
    }
    auto request = std::make_unique<Request>();
    request->mine.assign(mine.begin(), mine.end());
    request->all.resize(all.size());
    const int count = static_cast<int>(mine.size());
    check(MPI_Iallgather(request->mine.data(), count, MPI_BYTE, request->all.data(), count, MPI_BYTE, communicator_,
                         &request->handle),
          "MPI_Iallgather");
    // finish() waits; the analyzer does not see it through the struct.
    request = finish(std::move(request), "MPI_Iallgather");  // NOLINT(clang-analyzer-optin.mpi.MPI-Checker)
    std::copy(request->all.begin(), request->all.end(), all.begin());
  }

 private:
  struct Request {
    MPI_Request handle = MPI_REQUEST_NULL;
    std::vector<std::byte> mine;
    std::vector<std::byte> all;
  };

  // Polled, because a blocking call could not keep the promise that every wait has a deadline.
  std::unique_ptr<Request> finish(std::unique_ptr<Request> request, const char* call) {
    const Deadline deadline(timeout_s_);
    auto nap = std::chrono::microseconds(0);
    for (int done = 0;;) {
      check(MPI_Test(&request->handle, &done, MPI_STATUS_IGNORE), call);
      if (done != 0) return request;
      if (deadline.expired()) {
        broken_ = true;
        // Left alone: MPI may still write into it, as a collective cannot be cancelled.
        static_cast<void>(request.release());  // NOLINT(bugprone-unused-return-value)
        // NOLINTNEXTLINE(clang-analyzer-optin.mpi.MPI-Checker)
        fail<TimeoutError>("bootstrap over MPI: rank {} of {} waited {} s in {} for the other ranks", rank_, size_,
                           timeout_s_, call);
      }
      std::this_thread::sleep_for(nap);
      if (nap < std::chrono::milliseconds(1)) nap += std::chrono::microseconds(5);
    }
  }

  double timeout_s_;
  MPI_Comm communicator_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 1;
  bool broken_ = false;
};

}  // namespace

std::shared_ptr<Bootstrap> make_mpi_bootstrap(const void* communicator, std::optional<double> timeout_s) {
  const double seconds = timeout_in_effect(timeout_s);
  initialize_if_needed();
  const auto group = std::make_shared<MpiGroup>(
      communicator == nullptr ? MPI_COMM_WORLD : *static_cast<const MPI_Comm*>(communicator), seconds);
  return make_callback_bootstrap(
      group->rank(), group->size(),
      [group](std::span<const std::byte> mine, std::span<std::byte> all) { group->all_gather(mine, all); });
}

}  // namespace deep_ep
