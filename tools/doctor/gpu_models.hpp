// What the names of GPUs tell: files of a machine say nothing else about what a GPU can do.
#pragma once

#include <string_view>

namespace deep_ep::tools {

struct GpuModel {
  std::string_view word;    ///< of its name: "B200"
  int capability = 0;       ///< compute capability, 100 for 10.0
  int memory_gb = 0;        ///< as it is sold, decimal; 0: several kinds are
  int least_driver = 0;     ///< major version of the first driver that runs it
  bool multi_node = false;  ///< its NVLink may join several nodes
};
/// Null for names that nobody has put down here.
const GpuModel* model_of(std::string_view name);

}  // namespace deep_ep::tools
