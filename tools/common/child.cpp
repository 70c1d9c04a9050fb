#include "tools/common/child.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"
#include "tools/common/pipe.hpp"

extern char** environ;

namespace deep_ep::tools {
namespace {

using Clock = std::chrono::steady_clock;

/// Variables of a child as execve wants them.
std::vector<std::string> environment_for(const ChildCommand& command) {
  std::vector<std::string> all;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const bool replaced = std::ranges::any_of(
        command.variables, [&](const auto& variable) { return text.starts_with(variable.first + '='); });
    if (!replaced) all.push_back(text);
  }
  for (const auto& [name, value] : command.variables) all.push_back(name + '=' + value);
  return all;
}

std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> all;
  for (std::string& word : words) all.push_back(word.data());
  all.push_back(nullptr);
  return all;
}

[[noreturn]] void become(const std::vector<char*>& arguments, const std::vector<char*>& environment, pid_t parent,
                         int output, int errors) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(127);
  signal(SIGPIPE, SIG_DFL);
  const int nothing = open("/dev/null", O_RDONLY);
  dup2(nothing, STDIN_FILENO);
  dup2(output, STDOUT_FILENO);
  dup2(errors, STDERR_FILENO);
  execvpe(arguments.front(), arguments.data(), environment.data());
  const char* what = std::strerror(errno);
  for (const char* text : {static_cast<const char*>(arguments.front()), ": ", what, "\n"}) {
    if (write(STDERR_FILENO, text, std::strlen(text)) < 0) break;
  }
  _exit(127);
}

/// A child whose output becomes a ChildResult.
class Listened {
 public:
  explicit Listened(const ChildCommand& command) : most_output_(command.most_output), child_(command) {}

  /// Waits for output for at most a moment, and takes it.
  void take_output(ChildResult& result) {
    std::array<pollfd, 2> polled{pollfd{child_.output.get(), POLLIN, 0}, pollfd{child_.errors.get(), POLLIN, 0}};
    constexpr int kMoment = 20;  // ms
    if (poll(polled.data(), polled.size(), kMoment) <= 0) return;
    for (std::size_t i = 0; i < polled.size(); ++i) {
      if (polled[i].revents == 0) continue;
      UniqueFd& from = i == 0 ? child_.output : child_.errors;
      std::string& text = i == 0 ? result.output : result.errors;
      const ssize_t count = read(from.get(), bytes_.data(), bytes_.size());
      if (count > 0) {
        text.append(bytes_.data(), static_cast<std::size_t>(count));
      } else if (count == 0 || errno != EINTR) {
        from = UniqueFd();
      }
    }
    if (result.output.size() <= most_output_ && result.errors.size() <= most_output_) return;
    result.too_long = true;
    kill_all();
    child_.output = UniqueFd();
    child_.errors = UniqueFd();
  }
  bool is_silent() const { return !child_.output && !child_.errors; }

  /// Whether it has ended; then `result` has its status.
  bool has_ended(ChildResult& result) {
    const std::optional<int> status = child_.status();
    result.status = status.value_or(result.status);
    return status.has_value();
  }
  void kill_all() const { child_.signal_all(SIGKILL); }

 private:
  std::size_t most_output_;
  Child child_;
  std::array<char, 65536> bytes_;
};

}  // namespace

Child::Child(const ChildCommand& command) {
  Pipe out("cannot start " + command.words.front());
  Pipe err("cannot start " + command.words.front());
  // Everything that allocates comes before the fork: this process may have threads.
  std::vector<std::string> words = command.words;
  std::vector<std::string> variables = environment_for(command);
  const std::vector<char*> arguments = pointers(words);
  const std::vector<char*> environment = pointers(variables);
  const pid_t parent = getpid();
  process_ = fork();
  if (process_ < 0) fail<SystemError>("cannot start {}: {}", words.front(), errno_text(errno));
  if (process_ == 0) become(arguments, environment, parent, out.in.get(), err.in.get());
  setpgid(process_, process_);  // here as well, so that it is done when this process wants to kill the group
  output = std::move(out.out);
  errors = std::move(err.out);
}

Child::~Child() {
  signal_all(SIGKILL);
  // A driver may hold a process in a call that no signal ends: then it is left to init.
  const Clock::time_point end = Clock::now() + std::chrono::seconds(5);
  while (!status() && Clock::now() < end) poll(nullptr, 0, 2);
}

std::optional<int> Child::status() {
  int status = 0;
  if (!status_ && waitpid(process_, &status, WNOHANG) == process_) {
    status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  return status_;
}

void Child::signal_all(int signal) const { kill(-process_, signal); }

std::string describe_status(int status) {
  if (status <= 128 || status > 128 + 64) return fmt::format("status {}", status);
  return fmt::format("signal {} ({})", status - 128, strsignal(status - 128));
}

std::string ChildResult::reason() const {
  if (timed_out) return "it took too long";
  if (too_long) return "it printed too much";
  std::string line;
  std::size_t end = errors.find_last_not_of(" \n\r");
  if (end != std::string::npos) {
    const std::size_t begin = errors.find_last_of('\n', end);
    line = errors.substr(begin == std::string::npos ? 0 : begin + 1,
                         end - (begin == std::string::npos ? 0 : begin + 1) + 1);
  }
  constexpr const char* kPrefix = "deep_ep: ";
  if (line.starts_with(kPrefix)) line = line.substr(std::strlen(kPrefix));
  if (!line.empty()) return line;
  return status > 128 ? fmt::format("it was ended by signal {}", status - 128)
                      : fmt::format("it ended with status {}", status);
}

std::vector<ChildResult> run_children(const std::vector<ChildCommand>& commands, double seconds) {
  const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
  std::vector<std::unique_ptr<Listened>> children;
  for (const ChildCommand& command : commands) children.push_back(std::make_unique<Listened>(command));
  std::vector<ChildResult> results(commands.size());
  // What a child has started may keep its pipes open after it has ended: that is not waited for for long.
  std::size_t running = children.size();
  int silent_rounds = 0;
  constexpr int kSilence = 25;
  while (running > 0 || silent_rounds < kSilence) {
    running = 0;
    bool all_silent = true;
    bool failed = false;
    for (std::size_t i = 0; i < children.size(); ++i) {
      children[i]->take_output(results[i]);
      if (!children[i]->has_ended(results[i]))
        ++running;
      else if (results[i].status != 0)
        failed = true;
      all_silent = all_silent && children[i]->is_silent();
    }
    if (running == 0 && all_silent) break;
    silent_rounds = running == 0 ? silent_rounds + 1 : 0;
    const bool late = Clock::now() > deadline;
    // Killed, and still not gone: see ~Child().
    if (Clock::now() > deadline + std::chrono::seconds(5)) {
      for (std::size_t i = 0; i < children.size(); ++i) {
        if (!children[i]->has_ended(results[i])) results[i].timed_out = true;
      }
      break;
    }
    if (!late && !(failed && running > 0)) continue;
    for (std::size_t i = 0; i < children.size(); ++i) {
      if (late && !children[i]->has_ended(results[i])) results[i].timed_out = true;
      if (late || running > 0) children[i]->kill_all();
    }
  }
  return results;
}

std::string find_program(const std::string& name, const std::string& path) {
  for (const std::string_view folder : split(path, ':')) {
    if (folder.empty()) continue;
    std::string file = fmt::format("{}/{}", folder, name);
    if (access(file.c_str(), X_OK) == 0) return file;
  }
  return {};
}

std::string own_program() { return std::filesystem::read_symlink("/proc/self/exe").string(); }

}  // namespace deep_ep::tools
