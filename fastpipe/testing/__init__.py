"""For tests: a step of the unsplit model, a comparison of a pipeline with it, faults, and a transport with delays."""

from __future__ import annotations

from fastpipe.runtime.transport import Loopback
from fastpipe.testing.faults import Fault, flip_bit
from fastpipe.testing.parity import check_parity
from fastpipe.testing.reference import Reference, backward_order, reference_step

__all__ = ["Fault", "Loopback", "Reference", "backward_order", "check_parity", "flip_bit", "reference_step"]
