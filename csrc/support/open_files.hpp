// The number of files, sockets among them, that this process may open.
#pragma once

#include <cstddef>

namespace deep_ep {

/// Makes room for `more` open files: raises the soft limit to the hard one where it would not do.
/// @throws SystemError, with the numbers, if the hard one is too small.
void make_room_for_files(std::size_t more);

}  // namespace deep_ep
