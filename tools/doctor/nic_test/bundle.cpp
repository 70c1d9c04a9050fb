// The file to attach to a report: a tar archive of texts.
#include <fmt/format.h>

#include <array>
#include <cstring>
#include <ctime>
#include <fstream>

#include "csrc/rdma/verbs/libraries.hpp"
#include "csrc/support/environment.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/version.hpp"
#include "tools/doctor/nic_test/nic_test.hpp"
#include "tools/doctor/print.hpp"

namespace deep_ep::tools {
namespace {

constexpr std::size_t kBlock = 512;

/// A file of a tar archive, in the format that POSIX calls ustar.
std::string tar_member(const std::string& name, const std::string& content) {
  std::array<char, kBlock> header{};
  const auto put = [&](std::size_t at, const std::string& text) {
    std::memcpy(header.data() + at, text.data(), text.size());
  };
  put(0, "deep_ep_nic_test/" + name);
  put(100, "0000644");
  put(108, "0000000");
  put(116, "0000000");
  put(124, fmt::format("{:011o}", content.size()));
  put(136, fmt::format("{:011o}", std::time(nullptr)));
  put(148, "        ");  // the checksum counts itself as spaces
  put(156, "0");
  put(257, std::string("ustar\00000", 8));
  unsigned sum = 0;
  for (const char byte : header) sum += static_cast<unsigned char>(byte);
  put(148, fmt::format("{:06o}", sum));
  header[154] = '\0';
  const std::size_t padding = (kBlock - content.size() % kBlock) % kBlock;
  return std::string(header.data(), kBlock) + content + std::string(padding, '\0');
}

/// Variables that RDMA libraries read. No others: they may hold secrets.
std::string variables_text() {
  std::string text;
  for (const std::string& name : environment::names_of_process()) {
    for (const char* prefix : {"DEEP_EP_", "NVSHMEM_", "NCCL_", "UCX_", "CUDA_", "MLX5_", "RDMAV_", "IBV_", "EP_"}) {
      if (name.starts_with(prefix))
        text += fmt::format("{}={}\n", name, environment::of_process(name.c_str()).value_or(""));
    }
  }
  return text;
}

std::string json_text(const nlohmann::json& value) {
  return value.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace

void write_bundle(const std::string& file, const Patient& patient, const NicTestReport& report) {
  const Findings findings = check_everything(patient);
  nlohmann::json doctor = machine_json(patient);
  doctor["findings"] = findings_json(findings);
  std::string versions = fmt::format("deep_ep {}\n", DEEP_EP_VERSION);
  for (const std::string& line : rdma::verbs::describe(rdma::verbs::report_libraries())) versions += line + "\n";
  std::string log;
  for (const std::string& line : report.log) log += line + "\n";
  const std::string archive =
      tar_member("report.txt", report.text()) + tar_member("report.json", json_text(report.json())) +
      tar_member("doctor.txt", machine_text(patient) + "\nFindings\n" + to_text(findings)) +
      tar_member("doctor.json", json_text(doctor)) + tar_member("variables.txt", variables_text()) +
      tar_member("versions.txt", versions) + tar_member("log.txt", log) + std::string(2 * kBlock, '\0');
  std::ofstream out(file, std::ios::binary);
  out << archive;
  out.close();
  if (!out) throw SystemError(fmt::format("--bundle {}: cannot write it", file));
}

}  // namespace deep_ep::tools
