// The mbarriers of a block. The word in shared memory holds a ticket; the state is kept here.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "machine/bulk_engine.hpp"
#include "machine/fiber.hpp"
#include "machine/proxy_order.hpp"

namespace deep_ep::host_machine {

struct MbarrierState {
  const std::uint64_t* word = nullptr;
  std::uint32_t arrivals = 0;       ///< per phase
  std::uint32_t missing = 0;        ///< arrivals of this phase still to come
  std::int64_t expected_bytes = 0;  ///< announced and not written yet; below zero: written and not announced yet
  std::uint32_t phase = 0;
  bool fenced = false;          ///< fence_init made it known to the copy engine
  std::vector<BulkLoad> loads;  ///< issued, not done
  std::vector<Fiber*> waiting;
  MeetingPoint sync_point[2];  ///< one for each parity

  bool ended(std::uint32_t parity) const { return (phase & 1u) != parity; }
  /// Ends the phase if nothing is missing. Returns whether it did.
  bool advance();
};

class MbarrierTable {
 public:
  explicit MbarrierTable(const SharedMemory& shared) : shared_(shared) {}

  /// Returns the ticket to be written into the word.
  std::uint64_t init(const std::uint64_t& word, std::uint32_t arrivals);
  void fence_init();
  /// Throws if no barrier lives at the word.
  MbarrierState& find(const std::uint64_t& word, std::uint64_t ticket);

  std::string describe(const MbarrierState& state) const;
  /// What is still under way when all threads are gone; empty if nothing.
  std::string unfinished() const;

 private:
  const SharedMemory& shared_;
  std::deque<MbarrierState> states_;  ///< references stay valid; slots are not reused, so stale tickets are detected
};

}  // namespace deep_ep::host_machine
