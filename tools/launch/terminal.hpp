// Standard output and standard error, for what ranks print: nobody waits for who does not read them.
#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace deep_ep::tools {

class Terminal {
 public:
  /// `fd` stays open as long as the process; `name`: "standard output".
  Terminal(int fd, std::string name);
  /// Lets go of what nobody has read.
  ~Terminal();
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  /// Kept until it is written; dropped where much is kept and nobody reads it.
  void write(std::string_view text);

  /// Whoever reads is slower than what comes, but reads: what is to come should wait.
  bool is_behind() const;

  /// Waits until all is written, at most so long while nothing moves. What went wrong, empty if nothing did.
  std::string finish(double seconds);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace deep_ep::tools
