#include "tools/launch/remote_shell.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <iterator>
#include <sstream>

#include "csrc/support/environment.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::tools {
namespace {

/// A word of a shell's command.
std::string quoted(const std::string& word) {
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

/// Variables that the ranks of other hosts need as those here do.
std::string variables_to_send() {
  constexpr std::array kWanted = {
      "DEEP_EP_", "NVSHMEM_", "NCCL_", "CUDA_", "PATH=", "PYTHON", "LD_LIBRARY_PATH=", "VIRTUAL_ENV="};
  std::string text;
  for (const std::string& name : environment::names_of_process()) {
    const std::string variable = name + "=" + environment::of_process(name.c_str()).value_or("");
    const auto begins_it = [&](const char* prefix) { return variable.starts_with(prefix); };
    if (std::any_of(kWanted.begin(), kWanted.end(), begins_it)) text += " " + quoted(variable);
  }
  return text;
}

}  // namespace

std::string address_of(const std::vector<Host>& hosts) {
  const std::string& name = hosts.front().name;
  std::string address = name.substr(name.find('@') + 1);  // all of it where there is no user
  if (hosts.size() > 1 && (address == "localhost" || address == "::1" || address.starts_with("127."))) {
    throw InvalidArgument(fmt::format(
        "--hostfile: the first of several hosts is {}, allowed: a name or an address by which the others reach it",
        name));
  }
  return address;
}

std::vector<std::string> remote_shell(const LaunchOptions& options, const Host& host) {
  std::istringstream words(options.ssh);
  std::vector<std::string> command{std::istream_iterator<std::string>(words), {}};
  if (command.empty()) throw InvalidArgument("--ssh is empty, allowed: a program and its options");
  std::string text =
      fmt::format("cd {} && exec env{} {} launch --follow --lost-after {}", quoted(std::filesystem::current_path()),
                  variables_to_send(), quoted(std::filesystem::read_symlink("/proc/self/exe")), options.silence);
  const int ranks = host.ranks != 0 ? host.ranks : options.ranks;
  if (ranks != 0) text += fmt::format(" --ranks {}", ranks);  // otherwise as many as it has GPUs
  text += " --";
  for (const std::string& word : options.command) text += " " + quoted(word);
  command.push_back(host.name);
  command.push_back(text);
  return command;
}

}  // namespace deep_ep::tools
