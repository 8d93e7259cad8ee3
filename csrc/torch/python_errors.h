// Exceptions on their way between C++ and Python. A Python exception stays the object it is.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>

namespace fastpipe {

// Turns what the autograd engine makes of a Python exception into what pybind11 makes of one. Takes the GIL.
[[noreturn]] void rethrow_for_pybind(python_error& error);

// The Python exception for any C++ one, with its traceback: ValueError for an ArgumentError, fastpipe's own
// for a TransportError, RuntimeError for the core's others, torch's choice for torch's. The GIL must be held.
py::object to_python(const std::exception_ptr& error);

// Raises an exception object. The GIL must be held.
[[noreturn]] void raise(const py::object& exception);

// Runs the handlers of signals that have come, if this is the main thread; throws what they raise. Takes the GIL.
void check_signals();

}  // namespace fastpipe
