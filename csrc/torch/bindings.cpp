// The Python face of the native runtime: every binding stands here, and nothing but bindings.
// (torch/csrc/utils/pybind.h instead of torch/extension.h: it brings torch's own pybind11 at a third of the time.)
#include <torch/csrc/utils/pybind.h>

PYBIND11_MODULE(_runtime, m) { m.doc() = "fastpipe's native runtime"; }
