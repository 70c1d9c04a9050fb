#include "tools/doctor/clock.hpp"

#include <fmt/format.h>
#include <sys/timex.h>

#include <chrono>
#include <cmath>

#include "csrc/bootstrap/agreement.hpp"
#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {
namespace {

constexpr double kMostOff = 1;  ///< seconds

double clock_now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

const char* const ClockOffset::kMeaning =
    "calls do not depend on clocks, but logs of several nodes cannot be put in order, and certificates and tokens may "
    "count as expired";
const char* const ClockOffset::kAction =
    "timedatectl; chronyc tracking (chrony or systemd-timesyncd must run on the host)";

void check_clock(const Patient& patient, Findings& findings) {
  if (patient.root.is_this_machine()) {
    ::timex kernel{};
    const int state = ::adjtimex(&kernel);  // asks, and changes nothing
    if (state < 0) return;
    const double error = static_cast<double>(kernel.maxerror) * 1e-6;
    const bool synchronised = state != TIME_ERROR && (kernel.status & STA_UNSYNC) == 0;
    if (synchronised && error < kMostOff) {
      findings.push_back({"clock", Verdict::ok, fmt::format("the clock is right to {:.0f} ms", error * 1e3), "", ""});
    } else {
      findings.push_back({"clock", Verdict::note, "the kernel's clock is not synchronised by anybody",
                          ClockOffset::kMeaning, ClockOffset::kAction});
    }
    return;
  }
  // systemd-timesyncd touches this when it has set the clock.
  if (patient.root.exists("/run/systemd/timesync/synchronized")) {
    findings.push_back({"clock", Verdict::ok, "the clock is set by systemd-timesyncd", "", ""});
  }
}

std::string ClockOffset::text() const {
  return fmt::format("{:.3f} s {} (+- {:.3f} s)", std::fabs(seconds), seconds < 0 ? "behind" : "ahead", error);
}

bool ClockOffset::matters() const { return std::fabs(seconds) - error > kMostOff; }

ClockOffset compare_clocks(Bootstrap& bootstrap) {
  constexpr int kRounds = 8;
  const std::size_t other = bootstrap.rank() == 0 ? 1 : 0;
  ClockOffset best{0, INFINITY};
  for (int round = 0; round < kRounds; ++round) {
    // The other looks at its clock between these: it waits for this side before, and is waited for behind.
    const double before = clock_now();
    all_gather_values(bootstrap, round);
    const double theirs = all_gather_values(bootstrap, clock_now())[other];
    const double after = clock_now();
    const double error = (after - before) / 2;
    if (error < best.error) best = {theirs - before - error, error};
  }
  return best;
}

}  // namespace deep_ep::tools
