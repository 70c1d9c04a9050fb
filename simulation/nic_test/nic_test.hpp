// Everything that a NIC has to do for this library, done once: `deep_ep doctor --nic-test`.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "simulation/nic_test/bench.hpp"
#include "simulation/nic_test/outcome.hpp"

namespace deep_ep::rdma::nic_test {

/// Log lines around failures that the test makes on purpose.
inline constexpr std::string_view kFailuresBegin = "NIC test: a write by a wrong key comes now; what fails is to fail";
inline constexpr std::string_view kFailuresEnd = "NIC test: that was the write by a wrong key";

struct Subject {
  std::string name;  ///< "mlx5_0:1, rung by GPU 0"
  std::shared_ptr<Executor> executor;
  MakeEndsOn make;  ///< as a run would
  NicHandler handler = NicHandler::automatic;
  std::vector<NicHandler> others;  ///< tried briefly, one line each; none between machines
  std::string no_others;           ///< why there are none
  Link link = {};
  bool wants_gpu_handler = false;  ///< kernels are to ring the NIC; that they cannot is a failure
};

struct Limits {
  double wait_s = 5;              ///< for what must come; other ways are given 2 s at most
  std::uint64_t entries = 70000;  ///< more than the 16-bit index counts
  double entries_s = 10;          ///< time for them
  double phase_s = 0.3;           ///< of each measurement
  double seconds = 0;             ///< checks that begin later are skipped; 0: none
};

/// Collective. Lines of all checks; throws only where there is no memory for them, or the other side has gone. What
/// fails on one side fails on both.
Lines test_nic(Bootstrap& bootstrap, const Subject& subject, const Limits& limits);

}  // namespace deep_ep::rdma::nic_test
