"""Wrong arguments: a ValueError or TypeError that names the argument, what was found, and what to give."""

import math
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining.microbatch import _Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from fastpipe import GradScaler, Pipeline, StepError, all_to_all, check_parity, layer_costs, make_schedule
from fastpipe.runtime import construction
from fastpipe.runtime.common import lost_peer, torch_private
from fastpipe.runtime.model import check_device
from fastpipe.runtime.transport import process_group as coalesced
from fastpipe.runtime.transport.groups import Membership
from fastpipe.testing import Fault
from tests.conftest import executors_in_turn
from tests.runtime.models import CASES, WIDTH, Block, squared

LAYERS = CASES["plain"].layers(4)
SCHEDULE = make_schedule("1f1b", num_ranks=2, num_microbatches=4)
X, Y = torch.randn(9, WIDTH), torch.randn(9, WIDTH)
W = torch.ones(WIDTH, requires_grad=True)


class TwoInputs(nn.Module):
    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return x + z


class Optional(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        found: torch.Tensor = self.layer(x if z is None else x + z)
        return found


class Returns(nn.Module):
    """A last layer that returns a mean and its input, in some form."""

    def __init__(self, form: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        return self.form(x.square().mean(), x)


def build(**wrong: Any) -> Pipeline:
    good: dict[str, Any] = {"stages": LAYERS, "schedule": "1f1b", "num_microbatches": 4, "loss_fn": squared}
    return Pipeline(**{**good, "num_ranks": 2, **wrong})


CONSTRUCTION: dict[str, tuple[dict[str, Any], str]] = {
    "unknown schedule": ({"schedule": "2f2b"}, "'2f2b'.*use one of gpipe"),
    "a file": ({"schedule": "mine.csv", "num_microbatches": None}, "'mine.csv'.*, or Schedule.from_csv"),
    "no name": ({"schedule": 7, "num_microbatches": None}, "schedule name: expected a str"),
    "unknown option": ({"schedule_options": {"chunks": 2}}, "chunks = 2.*1f1b has no such option"),
    "options of a made schedule": ({"schedule": SCHEDULE, "schedule_options": {"x": 1}}, "schedule_options = "),
    "stages_per_rank twice": (
        {"schedule": "interleaved_1f1b", "stages_per_rank": 2, "schedule_options": {"stages_per_rank": 1}},
        "stages_per_rank = 2, and 1 in schedule_options: give one",
    ),
    "stages_per_rank of another": ({"stages_per_rank": 3}, "stages_per_rank = 3: 1f1b has 1"),
    "no microbatches": ({"num_microbatches": None}, "num_microbatches is missing"),
    "microbatches 0": ({"num_microbatches": 0}, "num_microbatches = 0"),
    "microbatches a str": ({"num_microbatches": "4"}, "num_microbatches = '4'"),
    "too few microbatches": ({"schedule": "dualpipev", "num_microbatches": 3}, "num_microbatches = 3"),
    "microbatches of a made schedule": ({"schedule": SCHEDULE, "num_microbatches": 5}, "num_microbatches = 5.*has 4"),
    "ranks of a made schedule": ({"schedule": SCHEDULE, "num_ranks": 3}, "num_ranks = 3.*has 2 ranks"),
    "ranks 0": ({"num_ranks": 0}, "num_ranks = 0"),
    "ranks a str": ({"num_ranks": "two"}, "num_ranks = 'two'"),
    "ranks a bool": ({"num_ranks": True}, "num_ranks = True"),
    "loss_fn": ({"loss_fn": 3}, "loss_fn = 3"),
    "loss_fn that two ranks would train": (
        {"schedule": "dualpipe", "loss_fn": nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 9, [3])},
        "loss_fn has parameters, and dualpipe computes the loss on two ranks.*a schedule with one route",
    ),
    "loss_reduction": ({"loss_reduction": "max"}, "loss_reduction = 'max'.*'mean', 'sum'"),
    "timeout": ({"timeout": 0}, "timeout = 0"),
    "timeout that is a flag": ({"timeout": True}, "timeout = True"),
    "timeout that is no number": ({"timeout": math.nan}, "timeout = nan"),
    "rng": ({"rng": "per_step"}, "rng = 'per_step'"),
    "executor": ({"executor": "cpp"}, "executor = 'cpp'.*'auto', 'native' or 'python'"),
    "transport": ({"transport": "mpi"}, "transport = 'mpi'"),
    "transport needs processes": ({"transport": "process_group"}, "one process for 2 ranks.*torchrun"),
    "too few layers": ({"stages": LAYERS[:1]}, "stages has 1 layers.*2 stages"),
    "partition": ({"partition": "blocks"}, "partition = 'blocks'"),
    "partition too short": ({"partition": [1, 2]}, r"partition = \[1, 2\].*4 layers"),
    "partition as an array": ({"partition": np.array([2, 2])}, r"partition = array\(\[2, 2\]\): use .* as a list"),
    "partition that skips": ({"partition": [range(2, 4), range(2)]}, r"range\(0, 2\)\]: stages are consecutive layers"),
    "partition with 0": ({"partition": [4, 0]}, r"partition = \[4, 0\]"),
    "no layers": ({"stages": [Block(), 3]}, r"stages\[1\] is a int"),
    "a function among the layers": (
        {"stages": [Block(), torch.relu]},
        r"stages\[1\] is a builtin_function_or_method: .* a function in the forward of one",
    ),
    "a class among the layers": ({"stages": [Block(), nn.ReLU]}, r"stages\[1\] is a type: .*torch.device\('meta'\)"),
    "a module": ({"stages": Block()}, r"stages is a Block: give the list .*fastpipe.split\(model\)"),
    "a function to nothing": ({"stages": lambda index: None}, r"stages\(0\) returned a NoneType"),
    "a lazy layer": (
        {"stages": [nn.Linear(WIDTH, WIDTH), nn.LazyLinear(WIDTH)]},
        "layer 1 of the model: weight has no shape yet.*run the model once",
    ),
    "a lazy layer in a stage": (
        {"stages": {0: nn.Linear(WIDTH, WIDTH), 1: nn.Sequential(nn.LazyBatchNorm1d())}},
        r"stages\[1\]: 0.weight has no shape yet",
    ),
    "a dict with a hole": ({"stages": {0: Block()}}, "stages lacks stage 1"),
    "a dict with no module": ({"stages": {0: Block(), 1: None}}, r"stages\[1\] is a NoneType: give an nn.Module"),
    "a dict with too much": ({"stages": {0: Block(), 1: Block(), 2: Block()}}, "stages has the key 2"),
    "stage_to_rank a dict": ({"stage_to_rank": {0: 1, 1: 0}}, "stage_to_rank = {0: 1, 1: 0}: give a list"),
    "stage_to_rank of None": ({"stage_to_rank": [None, None]}, r"stage_to_rank = \[None, None\]"),
    "microbatches a list": ({"num_microbatches": [4]}, r"num_microbatches = \[4\]"),
    "tied no list": ({"tied": [5]}, r"tied = \[5\]: give a list of groups"),
    "options without names": ({"schedule_options": {1: 2}}, "schedule_options = {1: 2}"),
    "stages_per_rank a bool": ({"stages_per_rank": True}, "stages_per_rank = True"),
    "stage_to_rank too short": ({"stage_to_rank": [0]}, r"stage_to_rank = \[0\]"),
    "stage_to_rank no renaming": ({"stage_to_rank": [1, 1]}, r"stage_to_rank = \[1, 1\]"),
    "another device": ({"device": "meta"}, "device is meta, which computes nothing"),
    "no device": ({"device": "gpu"}, "device = 'gpu': Expected one of cpu"),
    "a group by name": ({"group": "world"}, "group is a str: give a process group"),
    "a bad rule": ({"split": {0: "halves"}}, r"split\[0\] = 'halves': give a dimension"),
    "None for a rule": ({"split": {0: None}}, r"split\[0\] = None: give a dimension"),
    "None for an output's rule": ({"merge": {0: None}}, r"merge\[0\] = None: give a dimension"),
    "a rule that is a class": ({"split": {0: _Replicate}}, r"split\[0\] = <class .*_Replicate'>: give a dimension"),
    "rules in a tuple": ({"split": (0, 1)}, r"split = \(0, 1\): give a dimension.* in a dict by name or position"),
    "a rule for the last": ({"split": {-1: 1}}, r"split\[-1\]: give a name, or a position counted from 0"),
    "outputs merged badly": ({"merge": "cat"}, "merge = 'cat': give a dimension, .* in a dict by name or position"),
    "a class for a loss": ({"loss_fn": nn.MSELoss}, r"MSELoss: that is a class; give an instance, MSELoss\(\)"),
    "options in a list": ({"schedule_options": [1]}, r"schedule_options = \[1\]: give a dict"),
    "recompute of one argument": ({"recompute": lambda i: "full"}, "recompute is a function that does not take"),
    "a context for a function": ({"forward_context": torch.no_grad()}, "forward_context is a no_grad: give a function"),
    "a partition of made stages": (
        {"stages": lambda index: Block(), "partition": [7, 9, 100]},
        r"partition = \[7, 9, 100\]: these stages are cut already; omit partition",
    ),
    "recv_lookahead": ({"recv_lookahead": -1}, "recv_lookahead = -1"),
    "recv_lookahead a bool": ({"recv_lookahead": True}, "recv_lookahead = True: give a whole number, or 'all'"),
    "a metric without a name": ({"metrics": {1: "sum"}}, r"metrics\[1\]: metrics have names"),
    "too many ranks": ({"num_ranks": 10**9}, "num_ranks = 1000000000: there are at most 1,000,000"),
    "too many microbatches": (
        {"num_microbatches": 10**9},
        "num_microbatches = 1000000000.*that is 2,000,000,000 forwards.*at most 100,000,000",
    ),
    "an example by flops": (
        {"partition": "flops", "example": X[:, :-1]},
        r"example has \[\(9, 5\)\], .*shapes cannot be.*: pass one microbatch",
    ),
    "an example by seconds": ({"partition": "seconds", "example": 3}, r"example has \['int'\], on which"),
    "an example of two": (
        {"partition": "memory", "example": (X, X)},
        r"example has .*takes 2 positional arguments but 3 .*a tuple of its arguments",
    ),
}


@pytest.mark.parametrize(("wrong", "message"), CONSTRUCTION.values(), ids=CONSTRUCTION)
def test_building(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        build(**wrong)
    assert re.search(message, str(caught.value)), str(caught.value)


def test_a_stage_on_another_device() -> None:
    with pytest.raises(ValueError, match="weight of stage 3 is on cpu but device = cuda; move.*pass device='cpu'"):
        check_device({2: nn.Linear(2, 2, device="meta"), 3: nn.Linear(2, 2)}, torch.device("cuda"))


def test_a_cpu_with_an_index() -> None:
    assert build(device="cpu:0").device == torch.device("cpu")


def test_gathered_outputs_that_are_not_kept() -> None:
    with pytest.raises(ValueError, match="gather_outputs: merge=False keeps no outputs"):
        build(merge=False).eval_step(X, gather_outputs=True)


def test_none_among_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no stage of torch's, either, where nobody has imported these."""
    monkeypatch.delitem(sys.modules, "torch.distributed.pipelining.stage", raising=False)
    with pytest.raises(TypeError, match=r"stages\[1\] is a NoneType"):
        build(stages=[Block(), None])


def no_scalar(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target) ** 2


def no_tensor(output: torch.Tensor, target: torch.Tensor) -> Any:
    return 0.5


class Words:
    """Nothing that knows pytrees, or pickle."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Wordy(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x, Words(x)


STEPS: dict[str, tuple[dict[str, Any], Callable[[Pipeline], Any], str]] = {
    "no target": ({}, lambda p: p.step(X), "target = None.*pass target=.*or leave out loss_fn"),
    "a target for nobody": ({"loss_fn": None}, lambda p: p.step(X, target=Y), "target.*no loss_fn"),
    "a list too short": ({}, lambda p: p.step([X] * 3, target=Y), "the input has 3 microbatches.*num_microbatches = 4"),
    "a list of nothing": ({}, lambda p: p.step([], target=[]), "the input has 0 microbatches .*: pass as many$"),
    "no input": ({}, lambda p: p.step(None, target=Y), "the input is None: the model's first layer needs 'x'"),
    "no argument": ({}, lambda p: p.step(target=Y), "the input is missing: the model's first layer needs 'x'"),
    "a wrong name": (
        {},
        lambda p: p.step(arg_mbs=X, target=Y),
        "the input is missing: the model's first layer needs 'x'; it does not take 'arg_mbs', given by keyword; pass",
    ),
    "fewer rows than the schedule takes": (
        {"schedule": "dualpipev"},
        lambda p: p.step(X[:1], target=Y[:1]),
        "give at least one row per microbatch, or pass num_microbatches=1 to this call if the schedule allows it",
    ),
    "no input but a name": (
        {"stages": [TwoInputs(), *LAYERS[1:]]},
        lambda p: p.step(None, target=Y, z=X),
        "the input is None: the model's first layer needs 'x'",
    ),
    "one input of two": (
        {"stages": [TwoInputs(), *LAYERS[1:]]},
        lambda p: p.step(X, target=Y),
        "the input is missing: the model's first layer needs 'z'",
    ),
    "a sparse input": ({}, lambda p: p.step(X.to_sparse(), target=Y), "layout torch.sparse_coo.*give a list.*to_dense"),
    "a packed sequence": (
        {},
        lambda p: p.step(nn.utils.rnn.pack_sequence([X[0], X[1]]), target=Y),
        "the input is a PackedSequence: give a tensor .*, a list or an iterator of microbatches, or say how",
    ),
    "an input with a history": (
        {},
        lambda p: p.step(X * W, target=Y),
        "the input is the output of Mul.*x.detach.*requires_grad_.*x.backward",
    ),
    "a target with a history": (
        {},
        lambda p: p.step(X, target=Y * W),
        "target is the output of Mul.*after the step call",
    ),
    "a whole target beside uneven microbatches": (
        {},
        lambda p: p.step(list(X.split([1, 1, 1, len(X) - 3])), target=Y),
        r"target has 9 rows, .* of \[3, 2, 2, 2\], and those of the input have \[1, 1, 1, 6\]: give both as lists",
    ),
    "an iterator too short": ({}, lambda p: p.step(iter([X] * 3), target=Y), "the input .an iterator. has 3"),
    "a target list too long": ({}, lambda p: p.step(X, target=[Y] * 5), "target has 5 microbatches"),
    "too few rows": ({}, lambda p: p.step(X[:3], target=Y), "the input has 3 rows"),
    "too few target rows": ({}, lambda p: p.step(X, target=Y[:2]), "target has 2 rows .*or pass num_microbatches=2"),
    "another type": ({}, lambda p: p.step(object(), target=Y), "the input is a object"),
    "no such dimension": ({"split": 2}, lambda p: p.step(X, target=Y), "has no dimension 2"),
    "a leaf without a dimension": (
        {"loss_fn": lambda o, t: squared(o, t["y"]) * t["w"]},
        lambda p: p.step(X, target={"y": Y, "w": torch.ones(())}),
        r"target of shape \(\) has no dimension 0 .*, or a function that splits the whole argument",
    ),
    "a rule for nothing": ({"split": {"mask": 1}}, lambda p: p.step(X, target=Y), r"split\['mask'\]: no stage's"),
    "a batch of no tensors": ({}, lambda p: p.step(X.numpy(), target=Y), r"split=\{0: function\}, or 'replicate'"),
    "a function that splits wrongly": (
        {"split": {0: lambda v, n: [v]}},
        lambda p: p.step(X, target=Y),
        "split.* has 1",
    ),
    "a function that splits into nothing": (
        {"split": {0: lambda v, n: None}},
        lambda p: p.step(X, target=Y),
        r"split\[0\] returned a NoneType: return the list",
    ),
    "an unknown keyword": ({}, lambda p: p.step(X, target=Y, mask=X), "mask: no stage's forward takes"),
    "no gradients": ({}, lambda p: torch.no_grad()(p.step)(X, target=Y), "no_grad.*: call eval_step, or step outside"),
    "inference": ({}, lambda p: torch.inference_mode()(p.step)(X, target=Y), "inference_mode.*: call eval_step"),
    "microbatches 0": ({}, lambda p: p.step(X, target=Y, num_microbatches=0), "num_microbatches = 0"),
    "output_grad with too few": ({"loss_fn": None}, lambda p: p.step(X, output_grad=[X]), "output_grad has 1"),
    "output_grad of another kind": (
        {"loss_fn": None},
        lambda p: p.step(X, output_grad=[{}] * 4),
        "output_grad returned a dict|output_grad.*dict",
    ),
    "output_grad of another shape": ({"loss_fn": None}, lambda p: p.step(X, output_grad=X[:, :2]), "output_grad"),
    "a loss that is no scalar": ({"loss_fn": no_scalar}, lambda p: p.step(X, target=Y), r"shape \(3, 6\).*reduce"),
    "a loss that is no tensor": ({"loss_fn": no_tensor}, lambda p: p.step(X, target=Y), "loss_fn returned a float"),
    "rows and targets that differ": ({}, lambda p: p.step(X, target=Y[:8]), "target has 8 rows.*the input has 9"),
    "a second input of another length": (
        {},
        lambda p: p.step(X, torch.ones(7, 1), target=Y),
        "input 1 has 7 rows .* but input 0 has 9.*split=.*'replicate'",
    ),
    "a further input of fewer rows": (
        {"num_microbatches": 3},
        lambda p: p.step(X, torch.ones(3, 1), target=Y),
        "input 1 has 3 rows .* but input 0 has 9.*split=.*'replicate'",
    ),
    "a leaf of another length": (
        {"loss_fn": lambda o, t: squared(o, t["y"])},
        lambda p: p.step(X, target={"y": Y, "w": Y[:7]}),
        r"target\['w'\] has 7 rows .*the input has 9",
    ),
    "a complex loss": (
        {"loss_fn": lambda o, t: (o.to(torch.complex64) * (1 + 2j)).sum()},
        lambda p: p.step(X, target=Y),
        "loss_fn returned a complex",
    ),
    "a weight that is none": (
        {"loss_reduction": lambda t: None},
        lambda p: p.step(X, target=Y),
        "loss_reduction returned None for the target of microbatch 0",
    ),
    **{
        f"a weight of {text}": (
            {"loss_reduction": lambda t, weight=weight: weight},
            lambda p: p.step(X, target=Y),
            f"loss_reduction returned .*{text}.* for the target of microbatch 0: return one number.*at least 0 and",
        )
        for text, weight in {
            "-1.0": -1.0,
            "inf": math.inf,
            "nan": torch.tensor(math.nan),
            "1329 bits": 10**400,
            "on meta": torch.ones((), device="meta"),
        }.items()
    },
    "weights whose sum is infinite": (
        {"loss_reduction": lambda t: 1e308},
        lambda p: p.step(X, target=Y),
        "loss_reduction: the weights of the microbatches sum to inf",
    ),
    "a state of nothing": ({}, lambda p: p.load_state_dict(3), "state is a int"),
    "a state of another model": (
        {},
        lambda p: p.load_state_dict({**p.state_dict(), "9.weight": X}),
        "has '9.weight', which no stage has",
    ),
    "weights that sum to 0": (
        {"loss_reduction": lambda t: 0.0},
        lambda p: p.step(X, target=Y),
        "loss_reduction.*sum to",
    ),
    **{
        f"a loss in {where}": (
            {"stages": [*LAYERS[:3], Returns(form)], "loss_fn": None},
            lambda p: p.step(X),
            f"the last stage returned a {kind} with a scalar that requires a gradient.*return a loss as a scalar"
            ".* a loss_fn .lambda output",
        )
        for where, kind, form in [
            ("a tuple", "tuple", lambda loss, x: (x, loss)),
            ("a dict under another name", "dict", lambda loss, x: {"logits": x, "nll": loss}),
            ("a tensor with a dimension", "dict", lambda loss, x: {"logits": x, "loss": loss[None]}),
        ]
    },
    "another dtype": ({}, lambda p: p.step(X.double(), target=Y), "stage 0 has parameters of torch.float32.*float64"),
    "a rule for an input by its name": (
        {"split": {"x": 1}},
        lambda p: p.step(X, target=Y),
        r"split\['x'\]: step gets this input by position; write split=\{0: ",
    ),
    "a rule for an input by a name that a later layer has, too": (
        {"stages": [TwoInputs(), *LAYERS[1:3], Optional(LAYERS[3])], "split": {"z": "replicate"}},
        lambda p: p.step(X, torch.ones(9), target=Y),
        r"split\['z'\]: step gets this input by position; write split=\{1: ",
    ),
    "a rule for an output that nobody returns": (
        {"merge": {99: 0}},
        lambda p: p.step(X, target=Y),
        r"merge\[99\]: the model has no such output; its outputs are \[0\]",
    ),
    "a tensor where the number of the batch goes": (
        {},
        lambda p: p.step(X, target=Y, index=torch.arange(len(X))),
        "index is a Tensor: it is the number of the batch",
    ),
    "a tensor where tracing is chosen": (
        {},
        lambda p: p.eval_step(X, target=Y, trace=torch.ones(len(X))),
        "trace is a Tensor: it is whether the result has the times of all ranks",
    ),
    "a whole target of several rows for each of theirs": (
        {},
        lambda p: p.step(list(X.split([1, 1, 1, len(X) - 3])), target=Y.repeat(2, 1)),
        r"target has 18 rows, .* of \[5, 5, 4, 4\], and those of the input have \[1, 1, 1, 6\]",
    ),
    "a whole target beside what a function cuts": (
        {"split": {0: lambda x, n: list(x.split([1, 1, 1, len(x) - 3]))}},
        lambda p: p.step(X, target=Y),
        r"target has 9 rows, .* of \[3, 2, 2, 2\], .* have \[1, 1, 1, 6\]: .* or both a function in split=",
    ),
    "no flag": (
        {},
        lambda p: p.step(X, target=Y, gather_outputs="no"),  # type: ignore[arg-type]
        "gather_outputs is a str: it is whether every rank gets the outputs, a bool",
    ),
    "a tensor as a flag": (
        {},
        lambda p: p.step(X, target=Y, gather_outputs=Y),  # type: ignore[arg-type]
        "gather_outputs is a Tensor: it is whether every rank gets the outputs, a bool",
    ),
    "what a loss_fn would take": (
        {},
        lambda p: p.step(X, target=Y, labels=Y),
        "labels: no stage's forward takes .* loss_fn=layers.loss_fn",
    ),
    "no number": (
        {},
        lambda p: p.eval_step(X, num_microbatches=2.0),  # type: ignore[arg-type]
        "num_microbatches = 2.0: give a whole number of at least 1",
    ),
    "an all-to-all of nothing": ({}, lambda p: all_to_all(None), "tensor: expected a Tensor, found NoneType"),  # type: ignore[arg-type]
    "an all-to-all of a number of rows": (
        {},
        lambda p: all_to_all(X, 9),  # type: ignore[arg-type]
        "output_split_sizes: expected .*, found int; give the number of rows of every rank",
    ),
    "costs by several": (
        {},
        lambda p: layer_costs(LAYERS, X, by=["flops"]),  # type: ignore[arg-type]
        r"by = \['flops'\]: use 'parameters', 'flops'",
    ),
    "a list": (
        {},
        lambda p: p.step(X, target=Y, num_microbatches=[2]),  # type: ignore[arg-type]
        r"num_microbatches = \[2\]: give a whole number of at least 1",
    ),
    "a profile": ({}, lambda p: p.profile(X, target=Y, num_microbatches="2"), "num_microbatches = '2': give a whole"),
    "another parity": (
        {},
        lambda p: check_parity(p, LAYERS, (X, Y), kwargs=5),  # type: ignore[arg-type]
        "kwargs: expected a Mapping or None, found int",
    ),
    "layers that are none": (
        {},
        lambda p: check_parity(p, [5], (X, Y)),  # type: ignore[list-item]
        r"model\[0\] is a int: give nn.Modules",
    ),
    "clipping": (
        {},
        lambda p: p.clip_grad_norm_(1.0, error_if_nonfinite="no"),  # type: ignore[arg-type]
        "error_if_nonfinite = 'no': give True or False",
    ),
    "a state": (
        {},
        lambda p: p.load_state_dict(p.state_dict(), assign="no"),  # type: ignore[arg-type]
        "assign = 'no': give True or False",
    ),
    "a scaler": ({}, lambda p: GradScaler(p, math.nan), "init_scale = nan: give a number above 0 and below 3.4"),
    "a scale that is no float32": ({}, lambda p: GradScaler(p, 10**39), "init_scale = 10*: give .* below 3.4"),
    "a scaler's factor": ({}, lambda p: GradScaler(p, backoff_factor=1), "backoff_factor = 1: give .* below 1"),
    "a scaler's interval": (
        {},
        lambda p: GradScaler(p, growth_interval=1.5),  # type: ignore[arg-type]
        "growth_interval = 1.5: give a whole number",
    ),
    "a jagged batch": (
        {},
        lambda p: p.step(torch.nested.as_nested_tensor([X[:2], X[2:]], layout=torch.jagged), target=Y),
        "the input is a tensor of layout torch.jagged, .* or make it dense by to_padded_tensor",
    ),
    "what cannot be handed on": (
        {"stages": [Block(), Wordy(), Block(), Block()]},
        lambda p: p.step(X, target=Y),
        "stage 0 returned a Words that cannot be sent",
    ),
}


@executors_in_turn("options, step, message", STEPS.values(), ids=STEPS)
def test_stepping_and_then_a_good_step(
    options: dict[str, Any], step: Callable[[Pipeline], Any], message: str, executor: str
) -> None:
    pipe = build(**options, executor=executor)
    with pytest.raises((ValueError, TypeError, KeyError)) as caught:
        step(pipe)
    assert re.search(message, str(caught.value)), str(caught.value)
    if not options:
        assert pipe.step(X, target=Y).loss is not None


@pytest.mark.parametrize("form", [lambda loss, x: (x, loss.detach()), lambda loss, x: {"logits": x, "loss": None}])
def test_a_step_whose_scalars_train_nothing_is_forward_only(form: Any, executor: str) -> None:
    pipe = build(stages=[*CASES["plain"].layers(3), Returns(form)], loss_fn=None, executor=executor)
    for _ in range(2):
        result = pipe.step(X)
        assert result.loss is None and result.outputs is not None
    assert all(parameter.grad is None for parameter in pipe.parameters())


class Converts(nn.Module):
    """Returns its input a second time, in another form."""

    def __init__(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.convert = convert

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self.convert(x.detach())


@pytest.mark.parametrize(
    "convert",
    [torch.Tensor.to_sparse, torch.Tensor.to_mkldnn, lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)],
    ids=["sparse", "mkldnn", "quantized"],
)
def test_what_is_not_dense_is_refused(convert: Callable[[torch.Tensor], torch.Tensor], executor: str) -> None:
    pipe = build(stages=[Converts(convert), TwoInputs(), *LAYERS[2:]], executor=executor, num_ranks=4)
    with pytest.raises(ValueError, match="sparse, nested or quantized tensor to another rank"):
        pipe.step(X, target=Y)


class Padded(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nested.to_padded_tensor(self.layer(x), 0.0, (2, 3, WIDTH))


def test_jagged_microbatches_can_be_profiled() -> None:
    pipe = build(stages=[Padded(nn.Linear(WIDTH, WIDTH)), *LAYERS[1:]], loss_fn=lambda output, _: output.sum())
    batch = [torch.nested.as_nested_tensor([X[:2], X[2:5]], layout=torch.jagged) for _ in range(4)]
    assert min(pipe.profile(batch, target=Y, num_steps=1).per_stage("stage_bytes", 2)) > 0


def test_numbers_of_numpy_are_as_good() -> None:
    two: Any = np.int64(2)
    pipe = build(
        num_microbatches=two,
        num_ranks=two,
        stages_per_rank=np.int32(1),
        timeout=np.float32(60),
        split={0: two - two},
        partition=[two, two],
    )
    assert [type(number) for number in (pipe.num_microbatches, pipe.num_ranks, pipe.num_stages)] == [int] * 3
    assert pipe.step(X, target=Y, num_microbatches=two).loss == pipe.step(X, target=Y).loss


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("zero_grad", "a Pipeline has no 'zero_grad': call optimizer.zero_grad()"),
        ("to", "a Pipeline has no 'to': pass device= to Pipeline"),
        ("close", "a Pipeline has no 'close': there is nothing to call"),
        ("train_batch", r"a Pipeline has no 'train_batch': step\(x, target=y\)"),
        ("load_checkpoint", "a Pipeline has no 'load_checkpoint': call fastpipe.load_checkpoint"),
        ("modules", "a Pipeline has no 'modules': .* stage_modules"),
        ("stp", "^'Pipeline' object has no attribute 'stp'$"),
    ],
)
def test_names_of_other_libraries_are_told_what_to_call(name: str, hint: str) -> None:
    pipe = build()
    assert not hasattr(pipe, name)
    with pytest.raises(AttributeError, match=hint):
        getattr(pipe, name)


@pytest.mark.parametrize("place", ["whole", "list", "target"])
def test_nested_tensors_without_a_shape_are_refused(place: str) -> None:
    nested = torch.nested.as_nested_tensor([torch.zeros(2, WIDTH), torch.zeros(3, WIDTH)], layout=torch.strided)
    parts = [nested.clone() for _ in range(4)]
    x, y = {"whole": (nested, Y), "list": (parts, list(Y.tensor_split(4))), "target": (X, parts)}[place]
    with pytest.raises(ValueError, match="nested tensor of layout torch.strided, which has no shape"):
        build(num_ranks=4).step(x, target=y)


def test_microbatches_with_histories_of_their_own(executor: str) -> None:
    """They go through; and so does a whole batch where there is no backward."""
    pipe, scale = build(executor=executor), torch.ones(WIDTH, requires_grad=True)
    pipe.step([part * scale for part in X.tensor_split(4)], target=Y)
    assert scale.grad is not None and scale.grad.any()
    assert pipe.eval_step(X * scale, target=Y).loss is not None


def test_nothing_is_silently_left_out() -> None:
    """A rule for what is not there, a loss without a gradient, two ways to a gradient: each is refused by name."""
    case = CASES["plain"]
    batch = case.batches(1, 8)[0]
    x, y = batch.args[0], batch.target

    def pipe(**options: Any) -> Pipeline:
        return Pipeline(case.layers(4), "1f1b", 4, options.pop("loss_fn", squared), num_ranks=2, **options)

    with pytest.raises(ValueError, match="requires no gradient"):
        pipe(loss_fn=lambda output, target: squared(output, target).detach()).step(x, target=y)
    with pytest.raises(ValueError, match="target and output_grad are both given"):
        pipe().step(x, target=y, output_grad=y)
    with pytest.raises(ValueError, match=r"split\[5\]"):
        pipe(split={5: 0}).step(x, target=y)
    with pytest.raises(ValueError, match=r"merge\['foo'\]"):
        _ = pipe(merge={"foo": 0}).step(x, target=y).outputs
    with pytest.raises(KeyError, match="which stage 0 needs"):
        pipe().load_state_dict({})


@pytest.mark.parametrize("change", [{"3.linear.bias": None}, {"4.linear.bias": torch.ones(1)}], ids=["less", "more"])
def test_a_state_with_other_keys_changes_nothing(change: dict[str, Any]) -> None:
    pipe = Pipeline(CASES["plain"].layers(4), "1f1b", 4, squared, num_ranks=2)
    before = {key: value.clone() for key, value in pipe.state_dict().items()}
    state = {key: value + 1 for key, value in before.items()} | change
    with pytest.raises(KeyError, match="which (stage 1 needs|no stage has)"):
        pipe.load_state_dict({key: value for key, value in state.items() if value is not None})
    assert all(torch.equal(value, before[key]) for key, value in pipe.state_dict().items())


def test_an_error_is_not_its_own_cause(executor: str) -> None:
    """Whoever follows the causes of an exception comes to an end."""
    case = CASES["plain"]
    layers = [*case.layers(3), Fault(case.layers(1)[0], 0, RuntimeError("boom"))]
    batch = case.batches(1, 8)[0]
    with pytest.raises(RuntimeError, match="boom") as caught:
        Pipeline(layers, "1f1b", 4, squared, num_ranks=2, executor=executor).step(batch.args[0], target=batch.target)
    assert caught.value.__cause__ is None


class Refusing:
    """A group that coalesces, whose transfers fail."""

    supports_coalescing = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _get_backend(self, device: torch.device) -> "Refusing":
        return self

    def _start_coalescing(self, device: torch.device) -> None:
        self.calls.append("start")

    def _end_coalescing(self, device: torch.device) -> None:
        self.calls.append("end")

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        raise RuntimeError("no communicator")


def test_an_operation_that_fails_is_ended() -> None:
    """Else what others do next over NCCL, on the same thread, would never begin."""
    group, tensor = Refusing(), torch.zeros(1)
    with pytest.raises(RuntimeError, match="no communicator"), torch_private.coalesced(group, tensor.device):
        group.send([tensor], 1, 0)
    assert group.calls == ["start", "end"]


def test_only_backends_that_are_known_coalesce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalesced, "backend_of", lambda member: "mpi")
    with pytest.raises(ValueError, match="transport = 'process_group_coalesced': .*'mpi'.*use 'process_group'"):
        coalesced.CoalescedGroups(Membership())


def test_a_store_that_does_not_answer_is_a_step_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: Any) -> Membership:
        raise lost_peer("the store of the process group does not answer within 1 s", None)

    monkeypatch.setattr(construction, "membership", silent)
    with pytest.raises(StepError, match="the store of the process group does not answer within 1 s"):
        build()


@pytest.mark.parametrize("size", [1, 2])
def test_a_fake_process_group_is_refused_if_it_has_to_send(size: int) -> None:
    """torch's own for traces without other processes: its store answers with an INTERNAL ASSERT."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    try:
        if size == 1:
            assert check_parity(Pipeline(layers, "interleaved_1f1b", 2, squared), layers, (X, Y)).ok
        else:
            with pytest.raises(ValueError, match="backend is 'fake'.*num_ranks="):
                Pipeline(layers, "1f1b", 2, squared)
    finally:
        dist.destroy_process_group()
