// A bootstrap that loses one message of its rank.
#pragma once

#include <memory>
#include <thread>
#include <utility>

#include "csrc/support/deadline.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::faults {

class FaultyBootstrap final : public Bootstrap {
 public:
  FaultyBootstrap(std::shared_ptr<Bootstrap> inner, double timeout_s)
      : inner_(std::move(inner)), timeout_s_(timeout_s) {}

  int lost_message = 0;  ///< counts down with every all-gather; the one that makes it zero never reaches the others
  bool lost() const { return lost_; }

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::vector<std::byte> all_gather(std::span<const std::byte> mine) override {
    lost_ = lost_ || (lost_message != 0 && --lost_message == 0);
    if (!lost_) return inner_->all_gather(mine);
    // Nobody hears of this rank, and it hears of nobody.
    for (const Deadline deadline(timeout_s_); !deadline.expired();) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    throw TimeoutError("a message of this rank was lost");
  }

 private:
  std::shared_ptr<Bootstrap> inner_;
  double timeout_s_;
  bool lost_ = false;
};

}  // namespace deep_ep::faults
