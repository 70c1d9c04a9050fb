// Whole machines as files: the verdict of every check, whether the machine is usable, and what --report says of it.

#include "tests/topology/doctor_fixture.hpp"
#include "tools/doctor/bundle.hpp"
#include "tools/doctor/machine.hpp"

namespace deep_ep::tools {
namespace {

class Sysroot : public Doctor {
 protected:
  /// "D4 fail, D6 warn": all checks that are neither ok nor skipped.
  std::string verdicts() const {
    const Findings found = findings();
    std::string text;
    for (const Check& check : all_checks()) {
      const Verdict verdict = verdict_of(check, found);
      if (verdict < Verdict::warning) continue;
      text += fmt::format("{}{} {}", text.empty() ? "" : ", ", check.id, word_of(verdict));
    }
    return text.empty() ? "all ok" : text;
  }
  std::string skipped() const {
    const Findings found = findings();
    std::string text;
    for (const Check& check : all_checks()) {
      if (verdict_of(check, found) == Verdict::skip) text += fmt::format("{}{}", text.empty() ? "" : " ", check.id);
    }
    return text;
  }
  bool usable() const { return answer_quickly(patient(), {}).usable; }
  std::string report() const { return to_text(report_machine(patient(), "1.2.3")); }
};

TEST_F(Sysroot, HealthyA4) {
  write_healthy_machine(machine_);
  EXPECT_EQ(verdicts(), "all ok");
  EXPECT_EQ(skipped(), "D11 D12 D15 D16");
  EXPECT_TRUE(usable());
  EXPECT_EQ(report(),
            "deep_ep           1.2.3\n"
            "Host              node-0\n"
            "Boot              11111111-2222-3333-4444-555555555555\n"
            "Machine           Google Compute Engine\n"
            "GPUs              8 x NVIDIA B200\n"
            "NVIDIA driver     580.126.09\n"
            "NICs              8 x 400 Gb/s RoCE (mlx5_core)\n"
            "NIC firmware      8 x 28.41.1000\n"
            "GIDs              8 x RoCE v2\n"
            "Operating system  Ubuntu 24.04.3 LTS\n"
            "Kernel            6.14.0-1021-gcp\n"
            "RDMA driver       the kernel's own\n"
            "libibverbs        libibverbs.so.1.14.50.0 (private ABI 34)\n"
            "libmlx5           libmlx5.so.1.24.50.0 (private ABI 34)\n"
            "nvidia-peermem    580.126.09\n");
  const std::string text = machine_text(patient());
  EXPECT_NE(text.find("GPU 7 (0000:44:00.0) -> mlx5_7 port 1, 400 Gb/s, GID 3 (RoCE v2, 10.0.7.1, eth8), PIX"),
            std::string::npos)
      << text;
}

TEST_F(Sysroot, H200WithInfiniBand) {
  write_h200_machine(machine_);
  EXPECT_EQ(verdicts(), "all ok");
  EXPECT_NE(report().find("NICs              8 x 400 Gb/s InfiniBand (mlx5_core)\n"), std::string::npos) << report();
}

// --- single checks ---

TEST_F(Sysroot, TheBuildMustFitTheGpu) {
  write_healthy_machine(machine_, {.model = "NVIDIA B300"});
  const auto about_code = [&](const std::vector<std::string>& architectures) {
    Findings found;
    Patient b300 = patient();
    b300.build.architectures = architectures;
    check_driver(b300, found);
    for (const Finding& one : found) {
      if (one.found.starts_with("this build has no code")) return one.found;
    }
    return std::string();
  };
  EXPECT_EQ(about_code({"90a-real", "100-real", "90-virtual"}), "") << "machine code of 10.0 loads on 10.3";
  EXPECT_EQ(about_code({"100f-real"}), "");
  EXPECT_EQ(about_code({"90a-real", "100a-real"}),
            "this build has no code for NVIDIA B300 (compute capability 10.3), only for 90a-real, 100a-real");
  EXPECT_EQ(
      about_code({"90a-real", "100a-real", "90-virtual"}),
      "this build has no code of its own for NVIDIA B300 (compute capability 10.3), only for 90a-real, 100a-real, "
      "90-virtual");
  machine_.write("/sys/module/nvidia/version", "575.57.08");
  EXPECT_EQ(complaints("driver").find("is older than"), std::string::npos) << "this build is of CUDA 12";
  Patient cuda_13 = patient();
  cuda_13.build = {"13.0.88", {"90a-real", "100-real"}};
  Findings of_cuda_13;
  check_driver(cuda_13, of_cuda_13);
  ASSERT_EQ(of_cuda_13.size(), 1u);
  EXPECT_EQ(of_cuda_13[0].found, "driver 575.57.08 is older than 580, the first for CUDA 13.0.88");
}

// --- the answer to --quick, and the list of all checks ---

TEST_F(Sysroot, QuickAnswersInOneLine) {
  EXPECT_TRUE(usable()) << "one machine without GPUs: the CPU executor works";
  EXPECT_EQ(answer_quickly(patient(), {.gpus = 8, .nics = 2}).line,
            "not usable: 0 GPUs are here, --gpus 8 expected; 0 RDMA devices are usable here, --nics 2 expected");
  write_healthy_machine(machine_);
  const QuickAnswer answer = answer_quickly(patient(), {.gpus = 8, .nics = 8});
  EXPECT_EQ(answer.line, "usable: 8 GPUs, 8 RDMA devices, 0 warnings");
  for (const Finding& finding : answer.findings) EXPECT_NE(finding.check, "libraries") << "that takes long";
  EXPECT_FALSE(answer_quickly(patient(), {.gpus = 9}).usable);
  machine_.write("/sys/class/infiniband/mlx5_5/ports/1/state", "1: DOWN");
  machine_.write("/sys/class/infiniband/mlx5_5/ports/1/phys_state", "3: Disabled");
  EXPECT_EQ(answer_quickly(patient(), {}).line, "not usable: D4 mlx5_5 port 1 is DOWN (link: Disabled)");
}

// --- damaged copies of machines ---

TEST_F(Sysroot, TextsThatAreNoUtf8AreStillJson) {
  write_healthy_machine(machine_);
  machine_.write("/sys/class/infiniband/mlx5_0/fw_ver", "28.\xff\xfe");
  machine_.write("/etc/os-release", "PRETTY_NAME=\"\xc3\x28\x1b[31m\"");
  variables_["NCCL_NET"] = "\xff";
  const nlohmann::json json = {{"report", to_json(report_machine(patient(), "1"))}, {"findings", findings()}};
  const std::string text = json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
  EXPECT_FALSE(nlohmann::json::parse(text, nullptr, false).is_discarded());
  EXPECT_EQ(printable("a\x1b[31m\n"), "a?[31m\n");
}

}  // namespace
}  // namespace deep_ep::tools
