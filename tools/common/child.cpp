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
#include "deep_ep/error.hpp"

extern char** environ;

namespace deep_ep::tools {
namespace {

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

}  // namespace

Children::Children(const std::vector<ChildCommand>& commands, Print print)
    : print_(std::move(print)), epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
  children_.reserve(commands.size());
  for (const ChildCommand& command : commands) start(command);
}

void Children::start(const ChildCommand& command) {
  std::vector<std::string> words = command.words;
  const auto check = [&](int result) {
    if (result < 0) fail<SystemError>("cannot start {}: {}", words.front(), errno_text(errno));
  };
  int output[2], errors[2];
  check(::pipe2(output, O_CLOEXEC));
  UniqueFd to_read(output[0]), to_write(output[1]);
  check(::pipe2(errors, O_CLOEXEC));
  UniqueFd errors_to_read(errors[0]), errors_to_write(errors[1]);
  // Everything that allocates comes before the fork: this process may have threads.
  std::vector<std::string> variables = environment_for(command);
  const std::vector<char*> arguments = pointers(words);
  const std::vector<char*> environment = pointers(variables);
  const pid_t parent = getpid();
  const pid_t process = fork();
  check(process);
  if (process == 0) become(arguments, environment, parent, to_write.get(), errors_to_write.get());
  setpgid(process, process);  // here as well, so that it is done when this process wants to kill the group
  UniqueFd ended(static_cast<int>(::syscall(SYS_pidfd_open, process, 0)));
  Child& child =
      children_.emplace_back(Child{process, {std::move(to_read), std::move(errors_to_read)}, std::move(ended)});
  for (const int fd : {child.output[0].get(), child.output[1].get(), child.ended.get()}) {
    if (fd < 0) continue;
    if (fd != child.ended.get()) ::fcntl(fd, F_SETFL, O_NONBLOCK);
    const std::uint64_t tag = 2 * (children_.size() - 1) + (fd == child.ended.get() ? 1 : 0);
    epoll_event event{.events = EPOLLIN, .data = {.u64 = tag}};
    check(::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event));
  }
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
  // The child that became ready first comes first: which of two children ended before the other matters.
  const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 200);
  for (int i = 0; i < count; ++i) {
    const std::uint64_t tag = events[static_cast<std::size_t>(i)].data.u64;
    tag % 2 == 1 ? take_end(tag / 2) : take_output(tag / 2);
  }
  for (std::size_t i = 0; i < children_.size(); ++i) {
    if (!children_[i].ended) take_end(i);
  }
}

void Children::take_output(std::size_t which) {
  for (const int stream : {0, 1}) {
    UniqueFd& from = children_[which].output[stream];
    std::array<char, 65536> bytes;
    const ssize_t count = from ? ::read(from.get(), bytes.data(), bytes.size()) : -1;
    if (count == 0) from = UniqueFd();
    if (count > 0) print_(which, stream, {bytes.data(), static_cast<std::size_t>(count)});
  }
}

void Children::take_end(std::size_t which) {
  Child& child = children_[which];
  int status = 0;
  if (child.status || waitpid(child.process, &status, WNOHANG) != child.process) return;
  kill(-child.process, SIGKILL);
  for (int i = 0; i < 3; ++i) take_output(which);  // what a pipe holds; more is of a process that has left the group
  for (const int stream : {0, 1}) print_(which, stream, {});
  for (UniqueFd* one : {&child.output[0], &child.output[1], &child.ended}) *one = UniqueFd();
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

Children::Print pass_on(std::FILE* output) {
  return [output](std::size_t, int stream, std::string_view text) {
    std::FILE* const out = stream == 0 ? output : stderr;
    std::fwrite(text.data(), 1, text.size(), out);
    std::fflush(out);
  };
}

std::string describe_status(int status) {
  if (status <= 128 || status > 128 + 64) return fmt::format("status {}", status);
  return fmt::format("signal {} ({})", status - 128, strsignal(status - 128));
}

std::string own_program() { return std::filesystem::read_symlink("/proc/self/exe").string(); }

}  // namespace deep_ep::tools
