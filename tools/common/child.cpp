#include "tools/common/child.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>

#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"

namespace deep_ep::tools {
namespace {

[[noreturn]] void become(const std::vector<char*>& arguments, pid_t parent, int output, int errors) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(127);
  signal(SIGPIPE, SIG_DFL);
  const int nothing = open("/dev/null", O_RDONLY);
  dup2(nothing, STDIN_FILENO);
  dup2(output, STDOUT_FILENO);
  dup2(errors, STDERR_FILENO);
  execvp(arguments.front(), arguments.data());
  const char* what = std::strerror(errno);
  for (const char* text : {static_cast<const char*>(arguments.front()), ": ", what, "\n"}) {
    if (write(STDERR_FILENO, text, std::strlen(text)) < 0) break;
  }
  _exit(127);
}

}  // namespace

Children::Children(const std::vector<ChildCommand>& commands) : epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
  for (const ChildCommand& command : commands) start(command);
}

void Children::start(const ChildCommand& command) {
  const auto check = [&](int result) {
    if (result < 0) fail<SystemError>("cannot start {}: {}", command.words.front(), errno_text(errno));
  };
  // Everything that allocates comes before the fork: this process may have threads.
  std::vector<std::string> words = command.words;
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t process = fork();
  check(process);
  if (process == 0) become(arguments, parent, command.output, command.errors);
  setpgid(process, process);  // here as well, so that it is done when this process wants to kill the group
  children_.push_back({process, UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, process, 0)))});
  const UniqueFd& ended = children_.back().ended;
  if (!ended) return;
  epoll_event event{.events = EPOLLIN, .data = {.u64 = children_.size() - 1}};
  check(::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, ended.get(), &event));
}

Children::~Children() {
  signal_all(SIGKILL);
  const Deadline end(5);
  for (Child& child : children_) {
    while (!child.status && waitpid(child.process, nullptr, WNOHANG) == 0 && !end.expired()) poll(nullptr, 0, 2);
  }
}

void Children::step() {
  std::array<epoll_event, 64> events;
  // The child that ended first comes first: which of two children ended before the other matters.
  const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 200);
  for (int i = 0; i < count; ++i) take_end(events[static_cast<std::size_t>(i)].data.u64);
  for (std::size_t i = 0; i < children_.size(); ++i) {
    if (!children_[i].ended) take_end(i);
  }
}

void Children::take_end(std::size_t which) {
  Child& child = children_[which];
  int status = 0;
  if (child.status || waitpid(child.process, &status, WNOHANG) != child.process) return;
  kill(-child.process, SIGKILL);
  child.ended = UniqueFd();
  child.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  if (*child.status != 0 && !first_failure_) first_failure_ = which;
}

std::size_t Children::running() const {
  return static_cast<std::size_t>(std::ranges::count_if(children_, [](const Child& one) { return !one.status; }));
}

void Children::signal_all(int signal) const {
  for (const Child& child : children_) {
    if (!child.status) kill(-child.process, signal);
  }
}

std::string describe_status(int status) {
  if (status <= 128 || status > 128 + 64) return fmt::format("status {}", status);
  return fmt::format("signal {} ({})", status - 128, strsignal(status - 128));
}

std::string own_program() { return std::filesystem::read_symlink("/proc/self/exe").string(); }

}  // namespace deep_ep::tools
