// What a user's first program looks like: public headers only.
#include <cstdio>

#include "deep_ep/buffer.hpp"
#include "deep_ep/version.hpp"

int main() {
  const std::string kind = deep_ep::name_of(deep_ep::DType::bfloat16);
  std::printf("deep_ep %s: %s has %zu bytes\n", DEEP_EP_VERSION, kind.c_str(),
              deep_ep::size_of(deep_ep::DType::bfloat16));
  return kind == "bfloat16" ? 0 : 1;
}
