#include "tools/doctor/gpu_models.hpp"

#include <cctype>

namespace deep_ep::tools {
namespace {

constexpr GpuModel kModels[] = {
    {"GB300", 103, 288, 575, true}, {"GB200", 100, 192, 570, true}, {"GH200", 90, 0, 535, true},
    {"B300", 103, 288, 575, false}, {"B200", 100, 180, 570, false}, {"H200", 90, 141, 535, false},
    {"H100", 90, 80, 525, false},   {"H800", 90, 80, 525, false},   {"H20", 90, 96, 535, false},
    {"A100", 80, 0, 450, false},    {"A800", 80, 80, 515, false},   {"L40S", 89, 48, 535, false},
    {"L40", 89, 48, 525, false},    {"L4", 89, 24, 525, false},     {"V100", 70, 0, 396, false},
    {"T4", 75, 16, 418, false},
};

bool is_part_of_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; }

bool has_word(std::string_view text, std::string_view word) {
  for (std::size_t at = text.find(word); at != std::string_view::npos; at = text.find(word, at + 1)) {
    const std::size_t end = at + word.size();
    const bool begins = at == 0 || !is_part_of_word(text[at - 1]);
    if (begins && (end == text.size() || !is_part_of_word(text[end]))) return true;
  }
  return false;
}

}  // namespace

const GpuModel* model_of(std::string_view name) {
  for (const GpuModel& model : kModels) {
    if (has_word(name, model.word)) return &model;
  }
  return nullptr;
}

}  // namespace deep_ep::tools
