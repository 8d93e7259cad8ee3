"""check_parity: quiet where all is equal, and where it is not, it says what, where and by how much."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fastpipe import Pipeline, check_parity, split
from fastpipe.runtime.stage.stage import Chain
from fastpipe.testing import Fault
from fastpipe.testing.parity import Difference, compared, measured, worst_first
from tests.runtime.checks import rows_for, same_bits
from tests.runtime.models import CASES, WIDTH, Block, squared

CASE = CASES["plain"]


def pipe_and_model(schedule: str = "1f1b", count: int = 4, **options: Any) -> tuple[Pipeline, list[nn.Module]]:
    layers = CASE.layers(6)
    return Pipeline(layers, schedule, count, squared, **{"num_ranks": 2, **options}), CASE.layers(6)


def batch(rows: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    made = CASE.batches(1, rows)[0]
    return made.args[0], made.target


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipe"])
def test_parity_of_what_is_equal(schedule: str, executor: str) -> None:
    pipe, model = pipe_and_model(schedule, executor=executor)
    parity = check_parity(pipe, model, batch())
    assert parity.ok, parity
    assert parity.num_compared == 12 and parity.loss[0] == parity.loss[1] > 0 and parity.norm[0] == parity.norm[1] > 0
    assert str(parity).endswith("and 12 gradients are those of the unsplit model, bit for bit")


@pytest.mark.parametrize("case", ["unused", "mask_beside", "keywords", "bfloat16", "frozen_first"])
def test_odd_models(case: str) -> None:
    made = CASES[case]
    pipe = Pipeline(made.layers(5), "dualpipev", 4, made.loss_fn, num_ranks=2, split=made.split)
    given = made.batches(1, rows_for(4))[0]
    parity = check_parity(pipe, made.layers(5), (given.args, given.target), kwargs=given.kwargs)
    assert parity.ok, parity


@pytest.mark.parametrize("kind", [list, nn.ModuleList])
def test_the_pipelines_own_layers_are_a_model(kind: Callable[[list[nn.Module]], Any]) -> None:
    layers = kind(CASE.layers(6))
    pipe = Pipeline(layers, "interleaved_1f1b", 4, squared, num_ranks=2)
    assert check_parity(pipe, layers, batch(), num_microbatches=6).ok


class Noisy(nn.Module):
    """Wrong in a pipeline: what it computes depends on how often it was called."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.block, self.by, self.calls = Block(), by, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.block(x) * (1 + self.by * (self.calls == 2))


def test_what_differs_is_listed_worst_first() -> None:
    layers = [*CASE.layers(3), Noisy(0.01), *CASE.layers(2)]
    # the unsplit model is called after the pipeline, so it makes no noise
    pipe = Pipeline(copy.deepcopy(layers), "1f1b", 4, squared, num_ranks=2)
    layers[3].by = 0.0
    parity = check_parity(pipe, layers, batch())
    assert not parity.ok and parity.loss[0] != parity.loss[1]
    listed = [(d.what, d.name) for d in parity.differences]
    assert ("loss", "microbatch 1") in listed and ("loss", "microbatch 0") not in listed and ("norm", "") in listed
    assert len([what for what, _ in listed if what == "gradient"]) == 12
    sizes = [d.relative for d in parity.differences]
    assert sizes == sorted(sizes, reverse=True) and 0 < sizes[-1] <= sizes[0] < 0.5
    text = str(parity)
    assert f"parity: {len(listed)} differences" in text and "3.block.linear.weight" in text
    assert all(any(column in line for line in text.splitlines()) for column in ("relative", "ulps"))


def test_stale_parameters_are_the_first_suspects() -> None:
    pipe, model = pipe_and_model()
    with torch.no_grad():
        model[4].linear.bias[0] += 1e-3
    parity = check_parity(pipe, model, batch())
    assert [d.name for d in parity.differences if d.what == "parameter"] == ["4.linear.bias"]
    assert parity.differences[0].what == "parameter" and parity.differences[0].stage == 1
    assert "load the pipeline's state into the model" in str(parity)


def test_random_numbers_are_suspected() -> None:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout()) for _ in range(4)]
    # one thread, whose order of actions is certain, and another than the unsplit model's
    pipe = Pipeline(layers, "looped_bfs", 4, squared, num_ranks=1, stages_per_rank=2)
    state = torch.get_rng_state()
    assert "random numbers were drawn" in str(check_parity(pipe, layers, batch()))
    assert torch.equal(torch.get_rng_state(), state)
    pipe.eval()
    assert check_parity(pipe, layers, batch()).ok


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
def test_random_numbers_of_each_microbatch_are_the_same(schedule: str, executor: str) -> None:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout()) for _ in range(8)]
    options = {"num_ranks": 2, "rng": "per_microbatch", "partition": [3, 5] if schedule == "1f1b" else "layers"}
    pipe = Pipeline(layers, schedule, 4, squared, executor=executor, **options)
    for count in (1, 2):
        assert check_parity(pipe, layers, batch()).ok
        pipe.step(batch()[0], target=batch()[1])
        assert pipe.step_count == count


def everything(pipe: Pipeline, model: nn.Module) -> list[Any]:
    modules = [model, *(stage.module for stage in pipe._steps.stages)]
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    return [torch.get_rng_state(), *(copy.deepcopy((t.detach(), t.grad)) for t in tensors)]


def normed(n: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)) for _ in range(n)]


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_left_as_it_was(fails: bool) -> None:
    """Gradients, also the batch's; buffers; generators; and after a failure just so."""
    layers = normed(4)
    model = Chain(dict(enumerate(copy.deepcopy(layers))))
    pipe = Pipeline(layers, "dualpipev", 4, squared, num_ranks=2)
    x, y = torch.randn(9, WIDTH, requires_grad=True), torch.randn(9, WIDTH)
    pipe.step(x, target=y)
    squared(model(x), y).backward()
    if fails:
        model.add_module("4", Fault(nn.Identity(), at_call=1, error=OverflowError("too large")))
        model._names.append(None)
    before, before_x = everything(pipe, model), x.grad.clone()
    if fails:
        with pytest.raises(OverflowError, match="too large"):
            check_parity(pipe, model, (x, y))
    else:
        check_parity(pipe, model, (x, y))
    for old, new in zip(before, everything(pipe, model), strict=True):
        pairs = zip(old, new, strict=True) if isinstance(old, tuple) else [(old, new)]
        assert all(a is b or same_bits(a, b) for a, b in pairs)
    assert same_bits(x.grad, before_x)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_sparse_gradients_are_compared(schedule: str, executor: str) -> None:
    layers = [nn.Embedding(20, WIDTH, sparse=True), *CASE.layers(3)]
    model, given = copy.deepcopy(layers), (torch.randint(20, (9,)), batch()[1])
    pipe = Pipeline(layers, schedule, 4, squared, num_ranks=2, executor=executor)
    parity = check_parity(pipe, model, given)
    assert parity.ok and parity.num_compared == 7, parity
    with torch.no_grad():
        model[0].weight[given[0][0], 0] += 0.25
    assert ("gradient", "0.weight") in {(d.what, d.name) for d in check_parity(pipe, model, given).differences}


class Averaging(nn.Module):
    """A forward that replaces one of its buffers, and makes another when it needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "first"):
            self.register_buffer("first", x.detach().clone())
        y = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return (y - self.mean + self.first.mean()).tanh()


def test_buffers_that_a_forward_replaces_are_put_back(executor: str) -> None:
    layers = [Averaging() for _ in range(4)]
    model = copy.deepcopy(layers)
    pipe = Pipeline(layers, "1f1b", 4, squared, num_ranks=2, executor=executor)
    before = [layer.mean for layer in (*layers, *model)]
    for given in (model, model, layers):
        assert check_parity(pipe, given, batch()).ok
    assert all(layer.mean is mean and not mean.any() for layer, mean in zip((*layers, *model), before, strict=True))
    assert not any(hasattr(layer, "first") for layer in (*layers, *model))


@pytest.mark.parametrize("own", [False, True])
def test_embeddings_that_torch_renormalises(own: bool) -> None:
    """Their weights are changed by the pipeline's forwards: these are no stale parameters, and they are put back."""
    layers = [nn.Embedding(20, WIDTH, max_norm=1.0), *CASE.layers(3)]
    model = layers if own else copy.deepcopy(layers)
    before = layers[0].weight.detach().clone()
    pipe = Pipeline(layers, "1f1b", 4, squared, num_ranks=2)
    parity = check_parity(pipe, model, (torch.randint(20, (9,)), batch()[1]))
    assert parity.ok, parity
    assert all(torch.equal(embedding.weight, before) for embedding in (layers[0], model[0]))


def test_a_tied_weight_is_matched_by_any_of_its_names() -> None:
    """The model names the head first, the pipeline the embedding."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 8, bias=False)
            self.tokens = nn.Embedding(8, 4)
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.head.weight = self.tokens.weight

        def forward(self, x: torch.Tensor) -> Any:
            x = self.tokens(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    model, x = Model(), torch.randint(8, (4, 3))
    pipe = Pipeline(split(model, x), "1f1b", 2, lambda output, _: output.square().mean(), num_ranks=2)
    assert {name for name, _ in model.named_parameters()} != {name for name, _ in pipe.named_parameters()}
    parity = check_parity(pipe, model, (x, x))
    assert parity.ok, parity


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_blocks_that_share_a_module(schedule: str) -> None:
    """The uses of each stage are summed first, as in the pipeline, also where the model names the blocks in a part."""

    class Block(nn.Module):
        def __init__(self, mix: nn.Module) -> None:
            super().__init__()
            self.norm, self.mix = nn.LayerNorm(4), mix

        def forward(self, x: torch.Tensor) -> Any:
            return x + self.mix(self.norm(x)).tanh()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            mix = nn.Linear(4, 4)
            self.blocks, self.head = nn.ModuleList(Block(mix) for _ in range(6)), nn.Linear(4, 4)
            self.shift = self.head.bias

        def forward(self, x: torch.Tensor) -> Any:
            x = x + self.shift
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    model, (x, y) = Model(), torch.randn(2, 9, 4)
    pipe = Pipeline(split(model, x), schedule, 6, nn.functional.mse_loss, num_ranks=2)
    mix = model.blocks[5].mix
    parity = check_parity(pipe, model, (x, y))
    assert parity.ok, parity
    assert all(block.mix is mix for block in model.blocks)


def test_stages_made_by_a_function_are_matched_by_order() -> None:
    layers = CASE.layers(4)
    pipe = Pipeline(lambda stage: copy.deepcopy(layers[stage]), "zbv", 4, squared, num_ranks=2)
    assert check_parity(pipe, layers, batch()).ok
    assert [name for name, _ in pipe.named_parameters()][0] == "0.linear.weight"
    named = nn.Sequential(*(nn.Sequential(layer) for layer in layers))
    assert check_parity(pipe, named, batch()).ok


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda p, m: check_parity(p, None, batch()), "model is None on every rank"),
        (lambda p, m: check_parity(p, m[:5], batch()), "model has 10 parameters but the pipeline has 12"),
        (lambda p, m: check_parity(p, m, (iter([1, 2]), None)), "batch has an iterator"),
        (lambda p, m: check_parity(p, m, batch()[0]), r"batch is a Tensor: give \(input, target\)"),
    ],
)
def test_wrong_arguments(call: Callable[..., Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call(*pipe_and_model())


def test_a_pipeline_without_a_loss() -> None:
    pipe = Pipeline(CASE.layers(4), "1f1b", 4, num_ranks=2)
    with pytest.raises(ValueError, match="its step has no loss"):
        check_parity(pipe, CASE.layers(4), (batch()[0], None))


def one(value: float, dtype: torch.dtype = torch.float) -> torch.Tensor:
    return torch.tensor([1.0, value], dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float, torch.double, torch.half, torch.bfloat16])
def test_ulps_count_representable_numbers(dtype: torch.dtype) -> None:
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    assert measured(one(1 + 3 * eps, dtype), one(1, dtype)) == (pytest.approx(3 * eps), 3)
    assert measured(one(-1 - 3 * eps, dtype), one(-1, dtype))[1] == 3
    smallest = tiny * eps
    assert measured(one(-smallest, dtype), one(2 * smallest, dtype))[1] == 3
    assert measured(one(math.nan, dtype), one(math.nan, dtype)) == (0, 0)
    assert measured(one(math.inf, dtype), one(1, dtype))[0] == math.inf
    assert measured(torch.ones(2, dtype=dtype), torch.zeros(2, dtype=dtype))[0] == math.inf


def test_what_is_compared() -> None:
    def between(a: torch.Tensor | None, b: torch.Tensor | None) -> list[Difference]:
        return compared("gradient", "w", 3, a, b)

    assert not between(None, None) and not between(torch.zeros(2), None) and not between(one(2), one(2))
    (missing,) = between(None, one(2))
    assert missing.relative == 1 and missing.stage == 3
    (sign,) = between(one(-0.0), one(0.0))
    assert sign.note == "only the signs of zeros" and sign.relative == 0
    assert between(one(2), one(2, torch.double))[0].note == "float32 [2] instead of float64 [2]"
    assert between(torch.ones(3), one(2))[0].note == "float32 [3] instead of float32 [2]"
    assert between(one(math.nan), one(2))[0].note == "not finite"
    assert between(torch.ones(2) * 1j, torch.ones(2) * 2j)[0].relative == 0.5


def test_the_worst_of_two_holders_counts() -> None:
    found = worst_first([Difference("g", "a", 0, 0.1), Difference("g", "b", 0, 0.3), Difference("g", "a", 0, 0.2)])
    assert [(d.name, d.relative) for d in found] == [("b", 0.3), ("a", 0.2)]


def test_a_long_table_is_cut() -> None:
    layers = CASE.layers(24)
    model = copy.deepcopy(layers)
    model[0].linear.weight.data *= 1.5
    text = str(check_parity(Pipeline(layers, "1f1b", 4, squared, num_ranks=2), model, batch()))
    assert "more" in text and len(text.splitlines()) == 2 + 1 + 20 + 1 + 1


def test_gradients_of_zeros_where_the_model_has_none_are_listed() -> None:
    class Detached(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.detach())

    layers = [nn.Linear(WIDTH, WIDTH), Detached(WIDTH, WIDTH)]
    pipe = Pipeline(layers, "1f1b", 2, nn.functional.mse_loss, num_ranks=2)
    x = torch.randn(4, WIDTH)
    found = check_parity(pipe, layers, (x, x))
    assert found.ok and found.zeros == ["0.bias", "0.weight"]
    assert "gradients of zeros, which are None in the unsplit model: 0.bias, 0.weight" in str(found)
    layers[0].requires_grad_(False)
    assert not check_parity(pipe, layers, (x, x)).zeros
