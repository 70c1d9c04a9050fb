#include "tools/launch/crew.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <utility>

#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::tools {
namespace {

volatile std::sig_atomic_t interruptions_seen = 0;
volatile std::sig_atomic_t last_signal = 0;

bool is_there(pid_t group) { return ::kill(-group, 0) == 0 || errno == EPERM; }

/// The guard's life: learns of process groups, and ends those that are left when nobody can tell it any more. A zero
/// says that all is well. It has nothing open, so that nobody waits for it.
[[noreturn]] void guard(int from) {
  ::setpgid(0, 0);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) ::signal(signal, SIG_IGN);
  ::dup2(from, 0);
  if (::close_range(1, ~0U, 0) != 0) {  // Linux before 5.9; it is started early, when little is open
    for (int fd = 1; fd < 1024; ++fd) ::close(fd);
  }
  std::array<pid_t, 4096> groups{};
  std::size_t count = 0;
  for (pid_t word = 0; ::read(0, &word, sizeof word) == ssize_t{sizeof word};) {
    if (word == 0) ::_exit(0);
    if (word > 0 && count < groups.size()) groups[count++] = word;
    if (word < 0)
      count = static_cast<std::size_t>(std::remove(groups.begin(), groups.begin() + count, -word) - groups.begin());
  }
  constexpr int kGraceInTenths = 50;
  for (std::size_t i = 0; i < count; ++i) ::kill(-groups[i], SIGTERM);
  for (int tenth = 0; tenth < kGraceInTenths; ++tenth) {
    if (std::none_of(groups.begin(), groups.begin() + count, is_there)) break;
    ::poll(nullptr, 0, 100);
  }
  for (std::size_t i = 0; i < count; ++i) ::kill(-groups[i], SIGKILL);
  ::_exit(0);
}

/// Of /proc/PID/stat: the word behind the state, which is behind the name in parentheses.
pid_t parent_of(const char* process) {
  std::string text;
  std::getline(std::ifstream(fmt::format("/proc/{}/stat", process)), text);
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string::npos || name_end + 4 > text.size()) return -1;
  const std::string_view rest = std::string_view(text).substr(name_end + 4);
  return parse_number<pid_t>(rest.substr(0, rest.find(' '))).value_or(-1);
}

std::vector<pid_t> children_of_this_process() {
  std::vector<pid_t> found;
  DIR* folder = ::opendir("/proc");
  if (folder == nullptr) return found;
  while (const dirent* entry = ::readdir(folder)) {
    const auto process = parse_number<pid_t>(std::string_view(entry->d_name));
    if (process && parent_of(entry->d_name) == ::getpid()) found.push_back(*process);
  }
  ::closedir(folder);
  return found;
}

}  // namespace

std::string describe_status(int status) {
  if (status <= 128 || status > 128 + 64) return fmt::format("status {}", status);
  const char* name = ::strsignal(status - 128);
  return fmt::format("signal {} ({})", status - 128, name != nullptr ? name : "?");
}

Crew::Crew(Loop& loop) : loop_(loop), strangers_(children_of_this_process()) {
  Pipe pipe("launch: cannot start ranks");
  const pid_t self = ::fork();
  if (self < 0) fail<SystemError>("launch: cannot start ranks: {}", errno_text(errno));
  if (self == 0) {
    pipe.in = UniqueFd();
    guard(pipe.out.get());
  }
  guard_ = self;
  to_guard_ = std::move(pipe.in);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const auto before = ::signal(signal, [](int which) {
      last_signal = which;
      interruptions_seen = interruptions_seen + 1;
    });
    if (before == SIG_IGN) ::signal(signal, SIG_IGN);  // as nohup wants it
  }
  ::signal(SIGPIPE, SIG_IGN);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);  // what ranks leave behind becomes ours, to be ended
}

Crew::~Crew() {
  signal_all(SIGKILL);
  kill_orphans();
  tell_guard(0);
  to_guard_ = UniqueFd();
  ::waitpid(guard_, nullptr, 0);
}

int Crew::interruptions() const { return interruptions_seen; }
int Crew::interrupted_by() const { return last_signal; }

void Crew::tell_guard(pid_t group) const {
  [[maybe_unused]] const ssize_t written = ::write(to_guard_.get(), &group, sizeof group);
}

void Crew::become(const std::vector<std::string>& command, std::vector<std::string> variables, int input, int output,
                  int error) {
  ::setpgid(0, 0);                     // whatever it starts ends with it
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);  // the guard does the rest
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    if (::signal(signal, SIG_DFL) == SIG_IGN) ::signal(signal, SIG_IGN);
  }
  ::signal(SIGPIPE, SIG_DFL);
  ::dup2(input, STDIN_FILENO);
  ::dup2(output, STDOUT_FILENO);
  ::dup2(error, STDERR_FILENO);
  std::vector<char*> words;
  for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  for (std::string& one : variables) ::putenv(one.data());
  ::execvp(words[0], words.data());
  ::dprintf(STDERR_FILENO, "deep_ep: cannot start '%s': %s\n", words[0], ::strerror(errno));
  ::_exit(errno == ENOENT ? 127 : 126);
}

void Crew::start(const std::string& name, const std::vector<std::string>& command,
                 const std::vector<std::string>& variables, int input, int output, Handlers handlers) {
  const UniqueFd nothing(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  auto member = std::make_unique<Member>();
  member->handlers = std::move(handlers);
  Pipe err("launch: cannot start " + name);
  Pipe out("launch: cannot start " + name);
  const pid_t process = ::fork();
  if (process < 0) fail<SystemError>("launch: cannot start {}: {}", name, errno_text(errno));
  if (process == 0) {
    become(command, variables, input < 0 ? nothing.get() : input, output < 0 ? out.in.get() : output, err.in.get());
  }
  ::setpgid(process, process);
  tell_guard(process);
  member->process = process;
  member->err = std::move(err.out);
  if (output < 0) member->out = std::move(out.out);
  member->ended = UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, process, 0)));
  Member& one = *members_.emplace_back(std::move(member));
  ++running_;
  if (!one.ended)
    fail<SystemError>("launch: cannot watch {}: {} (Linux 5.3 or later is needed)", name, errno_text(errno));
  for (UniqueFd* from : {&one.out, &one.err}) {
    if (*from) ::fcntl(from->get(), F_SETFL, O_NONBLOCK);
  }
  if (reading_) watch_output(one);
  loop_.watch(one.ended.get(), [this, &one] { take_end(one); });
}

void Crew::watch_output(Member& member) {
  for (auto [from, stream] : {std::pair(&member.out, Stream::out), std::pair(&member.err, Stream::err)}) {
    if (*from) loop_.watch(from->get(), [this, &member, from, stream] { read(member, *from, stream); });
  }
}

void Crew::set_reading(bool on) {
  if (on == reading_) return;
  reading_ = on;
  for (const auto& member : members_) {
    if (on) {
      watch_output(*member);
      continue;
    }
    for (const UniqueFd* from : {&member->out, &member->err}) {
      if (*from) loop_.forget(from->get());
    }
  }
}

void Crew::read(Member& member, UniqueFd& from, Stream stream) {
  std::array<char, 65536> bytes;
  const ssize_t count = ::read(from.get(), bytes.data(), bytes.size());
  if (count > 0) return member.handlers.on_output(stream, {bytes.data(), static_cast<std::size_t>(count)});
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
  loop_.forget(from.get());
  from = UniqueFd();
}

void Crew::take_end(Member& member) {
  int status = 0;
  if (::waitpid(member.process, &status, WNOHANG) != member.process) return;
  loop_.forget(member.ended.get());
  member.ended = UniqueFd();
  ::kill(-member.process, SIGKILL);  // what it has left behind
  tell_guard(-member.process);
  member.running = false;
  --running_;
  // Its last words: what a pipe holds. Whoever still writes into it has left the group, and is not waited for.
  constexpr int kMostReads = 32;
  for (auto [from, stream] : {std::pair(&member.out, Stream::out), std::pair(&member.err, Stream::err)}) {
    for (int i = 0; i < kMostReads && *from; ++i) {
      pollfd ready{.fd = from->get(), .events = POLLIN, .revents = 0};
      if (::poll(&ready, 1, 0) <= 0) break;
      read(member, *from, stream);
    }
  }
  member.handlers.on_end(WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status));
}

void Crew::signal_all(int signal) const {
  for (const auto& member : members_) {
    if (member->running) ::kill(-member->process, signal);
  }
}

void Crew::reap_orphans() {
  while (true) {
    siginfo_t ended{};
    if (::waitid(P_ALL, 0, &ended, WEXITED | WNOHANG | WNOWAIT) != 0 || ended.si_pid == 0) return;
    const auto is_it = [&](const auto& member) { return member->running && member->process == ended.si_pid; };
    if (ended.si_pid == guard_ || std::ranges::any_of(members_, is_it)) return;  // whoever waits for it is told
    ::waitpid(ended.si_pid, nullptr, 0);
    std::erase(strangers_, ended.si_pid);  // its number may be given again
  }
}

void Crew::kill_orphans() const {
  const Deadline deadline(5);    // a driver may hold a process longer, which then is init's
  while (!deadline.expired()) {  // the children of an orphan become orphans
    bool some = false;
    for (const pid_t child : children_of_this_process()) {
      if (child == guard_ || std::ranges::find(strangers_, child) != strangers_.end()) continue;
      ::kill(child, SIGKILL);
      ::waitpid(child, nullptr, WNOHANG);
      some = true;
    }
    if (!some) return;
    ::poll(nullptr, 0, 2);
  }
}

}  // namespace deep_ep::tools
