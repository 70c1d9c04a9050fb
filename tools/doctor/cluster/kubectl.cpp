#include "tools/doctor/cluster/kubectl.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <thread>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "csrc/support/unique_fd.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::tools {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kMostOutput = std::size_t{64} << 20;
constexpr std::size_t kMostErrors = 4096;

struct Pipe {
  UniqueFd read;
  UniqueFd write;
};
Pipe make_pipe() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) fail<SystemError>("pipe: {}", errno_text(errno));
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

int milliseconds_until(Clock::time_point end) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
  return left > 0 ? static_cast<int>(left) + 1 : 0;
}

/// Reads what there is; false at the end.
bool drain(const UniqueFd& from, std::string& text, std::size_t most) {
  std::array<char, 65536> block;
  const ::ssize_t count = ::read(from.get(), block.data(), block.size());
  if (count < 0) return errno == EINTR;
  if (count == 0) return false;
  text.append(block.data(), std::min(static_cast<std::size_t>(count), most - std::min(most, text.size())));
  return true;
}

}  // namespace

std::string find_program(const std::string& name, const std::string& path) {
  for (const std::string_view folder : split(path, ':')) {
    if (folder.empty()) continue;
    std::string file = fmt::format("{}/{}", folder, name);
    if (::access(file.c_str(), X_OK) == 0) return file;
  }
  return {};
}

ProgramOutput run_program(const std::vector<std::string>& command, double seconds) {
  ProgramOutput result;
  Pipe output = make_pipe();
  Pipe errors = make_pipe();
  std::vector<char*> arguments;
  arguments.reserve(command.size() + 1);
  for (const std::string& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  ::posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&actions, output.write.get(), STDOUT_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, errors.write.get(), STDERR_FILENO);
  ::posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);  // what it starts is ended with it
  ::pid_t child = 0;
  const int error = ::posix_spawn(&child, arguments[0], &actions, &attributes, arguments.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  ::posix_spawnattr_destroy(&attributes);
  if (error != 0) {
    result.errors = errno_text(error);
    return result;
  }
  output.write = UniqueFd();
  errors.write = UniqueFd();

  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  result.end = ProgramOutput::End::exited;
  std::array<::pollfd, 2> waits = {::pollfd{output.read.get(), POLLIN, 0}, ::pollfd{errors.read.get(), POLLIN, 0}};
  while (waits[0].fd >= 0 || waits[1].fd >= 0) {
    const int ready = ::poll(waits.data(), waits.size(), milliseconds_until(end));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) {
      result.end = ProgramOutput::End::out_of_time;
      break;
    }
    if (waits[0].revents != 0 && !drain(output.read, result.output, kMostOutput)) waits[0].fd = -1;
    if (waits[1].revents != 0 && !drain(errors.read, result.errors, kMostErrors)) waits[1].fd = -1;
    if (result.output.size() >= kMostOutput) {
      result.end = ProgramOutput::End::too_long;
      break;
    }
  }
  int status = 0;
  // Its output may have ended before it: that, too, has its time.
  while (result.end == ProgramOutput::End::exited && ::waitpid(child, &status, WNOHANG) == 0) {
    if (Clock::now() >= end) {
      result.end = ProgramOutput::End::out_of_time;
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  ::kill(-child, SIGKILL);
  if (result.end != ProgramOutput::End::exited) {
    while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
  }
  result.status = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return result;
}

Answer ask_cluster(const std::string& kubectl, const std::vector<std::string>& kind, double seconds) {
  std::vector<std::string> command = {kubectl, "get"};
  command.insert(command.end(), kind.begin(), kind.end());
  command.insert(command.end(), {"-o", "json"});
  const ProgramOutput output = run_program(command, seconds);
  Answer answer;
  const std::string asked = fmt::format("kubectl get {}", kind.front());
  const std::string first_line(trim(output.errors.substr(0, output.errors.find('\n'))));
  switch (output.end) {
    case ProgramOutput::End::not_started:
      answer.problem = fmt::format("{}: cannot start {}: {}", asked, kubectl, output.errors);
      return answer;
    case ProgramOutput::End::out_of_time:
      answer.problem = fmt::format("{}: no answer within {} s", asked, seconds);
      return answer;
    case ProgramOutput::End::too_long:
      answer.problem = fmt::format("{}: the answer is longer than 64 MiB", asked);
      return answer;
    case ProgramOutput::End::exited:
      break;
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
