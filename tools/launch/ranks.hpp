// The ranks of one node.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/support/deadline.hpp"
#include "tools/launch/crew.hpp"
#include "tools/launch/words.hpp"

namespace deep_ep::tools {

struct RankHandlers {
  std::function<void(int rank, Stream stream, std::string_view text)> on_output;
  std::function<void(int rank, int status)> on_end;
};

/// Starts the command once for each rank, and tells it by environment variables who it is.
void start_ranks(Crew& crew, const std::vector<std::string>& command, const Assignment& assignment,
                 const RankHandlers& handlers);

/// The first line of a rank's log.
std::string header_of(int rank, const Assignment& assignment, const std::string& host,
                      const std::vector<std::string>& command);

/// How the members of a crew come to their end: asked by SIGTERM, killed some seconds later, given up in the end.
class Ending {
 public:
  explicit Ending(Crew& crew) : crew_(crew) {}
  void begin();
  void kill();
  /// Now and then, as long as some run. False: some do not die, and nobody waits for them any more.
  bool go_on();
  bool has_begun() const { return grace_.has_value(); }

 private:
  Crew& crew_;
  std::optional<Deadline> grace_;
  std::optional<Deadline> patience_;  ///< since they were killed
};

}  // namespace deep_ep::tools
