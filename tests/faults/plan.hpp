// What one run does: ranks, calls, and one fault. Everything follows from a seed.
//
// These are faults because of which ranks wait for others, or might. Arguments and options that differ, or are not
// allowed, and a heap or an arena without room end calls before they wait: tests/buffer/ has each of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/cluster/case.hpp"
#include "tests/cluster/cluster.hpp"
#include "tests/cluster/low_latency_combine_case.hpp"

namespace deep_ep::faults {

enum class Fault : std::uint8_t {
  none,       ///< a control
  delay,      ///< a rank stands still within a kernel, for much less than the deadline
  stop,       ///< a rank makes no more calls
  freeze,     ///< a rank stands still within a kernel, for good
  pause,      ///< the same for longer than the deadline; then it goes on
  memory,     ///< no memory for a call's results
  set_up,     ///< no memory while a rank makes its buffer
  nic,        ///< operations of a rank's NIC to one peer fail
  bootstrap,  ///< a message of the bootstrap is lost
  kill,       ///< a process is killed, within a kernel or before a call
  suspend,    ///< a process is stopped by a signal for longer than the deadline, and goes on
};
inline constexpr int kFaults = static_cast<int>(Fault::suspend) + 1;
const char* name_of(Fault fault);
/// std::invalid_argument, which lists the names, for any other.
Fault fault_of(const std::string& name);
/// Needs ranks that are processes.
constexpr bool of_processes(Fault fault) { return fault == Fault::kill || fault == Fault::suspend; }

struct Step {
  enum class Kind : std::uint8_t { dispatch, cached, combine, low_latency_dispatch, low_latency_combine };
  Kind kind = Kind::dispatch;
  int data = 0;       ///< which of the two cases of its mode
  bool hook = false;  ///< low latency: the receive part comes by a hook
  bool heap = false;  ///< combine: the rows lie in the heap
  bool low_latency() const { return kind >= Kind::low_latency_dispatch; }
};
const char* name_of(Step::Kind kind);

struct Plan {
  std::uint64_t seed = 0;
  int ranks = 2;
  test::Topology topology = test::Topology::one_node;
  bool masking = false;
  HostExecutorOptions host = {};
  std::vector<Step> steps = {};

  Fault fault = Fault::none;
  int rank = 0;         ///< whose fault it is
  int step = 0;         ///< in which call
  int event = 1;        ///< within it: which event of a kernel, allocation, or message; 0: before the call
  int peer = 0;         ///< nic: to whom
  double hold = 0;      ///< delay, pause, suspend: how long, in deadlines
  bool credit = false;  ///< nic: of normal mode, the channel of credit, not that of rows

  /// 0: all ranks are of one node.
  int ranks_per_node() const {
    const bool nodes = topology == test::Topology::two_nodes || topology == test::Topology::rails;
    return !nodes ? 0 : ranks % 2 == 0 ? ranks / 2 : 1;
  }
  /// Ranks with masks agree on who is lost. Plans in which a rank does not come back: at the end survivors make two
  /// more calls, so that all hear of it.
  bool looks_for_survivors() const {
    return masking && (fault == Fault::stop || fault == Fault::freeze || fault == Fault::memory ||
                       fault == Fault::kill || fault == Fault::suspend || fault == Fault::nic);
  }
  /// Does the rank of the fault survive, where it makes all calls? (One that stood still may end before it is told.)
  bool may_survive_own_fault() const { return fault == Fault::nic; }
  std::string describe() const;
};

Plan make_plan(std::uint64_t seed, Fault fault);
/// The kind of fault of a seed in a campaign.
Fault pick_fault(std::uint64_t seed);

/// What the calls of a plan send and must receive.
struct Data {
  test::Case normal[2];
  test::LowLatencyCombineCase low_latency[2];
};
Data make_data(const Plan& plan);

/// The experts' rows for combine after a dispatch in which some ranks were left out: what is in a row depends on the
/// token and the expert alone, so that each rank knows it of all, wherever the row lies.
void fill_by_token(test::LowLatencyCombineCase& one);

}  // namespace deep_ep::faults
