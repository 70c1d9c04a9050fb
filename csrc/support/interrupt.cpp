#include "deep_ep/interrupt.hpp"

#include <utility>

namespace deep_ep {
namespace {

thread_local InterruptScope* current = nullptr;

}  // namespace

InterruptScope::InterruptScope(std::function<bool()> wanted)
    : wanted_(std::move(wanted)), outer_(std::exchange(current, this)) {}

InterruptScope::~InterruptScope() { current = outer_; }

bool InterruptScope::any() { return current != nullptr; }

bool InterruptScope::wanted() { return current != nullptr && current->wanted_(); }

}  // namespace deep_ep
