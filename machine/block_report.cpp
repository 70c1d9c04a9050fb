// The report of a block in which every thread waits for another.
#include "csrc/support/format.hpp"
#include "machine/block.hpp"

namespace deep_ep::host_machine {

std::string Block::describe_wait(const Fiber& fiber) const {
  switch (fiber.wait) {
    case Fiber::Wait::warp: {
      const auto& warp = *static_cast<const Gathering*>(fiber.wait_object);
      return fmt::format("wait for their warp ({} of {} lanes came)", warp.arrived, warp.threads);
    }
    case Fiber::Wait::barrier:
      return fmt::format("wait for their block ({} of {} threads came)", barrier_.arrived, barrier_.threads);
    case Fiber::Wait::mbarrier:
      return fmt::format("wait for parity {} of {}", fiber.wait_parity,
                         describe(*static_cast<const MbarrierState*>(fiber.wait_object)));
    case Fiber::Wait::finished:
      return "have exited";
    case Fiber::Wait::nothing:
      break;
  }
  return "can run";
}

std::string Block::describe_deadlock() const {
  std::string text = fmt::format("block {}: deadlock, no thread can go on:", index_);
  for (std::size_t first = 0; first < fibers_.size();) {
    const std::string what = describe_wait(*fibers_[first]);
    std::size_t last = first;
    while (last + 1 < fibers_.size() && describe_wait(*fibers_[last + 1]) == what) ++last;
    text += first == last ? fmt::format(" thread {} {};", first, what)
                          : fmt::format(" threads {}-{} {};", first, last, what);
    first = last + 1;
  }
  text.back() = '.';
  return text;
}

}  // namespace deep_ep::host_machine
