#include "csrc/support/environment.hpp"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <stdexcept>

#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::environment {
namespace {

constexpr std::array kVariables = {
    Variable{"DEEP_EP_TIMEOUT_S", Type::number, "100", "seconds, 0 = wait for ever",
             "how long a rank waits for another one before TimeoutError, where the program does not say"},
    Variable{"DEEP_EP_HEAP", Type::choice, "auto", "auto|posix_fd|fabric|cuda_ipc",
             "how GPUs share their symmetric heaps; auto takes the best kind that all ranks support"},
    Variable{"DEEP_EP_HOST_SEED", Type::unsigned_integer, "0", "0 = fixed order",
             "schedule of kernels on the CPU: any other number gives another, repeatable, order of threads and copies"},
    Variable{"DEEP_EP_HOST_THREADS", Type::unsigned_integer, "0", "0 = one for each hardware thread, at least 2",
             "worker threads that run kernels on the CPU"},
    Variable{"DEEP_EP_RDMA_ACK_TIMEOUT", Type::unsigned_integer, "18", "0 to 31; 0 = wait for ever",
             "an unanswered RDMA packet is sent again after 4.096 us * 2^this"},
    Variable{"DEEP_EP_RDMA_RETRY_COUNT", Type::unsigned_integer, "6", "0 to 7; soft-RoCE takes 7 for ever",
             "how often, before the connection to that peer fails"},
    Variable{"DEEP_EP_RDMA_TRAFFIC_CLASS", Type::unsigned_integer, "0", "0 to 255",
             "traffic class of RDMA packets; the DSCP is its upper six bits"},
    Variable{"DEEP_EP_RDMA_SERVICE_LEVEL", Type::unsigned_integer, "0", "0 to 15",
             "service level of RDMA packets, on Ethernet their priority"},
    Variable{"DEEP_EP_DEVICE_TO_HCA_MAPPING", Type::text, "",
             "<CUDA id or GPU UUID>:<hca>[:<port>],...; empty = automatic",
             "which NIC each GPU uses; CUDA ids are those of nvidia-smi"},
    Variable{"DEEP_EP_HCA_LIST", Type::text, "", "[^]<hca>[:<port>],...; ^ = all but these; empty = all",
             "NICs that the automatic choice may use"},
    Variable{"DEEP_EP_RDMA_GID_INDEX", Type::text, "auto", "auto, or a number from 0 to 255",
             "GID that every NIC uses; auto takes RoCE v2 with an IPv4 address first, for each NIC by itself"},
    Variable{"DEEP_EP_NIC_HANDLER", Type::choice, "auto", "auto|gpu|cpu",
             "who tells the NIC of new work: the GPU itself, or a thread on the CPU"},
    Variable{"DEEP_EP_RDMA_WIRE", Type::choice, "auto", "auto|local|verbs",
             "what carries RDMA: NICs (verbs), or copies on one host (local); auto = NICs where ranks have them"},
    Variable{"DEEP_EP_RANKS_PER_NODE", Type::unsigned_integer, "0",
             "0 = by host; else a divisor of the number of ranks",
             "how many consecutive ranks count as one node, where the program does not say; one host can play several"},
    Variable{
        "DEEP_EP_LOW_LATENCY_RAILS", Type::choice, "auto", "auto|always|never",
        "low-latency calls between nodes: rows once for each node, and on by NVLink, where the program does not say"},
    Variable{"DEEP_EP_LOG", Type::choice, "warn", "trace|debug|info|warn|error|off", "how much the library logs"},
    Variable{"DEEP_EP_LOG_FILE", Type::text, "", "%h = host name, %p = process id",
             "file that log lines are appended to; standard error where not set"},
};

const Variable& find(std::string_view name) {
  for (const Variable& variable : kVariables) {
    if (variable.name == name) return variable;
  }
  throw std::logic_error(fmt::format("{} is not in the table of environment variables", name));
}

const Variable& find(std::string_view name, Type type) {
  const Variable& variable = find(name);
  if (variable.type != type) throw std::logic_error(fmt::format("{} was asked for as another type", name));
  return variable;
}

[[noreturn]] void refuse(const Variable& variable, std::string_view value, std::string_view expected) {
  fail<InvalidArgument>("environment variable {}='{}' is not {} ({})", variable.name, value, expected,
                        variable.allowed);
}

const char* raw(std::string_view name) {
  // The table holds string literals, so the view is terminated; a caller's view need not be.
  const char* set = std::getenv(find(name).name.data());
  return set != nullptr && *set != '\0' ? set : nullptr;
}

}  // namespace

std::span<const Variable> variables() { return kVariables; }

bool is_set(std::string_view name) { return raw(name) != nullptr; }

std::string value(std::string_view name) {
  const char* set = raw(name);
  return set != nullptr ? std::string(set) : std::string(find(name).default_value);
}

double number(std::string_view name) {
  const Variable& variable = find(name, Type::number);
  const std::string given = value(name);
  double result = 0;
  // from_chars, not strtod: the decimal point must not depend on the locale.
  const auto [end, error] = std::from_chars(given.data(), given.data() + given.size(), result);
  if (error != std::errc() || end != given.data() + given.size() || !std::isfinite(result) || result < 0) {
    refuse(variable, given, "a number of zero or more");
  }
  return result;
}

std::uint64_t unsigned_integer(std::string_view name) {
  const Variable& variable = find(name, Type::unsigned_integer);
  const std::string given = value(name);
  const bool hexadecimal = given.starts_with("0x") || given.starts_with("0X");
  const char* begin = given.data() + (hexadecimal ? 2 : 0);
  const char* end = given.data() + given.size();
  std::uint64_t result = 0;
  const auto [last, error] = std::from_chars(begin, end, result, hexadecimal ? 16 : 10);
  if (error != std::errc() || last != end) refuse(variable, given, "a whole number from 0 to 2^64-1");
  return result;
}

std::string choice(std::string_view name) {
  const Variable& variable = find(name, Type::choice);
  std::string given = value(name);
  std::string_view rest = variable.allowed;
  while (!rest.empty()) {
    const std::size_t bar = rest.find('|');
    if (rest.substr(0, bar) == given) return given;
    rest = bar == std::string_view::npos ? std::string_view() : rest.substr(bar + 1);
  }
  refuse(variable, given, "one of the allowed words");
}

std::string text(std::string_view name) {
  find(name, Type::text);
  return value(name);
}

}  // namespace deep_ep::environment
