#include "tools/doctor/nic_test/nic_test.hpp"

#include <algorithm>
#include <memory>
#include <mutex>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/version.hpp"
#include "tools/common/socket_bootstrap.hpp"
#include "tools/doctor/nic_test/subjects.hpp"

namespace deep_ep::tools {
namespace {

using rdma::nic_test::Line;
using rdma::nic_test::Outcome;

const char* word_of(Outcome outcome) {
  return outcome == Outcome::pass ? "PASS" : outcome == Outcome::skip ? "SKIP" : "FAIL";
}

/// For each of so many NICs. With the default of `seconds` even eight that do not answer at all take less than a
/// minute.
rdma::nic_test::Limits limits_of(double seconds, std::size_t nics) {
  const double share = seconds / static_cast<double>(std::max<std::size_t>(nics, 1));
  rdma::nic_test::Limits limits;
  limits.wait_s = std::max(1.5, share / 22);
  limits.entries_s = share / 3;
  limits.phase_s = std::min(0.3, share / 20);
  limits.seconds = share;
  return limits;
}

}  // namespace

int NicTestReport::count(Outcome outcome) const {
  std::ptrdiff_t found = 0;
  for (const TestedNic& nic : nics) found += std::ranges::count(nic.lines, outcome, &Line::outcome);
  return static_cast<int>(found);
}

std::vector<std::string> NicTestReport::warnings() const {
  std::vector<std::string> found;
  bool on_purpose = false;
  for (const std::string& line : log) {
    if (line.ends_with(rdma::nic_test::kFailuresBegin)) on_purpose = true;
    if (line.ends_with(rdma::nic_test::kFailuresEnd)) on_purpose = false;
    const bool counts = !on_purpose && line.starts_with("warn: ");
    if (counts && std::find(found.begin(), found.end(), line) == found.end()) found.push_back(line);
  }
  return found;
}

std::string NicTestReport::text() const {
  std::string text = fmt::format("NIC test of deep_ep {}\n", DEEP_EP_VERSION);
  for (const TestedNic& nic : nics) {
    text += fmt::format("\n{}\n", nic.name);
    for (const Line& line : nic.lines) {
      text += fmt::format("  {} {:<11} {}\n", word_of(line.outcome), line.check, line.found);
      if (!line.meaning.empty()) text += fmt::format("       meaning: {}\n", line.meaning);
      if (!line.action.empty()) text += fmt::format("       to do:   {}\n", line.action);
    }
  }
  for (const std::string& line : warnings()) text += fmt::format("\n{}\n", line);
  const bool nothing = count(Outcome::pass) + count(Outcome::fail) == 0;
  return text + fmt::format("\n{} passed, {} failed, {} skipped{}\n", count(Outcome::pass), count(Outcome::fail),
                            count(Outcome::skip), nothing ? ": nothing was tested" : "");
}

nlohmann::json NicTestReport::json() const {
  nlohmann::json all = nlohmann::json::array();
  for (const TestedNic& nic : nics) {
    nlohmann::json lines = nlohmann::json::array();
    for (const Line& line : nic.lines) {
      lines.push_back({{"check", line.check},
                       {"verdict", word_of(line.outcome)},
                       {"found", line.found},
                       {"meaning", line.meaning},
                       {"action", line.action}});
    }
    all.push_back({{"nic", nic.name}, {"lines", lines}});
  }
  return {{"version", DEEP_EP_VERSION},      {"nics", all},
          {"passed", count(Outcome::pass)},  {"failed", count(Outcome::fail)},
          {"skipped", count(Outcome::skip)}, {"well", well()},
          {"warnings", warnings()}};
}

PeerAddress parse_peer(const std::string& text, std::uint16_t port) {
  PeerAddress peer{text, port};
  const std::size_t colon = text.rfind(':');
  const bool bracketed = text.starts_with('[');
  // Several colons without brackets are an IPv6 address.
  const bool has_port = colon != std::string::npos && (bracketed ? text[colon - 1] == ']' : text.find(':') == colon);
  bool good = !text.empty();
  if (has_port) {
    peer.host = text.substr(0, colon);
    peer.port = parse_number<std::uint16_t>(std::string_view(text).substr(colon + 1)).value_or(0);
    good = peer.port != 0;
  }
  if (bracketed && peer.host.ends_with(']')) peer.host = peer.host.substr(1, peer.host.size() - 2);
  if (!good || peer.host.empty()) fail<InvalidArgument>("--peer {}: allowed: HOST, HOST:PORT", text);
  return peer;
}

NicTestReport test_nics(const Patient& patient, const NicTestOptions& options) {
  if (options.listen && !options.peer.empty()) {
    throw InvalidArgument("--listen and --peer: one machine listens, the other one names it as its peer");
  }
  // Failures on purpose are not for the terminal.
  struct Log {
    std::mutex mutex;
    std::vector<std::string> lines;
  };
  const auto log = std::make_shared<Log>();
  set_log_sink(
      [log](LogLevel level, std::string_view line) {
        const std::lock_guard lock(log->mutex);
        constexpr const char* kNames[] = {"trace", "debug", "info", "warn", "error"};
        log->lines.push_back(fmt::format("{}: {}", kNames[static_cast<std::size_t>(level)], line));
      },
      log::enabled(LogLevel::trace) ? LogLevel::trace : LogLevel::debug);
  const std::shared_ptr<void> sink_to_the_end(nullptr, [](void*) { set_log_sink({}); });
  std::shared_ptr<Bootstrap> bootstrap = make_thread_bootstraps(1).front();
  if (options.listen) bootstrap = make_socket_bootstrap(0, 2, "", options.port, options.seconds);
  if (!options.peer.empty()) {
    const PeerAddress peer = parse_peer(options.peer, options.port);
    bootstrap = make_socket_bootstrap(1, 2, peer.host, peer.port, options.seconds);
  }
  Subjects found = find_subjects(patient, options);
  // Between machines the first NIC meets the first, and so on.
  std::size_t count = found.subjects.size();
  for (const std::size_t theirs : all_gather_values(*bootstrap, count)) count = std::min(count, theirs);
  NicTestReport report;
  for (std::size_t i = 0; i < count; ++i) {
    const rdma::nic_test::Subject& subject = found.subjects[i];
    TestedNic& tested = report.nics.emplace_back(TestedNic{subject.name, {}});
    try {
      tested.lines = rdma::nic_test::test_nic(*bootstrap, subject, limits_of(options.seconds, count));
    } catch (const Error& error) {
      tested.lines.push_back({"nic", Outcome::fail, error.what(), "this NIC's test did not come to its end",
                              "as the text says; between machines, also what the other one reports"});
      // The other machine may be anywhere.
      if (bootstrap->size() > 1) count = i + 1;
    }
  }
  for (std::size_t i = count; i < found.subjects.size(); ++i) {
    found.leave_out(fmt::format("{}: the other machine has fewer NICs, or is gone", found.subjects[i].name));
  }
  if (!found.left_out.empty()) report.nics.push_back({"not tested", found.left_out});
  const std::lock_guard lock(log->mutex);
  report.log = std::move(log->lines);
  return report;
}

}  // namespace deep_ep::tools
