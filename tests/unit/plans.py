"""A plan that tests ask for, and the costs of it; imports no torch."""

from typing import Any

import fastpipe
from fastpipe import CostModel, LayerCosts

COSTS = CostModel(1.0, 1.2, 0.8, comm=0.05)
UNEVEN = CostModel([1.0, 1.3, 0.9, 1.1], [1.2, 1.0, 1.4, 0.9], [0.7, 0.9, 0.8, 1.0], comm=0.15)
LAYERS = LayerCosts(
    num_layers=14,
    forward=[0.3, *[1.0] * 12, 1.5],
    backward_input=[0.1, *[1.1] * 12, 1.6],
    backward_weight=[0.2, *[0.9] * 12, 1.5],
    held_bytes=[2e6, *[10e6] * 12, 30e6],
    activation_bytes=1e6,
    parameter_bytes=[50e6, *[12e6] * 12, 50e6],
    comm=0.01,
    bandwidth=1e9,
    launch=0.02,
    microbatch_size=2,
    batch_size=16,
)


def small(costs: Any = COSTS, **options: Any) -> fastpipe.Plan:
    """A plan of a case so small that it takes no time."""
    numbers = {"num_ranks": 4, "num_microbatches": 8, "max_stages_per_rank": 2, "effort": 0.008, **options}
    return fastpipe.plan(costs, **numbers)
