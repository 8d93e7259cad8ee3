#include "python_errors.h"

#include "core/common.h"

namespace fastpipe {

namespace {

py::object taken_from(py::error_already_set& error) {
  py::object value = error.value();
  if (error.trace()) PyException_SetTraceback(value.ptr(), error.trace().ptr());
  return value;
}

}  // namespace

void rethrow_for_pybind(python_error& error) {
  const py::gil_scoped_acquire gil;
  // The engine's Python face leaves the exception set, as its own caller wants it.
  if (PyErr_Occurred() == nullptr) error.restore();
  throw py::error_already_set();
}

py::object to_python(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (py::error_already_set& python) {
    return taken_from(python);
  } catch (const ArgumentError& wrong) {
    return py::reinterpret_borrow<py::object>(PyExc_ValueError)(wrong.what());
  } catch (const TransportError& broken) {
    const py::object peer = broken.peer() < 0 ? py::object(py::none()) : py::int_(broken.peer());
    return py::module_::import("fastpipe.runtime.common").attr("TransportError")(broken.what(), peer);
  } catch (const Error& wrong) {
    return py::reinterpret_borrow<py::object>(PyExc_RuntimeError)(wrong.what());
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    py::error_already_set translated;
    return taken_from(translated);
  }
}

void raise(const py::object& exception) {
  PyErr_SetObject(py::type::handle_of(exception).ptr(), exception.ptr());
  throw py::error_already_set();
}

void check_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace fastpipe
