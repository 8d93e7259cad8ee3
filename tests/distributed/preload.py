"""What the server has imported before ranks are forked from it; some of it torch would import in the first backward."""

import numpy.ma
import torch.distributed
import torch.fx.experimental.symbolic_shapes

import fastpipe.runtime.pipeline
import tests.runtime.checks
from fastpipe.runtime import native

__all__ = ["fastpipe", "numpy", "tests", "torch"]

native.load()
