// What a user's first program looks like: public headers only, and one real call.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "deep_ep/buffer.hpp"
#include "deep_ep/version.hpp"

int main() {
  const auto bootstrap = deep_ep::make_thread_bootstraps(1).front();
  const auto executor = deep_ep::make_host_executor();
  deep_ep::Buffer buffer(bootstrap, executor, {.heap_bytes = std::size_t{16} << 20});

  // Three tokens with two choices each among four experts; the second token chose only one.
  std::vector<std::int64_t> experts = {0, 1, 3, -1, 2, 0};
  const auto topk_idx = deep_ep::TensorView::contiguous(experts.data(), deep_ep::DType::int64, {3, 2});
  const deep_ep::DispatchLayout layout = buffer.get_dispatch_layout(topk_idx, 4);
  buffer.check();
  const auto* counts = layout.num_tokens_per_expert.view().as<std::int32_t>();
  std::printf("deep_ep %s: tokens per expert %d %d %d %d\n", DEEP_EP_VERSION, counts[0], counts[1], counts[2],
              counts[3]);
  const bool right = counts[0] == 2 && counts[1] == 1 && counts[2] == 1 && counts[3] == 1;
  buffer.destroy();
  return right ? 0 : 1;
}
