// Ranks that mpirun (or a resource manager) started.
#include <mpi.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "csrc/bootstrap/polled.hpp"

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

class MpiTransport {
 public:
  static constexpr const char* name = "MPI";
  static constexpr bool kIsWrittenTo = true;
  int rank = 0, size = 1;

  explicit MpiTransport(MPI_Comm communicator) {
    // A duplicate: our messages never meet the program's, and its error handler stays as it is.
    check(MPI_Comm_dup(communicator, &communicator_), "MPI_Comm_dup");
    MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN);
    check(MPI_Comm_rank(communicator_, &rank), "MPI_Comm_rank");
    check(MPI_Comm_size(communicator_, &size), "MPI_Comm_size");
  }
  ~MpiTransport() {
    if (!finalized()) MPI_Comm_free(&communicator_);
  }
  MpiTransport(const MpiTransport&) = delete;
  MpiTransport& operator=(const MpiTransport&) = delete;

  void gather(std::span<const std::byte> mine, std::span<std::byte> all, const RankWait& wait) {
    mine_.assign(mine.begin(), mine.end());
    all_.resize(all.size());
    const int count = static_cast<int>(mine.size());
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Iallgather(mine_.data(), count, MPI_BYTE, all_.data(), count, MPI_BYTE, communicator_,
                         &request),  // NOLINT(clang-analyzer-optin.mpi.MPI-Checker)
          "MPI_Iallgather");
    wait.until([&] {
      int is_done = 0;
      check(MPI_Test(&request, &is_done, MPI_STATUS_IGNORE), "MPI_Iallgather");
      return is_done != 0 ? "" : "the other ranks";
    });
    std::ranges::copy(all_, all.begin());
  }

 private:
  MPI_Comm communicator_ = MPI_COMM_NULL;
  std::vector<std::byte> mine_, all_;  ///< MPI may use them still if a wait has ended
};

}  // namespace

std::shared_ptr<Bootstrap> make_mpi_bootstrap(const void* communicator, std::optional<double> timeout_s) {
  const double seconds = timeout_in_effect(timeout_s);
  initialize_if_needed();
  const MPI_Comm of = communicator == nullptr ? MPI_COMM_WORLD : *static_cast<const MPI_Comm*>(communicator);
  return make_polled_bootstrap(std::make_unique<MpiTransport>(of), seconds);
}

}  // namespace deep_ep
