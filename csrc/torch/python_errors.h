// Exceptions on their way between C++ and Python. A Python exception stays the object it is.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <exception>

#include "core/common.h"
#include "torch_private.h"

namespace fastpipe {

// The exception object with its traceback.
inline py::object object_of(py::error_already_set& error) {
  py::object value = error.value();
  if (error.trace()) PyException_SetTraceback(value.ptr(), error.trace().ptr());
  return value;
}

// The Python exception for any C++ one, with its traceback: ValueError for an ArgumentError, fastpipe's own
// for a TransportError, RuntimeError for the core's others, torch's choice for torch's. The GIL must be held.
inline py::object to_python(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (py::error_already_set& python) {
    return object_of(python);
  } catch (const ArgumentError& wrong) {
    return py::reinterpret_borrow<py::object>(PyExc_ValueError)(wrong.what());
  } catch (const TransportError& broken) {
    const py::object peer = broken.peer() < 0 ? py::object(py::none()) : py::int_(broken.peer());
    return py::module_::import("fastpipe.runtime.common").attr("lost_peer")(broken.what(), peer);
  } catch (const Error& wrong) {
    return py::reinterpret_borrow<py::object>(PyExc_RuntimeError)(wrong.what());
  } catch (...) {
    py::error_already_set python = translated(std::current_exception());
    return object_of(python);
  }
}

// Raises an exception object. The GIL must be held.
[[noreturn]] inline void raise(const py::object& exception) {
  PyErr_SetObject(py::type::handle_of(exception).ptr(), exception.ptr());
  throw py::error_already_set();
}

// A function for Python that makes the call without the GIL; the call must stay until it has returned.
inline py::cpp_function without_gil(FunctionRef<void()> call) {
  return py::cpp_function([call] {
    try {
      const py::gil_scoped_release no_gil;
      call();
    } catch (...) {
      raise(to_python(std::current_exception()));
    }
  });
}

// Runs the handlers of signals that have come, if this is the main thread; throws what they raise. Takes the GIL.
inline void check_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace fastpipe
