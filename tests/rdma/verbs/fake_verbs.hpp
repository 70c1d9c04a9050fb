// A device without hardware behind tables of verbs and mlx5 functions: it records what it is asked, refuses what
// devices refuse (Firmware), and answers as told.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/support/unique_fd.hpp"
#include "tests/rdma/verbs/firmware.hpp"

namespace deep_ep::rdma::verbs::test {

/// One exists at a time; the function tables reach it.
class FakeVerbs {
 public:
  FakeVerbs();
  ~FakeVerbs();
  FakeVerbs(const FakeVerbs&) = delete;
  FakeVerbs& operator=(const FakeVerbs&) = delete;

  VerbsFunctions functions;
  Mlx5Functions mlx5;

  // ---- What the device is like ----
  ibv_device_attr attributes{};
  ibv_port_attr port{};
  std::map<int, std::array<std::uint8_t, 16>> gids;
  std::map<std::string, int> refusals;       ///< function -> errno
  std::map<std::string, int> refusals_left;  ///< function -> how many more calls are refused; others: all
  std::size_t post_accepts = SIZE_MAX;       ///< work requests that the next calls take before ENOMEM

  // ---- What it was asked ----
  std::vector<std::string> calls;
  struct Registered {
    void* address;
    std::size_t bytes;
    std::uint64_t first_address;
    unsigned access;
  };
  std::vector<Registered> registered;
  struct StateChange {
    ibv_qp_attr attributes;
    int mask;
  };
  std::vector<StateChange> state_changes;
  struct Posted {
    ibv_send_wr request;
    ibv_sge piece;
  };
  std::vector<Posted> posted;
  int alive = 0;  ///< things made and not destroyed

  // ---- What it reports ----
  std::deque<ibv_wc> completions;
  void complete(std::size_t posted_index, ibv_wc_status status = IBV_WC_SUCCESS, std::uint32_t vendor = 0);
  void raise(ibv_event_type event);
  ibv_async_event take_event();

  // ---- DevX: commands as they came, answers as told ----
  struct Command {
    std::string call;
    std::vector<std::uint8_t> mailbox;
    std::uint64_t get(std::uint32_t bit, std::uint32_t width) const { return MailboxView(mailbox).get(bit, width); }
    std::uint16_t opcode() const { return static_cast<std::uint16_t>(get(0, 16)); }
  };
  std::vector<Command> commands;
  struct FirmwareRefusal {
    int error;
    std::uint8_t status;
    std::uint32_t syndrome;
  };
  std::map<std::uint16_t, FirmwareRefusal> firmware_refusals;  ///< by opcode
  Firmware firmware;
  std::vector<std::string> broken_rules;  ///< of the firmware, by refused commands
  FirmwareFacts facts() const;
  std::uint64_t completion_version = 1;
  std::uint8_t queue_pair_state = 3;
  std::uint16_t told = 0;               ///< entries that doorbells announced
  std::uint16_t fetched = 0;            ///< of these, read
  std::uint8_t counter_set = 0;         ///< that the kernel's queue pairs have
  bool counter_set_is_foreign = false;  ///< queue pairs of users may not have it
  std::uint8_t lag_state = 0;
  std::uint8_t port_select_mode = 0;
  std::uint32_t next_queue_pair = 0x1234;      ///< its number
  std::uint32_t next_completion_queue = 0x77;  ///< its number

  /// True, with errno set, where `function` is to be refused. Records the call.
  bool refuses(const std::string& function);

  ibv_device device{};
  ibv_context context{};
  ibv_pd domain{};
  ibv_cq completion_queue{};
  std::deque<ibv_qp> queue_pairs;
  std::deque<ibv_mr> regions;
  ibv_ah address_handle{};
  mlx5_wqe_av address_vector{};
  std::deque<mlx5dv_devx_umem> umems;
  mlx5dv_devx_uar uar{};

 private:
  std::deque<ibv_async_event> events_;
  UniqueFd event_count_;
};

}  // namespace deep_ep::rdma::verbs::test
