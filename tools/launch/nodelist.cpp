#include "tools/launch/nodelist.hpp"

#include <fmt/format.h>

#include <optional>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::tools {
namespace {

constexpr std::size_t kMostNodesOfList = 65536;

class Expansion {
 public:
  Expansion(std::string_view variable, std::string_view text) : variable_(variable), text_(text) {}

  std::vector<std::string> all() const {
    std::vector<std::string> names;
    for (const std::string_view name : outside_of_brackets()) append(names, name, "");
    return names;
  }

 private:
  [[noreturn]] void refuse() const {
    fail<InvalidArgument>("{}='{}', allowed: names of nodes such as gpu[1-4,07],login", variable_, text_);
  }

  /// Commas inside of brackets separate numbers, the others names.
  std::vector<std::string_view> outside_of_brackets() const {
    std::vector<std::string_view> names;
    std::size_t begin = 0;
    bool inside = false;
    for (std::size_t i = 0; i <= text_.size(); ++i) {
      if (i == text_.size() || (text_[i] == ',' && !inside)) {
        names.push_back(trim(text_.substr(begin, i - begin)));
        if (names.back().empty()) refuse();
        begin = i + 1;
      } else if (text_[i] == '[' || text_[i] == ']') {
        if (inside == (text_[i] == '[')) refuse();
        inside = !inside;
      }
    }
    if (inside) refuse();
    return names;
  }

  /// All that `rest` stands for, behind `done`.
  void append(std::vector<std::string>& names, std::string_view rest, const std::string& done) const {
    const std::size_t open = rest.find('[');
    if (open == std::string_view::npos) {
      if (names.size() == kMostNodesOfList) refuse();
      names.push_back(done + std::string(rest));
      return;
    }
    const std::size_t close = rest.find(']', open);
    for (const std::string_view range : split(rest.substr(open + 1, close - open - 1), ',')) {
      const std::string_view first = range.substr(0, range.find('-'));
      const std::string_view last = first.size() == range.size() ? first : range.substr(first.size() + 1);
      const auto from = parse_number<unsigned>(first);
      const auto to = parse_number<unsigned>(last);
      if (!from || !to || *from > *to || *to - *from >= kMostNodesOfList || first.size() > 9) refuse();
      for (unsigned number = *from; number <= *to; ++number) {
        append(names, rest.substr(close + 1),
               done + std::string(rest.substr(0, open)) + fmt::format("{:0{}}", number, first.size()));
      }
    }
  }

  std::string_view variable_;
  std::string_view text_;
};

}  // namespace

std::vector<std::string> expand_nodelist(std::string_view variable, std::string_view text) {
  return Expansion(variable, text).all();
}

}  // namespace deep_ep::tools
