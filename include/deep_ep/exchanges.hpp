// The exchanges of one buffer's ranks on the host: all-gathers that carry a purpose and the buffer's number.
#pragma once
// SPDX-License-Identifier: MIT

#include <memory>

#include "deep_ep/bootstrap.hpp"

namespace deep_ep {

/// The exchanges of one buffer that the program is about to make over `group`. A program whose ranks exchange messages
/// of their own first gives the result to Buffer's constructor, so these carry the buffer's number, too. (A Buffer over
/// a plain group calls this function itself.)
///
/// Ranks may make several buffers over one group, in the same order. A rank that has left a buffer alone (it was broken
/// or dropped there) says so in its exchanges of later buffers. If another rank still is in an exchange of that buffer,
/// this exchange ends: `Buffer::destroy` returns, other calls throw SystemError, which names the rank that left. If
/// ranks do different things otherwise, all throw RankMismatch, which says what two of them do.
///
/// @param group the ranks. Exchanges that the program makes through it directly carry no number.
/// @return exchanges whose all_gather throws the errors of `group` and those above.
std::shared_ptr<Bootstrap> make_buffer_exchanges(std::shared_ptr<Bootstrap> group);

}  // namespace deep_ep
