// Log lines on their way to Python.
//
// The library's threads never wait for Python: a line may be written by any of them, while some thread that has the GIL
// waits for that one. So lines lie in a queue, and a thread of Python's own (deep_ep/logs.py) fetches them.
#pragma once

#include <pybind11/pybind11.h>

namespace deep_ep::bindings {

namespace py = pybind11;

/// From now on lines from `least` on, a level of Python's module `logging`, go to the queue; 0: what DEEP_EP_LOG says.
/// The queue belongs to this process: in a forked child, which has no thread that fetches, they go to standard error.
void begin_log_lines(int least);
/// Waits for lines, without the GIL: ((level, line), ...). An empty tuple is the end: after end_log_lines, when all
/// lines were fetched.
py::tuple next_log_lines();
/// Lines go back to where DEEP_EP_LOG_FILE says. Returns at once.
void end_log_lines();

}  // namespace deep_ep::bindings
