// What stands in for the CUDA executor in a build without CUDA.
#include "csrc/support/format.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep {

std::shared_ptr<Executor> make_cuda_executor(int device) {
  fail<SystemError>("GPU {} was asked for, but this build of the library has no CUDA (configure with DEEP_EP_CUDA=ON)",
                    device);
}

int cuda_device_count() noexcept { return 0; }

std::string cuda_device_pci_address(int /*device*/) { return {}; }

}  // namespace deep_ep
