#include "tools/launch/coordinator.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "csrc/support/token.hpp"
#include "deep_ep/error.hpp"
#include "kernels/common/limits.hpp"
#include "tools/common/version.hpp"
#include "tools/launch/hostfile.hpp"
#include "tools/launch/link.hpp"
#include "tools/launch/meeting.hpp"
#include "tools/launch/ranks.hpp"
#include "tools/launch/remote_shell.hpp"

namespace deep_ep::tools {
namespace {

constexpr double kMostOfAStranger = 10;  ///< seconds for a caller to say who it is
constexpr double kMostOfAnEnd = 20;      ///< seconds for a node to end, once told to

/// Somebody who has called, or whom ssh leads to.
struct JoiningNode {
  int node = -1;  ///< -1: has not said who it is
  std::unique_ptr<Link> link;
};

struct Node {
  std::string name;      ///< for people
  std::string topology;  ///< where it stands, if anybody says
  int ranks = 0;
  bool is_local = false;
  JoiningNode* caller = nullptr;  ///< null: has not joined; of the local node always
  bool joined = false;
  bool done = false;  ///< all its ranks have ended well
  int number = 0;     ///< in the order of ranks
  int first_rank = 0;
};

/// The same for all ranks of this run, and another one for those of other runs.
std::string token_of_job() {
  const std::string agreed = environment::Reader().value("DEEP_EP_JOB_TOKEN").text;
  return agreed.empty() ? to_string(random_token()) : agreed;
}

class Coordinator {
 public:
  Coordinator(const LaunchOptions& options, int nodes)
      : options_(options),
        crew_(loop_),
        output_(options.logs),
        ending_(crew_),
        nodes_(static_cast<std::size_t>(nodes)),
        join_deadline_(options.join_timeout) {}

  /// The node of this process.
  void add_local(const std::string& name) {
    Node& node = nodes_[0];
    node.name = name;
    node.ranks = options_.ranks;
    node.topology = options_.topology;
    node.is_local = node.joined = true;
  }

  /// The others will call.
  void expect_callers(int port) {
    listener_ = listen_on(port);
    loop_.watch(listener_.get(), [this] {
      if (UniqueFd socket = accept_caller(listener_)) {
        const int yes = 1;
        ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        UniqueFd copy(::fcntl(socket.get(), F_DUPFD_CLOEXEC, 0));
        add_caller(-1, std::move(socket), std::move(copy));
      }
    });
  }

  void start_on(std::size_t i, const Host& host) {
    nodes_[i].name = host.name;
    nodes_[i].topology = host.topology;
    by_ssh_ = true;
    Pipe to("launch: cannot start ranks");
    Pipe from("launch: cannot start ranks");
    crew_.start(fmt::format("'{}' for {}", options_.ssh, host.name), remote_shell(options_, host), {}, to.out.get(),
                from.in.get(),
                {.on_output = [this, name = host.name](Stream, std::string_view text) { show_noise(name, text); },
                 .on_end = [this, i](int status) { take_end_of_ssh(nodes_[i], status); }});
    add_caller(static_cast<int>(i), std::move(from.out), std::move(to.in));
  }

  /// Ranks of this node that look for the name would not wait for it to become known.
  void await_name(const std::string& master) { master_known_ = watch_for_name(master); }

  int run(const std::string& master, int port) {
    master_ = master;
    port_ = port;
    begin_if_all_are_here();
    while (!is_over()) {
      const bool behind = output_.is_behind();
      crew_.set_reading(!behind);
      for (const auto& caller : callers_) caller->link->set_reading(!behind);
      loop_.wait(behind ? Loop::kBriefTick : Loop::kTick);
      look_around();
    }
    crew_.kill_orphans();
    return finish();
  }

 private:
  void add_caller(int node, UniqueFd in, UniqueFd out) {
    JoiningNode& caller = *callers_.emplace_back(std::make_unique<JoiningNode>());
    caller.node = node;
    caller.link = std::make_unique<Link>(
        loop_, std::move(in), std::move(out),
        Link::Handlers{.on_word = [this, &caller](Word word, std::string_view body) { take(caller, word, body); },
                       .on_noise = [this, &caller](std::string_view text) { take_noise(caller, text); },
                       .on_end = [this, &caller](const std::string& why) { take_end(caller, why); }});
    if (node >= 0) nodes_[static_cast<std::size_t>(node)].caller = &caller;
  }

  /// What ssh and the shell there say.
  void show_noise(const std::string& name, std::string_view text) {
    for (const std::string_view line : split(text, '\n')) {
      if (!line.empty()) output_.say(fmt::format("{}: {}", name, line));
    }
  }
  void take_noise(const JoiningNode& caller, std::string_view text) {
    if (caller.node >= 0) return show_noise(nodes_[static_cast<std::size_t>(caller.node)].name, text);
    caller.link->close();  // a stranger
  }

  void take(JoiningNode& caller, Word word, std::string_view body) {
    try {
      if (word == Word::hello) return welcome(caller, from_words<Hello>(body));
      if (caller.node < 0) return caller.link->close();
      Node& node = nodes_[static_cast<std::size_t>(caller.node)];
      if (word == Word::output) return take_output(body);
      if (word == Word::failed) return take_failure(node, from_words<Failure>(body));
      if (word == Word::done) node.done = true;
    } catch (const nlohmann::json::exception& error) {
      if (caller.node < 0) {
        return send_away(caller, fmt::format("a caller cannot join: it says what no launcher of deep_ep {} says: {}",
                                             full_version(), error.what()));
      }
      decide(1, fmt::format("{} says what makes no sense", nodes_[static_cast<std::size_t>(caller.node)].name));
    }
  }

  void welcome(JoiningNode& caller, const Hello& hello) {
    if (caller.node < 0 && !let_in(caller, hello)) return;
    Node& node = nodes_[static_cast<std::size_t>(caller.node)];
    if (node.joined) return;
    if (!by_ssh_) node.name = fmt::format("node {} ({})", hello.node, hello.host);
    node.caller = &caller;
    node.joined = true;
    node.ranks = hello.ranks;
    if (!by_ssh_) node.topology = hello.topology;
    compare_clocks(node.name, hello);
    if (hello.version != full_version()) {
      return decide(1, fmt::format("{} runs deep_ep {}, the first node {}", node.name, hello.version, full_version()));
    }
    if (const std::string why = objection_to(hello); !why.empty()) {
      return decide(1, fmt::format("{}: {}", node.name, why));
    }
    begin_if_all_are_here();
  }

  /// Runs do not depend on clocks; who reads the logs of several nodes does. A word that was long on its way looks like
  /// a clock that is behind, so that more of that is let pass.
  void compare_clocks(const std::string& name, const Hello& hello) {
    constexpr std::int64_t kMostAhead = 2'000;
    constexpr std::int64_t kMostBehind = 15'000;
    const std::int64_t ahead = hello.clock_ms - milliseconds_since_1970();
    if (-kMostBehind <= ahead && ahead <= kMostAhead) return;
    output_.say(
        fmt::format("the clock of {} is {:.0f} s {} that of the first node: times in logs do not compare "
                    "(chrony or systemd-timesyncd must run on both)",
                    name, std::fabs(static_cast<double>(ahead)) / 1000, ahead > 0 ? "ahead of" : "behind"));
  }

  static std::string objection_to(const Hello& hello) {
    if (hello.ranks >= 1 && hello.ranks <= kMaxRanks) return {};
    return fmt::format("it wants to start {} ranks, allowed: 1 to {}", hello.ranks, kMaxRanks);
  }

  void send_away(const JoiningNode& caller, const std::string& why) {
    output_.say(why);
    caller.link->send(Word::end, to_words(Verdict{.status = 2, .text = why, .at_once = false}));
  }

  /// A caller says which node it is. One that cannot be is sent away, and the others go on waiting.
  bool let_in(JoiningNode& caller, const Hello& hello) {
    std::string why;
    const int nodes = static_cast<int>(nodes_.size());
    if (hello.nodes != nodes) {
      why = fmt::format("it is told of {} nodes, the first node of {}", hello.nodes, nodes);
    } else if (hello.node < 1 || hello.node >= nodes) {
      why = fmt::format("allowed: nodes 1 to {}", nodes - 1);
    } else if (nodes_[static_cast<std::size_t>(hello.node)].joined) {
      why = fmt::format("{} is there already", nodes_[static_cast<std::size_t>(hello.node)].name);
    } else {
      why = objection_to(hello);
    }
    if (why.empty()) {
      caller.node = hello.node;
      return true;
    }
    send_away(caller, fmt::format("node {} ({}) cannot join: {}", hello.node, hello.host, why));
    return false;
  }

  void begin_if_all_are_here() {
    if (started_ || verdict_ || !std::ranges::all_of(nodes_, &Node::joined)) return;
    if (master_known_ && !*master_known_) return;
    started_ = true;
    try {
      number_ranks();
      for (Node& node : nodes_) start(node);
    } catch (const InvalidArgument& error) {
      decide(2, error.what());
    } catch (const Error& error) {
      decide(1, error.what());
    }
  }

  void number_ranks() {
    std::vector<std::string> labels;
    std::vector<std::string> names;
    for (const Node& node : nodes_) {
      labels.push_back(node.topology);
      names.push_back(node.name);
    }
    int ranks = 0;  // of at most kMaxRanks each
    for (const Node& node : nodes_) ranks += node.ranks;
    if (ranks > kMaxRanks) {
      fail<InvalidArgument>("launch: {} ranks on {} nodes, allowed: at most {} ranks", ranks, nodes_.size(), kMaxRanks);
    }
    std::string map = "# rank host node local_rank topology\n";
    int number = 0;
    for (const int i : near_order(labels, names)) {
      Node& node = nodes_[static_cast<std::size_t>(i)];
      node.number = number++;
      node.first_rank = world_size_;
      world_size_ += node.ranks;
      for (int local = 0; local < node.ranks; ++local) {
        map += fmt::format("{} {} {} {} {}\n", node.first_rank + local, node.name, node.number, local,
                           node.topology.empty() ? "-" : node.topology);
      }
    }
    output_.remove_logs_from(world_size_);
    output_.write_file("rank-map.txt", map);
  }

  void start(const Node& node) {
    const Assignment assignment{.node = node.number,
                                .nodes = static_cast<int>(nodes_.size()),
                                .first_rank = node.first_rank,
                                .ranks = node.ranks,
                                .world_size = world_size_,
                                .master = master_,
                                .port = port_,
                                .token = token_};
    for (int i = 0; (node.is_local || by_ssh_) && i < node.ranks; ++i) {
      const int rank = node.first_rank + i;
      output_.open(rank, header_of(rank, assignment, node.name, options_.command), node.is_local || node.number == 0);
    }
    if (!node.is_local) return node.caller->link->send(Word::start, to_words(assignment));
    start_ranks(
        crew_, options_.command, assignment,
        {.on_output = [this](int rank, Stream stream, std::string_view text) { output_.take(rank, stream, text); },
         .on_end = [this](int rank, int status) { take_end_of_local(rank, status); }});
  }

  /// "RANK STREAM TEXT".
  void take_output(std::string_view body) {
    const std::size_t space = body.find(' ');
    const auto rank = parse_number<int>(body.substr(0, space));
    if (!rank || body.size() < space + 3) return;
    output_.take(*rank, body[space + 1] == 'e' ? Stream::err : Stream::out, body.substr(space + 3));
  }

  void take_end_of_local(int rank, int status) {
    if (status != 0) return take_failure(nodes_[0], {.status = status, .rank = rank, .text = {}});
    if (crew_.running() == 0) nodes_[0].done = true;
  }

  void take_failure(const Node& node, const Failure& failure) {
    if (failure.rank < 0) return decide(failure.status, fmt::format("{}: {}", node.name, failure.text));
    const std::string where = nodes_.size() == 1 && node.is_local ? "" : " on " + node.name;
    const std::string log = node.is_local || by_ssh_ ? output_.log_of(failure.rank) : "";
    decide(failure.status, fmt::format("rank {}{} ended with {}{}", failure.rank, where,
                                       describe_status(failure.status), log.empty() ? "" : fmt::format(" ({})", log)));
  }

  void take_end(const JoiningNode& caller, const std::string& why) {
    if (caller.node < 0) return;
    const Node& node = nodes_[static_cast<std::size_t>(caller.node)];
    // Of one that did not join, ssh's status says more.
    if (node.caller == &caller && node.joined) decide(1, fmt::format("{} went away: {}", node.name, why));
  }

  void take_end_of_ssh(const Node& node, int status) {
    if (node.joined) return;
    decide(status != 0 ? status : 1, fmt::format("{}: '{}' ended with {} before a launcher of deep_ep answered there",
                                                 node.name, options_.ssh, describe_status(status)));
  }

  /// The first word on how the run ends counts.
  void decide(int status, const std::string& text) {
    if (verdict_) return;
    verdict_ = Verdict{.status = status, .text = text + "; the others are ended", .at_once = false};
    end_deadline_.emplace(kMostOfAnEnd);
    if (status != 0) output_.say(nodes_.size() == 1 && world_size_ == 1 ? text : verdict_->text);
    listener_gone();
    tell_nodes();
    // ssh ends when the launcher behind it does; where there is none, it is not waited for.
    if (!by_ssh_ || !started_) ending_.begin();
  }

  void tell_nodes() {
    for (const auto& caller : callers_) {
      if (caller->node < 0) {
        caller->link->close();
      } else {
        caller->link->send(Word::end, to_words(*verdict_));
      }
    }
  }

  void listener_gone() {
    if (listener_) loop_.forget(listener_.get());
    listener_ = UniqueFd();
  }

  void hurry() {
    if (verdict_->at_once) return;
    verdict_->at_once = true;
    end_deadline_.emplace(2);
    tell_nodes();
    if (!by_ssh_) ending_.kill();
  }

  void look_around() {
    crew_.reap_orphans();
    for (; interruptions_ < crew_.interruptions(); ++interruptions_) {
      const int status = 128 + crew_.interrupted_by();
      verdict_ ? hurry() : decide(status, fmt::format("launch was asked to end by {}", describe_status(status)));
    }
    begin_if_all_are_here();
    if (!started_ && !verdict_ && join_deadline_.expired()) give_up_joining();
    for (const auto& caller : callers_) look_at(*caller);
    if (!pause_ || pause_->expired()) {
      pause_.emplace(1);
      for (const auto& caller : callers_) caller->link->send(Word::ping);
    }
    if (!verdict_ && std::ranges::all_of(nodes_, &Node::done)) decide(0, "");
  }

  void look_at(const JoiningNode& caller) {
    if (!caller.link->is_open()) return;
    const double silence = caller.link->silent_for();
    if (caller.node < 0 && silence > kMostOfAStranger) caller.link->close();
    if (caller.node < 0 || silence <= options_.silence) return;
    const Node& node = nodes_[static_cast<std::size_t>(caller.node)];
    if (!node.joined) return;
    caller.link->close();
    decide(1, fmt::format("nothing was heard of {} for {} s", node.name, options_.silence));
  }

  void give_up_joining() {
    std::vector<std::string> missing;
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      if (!nodes_[i].joined) missing.push_back(nodes_[i].name.empty() ? std::to_string(i) : nodes_[i].name);
    }
    if (missing.empty()) return decide(1, fmt::format("the first node does not know its own name '{}'", master_));
    decide(1, fmt::format("{} of {} nodes did not join within {} s: {}", missing.size(), nodes_.size(),
                          options_.join_timeout, fmt::join(missing, ", ")));
  }

  /// Everybody has ended, or is not waited for any more.
  bool is_over() {
    if (!verdict_) return false;
    const bool dying = crew_.running() != 0;
    if (dying && !ending_.go_on()) {
      output_.say("some processes do not die; they are left alone");
      return true;
    }
    const auto still_there = [](const auto& caller) { return caller->node >= 0 && caller->link->is_open(); };
    const bool alone = std::ranges::none_of(callers_, still_there);
    if (alone && !dying) return true;
    if (!end_deadline_->expired()) return false;
    for (const auto& caller : callers_) {
      if (!still_there(caller)) continue;
      output_.say(fmt::format("{} did not say that it has ended; look there for what is left",
                              nodes_[static_cast<std::size_t>(caller->node)].name));
      caller->link->close();
    }
    if (dying) ending_.kill();
    return !dying;
  }

  int finish() {
    const std::string problem = output_.finish();
    return verdict_->status == 0 && !problem.empty() ? 1 : verdict_->status;
  }

  const LaunchOptions& options_;
  Loop loop_;
  Crew crew_;  ///< the ranks here, or ssh for each host
  RankOutput output_;
  Ending ending_;
  bool by_ssh_ = false;
  UniqueFd listener_;
  std::vector<std::unique_ptr<JoiningNode>> callers_;
  std::vector<Node> nodes_;
  Deadline join_deadline_;
  std::string master_;
  std::shared_ptr<const std::atomic<bool>> master_known_;  ///< null: not waited for
  int port_ = 0;
  const std::string token_ = token_of_job();
  int world_size_ = 0;
  bool started_ = false;
  int interruptions_ = 0;
  std::optional<Verdict> verdict_;
  std::optional<Deadline> end_deadline_;
  std::optional<Deadline> pause_;
};

}  // namespace

int launch_here(const LaunchOptions& options) {
  Coordinator coordinator(options, 1);
  coordinator.add_local(own_host_name());
  return coordinator.run(options.master, options.port);
}

int launch_as_first(const LaunchOptions& options, const Place& place) {
  Coordinator coordinator(options, place.nodes);
  coordinator.add_local(fmt::format("node 0 ({})", own_host_name()));
  if (place.nodes > 1) {
    coordinator.expect_callers(place.port + 2);
    coordinator.await_name(place.master);
  }
  return coordinator.run(place.master, place.port);
}

int launch_on_hosts(const LaunchOptions& options) {
  std::vector<Host> hosts = read_hosts(options.hostfile, options.range);
  if (!options.order_by.empty()) read_topology(options.order_by, hosts);
  const std::string master = options.master.empty() ? address_of(hosts) : options.master;
  Coordinator coordinator(options, static_cast<int>(hosts.size()));
  for (std::size_t i = 0; i < hosts.size(); ++i) coordinator.start_on(i, hosts[i]);
  return coordinator.run(master, options.port);
}

}  // namespace deep_ep::tools
