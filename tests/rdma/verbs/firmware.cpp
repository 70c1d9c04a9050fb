#include "tests/rdma/verbs/firmware.hpp"

#include <algorithm>
#include <bit>

namespace deep_ep::rdma::verbs::test {
namespace {

constexpr std::uint32_t kCompletionQueueContext = 0x80;
constexpr std::uint32_t kContext = 0xc0;
constexpr std::uint32_t kPath = kContext + 0xc0;
constexpr std::uint8_t kBadParameter = 0x3;
constexpr std::uint8_t kBadResource = 0x5;
constexpr std::uint8_t kBadState = 0x9;
constexpr std::uint32_t kTrafficClassWithoutRoute = 0x764216;

bool ethernet(const FirmwareFacts& facts) { return facts.port.link_layer == IBV_LINK_LAYER_ETHERNET; }
bool needs_route(const FirmwareFacts& facts) {
  return ethernet(facts) || (facts.port.flags & IBV_QPF_GRH_REQUIRED) != 0;
}
std::uint64_t log2_of(int value) { return value > 0 ? std::bit_width(static_cast<unsigned>(value)) - 1U : 0; }

}  // namespace

std::uint64_t MailboxView::get(std::uint32_t bit, std::uint32_t width) const {
  std::uint64_t value = 0;
  for (std::uint32_t i = bit; i < bit + width; ++i) value = value << 1 | (bytes_.at(i / 8) >> (7 - i % 8) & 1);
  return value;
}

std::optional<Firmware::Refusal> Firmware::refuse(const FirmwareFacts& facts, MailboxView command) const {
  Refusal refusal{.status = kBadResource};
  const auto opcode = command.get(0, 16);
  if (opcode == 0x400) refusal.rule = refuse_completion_queue(command);
  if (opcode == 0x500) refusal.rule = refuse_queue_pair(facts, command);
  if (opcode >= 0x502 && opcode <= 0x504) {
    refusal = {.status = kBadState, .rule = refuse_state(facts, command, static_cast<int>(opcode) - 0x502)};
    if (refusal.rule.empty() && opcode == 0x503) refusal = refuse_route(facts, command);
  }
  return refusal.rule.empty() ? std::nullopt : std::optional(refusal);
}

void Firmware::remove_object(std::uint32_t number) {
  completion_queues_.erase(number);
  states_.erase(number);
}

std::string Firmware::refuse_memory(std::uint64_t id, std::uint64_t offset, std::uint64_t bytes) const {
  const auto memory = memory_.find(static_cast<std::uint32_t>(id));
  if (memory == memory_.end()) return "memory that is not registered";
  return offset + bytes > memory->second.bytes ? "beyond the registered memory" : "";
}

std::uint64_t Firmware::add_memory(std::uint32_t id, std::uint64_t address, std::uint64_t bytes,
                                   std::uint64_t page_sizes) {
  std::uint64_t largest = 0;
  for (std::uint64_t page = 4096; page <= bytes; page *= 2) {
    if ((page_sizes & page) != 0 && address % page == 0 && bytes % page == 0) largest = page;
  }
  if (largest != 0) memory_[id] = {bytes, largest};
  return largest;
}

/// In 64ths of a page, of the one that the memory has and the one that the queue's context names.
std::string Firmware::refuse_place(std::uint64_t id, std::uint64_t offset, std::uint64_t log_page) const {
  const auto memory = memory_.find(static_cast<std::uint32_t>(id));
  const std::uint64_t page = memory == memory_.end() ? 4096 : memory->second.page;
  return offset % (std::max(page, std::uint64_t{4096} << log_page) / 64) != 0
             ? "the offset is no multiple of the page size / 64"
             : "";
}

std::string Firmware::refuse_completion_queue(MailboxView command) const {
  const auto context = [&](std::uint32_t bit, std::uint32_t width) {
    return command.get(kCompletionQueueContext + bit, width);
  };
  const std::uint64_t offset = command.get(0x280, 64);
  if (command.get(0x2e0, 1) == 0 || context(0x06, 1) == 0) return "a queue without memory of the user";
  if (auto wrong = refuse_place(command.get(0x2c0, 32), offset, context(0xc3, 5)); !wrong.empty()) return wrong;
  if (auto wrong = refuse_memory(command.get(0x2c0, 32), offset, std::uint64_t{64} << context(0x63, 5));
      !wrong.empty()) {
    return "entries in " + wrong;
  }
  if (context(0x1c0, 64) % 8 != 0) return "the doorbell record is not aligned to 8 bytes";
  if (auto wrong = refuse_memory(context(0x20, 32), context(0x1c0, 64), 8); !wrong.empty()) return "record in " + wrong;
  if (!registers_.contains(static_cast<std::uint32_t>(context(0x68, 24)))) return "a foreign doorbell page";
  return context(0xb8, 8) == kEventQueue ? "" : "a foreign event queue";
}

std::string Firmware::refuse_queue_pair(const FirmwareFacts& facts, MailboxView command) const {
  const auto context = [&](std::uint32_t bit, std::uint32_t width) { return command.get(kContext + bit, width); };
  const std::uint64_t depth = context(0x51, 4);
  if (context(0x28, 24) != kProtectionDomain) return "a foreign protection domain";
  if (!registers_.contains(static_cast<std::uint32_t>(context(0x68, 24)))) return "a foreign doorbell page";
  for (const std::uint32_t bit : {0x3e8U, 0x4e8U}) {
    if (!completion_queues_.contains(static_cast<std::uint32_t>(context(bit, 24)))) return "a foreign completion queue";
  }
  if (depth > log2_of(facts.attributes.max_qp_wr)) return "deeper than the device allows";
  if (context(0x565, 3) == 3 && context(0x49, 4) != 0) return "a receive queue of a pair that has none";
  if (command.get(0x860, 1) == 0 || context(0x683, 1) == 0) return "a queue without memory of the user";
  if (auto wrong = refuse_place(command.get(0x840, 32), command.get(0x800, 64), context(0xa3, 5)); !wrong.empty()) {
    return wrong;
  }
  if (auto wrong = refuse_memory(command.get(0x840, 32), command.get(0x800, 64), std::uint64_t{64} << depth);
      !wrong.empty()) {
    return "ring in " + wrong;
  }
  if (context(0x500, 64) % 8 != 0) return "the doorbell record is not aligned to 8 bytes";
  const auto wrong = refuse_memory(context(0x720, 32), context(0x500, 64), 8);
  return wrong.empty() ? "" : "record in " + wrong;
}

std::string Firmware::refuse_state(const FirmwareFacts& facts, MailboxView command, int from) const {
  const auto pair = states_.find(static_cast<std::uint32_t>(command.get(0x48, 24)));
  if (pair == states_.end()) return "a foreign queue pair";
  if (pair->second != from) return "a state change out of order";
  if (from == 2 && command.get(kContext + 0x388, 3) > log2_of(facts.attributes.max_qp_init_rd_atom)) {
    return "more atomics under way than the device allows";
  }
  if (from == 0 && command.get(kContext + 0x13, 2) != 3) return "no migration state";
  if (from == 0 && !facts.counter_sets.contains(command.get(kContext + 0x60, 8))) return "a foreign set of counters";
  const auto port = command.get(kPath + 0x128, 8);
  return from != 2 && (port == 0 || port > facts.attributes.phys_port_cnt) ? "a port that does not exist" : "";
}

Firmware::Refusal Firmware::refuse_route(const FirmwareFacts& facts, MailboxView command) const {
  const auto path = [&](std::uint32_t bit, std::uint32_t width) { return command.get(kPath + bit, width); };
  const auto refused = [](std::string rule, std::uint32_t syndrome = 0) {
    return Refusal{kBadParameter, syndrome, std::move(rule)};
  };
  const auto mtu = command.get(kContext + 0x40, 3);
  if (mtu < 1 || mtu > facts.port.active_mtu) return refused("an MTU that the port does not have");
  if (command.get(kContext + 0x43, 5) > 30) return refused("messages that are too long");
  if (command.get(kContext + 0x488, 3) > log2_of(facts.attributes.max_qp_rd_atom)) {
    return refused("more atomics to answer than the device allows");
  }
  const bool route = ethernet(facts) || path(0x28, 1) != 0;
  if (!route && path(0x64, 8) != 0) return refused("a traffic class without GRH", kTrafficClassWithoutRoute);
  if (!route && needs_route(facts)) return refused("no GRH on a port that needs it");
  if (!route) return path(0x30, 16) == 0 ? refused("LID 0") : refused("");
  if (path(0x80, 64) == 0 && path(0xc0, 64) == 0) return refused("no remote GID");
  if (!facts.gid_indices.contains(static_cast<int>(path(0x48, 8)))) return refused("an empty source GID");
  if (path(0x58, 8) == 0) return refused("hop limit 0");
  if (!ethernet(facts)) return refused("");
  if (path(0x130, 48) == 0) return refused("no remote MAC");
  return path(0x110, 16) < 0xc000 ? refused("a UDP source port below 0xc000") : refused("");
}

std::string Firmware::refuse(const FirmwareFacts& facts, const ibv_qp* pair, const ibv_qp_attr& attributes,
                             int mask) const {
  struct Step {
    ibv_qp_state from, to;
    int needs;
  };
  constexpr Step kSteps[] = {
      {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
      {IBV_QPS_INIT, IBV_QPS_RTR,
       IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
           IBV_QP_MIN_RNR_TIMER},
      {IBV_QPS_RTR, IBV_QPS_RTS,
       IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC}};
  const auto known = verbs_states_.find(pair);
  const ibv_qp_state from = known == verbs_states_.end() ? IBV_QPS_RESET : known->second;
  const auto* step = std::find_if(std::begin(kSteps), std::end(kSteps),
                                  [&](const Step& s) { return s.from == from && s.to == attributes.qp_state; });
  if (step == std::end(kSteps)) return "a state change out of order";
  if ((step->needs & ~mask) != 0) return "attributes that the state change needs are missing";
  if (step->to != IBV_QPS_RTR) return "";
  const ibv_ah_attr& route = attributes.ah_attr;
  if (attributes.path_mtu > facts.port.active_mtu) return "an MTU that the port does not have";
  if (attributes.max_dest_rd_atomic > facts.attributes.max_qp_rd_atom) {
    return "more atomics to answer than the device allows";
  }
  if (route.is_global == 0) return needs_route(facts) ? "no GRH on a port that needs it" : "";
  return facts.gid_indices.contains(route.grh.sgid_index) ? "" : "an empty source GID";
}

}  // namespace deep_ep::rdma::verbs::test
