"""What the server has imported before ranks are forked from it; some of it torch would import in the first backward."""

import numpy.ma
import pytest
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.fx.experimental.symbolic_shapes

import fastpipe.runtime.pipeline
import tests.runtime.checks
from fastpipe.runtime import native

__all__ = ["fastpipe", "numpy", "pytest", "tests", "torch"]

native.load()
