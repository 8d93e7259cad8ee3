"""What the server has imported before processes are forked from it.

Some of it torch would import in the first backward; the compiler, when an optimizer is made.
"""

import contextlib
import gc
import importlib

import numpy.ma
import pytest
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.fx.experimental.symbolic_shapes

import fastpipe.runtime.pipeline
import tests.runtime.checks
from fastpipe.runtime import native

with contextlib.suppress(ImportError):
    importlib.import_module("transformers.models.gpt2.modeling_gpt2")
    importlib.import_module("transformers.models.llama.modeling_llama")

__all__ = ["fastpipe", "numpy", "pytest", "tests", "torch"]

native.load()

# A collection in a forked process would write to every object that is here, and so copy all of their memory.
gc.collect()
gc.freeze()
