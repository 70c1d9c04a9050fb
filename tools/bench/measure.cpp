#include "tools/bench/measure.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <span>

#include "csrc/bootstrap/agreement.hpp"

namespace deep_ep::tools {
namespace {

using Clock = std::chrono::steady_clock;

double median(std::vector<double> values) {
  std::ranges::sort(values);
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

}  // namespace

Meter::Meter(Bootstrap& bootstrap, Executor& executor, StreamHandle stream)
    : bootstrap_(bootstrap), executor_(executor), stream_(stream) {}

Timing Meter::measure(const Rounds& rounds, const std::function<void()>& call) {
  for (int round = 0; round < rounds.warmup; ++round) call();
  executor_.synchronize(stream_);

  std::vector<Round> measured;
  for (int round = 0; round < rounds.count; ++round) measured.push_back(run(call));
  Timing timing = summarise(measured);

  // Enqueued back to back, so the device is never idle: a call ends when its slowest peer ends, so no other alignment
  // is needed, and the host's share shows only where the host has to wait.
  align();
  std::vector<EventHandle> events{executor_.record_timed_event(stream_)};
  std::vector<double> host;
  for (int round = 0; round < rounds.count; ++round) {
    const auto begin = Clock::now();
    call();
    host.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    events.push_back(executor_.record_timed_event(stream_));
  }
  executor_.synchronize(stream_);
  std::vector<double> spans;
  for (std::size_t i = 1; i < events.size(); ++i) spans.push_back(executor_.elapsed_seconds(events[i - 1], events[i]));

  timing.back_to_back = median(slowest(spans));
  timing.host = slowest({median(host)}).front();
  return timing;
}

std::pair<Timing, Timing> Meter::measure_parts(const Rounds& rounds, const std::function<void()>& first,
                                               const std::function<void()>& second) {
  std::vector<Round> firsts;
  std::vector<Round> seconds;
  for (int round = -rounds.warmup; round < rounds.count; ++round) {
    const Round one = run(first);
    const Round two = run(second);
    if (round < 0) continue;
    firsts.push_back(one);
    seconds.push_back(two);
  }
  // One after the other: both are collective.
  const Timing of_first = summarise(firsts);
  return {of_first, summarise(seconds)};
}

Meter::Round Meter::run(const std::function<void()>& call) {
  align();
  if (in_front_) in_front_();
  const auto begin = Clock::now();
  const EventHandle before = executor_.record_timed_event(stream_);
  call();
  const EventHandle after = executor_.record_timed_event(stream_);
  executor_.synchronize(stream_);
  const double wall = std::chrono::duration<double>(Clock::now() - begin).count();
  return {executor_.elapsed_seconds(before, after), wall};
}

Timing Meter::summarise(const std::vector<Round>& rounds) {
  std::vector<double> device;
  std::vector<double> wall;
  for (const Round& round : rounds) {
    device.push_back(round.device);
    wall.push_back(round.wall);
  }
  const std::vector<double> device_rounds = slowest(device);
  Timing timing;
  timing.median = median(device_rounds);
  timing.fastest = *std::ranges::min_element(device_rounds);
  timing.slowest = *std::ranges::max_element(device_rounds);
  timing.mean = std::accumulate(device_rounds.begin(), device_rounds.end(), 0.0) / static_cast<double>(rounds.size());
  timing.wall = median(slowest(wall));
  return timing;
}

void Meter::align() {
  // Ranks leave a barrier tens of microseconds apart. Those of one host share a clock: all wait for one moment.
  const std::vector<std::int64_t> times = all_gather_values(bootstrap_, Clock::now().time_since_epoch().count());
  if (executor_.device().kind == Device::Kind::cpu) return;  // spinning would take the CPU from the kernels
  const auto latest = Clock::time_point(Clock::duration(std::ranges::max(times)));
  const auto start = latest + std::chrono::microseconds(300);
  while (Clock::now() < start) {
  }
}

std::vector<double> Meter::slowest(const std::vector<double>& mine) {
  const std::vector<std::byte> all = bootstrap_.all_gather(std::as_bytes(std::span(mine)));
  std::vector<double> values(all.size() / sizeof(double));
  std::memcpy(values.data(), all.data(), all.size());
  std::vector<double> result = mine;
  for (std::size_t i = 0; i < values.size(); ++i)
    result[i % mine.size()] = std::max(result[i % mine.size()], values[i]);
  return result;
}

}  // namespace deep_ep::tools
