// What mlx5 firmware and the kernel refuse, as rules that the fake device keeps: tests/rdma/review.md lists them with
// their sources. A mistake in a command is then an error here too, wherever in the mailbox it is.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "csrc/rdma/verbs/functions.hpp"

namespace deep_ep::rdma::verbs::test {

/// What the rules depend on besides the objects themselves.
struct FirmwareFacts {
  ibv_device_attr attributes{};
  ibv_port_attr port{};
  std::set<int> gid_indices;
  std::set<std::uint64_t> counter_sets{0};  ///< that queue pairs of users may have
};

/// A command for the firmware, read at its bits.
class MailboxView {
 public:
  explicit MailboxView(const std::vector<std::uint8_t>& bytes) : bytes_(bytes) {}
  std::uint64_t get(std::uint32_t bit, std::uint32_t width) const;

 private:
  const std::vector<std::uint8_t>& bytes_;
};

class Firmware {
 public:
  struct Refusal {
    std::uint8_t status = 0;
    std::uint32_t syndrome = 0;  ///< where one is known
    std::string rule = {};
  };

  /// Nothing where the command is good. What it changes is recorded by the functions below.
  std::optional<Refusal> refuse(const FirmwareFacts& facts, MailboxView command) const;
  /// The rule that a verbs state change breaks; empty where it is good.
  std::string refuse(const FirmwareFacts& facts, const ibv_qp* pair, const ibv_qp_attr& attributes, int mask) const;

  /// Memory whose pages are as large as length, alignment and the allowed sizes let them be. Returns their size, or 0
  /// if none fits.
  std::uint64_t add_memory(std::uint32_t id, std::uint64_t address, std::uint64_t bytes, std::uint64_t page_sizes);
  void remove_memory(std::uint32_t id) { memory_.erase(id); }
  void add_register(std::uint32_t page) { registers_.insert(page); }
  void remove_register(std::uint32_t page) { registers_.erase(registers_.find(page)); }
  void add_completion_queue(std::uint32_t number) { completion_queues_.insert(number); }
  void add_queue_pair(std::uint32_t number) { states_[number] = 0; }
  void remove_object(std::uint32_t number);
  void set_state(std::uint32_t queue_pair, int state) { states_[queue_pair] = state; }
  void set_state(const ibv_qp* pair, ibv_qp_state state) { verbs_states_[pair] = state; }

 private:
  std::string refuse_completion_queue(MailboxView command) const;
  std::string refuse_queue_pair(const FirmwareFacts& facts, MailboxView command) const;
  std::string refuse_state(const FirmwareFacts& facts, MailboxView command, int from) const;
  Refusal refuse_route(const FirmwareFacts& facts, MailboxView command) const;
  std::string refuse_memory(std::uint64_t id, std::uint64_t offset, std::uint64_t bytes) const;
  std::string refuse_place(std::uint64_t id, std::uint64_t offset, std::uint64_t log_page) const;

  struct Memory {
    std::uint64_t bytes, page;
  };
  std::map<std::uint32_t, Memory> memory_;  ///< UMEMs
  std::multiset<std::uint32_t> registers_;  ///< pages of doorbell registers
  std::set<std::uint32_t> completion_queues_;
  std::map<std::uint32_t, int> states_;
  std::map<const ibv_qp*, ibv_qp_state> verbs_states_;
};

inline constexpr std::uint32_t kProtectionDomain = 0x55;
inline constexpr std::uint32_t kEventQueue = 0x9;

}  // namespace deep_ep::rdma::verbs::test
