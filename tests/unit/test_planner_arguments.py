"""What `fastpipe.plan` takes: costs in every form, and what it refuses by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
from fastpipe import CostModel, LayerCosts
from fastpipe.planner.problem import Memory, memory_of, read_costs
from tests.unit.plans import LAYERS, UNEVEN, small


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": 0}, "num_ranks = 0"),
        ({"num_microbatches": 1.5}, "num_microbatches = 1.5"),
        ({"objective": "fun"}, "objective = 'fun': use one of makespan, span"),
        ({"max_stages_per_rank": 0}, "max_stages_per_rank = 0"),
        ({"effort": -1}, "effort = -1"),
        ({"time_limit": 0}, "time_limit = 0"),
        ({"seed": -1}, "seed = -1"),
        ({"recompute": "some"}, "recompute = 'some': use one of none, full, auto"),
        ({"costs": CostModel(recompute=0.5), "recompute": "auto"}, "the costs say already what is recomputed"),
        ({"placement": fastpipe.Placement.loop(3)}, "placement has 3 ranks and num_ranks = 4"),
        ({"placement": fastpipe.Placement.loop(4, 2), "costs": UNEVEN}, "placement has 8 stages and the costs name 4"),
        ({"placement": fastpipe.Placement.loop(4, 4), "costs": LAYERS}, "there are only 14 layers"),
        ({"memory": "1GiB"}, "the costs do not say how many bytes a stage holds"),
        ({"memory": 0.01}, r"nothing fits; the smallest, .*, needs 0\.25 of 1F1B's"),
        ({"time_limit": True}, "time_limit = True"),
        ({"costs": CostModel(comm={(0, 4): 1.0})}, "comm names the link 0->4, and num_ranks = 4: there are 0 to 3"),
        ({"costs": LayerCosts(8, batch_size=6)}, "num_microbatches = 8: a batch_size of 6 has too few rows"),
    ],
)
def test_wrong_arguments_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**options)


def test_numbers_of_numpy_are_numbers() -> None:
    numbers = {"memory": np.float32(0.5), "effort": np.float32(0), "num_microbatches": np.int64(8)}
    assert small(**numbers).schedule == small(memory=0.5, effort=0).schedule
    assert memory_of(np.int64(1)) == Memory("fraction", 1.0)


def test_a_placement_is_a_placement() -> None:
    with pytest.raises(TypeError, match="placement: .*Placement or a Schedule.* str"):
        small(placement="loop")


def test_costs_are_read_from_files_and_dicts(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"forward": 1.0, "backward_input": 1.2, "backward_weight": 0.8, "comm": 0.05}))
    assert small(path, effort=0).schedule == small(str(path), effort=0).schedule == small(effort=0).schedule
    layers = {"num_layers": 8, "forward": 0.5, "bandwidth": {"0->1": 5.0}, "activation_bytes": 1.0}
    path.write_text(json.dumps(layers))
    assert LayerCosts.from_json(path) == LayerCosts(8, 0.5, bandwidth={(0, 1): 5.0}, activation_bytes=1.0)
    assert LayerCosts.from_json(json.dumps(layers) + "\n") == LayerCosts.from_json(path)
    assert small(layers, effort=0).partition is not None
    for text, message in (
        ("{", "no JSON"),
        ("[]", "give an object with"),
        ('{"num_layers": 8, "speed": 3}', "there is no 'speed'"),
        ('{"num_layers": 8, "comm": null}', "comm is or has a null"),
    ):
        path.write_text(text)
        for read in (small, LayerCosts.from_json):
            with pytest.raises(ValueError, match=rf"costs\.json: {message}"):
                read(path)
    path.write_text('{"forward": -1}')
    for reads in (small, CostModel.from_json):
        with pytest.raises(ValueError, match=r"costs\.json: forward = -1: give numbers"):
            reads(path)
    with pytest.raises(TypeError, match="costs: .*CostModel, LayerCosts, .*int"):
        small(3)
    with pytest.raises(TypeError, match="parts: expected a Sequence, found int; LayerCosts.partition gives them"):
        LAYERS.stages(3, 8)
    with pytest.raises(ValueError, match=r"part = range\(0, 9\): give layers of 0 to 3, at least one"):
        LayerCosts(4).parameters([range(0, 9)])
    with pytest.raises(ValueError, match="held_bytes is of layers; say num_layers too"):
        small({"held_bytes": 3})
    with pytest.raises(ValueError, match="there is no 'speed'"):
        small({"num_layers": 8, "speed": 3})


def test_costs_in_a_dict_are_what_the_classes_take() -> None:
    links, seconds = {(0, 1): 0.5, (1, 0): 0.25}, np.array([1, 2, 1, 1], dtype=np.float32)
    assert read_costs({"comm": links, "forward": seconds}) == CostModel(comm=links, forward=[1, 2, 1, 1])
    assert read_costs({"comm": {"0->1": 0.5, "1->0": 0.25}}) == read_costs({"comm": links})
    layers = LayerCosts(4, [1.0, 2.0, 1.0, 1.0], comm=links, launch=0.5)
    given = {"num_layers": np.int64(4), "forward": seconds, "comm": links, "launch": np.float32(0.5)}
    assert read_costs(given) == LayerCosts(**given) == layers
    with pytest.raises(ValueError, match=r"costs: comm: \(0,\) is no link"):
        read_costs({"comm": {(0,): 1.0}})
    with pytest.raises(ValueError, match="costs: forward is or has a null"):
        read_costs({"forward": [1.0, None]})


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"num_layers": 0}, "num_layers = 0"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"forward": [1.0]}, "forward = .*one for each of 2 layers"),
        ({"forward": [1.0, -1.0]}, r"forward\[1\] = -1.0"),
        ({"launch": float("nan")}, "launch = nan"),
        ({"comm": -1.0}, "comm = -1.0"),
    ],
)
def test_layers_costs_are_checked(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerCosts(**{"num_layers": 2, **attributes})


def test_layers_grow_with_the_microbatch_and_launches_do_not() -> None:
    parts = [range(0, 7), range(7, 14)]
    measured, twice = LAYERS.stages(parts, 8), LAYERS.stages(parts, 4)
    for name in ("forward", "backward_input", "backward_weight", "backward"):
        old, new = measured.per_stage(name, 2), twice.per_stage(name, 2)
        assert (new - 0.02).tolist() == pytest.approx((2 * (old - 0.02)).tolist())
    assert twice.per_stage("stage_bytes", 2).tolist() == (2 * measured.per_stage("stage_bytes", 2)).tolist()
    assert LAYERS.parameters(parts) == [50e6 + 72e6, 50e6 + 72e6]
    fused = LayerCosts(4, 1.0, 1.0, 1.0, fused=0.75).stages([range(0, 2), range(2, 4)], 1)
    assert fused.per_stage("overlapped", 2).tolist() == [4.5, 4.5]
