// An environment variable for the time of one test.
#pragma once

#include <stdlib.h>

#include <optional>
#include <string>

namespace deep_ep {

/// Sets a variable (or removes it) and at the end puts back what was there.
class Setting {
 public:
  Setting(const char* name, std::optional<std::string> value) : name_(name) {
    if (const char* old = ::getenv(name)) old_ = old;
    apply(value);
  }
  ~Setting() { apply(old_); }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;

 private:
  void apply(const std::optional<std::string>& value) const {
    value ? ::setenv(name_, value->c_str(), 1) : ::unsetenv(name_);
  }
  const char* name_;
  std::optional<std::string> old_;
};

}  // namespace deep_ep
