#include "tools/doctor/pod_info.hpp"

#include <sstream>
#include <string_view>

namespace deep_ep::tools {
namespace {

std::string unquoted(std::string_view text) {
  if (text.starts_with('"')) text.remove_prefix(1);
  if (text.ends_with('"')) text.remove_suffix(1);
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\\' || i + 1 == text.size()) {
      result += text[i];
      continue;
    }
    const char escaped = text[++i];
    result += escaped == 'n' ? '\n' : escaped == 't' ? '\t' : escaped;
  }
  return result;
}

}  // namespace

std::map<std::string, std::string> read_pod_info(const topology::SystemRoot& root, const std::string& what) {
  std::map<std::string, std::string> values;
  std::istringstream lines(root.read("/etc/podinfo/" + what).value_or(""));
  for (std::string line; std::getline(lines, line);) {
    const std::size_t equals = line.find('=');
    if (equals == std::string::npos) continue;
    values[line.substr(0, equals)] = unquoted(std::string_view(line).substr(equals + 1));
  }
  return values;
}

}  // namespace deep_ep::tools
