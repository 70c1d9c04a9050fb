#include "csrc/support/environment.hpp"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "deep_ep/error.hpp"
#include "tests/rdma/messages.hpp"
#include "tests/support/setting.hpp"
#include "tests/support/variables.hpp"

namespace deep_ep {
namespace {

using test::contains;
using test::message_of;
using test::says;

TEST(Environment, EveryVariableIsDescribedAndItsDefaultIsInEffect) {
  std::set<std::string_view> names;
  environment::Reader nothing_is_set{source_of({})};
  for (const environment::Variable& variable : environment::variables()) {
    SCOPED_TRACE(variable.name());
    EXPECT_TRUE(names.insert(variable.name()).second) << "listed twice";
    for (const std::string_view other : variable.others()) {
      EXPECT_TRUE(names.insert(other).second) << other << " is listed twice";
      EXPECT_FALSE(environment::is_own(other)) << "the library's own name must win";
    }
    EXPECT_FALSE(variable.help.empty());
    const environment::Value value = nothing_is_set.value(variable.name());
    EXPECT_EQ(value.text, variable.default_value);
    EXPECT_EQ(value.name, "");
    if (variable.is_number) {
      EXPECT_TRUE(value.number());
    } else if (variable.most != 0) {
      EXPECT_TRUE(variable.choices == value.text || value.integer() <= variable.most);
    } else {
      EXPECT_TRUE(variable.choices.find(value.text) != std::string_view::npos || variable.choices.empty());
    }
  }
}

TEST(Environment, WhatOthersSwitchOff) {
  const auto word = [](const char* name, Variables variables) {
    return environment::Reader{source_of(variables)}.value(name).text;
  };
  EXPECT_EQ(word("DEEP_EP_NVLINK", {{"NVSHMEM_DISABLE_P2P", "1"}}), "off");
  EXPECT_EQ(word("DEEP_EP_NVLINK", {{"NVSHMEM_DISABLE_P2P", "false"}}), "on");
  EXPECT_EQ(word("DEEP_EP_NVLINK", {{"NVSHMEM_DISABLE_P2P", "0"}, {"NCCL_P2P_DISABLE", "1"}}), "off");
  EXPECT_EQ(word("DEEP_EP_NVLINK", {{"DEEP_EP_NVLINK", "on"}, {"NCCL_P2P_DISABLE", "1"}}), "on");
  EXPECT_EQ(word("DEEP_EP_MNNVL", {{"NVSHMEM_DISABLE_MNNVL", "yes"}}), "off");
  EXPECT_EQ(word("DEEP_EP_MNNVL", {{"NCCL_MNNVL_ENABLE", "2"}}), "auto");
  EXPECT_EQ(word("DEEP_EP_MNNVL", {{"NCCL_MNNVL_ENABLE", "0"}}), "off");
}

TEST(Environment, HowMuchOthersLogIsUnderstood) {
  const auto level = [](Variables variables) {
    return environment::Reader{source_of(variables)}.value("DEEP_EP_LOG").text;
  };
  EXPECT_EQ(level({{"NCCL_DEBUG", "INFO"}}), "info");
  EXPECT_EQ(level({{"NCCL_DEBUG", "VERSION"}}), "warn") << "the default: it asks for a version only";
  EXPECT_EQ(level({{"NVSHMEM_DEBUG", "WARN,INFO"}, {"NCCL_DEBUG", "TRACE"}}), "info");
  EXPECT_EQ(level({{"NCCL_DEBUG", "TRACE"}}), "trace");
  EXPECT_EQ(level({{"EP_BUFFER_DEBUG", "1"}}), "debug");
  EXPECT_EQ(level({{"EP_BUFFER_DEBUG", "0"}}), "warn");
  EXPECT_EQ(level({{"DEEP_EP_LOG", "error"}, {"NCCL_DEBUG", "INFO"}}), "error");
  environment::Reader odd{source_of({{"NCCL_DEBUG", "loud"}})};
  EXPECT_EQ(odd.value("DEEP_EP_LOG").text, "warn");
  EXPECT_EQ(odd.ignored.size(), 1U);
}

TEST(Environment, MalformedNumbersAreRefusedByNameAndValue) {
  for (const char* value : {"soon", "-1", "1s", "1,5", "nan", "inf", " 3", "0x"}) {
    SCOPED_TRACE(value);
    const Setting set("DEEP_EP_TIMEOUT_S", value);
    const std::string text = message_of<InvalidArgument>([] { environment::number("DEEP_EP_TIMEOUT_S"); });
    EXPECT_TRUE(says(text, {"DEEP_EP_TIMEOUT_S", value}));
  }
}

TEST(Environment, UnsignedIntegers) {
  const auto read = [](const char* value) {
    const Setting set("DEEP_EP_HOST_SEED", value);
    return environment::unsigned_integer("DEEP_EP_HOST_SEED");
  };
  EXPECT_EQ(read("7"), 7u);
  EXPECT_EQ(read("0x1F"), 31u);
  EXPECT_EQ(read("18446744073709551615"), ~std::uint64_t{0});
  for (const char* value : {"-7", "7.0", "0x", "18446744073709551616", "seven", "7 "}) {
    SCOPED_TRACE(value);
    EXPECT_THROW(read(value), InvalidArgument);
  }
}

TEST(Environment, ChoicesNameWhatIsAllowed) {
  const auto read = [](const char* value) {
    const Setting set("DEEP_EP_NIC_HANDLER", value);
    return environment::text("DEEP_EP_NIC_HANDLER");
  };
  EXPECT_EQ(read("auto"), "auto");
  EXPECT_EQ(read("doorbell"), "doorbell");
  EXPECT_TRUE(contains(message_of<InvalidArgument>([&] { read("door"); }), "auto|gpu|doorbell|cpu"));
  EXPECT_THROW(read("auto|gpu"), InvalidArgument);
}

}  // namespace
}  // namespace deep_ep
