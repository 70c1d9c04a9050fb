#include "tools/doctor/cluster/kubectl.hpp"

#include <fmt/format.h>

#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"
#include "tools/common/child.hpp"

namespace deep_ep::tools {

Answer ask_cluster(const std::string& kubectl, const std::vector<std::string>& kind, double seconds) {
  std::vector<std::string> command = {kubectl, "get"};
  command.insert(command.end(), kind.begin(), kind.end());
  command.insert(command.end(), {"-o", "json"});
  constexpr std::size_t kMostOutput = std::size_t{64} << 20;
  Answer answer;
  const std::string asked = fmt::format("kubectl get {}", kind.front());
  ChildResult output;
  try {
    output = run_children({{.words = command, .most_output = kMostOutput}}, seconds).front();
  } catch (const SystemError& error) {
    answer.problem = fmt::format("{}: {}", asked, error.what());
    return answer;
  }
  const std::string first_line(trim(output.errors.substr(0, output.errors.find('\n'))));
  if (output.timed_out || output.too_long) {
    answer.problem = output.timed_out ? fmt::format("{}: no answer within {} s", asked, seconds)
                                      : fmt::format("{}: the answer is longer than 64 MiB", asked);
    return answer;
  }
  answer.unknown_kind = output.errors.find("doesn't have a resource type") != std::string::npos;
  if (output.status != 0) {
    answer.problem = fmt::format("{} ended with status {}: {}", asked, output.status, first_line);
    return answer;
  }
  const auto json = nlohmann::json::parse(output.output, nullptr, false);
  if (!json.is_object() || !json.contains("items") || !json["items"].is_array()) {
    answer.problem = fmt::format("{}: the answer is no list of objects", asked);
    return answer;
  }
  answer.items = json["items"];
  return answer;
}

}  // namespace deep_ep::tools
