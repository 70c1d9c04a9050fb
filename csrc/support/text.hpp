// Reading text: what lists, numbers and files of the system are taken apart with.
#pragma once

#include <charconv>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace deep_ep {

inline constexpr std::string_view kWhiteSpace = " \t\r\n\f\v";

/// `text` without white space around it.
inline std::string_view trim(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(kWhiteSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kWhiteSpace) - begin + 1);
}

/// The parts of `text`, each without white space around it; one empty part for an empty text.
inline std::vector<std::string_view> split(std::string_view text, std::string_view separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t end = text.find(separator);
    parts.push_back(trim(text.substr(0, end)));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + separator.size());
  }
}
inline std::vector<std::string_view> split(std::string_view text, char separator) {
  return split(text, std::string_view(&separator, 1));
}

/// The first line that begins with `head`, without it and without white space around the rest.
inline std::string rest_of_line(std::string_view text, std::string_view head) {
  for (const std::string_view line : split(text, '\n')) {
    if (line.starts_with(head)) return std::string(trim(line.substr(head.size())));
  }
  return {};
}

/// The number that `text` is, all of it. from_chars, not strtod: the decimal point must not depend on the locale.
template <class T, class... Base>
std::optional<T> parse_number(std::string_view text, Base... base) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base...);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(value) : std::nullopt;
}

}  // namespace deep_ep
