#include "tools/common/crew.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <string_view>

#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/unique_fd.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::tools {
namespace {

constexpr double kGrace = 5;  ///< seconds between the request to end and the end

volatile std::sig_atomic_t interrupted = 0;

bool input_has_ended() {
  pollfd input{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
  if (::poll(&input, 1, 0) <= 0) return false;
  char byte = 0;
  return ::read(STDIN_FILENO, &byte, 1) == 0;
}

}  // namespace

Crew::Crew() {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const auto before = ::signal(signal, [](int which) { interrupted = which; });
    if (before == SIG_IGN) ::signal(signal, SIG_IGN);  // as nohup wants it
  }
  ::signal(SIGPIPE, SIG_IGN);
}

Crew::~Crew() { signal_all(SIGKILL); }

void Crew::start(const std::string& name, const std::vector<std::string>& command,
                 const std::vector<std::string>& variables, int input, int output) {
  std::vector<char*> words;
  for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  const auto is_given = [&](std::string_view one) {
    const std::string_view name = one.substr(0, one.find('=') + 1);
    return std::any_of(variables.begin(), variables.end(),
                       [&](const std::string& variable) { return variable.starts_with(name); });
  };
  std::vector<char*> environment;
  for (char** one = environ; *one != nullptr; ++one) {
    if (!is_given(*one)) environment.push_back(*one);
  }
  for (const std::string& one : variables) environment.push_back(const_cast<char*>(one.c_str()));
  environment.push_back(nullptr);
  const UniqueFd nothing(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const pid_t process = ::fork();
  if (process < 0) fail<SystemError>("cannot start {}: {}", name, errno_text(errno));
  if (process == 0) {
    ::setpgid(0, 0);                     // whatever it starts ends with it
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);  // not SIGKILL: a launcher among them ends its own
    ::signal(SIGPIPE, SIG_DFL);
    ::dup2(input < 0 ? nothing.get() : input, STDIN_FILENO);
    if (output >= 0) {
      ::dup2(output, STDOUT_FILENO);
      ::dup2(output, STDERR_FILENO);
    }
    ::execvpe(words[0], words.data(), environment.data());
    ::dprintf(STDERR_FILENO, "deep_ep: cannot start '%s': %s\n", words[0], ::strerror(errno));
    ::_exit(127);
  }
  ::setpgid(process, process);
  members_.push_back({process, name, {}});
}

bool Crew::has_just_ended(Member& member) {
  int status = 0;
  if (member.status || ::waitpid(member.process, &status, WNOHANG) != member.process) return false;
  member.status = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  ::kill(-member.process, SIGKILL);  // what it has left behind
  return true;
}

int Crew::run(bool lifeline, const std::function<void()>& request_end, const std::function<void()>& meanwhile) {
  int status = 0;
  std::optional<Deadline> grace;
  bool killed = false;
  while (std::any_of(members_.begin(), members_.end(), [](const Member& one) { return !one.status; })) {
    meanwhile();
    for (Member& member : members_) {
      if (!has_just_ended(member) || *member.status == 0 || status != 0) continue;
      status = *member.status;
      fmt::print(stderr, "deep_ep: {} ended with status {}; the others are ended\n", member.name, status);
    }
    if (status == 0 && interrupted != 0) status = 128 + interrupted;
    if (status == 0 && lifeline && input_has_ended()) status = 128 + SIGHUP;
    if (status != 0 && !grace) {
      grace.emplace(kGrace);
      request_end();
    }
    if (grace && grace->expired() && !killed) {
      signal_all(SIGKILL);
      killed = true;
    }
  }
  return status;
}

void Crew::signal_all(int signal) const {
  for (const Member& member : members_) {
    if (!member.status) ::kill(-member.process, signal);
  }
}

}  // namespace deep_ep::tools
