// What a kernel put on record, in words.
#pragma once

#include <optional>
#include <string>

#include "kernels/common/faults.hpp"

namespace deep_ep {

/// The message of an exception for a fault or a note that kernels of `rank` have met. `lost`: of a time-out, whom the
/// rank that was waited for waits for itself, if it does.
std::string describe_fault(const FaultRecord& fault, int rank, double timeout_s, std::optional<int> lost = {});

/// The same for a wait that has ended as `fault.peer` is lost: because of rank `lost`. `gone`: whose processes ended.
std::string describe_lost(const FaultRecord& fault, int rank, int lost, const std::string& gone);

/// A line for the log: why kernels of `rank` have masked another one.
std::string describe_masking(const FaultRecord& record, int rank, double timeout_s);

}  // namespace deep_ep
