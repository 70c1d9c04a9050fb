#include "tools/launch/ranks.hpp"

#include <fmt/format.h>

#include <csignal>

namespace deep_ep::tools {
namespace {

constexpr double kGrace = 5;            ///< seconds between the request to end and the end
constexpr double kKilledPatience = 10;  ///< for a killed process: a driver may hold it

}  // namespace

void start_ranks(Crew& crew, const std::vector<std::string>& command, const Assignment& assignment,
                 const RankHandlers& handlers) {
  for (int local = 0; local < assignment.ranks; ++local) {
    const int rank = assignment.first_rank + local;
    crew.start(fmt::format("rank {}", rank), command,
               {fmt::format("RANK={}", rank), fmt::format("WORLD_SIZE={}", assignment.world_size),
                fmt::format("LOCAL_RANK={}", local), fmt::format("LOCAL_WORLD_SIZE={}", assignment.ranks),
                fmt::format("NODE_RANK={}", assignment.node), fmt::format("NNODES={}", assignment.nodes),
                fmt::format("MASTER_ADDR={}", assignment.master), fmt::format("MASTER_PORT={}", assignment.port),
                fmt::format("DEEP_EP_JOB_TOKEN={}", assignment.token)},
               -1, -1,
               {.on_output = [=](Stream stream, std::string_view text) { handlers.on_output(rank, stream, text); },
                .on_end = [=](int status) { handlers.on_end(rank, status); }});
  }
}

std::string header_of(int rank, const Assignment& assignment, const std::string& host,
                      const std::vector<std::string>& command) {
  return fmt::format("rank {} of {} on {} (node {} of {}, local rank {}): {}", rank, assignment.world_size, host,
                     assignment.node, assignment.nodes, rank - assignment.first_rank, fmt::join(command, " "));
}

void Ending::begin() {
  if (grace_) return;
  grace_.emplace(kGrace);
  crew_.signal_all(SIGTERM);
}

void Ending::kill() {
  begin();
  if (patience_) return;
  patience_.emplace(kKilledPatience);
  crew_.signal_all(SIGKILL);
}

bool Ending::go_on() {
  if (grace_ && grace_->expired()) kill();
  return !patience_ || !patience_->expired();
}

}  // namespace deep_ep::tools
