// What a kernel put on record, in words.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "csrc/control/plane.hpp"
#include "kernels/common/faults.hpp"

namespace deep_ep {

/// The message of an exception for a fault or a note that kernels of `rank` have met. `lost`: of a time-out, whom the
/// rank that was waited for waits for itself, if it does.
std::string describe_fault(const FaultRecord& fault, int rank, double timeout_s, std::optional<int> lost = {});

/// The same for a wait that has ended as `fault.peer` is lost: because of rank `lost`. `gone`: whose processes ended.
std::string describe_lost(const FaultRecord& fault, int rank, int lost, const std::string& gone);

/// The message of an exception: with masking, the others go on without `rank`. `lost`: all verdicts.
std::string describe_given_up(std::span<const control::LostRank> lost, int rank);

/// A line for the log: why a rank is masked. `gone`: whose processes ended.
std::string describe_masking(const control::LostRank& lost, const std::string& gone);

}  // namespace deep_ep
