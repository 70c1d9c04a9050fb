#include "tools/launch/rank_output.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <optional>
#include <system_error>
#include <vector>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::tools {
namespace {

constexpr std::size_t kLongestLine = 65536;
constexpr double kReaderPatience = 3;  ///< seconds in which a terminal that is read takes something

int write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = ::write(fd, text.data(), text.size());
    if (count > 0) {
      text.remove_prefix(static_cast<std::size_t>(count));
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

/// N of "rank-N.log", nothing for any other name.
std::optional<int> rank_of_log(const std::string& name) {
  constexpr std::string_view kBegin = "rank-";
  constexpr std::string_view kEnd = ".log";
  if (!name.starts_with(kBegin) || !name.ends_with(kEnd) || name.size() <= kBegin.size() + kEnd.size()) return {};
  const std::string number = name.substr(kBegin.size(), name.size() - kBegin.size() - kEnd.size());
  const auto rank = parse_number<int>(number);
  return rank && *rank >= 0 && std::to_string(*rank) == number ? rank : std::nullopt;
}

}  // namespace

RankOutput::RankOutput(std::string folder)
    : folder_(std::move(folder)), out_(STDOUT_FILENO, "standard output"), err_(STDERR_FILENO, "standard error") {
  if (folder_.empty()) return;
  std::error_code refused;
  std::filesystem::create_directories(folder_, refused);
  if (::access(folder_.c_str(), W_OK | X_OK) != 0) {
    throw SystemError(fmt::format("--logs {}: cannot write there: {}", folder_, errno_text(errno)));
  }
}

std::string RankOutput::log_of(int rank) const {
  return folder_.empty() ? std::string() : fmt::format("{}/rank-{}.log", folder_, rank);
}

void RankOutput::remove_logs_from(int world_size) const {
  if (folder_.empty()) return;
  std::error_code refused;
  std::vector<std::filesystem::path> old;
  for (std::filesystem::directory_iterator it(folder_, refused), end; !refused && it != end; it.increment(refused)) {
    if (!std::filesystem::is_regular_file(it->symlink_status(refused))) continue;
    if (rank_of_log(it->path().filename()).value_or(-1) >= world_size) old.push_back(it->path());
  }
  for (const auto& path : old) std::filesystem::remove(path, refused);
}

void RankOutput::open(int rank, const std::string& header, bool shows) {
  Log& log = logs_[rank];
  log.shows = shows;
  if (folder_.empty()) return;
  log.file = UniqueFd(::open(log_of(rank).c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!log.file) throw SystemError(fmt::format("--logs {}: cannot write {}", folder_, log_of(rank)));
  write_log(rank, "# " + header + "\n");
}

void RankOutput::write_log(int rank, std::string_view text) {
  Log& log = logs_[rank];
  if (!log.file) return;
  const int error = write_all(log.file.get(), text);
  if (error == 0) return;
  log.file = UniqueFd();
  if (problem_.empty()) problem_ = fmt::format("{} is not complete: {}", log_of(rank), errno_text(error));
}

void RankOutput::take(int rank, Stream stream, std::string_view text) {
  write_log(rank, text);
  if (!logs_[rank].shows) return;
  std::string& line = unfinished_[{rank, stream}];
  line += text;
  const std::size_t end = line.find_last_of("\n\r");
  const std::size_t ready = end != std::string::npos ? end + 1 : line.size() > kLongestLine ? line.size() : 0;
  show(stream, std::string_view(line).substr(0, ready));
  line.erase(0, ready);
}

void RankOutput::write_file(const std::string& name, const std::string& text) {
  if (folder_.empty()) return;
  const std::string path = folder_ + "/" + name;
  const std::string draft = path + ".new";
  const UniqueFd file(::open(draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!file || write_all(file.get(), text) != 0 || ::rename(draft.c_str(), path.c_str()) != 0) {
    throw SystemError(fmt::format("--logs {}: cannot write {}", folder_, path));
  }
}

void RankOutput::say(const std::string& line) { err_.write("deep_ep: " + line + "\n"); }

std::string RankOutput::finish() {
  for (auto& [which, line] : unfinished_) show(which.second, line);
  unfinished_.clear();
  const std::string of_output = out_.finish(kReaderPatience);  // waited for whatever became of the logs
  if (problem_.empty()) problem_ = of_output;
  if (!problem_.empty()) say(problem_);
  const std::string of_errors = err_.finish(kReaderPatience);
  return problem_.empty() ? of_errors : problem_;
}

}  // namespace deep_ep::tools
