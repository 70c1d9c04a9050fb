// The exchanges of one buffer's ranks on the host: all-gathers that carry a purpose and the buffer's number.
#pragma once

#include <memory>

#include "deep_ep/bootstrap.hpp"

namespace deep_ep {

/// The exchanges of one buffer that is about to be made over `group`. A program whose ranks must exchange something
/// before gives it to Buffer's constructor instead of `group`: what goes through it carries the buffer's number, too.
/// (A Buffer over a plain group calls this function itself.)
///
/// Several buffers may be made over one group, side by side or one after the other, by equal ranks in the same order.
/// A rank that left a buffer alone (it was broken there, or dropped) says so in its exchanges of later buffers. If a
/// rank still is in an exchange of that buffer, this exchange ends: `Buffer::destroy` returns, other calls throw
/// SystemError, which names the rank that left. That rank repeats its message in the next round. Ranks that do
/// different things otherwise all get RankMismatch, with what each of them does.
///
/// @param group how the ranks find each other. Exchanges that the program makes through it directly carry no number.
/// @return exchanges whose all_gather throws what `group`'s does, and the errors above.
std::shared_ptr<Bootstrap> make_buffer_exchanges(std::shared_ptr<Bootstrap> group);

}  // namespace deep_ep
