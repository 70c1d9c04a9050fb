// Stands in for libnvidia-ml.so.1: two GPUs, of which the second has lost an NVLink.
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace {

constexpr int kSuccess = 0;
constexpr int kNotSupported = 3;
constexpr int kInvalid = 2;
std::uintptr_t number_of(void* device) { return reinterpret_cast<std::uintptr_t>(device) - 1; }

}  // namespace

extern "C" {

int nvmlInit_v2() { return kSuccess; }
int nvmlShutdown() { return kSuccess; }
int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = 2;
  return kSuccess;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = reinterpret_cast<void*>(std::uintptr_t{index} + 1);
  return kSuccess;
}
int nvmlDeviceGetMemoryInfo(void*, unsigned long long* total_free_used) {
  total_free_used[0] = 192'000'000'000;
  total_free_used[1] = 190'000'000'000;
  total_free_used[2] = 2'000'000'000;
  return kSuccess;
}
// 16 characters, five numbers, then 32 characters.
int nvmlDeviceGetPciInfo_v3(void* device, char* info) {
  std::snprintf(info + 36, 32, "00000000:%02X:00.0", static_cast<unsigned>(0x1a + number_of(device)));
  return kSuccess;
}
// Version 2 has 36 bytes: version, 16 of the cluster, status, clique, state, health.
int nvmlDeviceGetGpuFabricInfoV(void*, char* info) {
  const std::uint32_t version = 36U | 2U << 24;
  if (std::memcmp(info, &version, sizeof version) != 0) return kInvalid;
  const std::uint32_t clique = 7;
  for (int i = 0; i < 16; ++i) info[4 + i] = static_cast<char>(0x10 + i);
  std::memset(info + 20, 0, 4);
  std::memcpy(info + 24, &clique, sizeof clique);
  info[28] = 3;  // completed
  std::memset(info + 32, 0, 4);
  return kSuccess;
}
int nvmlDeviceGetNvLinkState(void* device, unsigned link, int* active) {
  if (link > 18) return kInvalid;
  if (link >= 4) return kNotSupported;
  *active = number_of(device) == 1 && link == 2 ? 0 : 1;
  return kSuccess;
}
}
