"""fastpipe.split of models whose forward changes attributes: for one stage it works, for several it is refused."""

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fastpipe
from fastpipe.runtime.common import KeptAttributes
from fastpipe.testing import reference_step
from tests.runtime.checks import assert_same

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.calls, self.log = 0, [1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mix(x))


class Counting(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


class Logging(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append(1)
        return super().forward(x) / len(self.log)


class Head(nn.Linear):
    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor


class Model(nn.Module):
    """Its forward does ``before`` with the input of its blocks, and ``after`` with their output."""

    def __init__(
        self,
        before: Callable[..., torch.Tensor] = lambda m, x: x,
        after: Callable[..., torch.Tensor] = lambda m, x: x,
        block: type[Block] = Block,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = before, after
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), Head(WIDTH, 3)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.calls = self._calls = 0
        self.seen: list[int] = []
        self.cache: dict[str, Any] = {}
        self.kinds: set[int] = set()
        self.sum = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(self, self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.after(self, x))


def counted(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return x / model.calls


def counted_privately(model: Model, x: torch.Tensor) -> torch.Tensor:
    model._calls += 1
    return x / model._calls


def only_counted(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return x


def late(model: Model, x: torch.Tensor) -> torch.Tensor:
    return x / 2 if model.calls > 1000 else x


def added(model: Model, x: torch.Tensor) -> torch.Tensor:
    return x / model.sum.add_(1).clone()


def appended(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.seen.append(len(x))
    model.kinds.add(len(model.seen))
    return x / (len(model.seen) + len(model.kinds))


def cached(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.cache["count"] = model.cache.get("count", 0) + 1
    if "half" not in model.cache:
        model.cache["half"] = torch.full((1,), 0.5)
    return x * model.cache["half"] / model.cache["count"]


def of_the_cache(model: Model, x: torch.Tensor) -> torch.Tensor:
    return x * model.cache["half"]


def heated(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.head.factor *= 0.9
    return x


KEPT: dict[str, Callable[[], Model]] = {
    "a counter before the blocks": lambda: Model(counted),
    "a private counter before the blocks": lambda: Model(counted_privately),
    "a counter in blocks": lambda: Model(block=Counting),
    "a list in blocks": lambda: Model(block=Logging),
    "a list and a set": lambda: Model(appended),
    "a dict": lambda: Model(cached),
    "a tensor that is no buffer": lambda: Model(added),
}


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3


@pytest.mark.parametrize("what", KEPT)
def test_attributes_that_one_stage_changes(what: str, executor: str) -> None:
    """They begin as they were before the split, and three steps are the unsplit model's."""
    model, unsplit, (x, target) = KEPT[what](), KEPT[what](), batch()
    layers, loss_fn = fastpipe.split(model, x[:2]), nn.functional.cross_entropy
    assert len(layers) == 6
    pipe = fastpipe.Pipeline(layers, "1f1b", 4, loss_fn, num_ranks=2, executor=executor, timeout=60)
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (pipe, unsplit)]
    for _ in range(3):
        result = pipe.step(x, target=target)
        assert_same(pipe, result, unsplit, reference_step(unsplit, (x, target), pipe.schedule, loss_fn))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def behind_a_list(model: Model, x: torch.Tensor) -> torch.Tensor:
    return x / (1 + len(model.seen))


def with_one_log() -> Model:
    model = Model(block=Logging)
    for block in model.blocks:
        block.log = model.blocks[0].log
    return model


SEEN_BY_OTHERS: dict[str, tuple[Callable[[], Model], str]] = {
    "a counter that is read after the blocks": (
        lambda: Model(counted, lambda m, x: x / m.calls),
        "changes calls before its first block and reads it after that.* it was 1, and is 2 now",
    ),
    "a counter that has an effect much later": (lambda: Model(only_counted, late), "changes calls before its first"),
    "a counter after the blocks": (lambda: Model(after=counted), "changes calls after its first block"),
    "a private counter after the blocks": (lambda: Model(after=counted_privately), "changes _calls after its first"),
    "a tensor after the blocks": (lambda: Model(after=added), "a tensor that was in no variable at the first block"),
    "a list that is read after the blocks": (
        lambda: Model(appended, behind_a_list),
        r"changes seen before its first block and reads it after that.* it was \[2\], and is \[2, 2\] now",
    ),
    "a tensor in a dict that is read after the blocks": (lambda: Model(cached, of_the_cache), "changes cache before"),
    "a list of all blocks": (with_one_log, r"its forward changes blocks.0.log, of which each stage has only its own"),
    "an attribute of a later module": (lambda: Model(heated), "its forward changes head.factor, of which each stage"),
}


@pytest.mark.parametrize("what", SEEN_BY_OTHERS)
def test_attributes_that_another_stage_would_not_see_are_refused(what: str) -> None:
    make, text = SEEN_BY_OTHERS[what]
    model = make()
    with pytest.raises(ValueError, match=text):
        fastpipe.split(model, batch()[0][:2])
    assert (model.calls, model._calls, model.seen, model.cache, model.head.factor) == (0, 0, [], {}, 1.0)


def test_a_setting_that_the_forward_makes_is_the_same_in_every_step() -> None:
    """It may be read after the blocks as long as it is that of the example."""

    def before(model: Model, x: torch.Tensor) -> torch.Tensor:
        model.calls = 1 if x.shape[0] < 8 else 2
        return x

    x = batch()[0]
    layers = fastpipe.split(Model(before, lambda m, x: x / m.calls), x[:2])
    pipe = fastpipe.Pipeline(layers, "1f1b", 2, num_ranks=2, timeout=60)
    pipe.eval_step(x)
    with pytest.raises(ValueError, match="changes calls before its first block .* it was 1, and is 2 now; make what"):
        pipe.eval_step(torch.cat([x, x]))


def test_what_is_before_the_first_block_counts_by_itself() -> None:
    """From the count that the model had when it was split."""
    model, (x, _) = Model(counted), batch()
    model(x)
    layers, expected = fastpipe.split(model, x[:2]), copy.deepcopy(model)
    assert model.calls == 1
    for _ in range(2):
        value = layers[0](x)
        for layer in layers[1:]:
            value = layer(value)
        assert torch.equal(value, expected(x))
    assert model.calls == 1


def test_costs_of_layers_leave_attributes_alone() -> None:
    class Caching(Counting):
        last: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = super().forward(x)
            return self.last

    layers = [Caching() for _ in range(2)]
    for by in ("flops", "seconds", "memory"):
        fastpipe.layer_costs(layers, batch()[0], by=by)
        assert all("last" not in vars(layer) and layer.calls == 0 for layer in layers), by


def test_lazy_modules_are_initialized() -> None:
    model = Model()
    model.stem = nn.LazyLinear(WIDTH)
    layers = fastpipe.split(model, batch()[0][:2])
    assert model.stem.in_features == WIDTH and torch.equal(layers[0](batch()[0]), model.stem(batch()[0]))


def test_what_is_put_back() -> None:
    module = nn.Module()
    module.queue, module.order = deque([1], maxlen=2), {"a": 1, "b": [2]}
    module.held, module.nested = [nn.Linear(2, 2)], ([],)
    before = copy.deepcopy(vars(module))
    kept = KeptAttributes([module])
    assert not kept.changed()
    module.queue.extend([5, 6])
    module.order["a"] = module.order.pop("a")
    module.order["b"].append(3)
    module.held[0].extra = module.new = 1
    module.nested[0].append(4)
    module.training = False
    assert kept.changed() == ["new", "queue", "order", "held.extra", "nested"]
    kept.put_back()
    assert not kept.changed() and vars(module).keys() == before.keys()
    assert [*module.order] == ["a", "b"] and module.order == before["order"] and module.queue == before["queue"]
    assert module.nested == ([],) and not hasattr(module.held[0], "extra") and module.training
