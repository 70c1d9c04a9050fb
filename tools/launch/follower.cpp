#include "tools/launch/follower.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <optional>
#include <string>
#include <utility>

#include "deep_ep/error.hpp"
#include "tools/common/version.hpp"
#include "tools/launch/link.hpp"
#include "tools/launch/meeting.hpp"
#include "tools/launch/ranks.hpp"

namespace deep_ep::tools {
namespace {

class Follower {
 public:
  /// `output`: null where the first launcher gets it all.
  Follower(const LaunchOptions& options, Loop& loop, Crew& crew, RankOutput* output)
      : options_(options), loop_(loop), crew_(crew), output_(output), ending_(crew) {}

  int run(UniqueFd in, UniqueFd out, const Hello& hello) {
    Link link(loop_, std::move(in), std::move(out),
              {.on_word = [&](Word word, std::string_view body) { take(word, body); },
               .on_noise = nullptr,
               .on_end = [&](const std::string& why) { lose_first(why); }});
    link_ = &link;
    link.send(Word::hello, to_words(hello));
    while (!verdict_ || crew_.running() != 0) {
      // A rank waits for a network or a reader that is slow, but not for one that stands still.
      const bool behind = link.is_behind() || (output_ != nullptr && output_->is_behind());
      crew_.set_reading(!behind);
      loop_.wait(behind ? Loop::kBriefTick : Loop::kTick);
      look_around();
      if (crew_.running() != 0 && !ending_.go_on()) {
        say("some ranks do not die; they are left alone");
        break;
      }
    }
    // The orphans' pipes may hold up nobody, and the first launcher shall read what there is.
    for (const Deadline patience(options_.silence); !link.has_sent_all() && !patience.expired();)
      loop_.wait(Loop::kTick);
    // There is none where the ranks did not die before it came.
    return verdict_ ? verdict_->status : failure_.value_or(1);
  }

 private:
  void say(const std::string& text) const {
    if (output_ != nullptr) output_->say(text);
  }

  void take(Word word, std::string_view body) {
    try {
      if (word == Word::start) start(from_words<Assignment>(body));
      if (word == Word::end) end(from_words<Verdict>(body));
    } catch (const nlohmann::json::exception& error) {
      lose_first(fmt::format("it says what makes no sense: {}", error.what()));
    }
  }

  void start(const Assignment& assignment) {
    if (started_ || ending_.has_begun()) return;
    started_ = true;
    try {
      if (output_ != nullptr) output_->remove_logs_from(assignment.world_size);
      for (int i = 0; output_ != nullptr && i < assignment.ranks; ++i) {
        const int rank = assignment.first_rank + i;
        output_->open(rank, header_of(rank, assignment, own_host_name(), options_.command), true);
      }
      start_ranks(crew_, options_.command, assignment,
                  {.on_output = [this](int rank, Stream stream, std::string_view text) { print(rank, stream, text); },
                   .on_end = [this](int rank, int status) { take_end(rank, status); }});
    } catch (const Error& error) {
      report({.status = 1, .rank = -1, .text = error.what()});
    }
  }

  void print(int rank, Stream stream, std::string_view text) {
    if (output_ != nullptr) return output_->take(rank, stream, text);
    link_->send(Word::output, fmt::format("{} {} {}", rank, static_cast<char>(stream), text));
  }

  void take_end(int rank, int status) {
    if (status != 0) return report({.status = status, .rank = rank, .text = {}});
    if (crew_.running() == 0 && !ending_.has_begun()) link_->send(Word::done);
  }

  /// Only what comes first counts.
  void report(const Failure& failure) {
    if (!failure_ && !ending_.has_begun()) {
      failure_ = failure.status;
      link_->send(Word::failed, to_words(failure));
    }
    ending_.begin();
  }

  void end(const Verdict& verdict) {
    if (!verdict_ && verdict.status != 0) say(verdict.text);
    if (!verdict_) verdict_ = verdict;
    verdict.at_once ? ending_.kill() : ending_.begin();
  }

  void lose_first(const std::string& why) {
    if (!verdict_) {
      end({.status = failure_.value_or(1),
           .text = fmt::format("the launcher of the first node went away: {}; the ranks here are ended", why)});
    }
    ending_.begin();
  }

  void look_around() {
    crew_.reap_orphans();
    for (; interruptions_ < crew_.interruptions(); ++interruptions_) {
      if (ending_.has_begun()) ending_.kill();
      const int status = 128 + crew_.interrupted_by();
      report({.status = status, .rank = -1, .text = fmt::format("was asked to end by {}", describe_status(status))});
    }
    if (link_->is_open() && link_->silent_for() > options_.silence) {
      link_->close();
      lose_first(fmt::format("nothing was heard of it for {} s", options_.silence));
    }
    if (!pause_ || pause_->expired()) {
      pause_.emplace(1);
      link_->send(Word::ping);
    }
  }

  const LaunchOptions& options_;
  Loop& loop_;
  Crew& crew_;
  RankOutput* output_;
  Ending ending_;
  Link* link_ = nullptr;
  bool started_ = false;
  int interruptions_ = 0;
  std::optional<int> failure_;
  std::optional<Verdict> verdict_;
  std::optional<Deadline> pause_;
};

}  // namespace

int follow_by_tcp(const LaunchOptions& options, const Place& place) {
  Loop loop;
  Crew crew(loop);
  RankOutput output(options.logs);
  UniqueFd socket = call_until_answered(
      place.master, place.port + 2, options.join_timeout, [&] { return crew.interruptions() != 0; },
      [&](const std::string& why) {
        output.say(fmt::format("node {} of {} waits for the first node at {} port {}: {}", place.node, place.nodes,
                               place.master, place.port + 2, why));
      });
  if (!socket) return 128 + crew.interrupted_by();
  UniqueFd copy(::fcntl(socket.get(), F_DUPFD_CLOEXEC, 0));
  int status = Follower(options, loop, crew, &output)
                   .run(std::move(socket), std::move(copy),
                        {.version = full_version(),
                         .node = place.node,
                         .nodes = place.nodes,
                         .ranks = options.ranks,
                         .host = own_host_name(),
                         .topology = options.topology});
  crew.kill_orphans();
  if (!output.finish().empty() && status == 0) status = 1;
  return status;
}

int follow_by_ssh(const LaunchOptions& options) {
  Loop loop;
  Crew crew(loop);
  // Whatever else this process starts or prints must not get between.
  UniqueFd in(::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3));
  UniqueFd out(::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3));
  ::dup2(STDERR_FILENO, STDOUT_FILENO);
  return Follower(options, loop, crew, nullptr)
      .run(std::move(in), std::move(out),
           {.version = full_version(),
            .node = 0,
            .nodes = 0,
            .ranks = options.ranks,
            .host = own_host_name(),
            .topology = {}});
}

}  // namespace deep_ep::tools
