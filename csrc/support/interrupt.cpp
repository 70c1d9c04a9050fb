#include "deep_ep/interrupt.hpp"

#include <utility>

#include "csrc/support/program_code.hpp"

namespace deep_ep {
namespace {

thread_local InterruptScope* current = nullptr;

// Python wants its lock for an answer, which another thread may hold for long: a wait that is soon over must not ask.
constexpr std::chrono::milliseconds kBetweenQuestions{100};

}  // namespace

InterruptScope::InterruptScope(std::function<bool()> wanted)
    : wanted_(std::move(wanted)),
      next_(std::chrono::steady_clock::now() + kBetweenQuestions),
      outer_(std::exchange(current, this)) {}

InterruptScope::~InterruptScope() { current = outer_; }

bool InterruptScope::wanted() {
  if (current == nullptr) return false;
  const auto now = std::chrono::steady_clock::now();
  if (now < current->next_) return false;
  current->next_ = now + kBetweenQuestions;
  struct Outside {  // the question may itself ask the scope around
    Outside() : scope(std::exchange(current, current->outer_)) {}
    ~Outside() { current = scope; }
    InterruptScope* scope;
  } const outside;
  const ProgramCode handlers_of_signals;
  return outside.scope->wanted_();
}

}  // namespace deep_ep
