#include "csrc/support/logging.hpp"

#include <gtest/gtest.h>

#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/setting.hpp"

namespace deep_ep {
namespace {

using Line = std::pair<LogLevel, std::string>;

/// Puts the environment's log back when the test ends.
struct SinkOfTest {
  explicit SinkOfTest(LogSink sink, std::optional<LogLevel> least = {}) { set_log_sink(std::move(sink), least); }
  ~SinkOfTest() { set_log_sink(nullptr); }
};

TEST(LogSink, GetsLevelAndTextOfWhatIsNotBelowTheLeastLevel) {
  std::vector<Line> lines;
  const SinkOfTest sink([&](LogLevel level, std::string_view line) { lines.emplace_back(level, line); },
                        LogLevel::info);
  log::debug("too small");
  log::info("heap of {} bytes", 64);
  log::error("lost");
  EXPECT_FALSE(log::enabled(LogLevel::debug));
  EXPECT_EQ(lines, (std::vector<Line>{{LogLevel::info, "heap of 64 bytes"}, {LogLevel::error, "lost"}}));
}

TEST(LogSink, WithoutALevelTheEnvironmentSaysIt) {
  std::vector<Line> lines;
  const Setting level("DEEP_EP_LOG", "error");
  const SinkOfTest sink([&](LogLevel level, std::string_view line) { lines.emplace_back(level, line); });
  log::warn("not asked for");
  log::error("asked for");
  EXPECT_EQ(lines, (std::vector<Line>{{LogLevel::error, "asked for"}}));
}

TEST(LogSink, WhatItThrowsReachesNoCall) {
  int lines = 0;
  const SinkOfTest sink([&](LogLevel, std::string_view) {
    ++lines;
    throw std::runtime_error("a full disk");
  });
  EXPECT_NO_THROW(log::error("lost"));
  EXPECT_EQ(lines, 1);
}

/// Runs `check` in a process of its own, where nothing has been logged yet; it gets what is written to standard error.
template <class Act, class Check>
[[noreturn]] void exit_with(Act&& act, Check&& check) {
  testing::internal::CaptureStderr();
  act();
  const std::string text = testing::internal::GetCapturedStderr();
  const bool right = check(text);
  if (!right) std::fprintf(stderr, "standard error was: %s\n", text.c_str());
  std::_Exit(right ? 0 : 1);
}

TEST(LogDeathTest, AWrongLevelIsToldToTheFirstSinkAlone) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  std::vector<Line> lines;
  EXPECT_EXIT(exit_with(
                  [&] {
                    ::setenv("DEEP_EP_LOG", "loud", 1);
                    ::unsetenv("DEEP_EP_LOG_FILE");
                    set_log_sink([&](LogLevel level, std::string_view line) { lines.emplace_back(level, line); });
                    log::error("lost");
                  },
                  [&](const std::string& text) { return text.empty() && lines.size() == 2; }),
              testing::ExitedWithCode(0), "");
}

TEST(LogDeathTest, AFileThatCannotBeOpenedIsToldAtTheLevelOfAWarning) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (const auto& [level, told] : {std::pair("error", false), std::pair("warn", true)}) {
    EXPECT_EXIT(exit_with(
                    [level = level] {
                      ::setenv("DEEP_EP_LOG", level, 1);
                      ::setenv("DEEP_EP_LOG_FILE", "/dev/null/log", 1);
                      log::error("lost");
                    },
                    [told = told](const std::string& text) {
                      return text.find("lost") != std::string::npos &&
                             (text.find("/dev/null/log") != std::string::npos) == told;
                    }),
                testing::ExitedWithCode(0), "");
  }
}

TEST(LogDeathTest, LinesAreAppendedToTheFile) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (const bool there : {false, true}) {
    std::string folder, pid;
    EXPECT_EXIT(exit_with(
                    [&] {
                      pid = std::to_string(::getpid());
                      folder = testing::TempDir() + "deep_ep-log-" + pid;
                      ::setenv("DEEP_EP_LOG", "info", 1);
                      ::setenv("DEEP_EP_LOG_FILE", (folder + "/made/%p.log").c_str(), 1);
                      if (there) {
                        std::filesystem::create_directories(folder + "/made");
                        std::ofstream(folder + "/made/" + pid + ".log") << "before\n";
                      }
                      log::debug("too small");
                      log::info("heap of {} bytes", 64);
                      log::warn("late");
                    },
                    [&](const std::string& text) {
                      std::stringstream written;
                      written << std::ifstream(folder + "/made/" + pid + ".log").rdbuf();
                      std::filesystem::remove_all(folder);
                      const std::string head = R"(\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}\] \[deep_ep )" + pid;
                      const std::regex lines((there ? "before\n" : "") + head + R"(\] \[info\] heap of 64 bytes\n)" +
                                             head + R"(\] \[warning\] late\n)");
                      return text.empty() && std::regex_match(written.str(), lines);
                    }),
                testing::ExitedWithCode(0), "");
  }
}

TEST(LogSink, MayChangeWhileOthersLog) {
  std::atomic<int> lines = 0;
  const LogSink count = [&](LogLevel, std::string_view) { ++lines; };
  const SinkOfTest sink(count, LogLevel::warn);
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([] {
      for (int line = 0; line < 1000; ++line) log::warn("line {}", line);
    });
  }
  for (int i = 0; i < 100; ++i) set_log_sink(count, LogLevel::warn);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(lines, 3000);
}

}  // namespace
}  // namespace deep_ep
