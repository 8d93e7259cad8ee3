"""fastpipe.split of Sequentials, and of modules with a list of blocks: the same model, the same names, or a refusal."""

import copy
import functools
import gc
import math
import pickle
import random
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fastpipe
from fastpipe.testing import reference_step
from tests.runtime.checks import assert_same, same_bits

VOCABULARY, WIDTH, TOKENS = 31, 16, 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mix(self.norm(x)))


class Decoder(nn.Module):
    """Everything that may stand before the blocks: positions, a parameter and a buffer of its own, dropout."""

    def __init__(self, *, tied: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.ModuleDict(
            {
                "tokens": nn.Embedding(VOCABULARY, WIDTH),
                "positions": nn.Embedding(TOKENS, WIDTH),
                "drop": nn.Dropout(dropout),
                "blocks": nn.ModuleList(Block() for _ in range(6)),
                "norm": nn.LayerNorm(WIDTH),
            }
        )
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("scale", torch.tensor(0.7))
        self.register_buffer("unsaved", torch.tensor(0.1), persistent=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.inner["tokens"].weight

    def embed(self, ids: torch.Tensor, offset: int) -> torch.Tensor:
        x = self.inner["tokens"](ids) + self.inner["positions"]((torch.arange(ids.shape[1]) + offset) % TOKENS)
        return self.inner["drop"](x * self.scale + self.shift + self.unsaved)

    def forward(self, ids: torch.Tensor, offset: int = 0) -> torch.Tensor:
        x = self.embed(ids, offset)
        for block in self.inner["blocks"]:
            x = block(x)
        return self.head(self.inner["norm"](x))


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batch(rows: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (rows, TOKENS), generator=torch.Generator().manual_seed(rows))
    return ids, ids.roll(-1, dims=1)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("schedule", "num_ranks"), [("1f1b", 4), ("1f1b", 9), ("zbv", 2), ("dualpipev", 2)])
def test_a_module_with_a_list_of_blocks(schedule: str, num_ranks: int, tied: bool, executor: str) -> None:
    model = Decoder(tied=tied)
    unsplit = copy.deepcopy(model)
    ids, target = batch()
    layers = fastpipe.split(model, ids[:2])
    assert len(layers) == 9
    pipe = fastpipe.Pipeline(layers, schedule, 4, loss_fn, num_ranks=num_ranks, executor=executor)
    for kwargs in ({}, {"offset": 3}):
        result = pipe.step(ids, target=target, **kwargs)
        reference = reference_step(unsplit, (ids, target), pipe.schedule, loss_fn, kwargs=kwargs, ties=pipe._local.ties)
        assert_same(pipe, result, unsplit, reference)
    assert pipe.state_dict().keys() == model.state_dict().keys()
    assert {name for name, _ in pipe.named_parameters()} == {name for name, _ in model.named_parameters()}
    assert (
        "tied        head.weight = inner.tokens.weight" in pipe.describe()
    ) == tied or "tied        inner" in pipe.describe()


def test_modes_reach_what_comes_before_the_blocks() -> None:
    model = Decoder(dropout=0.5)
    ids, target = batch()
    pipe = fastpipe.Pipeline(fastpipe.split(model, ids[:2]), "1f1b", 3, loss_fn, num_ranks=3, rng="per_microbatch")
    torch.manual_seed(1)
    dropped = pipe.step(ids, target=target).loss
    unsplit = Decoder(dropout=0.5)
    options = {"rng": "per_microbatch", "ties": pipe._local.ties}
    reference = reference_step(
        fastpipe.split(unsplit, ids[:2]), (ids, target), pipe.schedule, loss_fn, seed=pipe._build.seed, **options
    )
    assert same_bits(dropped, reference.loss)
    assert fastpipe.check_parity(pipe, fastpipe.split(model, ids[:2]), (ids, target)).ok
    kept = pipe.eval().eval_step(ids, target=target).outputs
    assert same_bits(kept, model.eval()(ids)) or torch.allclose(kept, model(ids), atol=1e-6)
    assert not torch.allclose(dropped, pipe.eval_step(ids, target=target).loss)


class Stem(nn.Module):
    """What depends on the mode before the blocks: modules, and a function of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.drop(self.norm(x)), 0.5, self.training)
        for block in self.blocks:
            x = block(x)
        return x


def test_blocks_that_torch_compile_returned() -> None:
    """Asked whether it is there, such a module asks the block for its length."""
    model = Stem().eval()
    model.blocks[2] = torch.compile(model.blocks[2], backend="eager")  # type: ignore[assignment]
    x = torch.randn(4, WIDTH)
    pipe = fastpipe.Pipeline(fastpipe.split(model, x), "1f1b", 2, nn.functional.mse_loss, num_ranks=2)
    torch.testing.assert_close(pipe.eval_step(x, target=x).outputs, model(x).detach())


@pytest.mark.parametrize("first", [True, False])
def test_what_comes_before_the_blocks_has_the_models_modes(first: bool) -> None:
    """Those of the construction, until `train` or `eval`; a step does not change the mode of a module."""
    model = Stem().train(first)
    x = torch.randn(8, WIDTH)
    layers = fastpipe.split(model, x[:2])
    assert all(module.training == first for module in model.modules())
    model.eval()
    pipe = fastpipe.Pipeline(layers, "1f1b", 2, nn.functional.mse_loss, num_ranks=2)
    expected = model(x).detach()
    torch.testing.assert_close(pipe.step(x, target=x).outputs, expected)
    assert not any(module.training for module in model.modules())
    pipe.train()
    model.norm.eval()
    pipe.step(x, target=x)
    assert model.drop.training and not model.norm.training


class Stemmed(nn.Module):
    """The blocks and what precedes them are in a part, which may have another mode than the model."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = Stem(), nn.Linear(WIDTH, WIDTH)
        self.stem.norm, self.stem.drop = nn.Identity(), nn.Identity()  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stem(x * 2 if self.training else x))


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_the_mode_is_the_one_that_was_set_last_of_the_model_or_of_the_pipeline(schedule: str) -> None:
    model, x = Stemmed(), torch.randn(8, WIDTH)
    layers = fastpipe.split(model, x[:2])
    pipe = fastpipe.Pipeline(layers, schedule, 4, nn.functional.mse_loss, num_ranks=2)

    def assert_unsplit_output(model: nn.Module = model) -> None:
        torch.testing.assert_close(pipe.eval_step(x, target=x).outputs, model(x).detach())

    model.eval()
    assert_unsplit_output()
    pipe.train()
    assert model.training and model.stem.training
    model.stem.eval()
    assert_unsplit_output()
    pipe.eval()
    assert_unsplit_output()
    pipe.train()
    model.eval()
    assert not fastpipe.check_parity(pipe, layers, (x, x)).differences
    assert_unsplit_output()
    copied = copy.deepcopy(pipe.stage_modules[0])
    copied.train()
    assert not model.training and pickle.loads(pickle.dumps(copied)).training
    del model, layers, assert_unsplit_output
    with_dropout = pipe.train().eval_step(x, target=x).outputs
    assert not torch.equal(with_dropout, pipe.eval().eval_step(x, target=x).outputs)


def test_split_leaves_the_model_alone() -> None:
    model = Decoder(dropout=0.5)
    model.inner["norm"] = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(WIDTH), nn.Unflatten(0, (-1, TOKENS)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    fastpipe.split(model, batch()[0])
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.training and all(p.grad is None for p in model.parameters())


def test_sequentials_keep_their_names() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        OrderedDict(first=nn.Linear(4, 4), act=nn.Tanh(), again=nn.Linear(4, 4), last=nn.Linear(4, 2))
    )
    for layers in (model, fastpipe.split(model)):
        pipe = fastpipe.Pipeline(layers, "1f1b", 2, nn.functional.mse_loss, num_ranks=2)
        assert pipe.state_dict().keys() == model.state_dict().keys()
        parity = fastpipe.check_parity(pipe, model, (torch.randn(4, 4), torch.randn(4, 2)))
        assert parity.ok, parity
    assert [*fastpipe.split([*model])] == [*model]
    tied = fastpipe.Pipeline(
        model, "1f1b", 2, nn.functional.mse_loss, num_ranks=2, tied=[("first.weight", "again.weight")]
    )
    assert "first.weight = again.weight" in tied.describe()


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor.mul_(2)


class Wrong(Decoder):
    """A decoder whose forward does ``what`` with its hidden states."""

    def __init__(self, what: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.what = what
        self.scaling = Scaling()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.what(self, self.embed(ids, 0))


def through(
    model: Decoder, x: torch.Tensor, between: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
) -> torch.Tensor:
    for block in model.inner["blocks"]:
        x = between(block(x))
    return x


def ending(model: Decoder, x: torch.Tensor) -> torch.Tensor:
    return model.head(model.inner["norm"](x))


ONES = torch.ones(1)

WRONG: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "a layer's weight": (
        lambda m, x: m.head(nn.functional.linear(through(m, x), m.inner["blocks"][2].mix.weight)),
        "after its first block .*it uses inner.blocks.2.mix.weight outside its module",
    ),
    "a block twice": (
        lambda m, x: ending(m, through(m, m.inner["blocks"][5](x))),
        "inner.blocks.5 is called twice",
    ),
    "a part of a block again": (
        lambda m, x: ending(m, m.inner["blocks"][1].norm(through(m, x))),
        "inner.blocks.1.norm is called twice",
    ),
    "a parameter is changed": (
        lambda m, x: ending(m, through(m, x) + (y := m.shift.data, y.mul_(2), m.shift)[2]),
        "after its first block .*it changes shift in place",
    ),
    "a buffer that a module changes": (
        lambda m, x: ending(m, m.scaling(through(m, x)) * m.scaling.factor),
        "after its first block .*it changes scaling.factor in place",
    ),
    "no block": (lambda m, x: ending(m, x), "its blocks are inner.blocks.0 to inner.blocks.5, .* calls none"),
    "a view that is changed later": (
        lambda m, x: (y := m.inner["norm"](through(m, x)), m.head(y.detach()), y.view(-1).mul_(2))[1:],
        "changes in place a value of which later layers have a view",
    ),
    "a tensor of something else": (
        lambda m, x: ending(m, through(m, x) + ONES),
        "after inner.blocks.5 .*a tensor that was in no variable .* and is no parameter",
    ),
    "the norm twice": (
        lambda m, x: m.head(m.inner["norm"](m.inner["norm"](through(m, x)))),
        "inner.norm is called twice",
    ),
    "blocks early": (
        lambda m, x: ending(m, through(m, x + m.inner["blocks"][3].mix.weight.mean())),
        "fail where the model does not .Tensor on device meta",
    ),
    "the norm early": (
        lambda m, x: ending(m, through(m, m.inner["norm"](x))),
        "inner.norm is called twice, and its weights",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_row_is_refused(what: str) -> None:
    forward, text = WRONG[what]
    with pytest.raises(ValueError, match=text):
        fastpipe.split(Wrong(forward), batch()[0])


def no_grad_between(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x * 2


def autocast_between(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x * 2


WRONG |= {
    "without gradients": (
        lambda m, x: ending(m, through(m, x, no_grad_between)),
        "after inner.blocks.0 .*a no_grad or an autocast of its own",
    ),
    "autocast": (lambda m, x: ending(m, through(m, x, autocast_between)), "a no_grad or an autocast of its own"),
    "a value decides": (
        lambda m, x: ending(m, through(m, x, lambda x: x * 2 if x.mean() > 0 else x)),
        "after inner.blocks.0 .*it reads the value of a tensor",
    ),
    "rows of the input": (
        lambda m, x: ending(m, through(m, x) / len(x)),
        "another number of rows in the example.*a size or value that it read before;",
    ),
}

FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "between blocks": lambda m, x: ending(m, through(m, x, lambda x: x * 2)),
    "in place": lambda m, x: ending(m, through(m, x, lambda x: x.mul_(2))),
    "in place, without its result": lambda m, x: ending(m, through(m, x, lambda x: [x.mul_(2), x][1])),
    "sizes": lambda m, x: ending(m, through(m, x, lambda x: x.reshape(x.shape[0], -1, WIDTH) / x.size(1))),
    "pooling": lambda m, x: m.head(m.inner["norm"](through(m, x))[:, [0, -1]].mean(1, keepdim=True)),
    "after the head": lambda m, x: nn.functional.log_softmax(ending(m, through(m, x)), dim=-1),
    "in place after the head": lambda m, x: ending(m, through(m, x)).mul_(2),
    "a part without gradients": lambda m, x: ending(m, through(m, x, lambda x: x + x.detach())),
    "a skip over all blocks": lambda m, x: ending(m, x + through(m, x)),
    "skips": lambda m, x: skipping(m, x),
    "a skip in place": lambda m, x: ending(m, through(m, x, lambda x: x.add_((x * 2).relu()))),
    "another order": lambda m, x: ending(m, functools.reduce(lambda x, b: b(x), reversed(m.inner["blocks"]), x)),
    "a parameter": lambda m, x: ending(m, through(m, x, lambda x: x * m.shift.expand(x.shape[0], 1, -1))),
    "the embedding's weight": lambda m, x: ending(m, through(m, x)) @ m.inner["tokens"].weight,
    "a new tensor": lambda m, x: ending(m, through(m, x) + torch.ones(x.shape[1], 1, device=x.device)),
    "a new tensor of constants": lambda m, x: ending(m, through(m, x) + torch.linspace(0, 1, WIDTH)),
    "a buffer's value": lambda m, x: ending(m, through(m, x)) * m.scale.item(),
    "a float of a size": lambda m, x: ending(m, through(m, x) / math.sqrt(x.shape[1]) * x.shape[2] ** 0.5),
    "a size of the input": lambda m, x: ending(m, through(m, x).view(-1, x.shape[1], WIDTH)),
    "a size that decides": lambda m, x: ending(m, through(m, x) / max(x.shape[1], 2 * len(x.shape))),
    "sizes of an earlier output": lambda m, x: sizes_of_an_earlier_output(m, x),
}


def skipping(model: Decoder, x: torch.Tensor) -> torch.Tensor:
    """As a U-Net."""
    first, second, third, *later = model.inner["blocks"]
    kept = [x, y := first(x), z := second(y)]
    for block in (third, *later):
        z = block(torch.stack([z, kept.pop() if kept else z]).mean(0))
    return ending(model, z)


def sizes_of_an_earlier_output(model: Decoder, x: torch.Tensor) -> torch.Tensor:
    x = model.inner["blocks"][0](x)
    rows, size = x.shape[0], x.shape
    for block in list(model.inner["blocks"])[1:]:
        x = block(x.reshape(rows * TOKENS, -1)).view(size)
    return ending(model, x)


@pytest.mark.parametrize(("schedule", "num_ranks"), [("1f1b", 2), ("zbv", 2), ("gpipe", 8)])
@pytest.mark.parametrize("what", FUNCTIONS)
def test_functions_between_modules(what: str, schedule: str, num_ranks: int, executor: str) -> None:
    model, unsplit = Wrong(FUNCTIONS[what]), Wrong(FUNCTIONS[what])
    ids, _ = batch()
    target = torch.rand_like(model(ids).detach())
    layers = fastpipe.split(model, ids[:1])
    assert len(layers) == 1 + 6 + 2
    pipe = fastpipe.Pipeline(layers, schedule, 3, nn.functional.mse_loss, num_ranks=num_ranks, executor=executor)
    parity = fastpipe.check_parity(pipe, unsplit, (ids, target))
    assert parity.ok, parity
    assert pipe.state_dict().keys() == model.state_dict().keys()
    assert pipe.eval_step(ids).outputs.shape == target.shape


@pytest.mark.parametrize(("schedule", "num_ranks"), [("1f1b", 3), ("zbv", 2), ("dualpipe", 2)])
def test_a_module_without_weights_is_called_many_times(schedule: str, num_ranks: int, executor: str) -> None:
    """Before the blocks, between them, and after; each stage that calls it has it, and its mode."""
    model = Wrong(lambda m, x: ending(m, m.inner["drop"](through(m, x, m.inner["drop"]))))
    model.inner["drop"].p = 0.3
    layers = fastpipe.split(model, batch()[0][:1])
    assert len(layers) == 1 + 12 + 1 + 2
    pipe = fastpipe.Pipeline(layers, schedule, 4, loss_fn, num_ranks=num_ranks, executor=executor, rng="per_microbatch")
    parity = fastpipe.check_parity(pipe, layers, batch())
    assert parity.ok, parity
    for stage in pipe.stage_modules.values():
        stage.eval()
        assert not any(module.training for module in stage.modules())


class Ramp(nn.Module):
    def forward(self, size: int, device: torch.device) -> torch.Tensor:
        return torch.linspace(0, 1, size, device=device)[:, None]


def test_a_module_that_takes_a_device(executor: str) -> None:
    """As positions of DETR; each stage has its own device."""
    model = Wrong(lambda m, x: ending(m, through(m, x, lambda x: x + m.scaling(x.shape[1], x.device))))
    model.scaling = Ramp()
    layers = fastpipe.split(model, batch()[0][:1])
    pipe = fastpipe.Pipeline(layers, "1f1b", 3, loss_fn, num_ranks=3, executor=executor)
    parity = fastpipe.check_parity(pipe, copy.deepcopy(model), batch())
    assert parity.ok, parity


class Reader(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(1, TOKENS, WIDTH))
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, *memory: torch.Tensor) -> torch.Tensor:
        x = x + self.places[:, : x.shape[1]]
        for layer in self.layers:
            x = layer(x, *memory)
        return self.norm(x)


class Translator(nn.Module):
    """Two lists of blocks, one after the other, each in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.encoder = Reader(nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True))
        self.decoder = Reader(nn.TransformerDecoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True))

    def forward(self, source: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.decoder(self.tokens(ids) * 2, self.encoder(self.tokens(source))))


class OneAfterTheOther(Translator):
    """The shared embedding is called again after the encoder."""

    def forward(self, source: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        memory = self.encoder(self.tokens(source))
        padded = nn.functional.pad(ids, (1, 0), value=2)[:, :-1]
        return self.head(self.decoder(self.tokens(padded), memory))


class Transformer(Translator):
    """That of torch, whose decoder reads the values of a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Module(), nn.Module()
        self.both = nn.Transformer(WIDTH, 2, 3, 3, 32, dropout=0.0, batch_first=True)

    def forward(self, source: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.both(self.tokens(source), self.tokens(ids), tgt_mask=mask))


@pytest.mark.parametrize(("schedule", "num_ranks"), [("1f1b", 5), ("zbv", 2), ("dualpipev", 2)])
@pytest.mark.parametrize("kind", [Translator, OneAfterTheOther, Transformer])
def test_encoder_and_decoder(kind: type[Translator], schedule: str, num_ranks: int, executor: str) -> None:
    ids, target = batch()
    source = ids.flip(1)[:, :-2]
    layers = fastpipe.split(kind(), source[:2], ids[:2])
    assert len(layers) == 1 + 3 + 1 + 3 + 2
    pipe = fastpipe.Pipeline(layers, schedule, 4, loss_fn, num_ranks=num_ranks, executor=executor)
    parity = fastpipe.check_parity(pipe, kind(), ((source, ids), target))
    assert parity.ok, parity
    parity = fastpipe.check_parity(pipe, kind(), ((source[:4, 1:], ids[:4]), target[:4]))
    assert parity.ok, parity


@pytest.mark.parametrize("kind", [OneAfterTheOther, Transformer])
def test_compiled_stages(kind: type[Translator]) -> None:
    """The forward up to the first block is not compiled, as the stage ends within it."""
    (ids, target), unsplit = batch(), kind()
    layers = fastpipe.split(kind(), ids[:2], ids[:2])
    pipe = fastpipe.Pipeline(layers, "zbv", 4, loss_fn, num_ranks=2)
    for stage in pipe.stage_modules.values():
        stage.compile(backend="aot_eager")
    loss = loss_fn(unsplit(ids, ids), target)
    loss.backward()
    torch.testing.assert_close(pipe.step(ids, ids, target=target).loss, loss.detach())
    expected = dict(unsplit.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_dropout_between_modules_follows_their_mode(schedule: str, executor: str) -> None:
    def forward(m: Decoder, x: torch.Tensor) -> Any:
        x = through(m, x, lambda x: nn.functional.dropout(x, 0.3, training=m.training))
        return OrderedDict(logits=ending(m, x), hidden=x)

    def of_logits(output: Any, target: torch.Tensor) -> torch.Tensor:
        return loss_fn(output["logits"], target)

    model, (ids, target) = Wrong(forward), batch()
    layers = fastpipe.split(model, ids[:2])
    pipe = fastpipe.Pipeline(
        layers, schedule, 4, of_logits, num_ranks=2, executor=executor, rng="per_microbatch", partition="parameters"
    )
    parity = fastpipe.check_parity(pipe, layers, (ids, target))
    assert parity.ok, parity
    expected = model.eval()(ids)
    for switch in (model.eval, pipe.eval):
        switch()
        output = pipe.eval_step(ids).outputs
        assert type(output) is OrderedDict and all(map(torch.equal, output.values(), expected.values()))
        model.train()


def test_large_parameters_that_are_sent_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = Wrong(FUNCTIONS["the embedding's weight"])
    fastpipe.split(model, batch()[0][:1])
    assert not caplog.messages
    model.inner["tokens"] = nn.Embedding(20_000, WIDTH)
    model.head = nn.Linear(WIDTH, 20_000)
    fastpipe.split(model, batch()[0][:1])
    assert "functions after the first block use inner.tokens.weight, so" in caplog.text and "1 MB" in caplog.text


def test_an_embedding_that_is_called_before_every_block(caplog: pytest.LogCaptureFixture) -> None:
    class Placed(Decoder):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x, places = self.embed(ids, 0), torch.arange(ids.shape[1]) % VOCABULARY
            for block in self.inner["blocks"]:
                x = block(x + self.inner["tokens"](places))
            return ending(self, x)

    (ids, target), model = batch(), Placed()
    pipe = fastpipe.Pipeline(fastpipe.split(model, ids[:2]), "zbv", 4, loss_fn, num_ranks=2)
    assert "split: inner.tokens is called 5 times after the first block began; layer 0 does that" in caplog.text
    assert fastpipe.check_parity(pipe, Placed(), (ids, target)).ok


def test_functions_leave_the_hooks_of_modules_alone() -> None:
    """Those get the module's tensors, and no proxies; those of a module that no stage calls are refused."""
    model, seen = Wrong(FUNCTIONS["pooling"]), []
    model.head.register_forward_pre_hook(lambda _, args: seen.extend(map(type, args)))
    model.inner["norm"].register_forward_hook(lambda _, args, output: seen.append(type(output)))
    fastpipe.split(model, batch()[0])
    assert seen and set(seen) == {torch.Tensor}
    model.inner.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="the ModuleDict has hooks"):
        fastpipe.split(model, batch()[0])


class Residues(nn.Module):
    """As a ResNet is written: Sequentials of blocks, one after the other, then a pooling and a flattening."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 4, 3)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(count)))
            for count in (2, 3, 1)
        )
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer3(self.layer2(self.layer1(nn.functional.relu(self.stem(x), inplace=True))))
        return self.head(torch.flatten(self.pool(x), 1))


class Digits(nn.Module):
    """Without a list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
        self.fc1, self.fc2 = nn.Linear(36, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.relu(self.conv1(x), inplace=True)
        x = nn.functional.max_pool2d(nn.functional.relu(self.conv2(x)), 2)
        x = self.fc2(nn.functional.relu(self.fc1(torch.flatten(x, 1))))
        return nn.functional.log_softmax(x, dim=1)


def test_a_model_without_a_list_of_blocks(executor: str) -> None:
    x, target = torch.randn(8, 1, 10, 10), torch.randint(10, (8,))
    layers = fastpipe.split(Digits(), x[:2])
    assert len(layers) == 1 + 4
    pipe = fastpipe.Pipeline(layers, "zbv", 4, nn.functional.nll_loss, num_ranks=2, executor=executor)
    parity = fastpipe.check_parity(pipe, Digits(), (x, target))
    assert parity.ok, parity


def test_rows_that_follow_each_other() -> None:
    model, unsplit = Residues(), Residues()
    x, target = torch.randn(8, 3, 9, 9), torch.randint(5, (8,))
    layers = fastpipe.split(model, x[:2])
    assert len(layers) == 1 + 2 + 3 + 1 + 2
    pipe = fastpipe.Pipeline(layers, "zbv", 4, nn.functional.cross_entropy, num_ranks=2)
    parity = fastpipe.check_parity(pipe, unsplit, (x, target))
    assert parity.ok, parity
    assert pipe.state_dict().keys() == model.state_dict().keys()
    model.layer2.register_forward_hook(lambda *_: None)  # it stays a layer then
    assert len(fastpipe.split(model, x[:2])) == 1 + 2 + 1 + 1 + 2


def test_blocks_that_are_no_layers_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """The head is a list, too, and the only one that is split."""
    model = Wrong(lambda m, x: m.head(m.inner["norm"](through(m, x) + ONES)))
    model.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY))
    layers = fastpipe.split(model, batch()[0])
    assert len(layers) == 1 + 2
    (said,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "of the parameters are in layer 0 of 3" in said and "after inner.blocks.5" in said


@pytest.mark.parametrize("training", [True, False])
def test_what_is_no_row_in_training_is_refused(training: bool) -> None:
    """A model that is handed over to be evaluated may be trained later."""

    def forward(m: Decoder, x: torch.Tensor) -> torch.Tensor:
        return ending(m, through(m, x, lambda x: torch.dropout(x, 0.5, m.training)))

    model = Wrong(forward).train(training)
    model.head.eval()
    with pytest.raises(ValueError, match="in training|in evaluation"):
        fastpipe.split(model, batch()[0])
    assert model.training == training and not model.head.training


def test_a_tuple_of_which_one_tensor_is_passed_on() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
            self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(4))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x, _ = layer(x)
            return self.head(x[:, -1])

    ids = batch()[0]
    pipe = fastpipe.Pipeline(
        fastpipe.split(Recurrent(), ids[:2]), "zbv", 4, nn.functional.cross_entropy, num_ranks=2, partition=[1, 2, 1, 2]
    )
    parity = fastpipe.check_parity(pipe, Recurrent(), (ids, ids[:, 0]))
    assert parity.ok, parity


class Gpt(Decoder):
    """As nanoGPT: with targets it returns a loss, too."""

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> Any:  # type: ignore[override]
        x = through(self, self.embed(ids, 0))
        if targets is None:
            return ending(self, x[:, [-1]]), None
        logits = ending(self, x)
        return logits, nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def own_loss(output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return output[1]


@pytest.mark.parametrize(("schedule", "num_ranks"), [("1f1b", 9), ("zbv", 2), ("dualpipe", 2)])
def test_logits_and_the_loss_of_an_argument(schedule: str, num_ranks: int, executor: str) -> None:
    ids, target = batch()
    layers = fastpipe.split(Gpt(), ids[:2], targets=target[:2])
    pipe = fastpipe.Pipeline(layers, schedule, 4, own_loss, num_ranks=num_ranks, executor=executor)
    parity = fastpipe.check_parity(pipe, Gpt(), (ids, target), kwargs={"targets": target})
    assert parity.ok, parity
    logits, _ = pipe.eval_step(ids, targets=target).outputs
    assert torch.equal(logits[:3], Gpt()(ids[:3], target[:3])[0])
    with pytest.raises(ValueError, match="targets: .* an example in which it was a tensor"):
        pipe.eval_step(ids)


def test_a_loss_that_is_nan_with_other_sizes_than_the_examples() -> None:
    """As that of models for questions and answers, which ignores what is beyond the last token."""

    class Answer(Decoder):
        def forward(self, ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            scores = ending(self, through(self, self.embed(ids, 0)))[:, :, 0]
            return nn.functional.cross_entropy(scores, at.clamp(0, scores.size(1)), ignore_index=scores.size(1))

    ids = batch()[0]
    at = torch.full((len(ids),), ids.shape[1] - 1)  # a shorter example has no such token
    assert Answer()(ids[:, :-1], at).isnan()
    layers = fastpipe.split(Answer(), ids[:2], at=at[:2])
    parity = fastpipe.check_parity(
        fastpipe.Pipeline(layers, "1f1b", 4, num_ranks=2), Answer(), (ids, None), kwargs={"at": at}
    )
    assert parity.ok, parity


class Paired(nn.Module):
    """Lists in a list, and skips around their modules in the model's forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(12, WIDTH), nn.Linear(WIDTH, 5)
        self.layers = nn.ModuleList(nn.ModuleList([Block(), nn.Linear(WIDTH, WIDTH)]) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for mix, feed in self.layers:
            x = mix(x) + x
            x = feed(x) + x
        return self.head(x.mean(1))


@pytest.mark.parametrize(("schedule", "num_ranks"), [("1f1b", 8), ("zbv", 2), ("dualpipev", 2)])
def test_lists_in_a_list(schedule: str, num_ranks: int, executor: str) -> None:
    x, target = torch.randn(9, 3, 12), torch.randint(5, (9,))
    layers = fastpipe.split(Paired(), x[:2])
    assert len(layers) == 1 + 6 + 1
    pipe = fastpipe.Pipeline(
        layers, schedule, 4, nn.functional.cross_entropy, num_ranks=num_ranks, executor=executor, recompute="layers"
    )
    parity = fastpipe.check_parity(pipe, Paired(), (x, target))
    assert parity.ok, parity


def test_torchs_encoder_reads_its_first_layer() -> None:
    class Classifier(nn.Module):
        def __init__(self, *, nests: bool = False) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3)
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 4, nn.LayerNorm(WIDTH), enable_nested_tensor=nests)

        def forward(self, ids: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
            return self.head(self.encoder(self.embed(ids), src_key_padding_mask=padding).mean(1))

    ids = batch()[0]
    padding = ids == 3
    with pytest.raises(ValueError, match="in evaluation, its layers"):  # then it sets the outputs of padding to 0
        fastpipe.split(Classifier(nests=True), ids[:2], padding[:2])
    layers = fastpipe.split(Classifier(), ids[:2], padding[:2])
    assert len(layers) == 1 + 4 + 2
    pipe = fastpipe.Pipeline(layers, "zbv", 4, nn.functional.cross_entropy, num_ranks=2)
    parity = fastpipe.check_parity(pipe, Classifier(), (ids, ids[:, 0] % 3), kwargs={"padding": padding})
    assert parity.ok, parity


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor], *, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(x).chunk(3, dim=-1)
        cos, sin = turns
        return x + nn.functional.scaled_dot_product_attention(q * cos, k * sin, v, mask)


class Llama(nn.Module):
    """A decoder whose forward computes a mask, and slices rotary embeddings, for all blocks, as many are written."""

    def __init__(self, *, has_bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(6))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.turns = torch.linspace(0, 1, 2 * TOKENS)[:, None]
        self.bias = nn.Parameter(torch.randn(TOKENS)) if has_bias else None

    def forward(self, ids: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        x, length = self.tokens(ids), ids.shape[1]
        turns = self.turns[:length].cos(), self.turns[:length].sin()
        mask = torch.full((length, length), -1e9).triu(1).expand(len(ids), -1, -1)
        if self.bias is not None:
            mask = mask + self.bias[:length]
        if padding is not None:
            mask = mask.masked_fill(padding[:, None, :] == 0, -1e9)
        for layer in self.layers:
            x = layer(x, turns, mask=mask)
        return self.output(self.norm(x))


@pytest.mark.parametrize(
    ("schedule", "num_ranks"), [("1f1b", 8), ("interleaved_1f1b", 2), ("zbv", 2), ("dualpipe", 4), ("gpipe", 9)]
)
def test_arguments_that_all_blocks_get(schedule: str, num_ranks: int, executor: str) -> None:
    model, unsplit = Llama(), Llama()
    ids = batch()[0][:2]
    layers = fastpipe.split(model, ids, padding=(ids != 3).long())
    pipe = fastpipe.Pipeline(layers, schedule, 8, loss_fn, num_ranks=num_ranks, executor=executor)
    for rows, length in ((9, TOKENS), (8, TOKENS - 2)):
        ids, target = (x[:, :length] for x in batch(rows))
        padding = (ids != 3).long()
        for kwargs in ({}, {"padding": padding}):
            parity = fastpipe.check_parity(pipe, unsplit, (ids, target), kwargs=kwargs)
            assert parity.ok, parity


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev"])
def test_blocks_are_recomputed(schedule: str, executor: str) -> None:
    """Each once for every microbatch, with the arguments that all get."""
    model, unsplit = Llama(), Llama()
    ids, target = batch()
    calls: list[str] = []
    for layer in model.layers:
        layer.mix.register_forward_hook(lambda *_: calls.append(""))
    pipe = fastpipe.Pipeline(
        fastpipe.split(model, ids[:2]), schedule, 4, loss_fn, num_ranks=2, executor=executor, recompute="layers"
    )
    calls.clear()
    pipe.step(ids, target=target)
    assert len(calls) == 2 * 4 * 6
    model.zero_grad()
    parity = fastpipe.check_parity(pipe, unsplit, (ids, target))
    assert parity.ok, parity


def test_an_argument_that_all_blocks_get_may_be_trained(executor: str) -> None:
    """Its gradient has parts of all stages; with a block in each the sum has autograd's order."""
    model, unsplit = Llama(has_bias=True), Llama(has_bias=True)
    ids, target = batch()
    layers = fastpipe.split(model, ids[:2])
    pipe = fastpipe.Pipeline(
        layers, "zbv", 4, loss_fn, num_ranks=4, partition=[2, 1, 1, 1, 1, 1, 1, 1], executor=executor
    )
    parity = fastpipe.check_parity(pipe, unsplit, (ids, target))
    assert parity.ok, parity
    pipe.step(ids, target=target)
    assert model.bias is not None and model.bias.grad is not None


class Gemma(Llama):
    """Blocks of two kinds, with masks and rotary embeddings for each in dicts, and a scale for after the blocks."""

    def forward(self, ids: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        length = ids.shape[1]
        scale = torch.rsqrt((ids > 0).sum(1, keepdim=True) + 1.0)[..., None]
        turns = {kind: (base + self.bias[:length, None], base) for kind, base in self.bases(length).items()}
        masks = {"wide": torch.full((length, length), -1e9).triu(1)}
        masks["near"] = masks["wide"] + torch.full((length, length), -1e9).tril(-3)
        return self.output(self.norm(self.blocks(self.tokens(ids), turns, masks)) * scale)

    def bases(self, length: int) -> dict[str, torch.Tensor]:
        return {"near": self.turns[:length].cos(), "wide": self.turns[:length].sin()}

    def blocks(self, x: torch.Tensor, turns: Any, masks: dict[str, torch.Tensor]) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            kind = "wide" if i % 3 == 2 else "near"
            x = layer(x, turns[kind], mask=masks[kind])
        return x


@pytest.mark.parametrize(("schedule", "num_ranks"), [("1f1b", 8), ("zbv", 2), ("dualpipe", 2)])
def test_variables_that_only_later_blocks_use(schedule: str, num_ranks: int, executor: str) -> None:
    """Of the model's forward and of what it calls; also trained."""
    model, unsplit = Gemma(has_bias=True), Gemma(has_bias=True)
    pipe = fastpipe.Pipeline(
        fastpipe.split(model, batch()[0][:2]), schedule, 4, loss_fn, num_ranks=num_ranks, executor=executor
    )
    for rows, length in ((9, TOKENS), (8, TOKENS - 2)):
        ids, target = (x[:, :length] for x in batch(rows))
        pipe.step(ids, target=target)
        found = {name: parameter.grad for name, parameter in pipe.named_parameters()}
        reference_step(unsplit, (ids, target), pipe.schedule, loss_fn)
        for name, parameter in unsplit.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad)


@pytest.mark.parametrize("schedule", ["gpipe", "zbv"])
def test_an_argument_that_blocks_change(schedule: str) -> None:
    """Each stage passes on what it has changed."""

    class Counting(Block):
        def forward(self, x: torch.Tensor, count: Any = None) -> torch.Tensor:
            return super().forward(x) + count.add_(1)

    def forward(model: Decoder, x: torch.Tensor) -> torch.Tensor:
        count = torch.zeros(1)
        for block in model.inner["blocks"]:
            x = block(x, count)
        return ending(model, x)

    models = []
    for _ in range(2):
        models.append(Wrong(forward))
        models[-1].inner["blocks"] = nn.ModuleList(Counting() for _ in range(3))
    models[1].load_state_dict(models[0].state_dict())
    pipe = fastpipe.Pipeline(fastpipe.split(models[0], batch()[0][:2]), schedule, 3, loss_fn, num_ranks=2)
    parity = fastpipe.check_parity(pipe, models[1], batch())
    assert parity.ok, parity


class Residual(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def test_forwards_that_no_stage_would_run_are_refused() -> None:
    """Of the model, of a module on the way to its blocks, and of a Sequential."""
    model = Decoder()
    model.forward = torch.compile(model.forward, backend="eager")
    with pytest.raises(ValueError, match="Decoder.forward was replaced on the instance"):
        fastpipe.split(model, batch()[0])
    sequential = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sequential.forward = lambda x: -x
    residual = Residual(nn.Linear(4, 4), nn.Linear(4, 4))
    for model, text in ((sequential, "Sequential.forward was replaced"), (residual, "Residual is a Sequential with a")):
        with pytest.raises(ValueError, match=text):
            fastpipe.split(model)
        with pytest.raises(ValueError, match=text):
            fastpipe.Pipeline(model, "1f1b", 2, nn.functional.mse_loss, num_ranks=2)


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_hooks_of_the_whole_model_are_refused(kind: str) -> None:
    model, sequential = Decoder(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for hooked in (model, sequential):
        getattr(hooked, f"register_{kind}")(lambda *_: None)
        with pytest.raises(ValueError, match=f"the {type(hooked).__name__} has hooks .* register them on its layers"):
            fastpipe.split(hooked, batch()[0])
    with pytest.raises(ValueError, match="the Sequential has hooks"):
        fastpipe.Pipeline(sequential, "1f1b", 2, nn.functional.mse_loss, num_ranks=2)


def test_hooks_of_the_whole_model_that_come_later_are_refused() -> None:
    model, sequential = Decoder(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = batch()[0]
    for whole, layers, inputs in ((model, fastpipe.split(model, x), x), (sequential, sequential, torch.ones(4, 4))):
        pipe = fastpipe.Pipeline(layers, "1f1b", 2, num_ranks=2)
        pipe.eval_step(inputs)
        hook = whole.register_forward_hook(lambda *_: None)
        with pytest.raises(ValueError, match=f"the {type(whole).__name__} has hooks .* register them on its layers"):
            pipe.eval_step(inputs)
        hook.remove()
        pipe.eval_step(inputs)


def test_layers_of_the_whole_model_that_are_replaced_later_are_refused() -> None:
    model, sequential = Decoder(), nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    x, y = batch()[0], torch.ones(4, 4)
    for layers, blocks, path, inputs in (
        (fastpipe.split(model, x), model.inner["blocks"], "inner.blocks.", x),
        (sequential, sequential, "", y),
    ):
        pipe = fastpipe.Pipeline(layers, "1f1b", 2, num_ranks=2)
        pipe.eval_step(inputs)
        first = blocks[0]
        blocks[0] = copy.deepcopy(first)
        with pytest.raises(ValueError, match=rf"model: {path}0, a \w+, was put in the place of another module after"):
            pipe.eval_step(inputs)
        blocks[0] = first
        blocks.append(copy.deepcopy(first))
        with pytest.raises(ValueError, match=rf"model: {path}\d, a \w+, was added after the Pipeline was built"):
            pipe.eval_step(inputs)
        del blocks[0], blocks[-1]  # a script may let go of layers that a stage has
        pipe.eval_step(inputs)


class Patches(nn.Module):
    """A vision transformer: its blocks are an nn.Sequential, and each has another one in it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(12, WIDTH)
        blocks = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh()) for _ in range(4)]
        self.blocks = nn.Sequential(*(nn.Sequential(block, nn.Linear(4 * WIDTH, WIDTH)) for block in blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.pool = nn.AdaptiveAvgPool1d(1)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(3, VOCABULARY))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.norm(self.blocks(self.embed(x)))))


class Turned(nn.Module):
    """A block that gets rotary embeddings, a buffer of the model, and what is None unless the step gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, turns: torch.Tensor, masks: Any = None, *, scale: float) -> torch.Tensor:
        mixed = x + torch.tanh(self.mix(x * turns[: x.shape[1], None])) * scale
        return mixed if masks is None else mixed * masks


class Dictionary(nn.Module):
    """As torchtitan writes a decoder: its blocks are an nn.ModuleDict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): Turned() for i in range(4)})
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("turns", torch.linspace(0, 1, 2 * TOKENS))

    def forward(self, ids: torch.Tensor, masks: Any = None) -> torch.Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers.values():
            x = layer(x, self.turns, masks, scale=0.5)
        return self.output(self.norm(x))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("kind", [Patches, Dictionary])
def test_blocks_in_a_sequential_or_a_dict(kind: type[nn.Module], schedule: str, executor: str) -> None:
    model, unsplit = kind(), kind()
    x = torch.randn(9, 3, 12) if kind is Patches else batch()[0]
    with torch.no_grad():
        target = torch.randn_like(model(x))
    layers = fastpipe.split(model, x[:2])
    assert len(layers) == 1 + 4 + (4 if kind is Patches else 2)
    pipe = fastpipe.Pipeline(layers, schedule, 4, nn.functional.mse_loss, num_ranks=2, executor=executor)
    assert pipe.state_dict().keys() == model.state_dict().keys()
    parity = fastpipe.check_parity(pipe, unsplit, (x, target))
    assert parity.ok, parity


def test_a_further_argument_that_the_example_did_not_have_is_refused() -> None:
    model = Dictionary()
    ids = batch()[0]
    layers = fastpipe.split(model, ids[:2])
    pipe = fastpipe.Pipeline(layers, "1f1b", 3, num_ranks=3)
    with pytest.raises(
        ValueError, match="masks: .* an example in which it was None, .* split the model with an example"
    ):
        pipe.eval_step(ids, masks=torch.ones(9, 1, 1))
    layers = fastpipe.split(model, ids[:2], masks=torch.ones(2, 1, 1))
    pipe = fastpipe.Pipeline(layers, "1f1b", 3, num_ranks=3)
    masks = torch.rand(9, 1, 1)
    assert torch.equal(pipe.eval_step(ids, masks=masks).outputs[:3], model(ids[:3], masks[:3]))
    assert torch.equal(pipe.eval_step(ids).outputs[:3], model(ids[:3]))  # its blocks find that there is none


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ValueError, match="Decoder: .* microbatch .*split"):
        fastpipe.split(Decoder())
    with pytest.raises(ValueError, match="Linear without several modules"):
        fastpipe.split(nn.Linear(2, 2), torch.randn(2, 2))
    with pytest.raises(ValueError, match="model has no layers"):
        fastpipe.split([])
    with pytest.raises(TypeError, match="model is a int: give an nn.Module"):
        fastpipe.split(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model is a str: give an nn.Module"):
        fastpipe.split("gpt2")  # type: ignore[arg-type]


def test_blocks_get_the_buffer_that_is_there(executor: str) -> None:
    """Not that of the example: it may be loaded, replaced or converted later."""
    model, unsplit, other = Dictionary(), Dictionary(), Dictionary()
    other.turns.mul_(-2)
    ids, _ = batch()
    layers = fastpipe.split(model, ids[:2])
    pipe = fastpipe.Pipeline(layers, "1f1b", 4, nn.functional.mse_loss, num_ranks=2, executor=executor)
    assert "turns" in pipe.stage_modules[1].state_dict()
    pipe.load_state_dict(other.state_dict(), assign=True)
    unsplit.load_state_dict(other.state_dict(), assign=True)
    target = torch.randn(9, TOKENS, VOCABULARY)
    assert fastpipe.check_parity(pipe, unsplit, (ids, target)).ok
    for changed in (model, unsplit):
        changed.register_buffer("turns", torch.linspace(3, 1, 2 * TOKENS))
    assert fastpipe.check_parity(pipe, unsplit, (ids, target)).ok
    for changed in (*pipe.stage_modules.values(), unsplit):
        changed.double()
    assert fastpipe.check_parity(pipe, unsplit, (ids, target.double())).ok


def test_what_comes_before_the_blocks_leaves_no_cycle() -> None:
    """What ends the model's forward there has a traceback, whose frames hold every tensor of that forward."""
    model = Dictionary()
    layers = fastpipe.split(model, batch()[0])
    seen: list[weakref.ref[torch.Tensor]] = []
    model.tok_embeddings.register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    gc.disable()
    try:
        layers.chain(range(2))(batch()[0])
        assert len(seen) == 1 and seen[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("training", [True, False])
def test_blocks_that_get_their_mode_are_refused(training: bool) -> None:
    class Moded(Dictionary):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.tok_embeddings(ids)
            for number, layer in enumerate(self.layers.values()):
                x = layer(x, self.turns, scale=0.1 * number * self.training)
            return self.output(self.norm(x))

    with pytest.raises(ValueError, match="in evaluation" if training else "in training"):
        fastpipe.split(Moded().train(training), batch()[0])


def test_a_forward_that_writes_to_a_buffer_of_its_blocks_is_refused() -> None:
    class Counting(Dictionary):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            if fastpipe.current() is not None:
                self.turns.add_(1)
            return super().forward(ids)

    pipe = fastpipe.Pipeline(fastpipe.split(Counting(), batch()[0]), "1f1b", 3, num_ranks=2)
    with pytest.raises(ValueError, match="writes to a buffer that it gives to its blocks"):
        pipe.eval_step(batch()[0])


class HalfWithoutGradients(Decoder):
    """Trains the last blocks only, by no_grad around all before them."""

    def forward(self, ids: torch.Tensor, offset: int = 0) -> torch.Tensor:
        blocks = list(self.inner["blocks"])
        with torch.no_grad():
            x = self.embed(ids, offset)
            for block in blocks[:3]:
                x = block(x)
        for block in blocks[3:]:
            x = block(x)
        return self.head(self.inner["norm"](x))


def test_blocks_without_gradients_are_refused_until_they_are_frozen(executor: str) -> None:
    """As layers they would be trained."""
    model = HalfWithoutGradients(tied=False)
    ids, target = batch()
    with pytest.raises(ValueError, match="runs inner.blocks.0 without gradients .* freeze its parameters"):
        fastpipe.split(model, ids[:2])
    for part in (model.inner["tokens"], model.inner["positions"], *model.inner["blocks"][:3]):
        part.requires_grad_(False)
    unsplit = copy.deepcopy(model)
    layers = fastpipe.split(model, ids[:2])
    pipe = fastpipe.Pipeline(layers, "1f1b", 3, loss_fn, num_ranks=2, executor=executor)
    result = pipe.step(ids, target=target)
    assert_same(pipe, result, unsplit, reference_step(unsplit, (ids, target), pipe.schedule, loss_fn))


class Checkpoints(Decoder):
    def forward(self, ids: torch.Tensor, offset: int = 0) -> torch.Tensor:
        x = self.embed(ids, offset)
        for block in self.inner["blocks"]:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
        return self.head(self.inner["norm"](x))


def test_blocks_in_a_reentrant_checkpoint_have_gradients() -> None:
    """Though these are off within it."""
    ids, _ = batch()
    assert len(fastpipe.split(Checkpoints(), ids[:2])) == 9


class Options(Decoder):
    """What its forward does after the blocks depends on arguments and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(  # type: ignore[override]
        self, ids: torch.Tensor, offset: int = 0, *, scale: float = 1.0, mask: Any = None, wide: bool = False
    ) -> torch.Tensor:
        x = through(self, self.embed(ids, offset))
        if mask is not None:
            x = x * mask[..., None]
        return ending(self, x.repeat(1, 1 + wide, 1)) * (scale * self.factor)


def test_arguments_that_the_layers_do_not_follow_must_be_as_in_the_example() -> None:
    """A forward may use them after the blocks, where they are constants."""
    model, ids = Options(), batch()[0]
    pipe = fastpipe.Pipeline(fastpipe.split(model, ids[:2], scale=3.0), "1f1b", 3, num_ranks=2)
    for named in ({}, {"offset": 3}):
        expected = torch.cat([model(part, scale=3.0, **named) for part in ids.split(3)])
        assert torch.equal(pipe.eval_step(ids, scale=3.0, **named).outputs, expected)
    for named, text in (
        ({}, "scale: .* in which it was 3.0, .* give it as in the example"),
        ({"mask": torch.ones(9, TOKENS)}, "mask: .* in which it was None"),
        ({"wide": True}, "wide: .* in which it was False"),
    ):
        with pytest.raises(ValueError, match=text):
            pipe.eval_step(ids, **{"scale": 1.0 if "scale" in text else 3.0, **named})


def test_further_arguments_by_name_must_be_those_of_the_example() -> None:
    class Named(Decoder):
        def forward(self, ids: torch.Tensor, **named: Any) -> torch.Tensor:  # type: ignore[override]
            x = through(self, self.embed(ids, 0))
            return ending(self, x if "mask" not in named else x * named["mask"])

    ids, mask = batch()[0], torch.ones(9, 1, 1)
    pipe = fastpipe.Pipeline(fastpipe.split(Named(), ids[:2], other=mask[:2]), "1f1b", 3, num_ranks=2)
    pipe.eval_step(ids, other=mask)
    with pytest.raises(ValueError, match="named: .* an example in which it was .'other': a tensor"):
        pipe.eval_step(ids, mask=mask)


@pytest.mark.parametrize("kind", [Options, Llama])
def test_attributes_that_change_after_the_split_are_refused(kind: type[nn.Module]) -> None:
    """Stages have copies of the modules on the way to the blocks, and constants in functions."""
    model, ids = kind(), batch()[0]
    model.factor = 1.0
    pipe = fastpipe.Pipeline(fastpipe.split(model, ids[:2]), "1f1b", 3, num_ranks=2)
    pipe.eval_step(ids)
    model.factor = 2.0
    with pytest.raises(ValueError, match=r"factor was 1.0 when the model was split and is 2.0 now.*make it a buffer"):
        pipe.eval_step(ids)
    model.factor = 1.0
    pipe.eval_step(ids)


class Scaled(Wrong):
    def __init__(self, what: Callable[..., torch.Tensor]) -> None:
        super().__init__(what)
        self.register_buffer("count", torch.tensor(1.0))
        self.last: Any = None
        self.inner["norm"] = Divided()


class Divided(nn.LayerNorm):
    """A later module that gets a number."""

    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
        return super().forward(x) / by


def counting(model: Scaled, x: torch.Tensor) -> torch.Tensor:
    x = through(model, x)
    model.count += 1
    return ending(model, x)


def remembering(model: Scaled, x: torch.Tensor) -> torch.Tensor:
    model.last = through(model, x)
    return ending(model, model.last)


def full_precision(model: Scaled, x: torch.Tensor) -> torch.Tensor:
    x = model.inner["norm"](through(model, x))
    with torch.autocast("cpu", enabled=False):
        return model.head(x.float())


def dropping(model: Scaled, x: torch.Tensor, draw: Callable[[], Any], in_modes: tuple[bool, ...]) -> torch.Tensor:
    for block in model.inner["blocks"]:
        if model.training not in in_modes or draw() > 1e-9:
            x = block(x)
    return ending(model, x)


def without_weights(model: Scaled, x: torch.Tensor) -> torch.Tensor:
    """As a head is initialized with zeros, the output does not show what precedes it."""
    model.head.weight.data.zero_()
    return model.head(torch.dropout(model.inner["norm"](through(model, x)), 0.5, model.training))


SILENT: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "a counter": (counting, "its forward changes count after its first block"),
    "an attribute": (remembering, "its forward changes last after its first block"),
    "autocast off": (full_precision, "with torch.autocast around both, its layers"),
    "random layers": (partial(dropping, draw=lambda: torch.rand(()), in_modes=(True, False)), "reads the value"),
    "random layers of Python": (partial(dropping, draw=random.random, in_modes=(True, False)), "other random numbers"),
    "random layers of NumPy": (
        partial(dropping, draw=np.random.random, in_modes=(True, False)),
        "other random numbers",
    ),
    "random layers in training": (partial(dropping, draw=random.random, in_modes=(True,)), "in training, .* random"),
    "random layers in evaluation": (partial(dropping, draw=random.random, in_modes=(False,)), "in evaluation, .* rand"),
    "a head of zeros": (without_weights, "in training|in evaluation"),
}


@pytest.mark.parametrize("what", SILENT)
def test_what_layers_would_compute_wrongly_in_a_later_step_is_refused(what: str) -> None:
    forward, text = SILENT[what]
    with pytest.raises(ValueError, match=text):
        fastpipe.split(Scaled(forward), batch()[0])


def test_sizes_that_are_read_before_the_blocks() -> None:
    """They are sent to the layers that use them, and not the tensors that have them."""

    class Segmentation(Residues):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows, size = x.shape[0], x.shape[-2:]
            if "largest" not in vars(self):
                self.largest = size[0]
            y = self.layer3(self.layer2(self.layer1(self.stem(x))))
            y = nn.functional.interpolate(y.reshape(rows, -1, *y.shape[2:]), size=size)
            return y if size[0] < 64 else y[:, :, : x.shape[2] // 2]

    x = torch.randn(8, 3, 9, 9)
    model = Segmentation()
    layers = fastpipe.split(model, x[:2])
    assert "largest" not in vars(model)
    assert not any(value is x for value in layers[0](x))
    pipe = fastpipe.Pipeline(layers, "1f1b", 4, lambda y, _: y.square().mean(), num_ranks=2)
    for size in (9, 12):
        for rows in (8, 6):
            x = torch.randn(rows, 3, size, size)
            parity = fastpipe.check_parity(pipe, Segmentation(), (x, torch.zeros(rows)))
            assert parity.ok, parity
    with pytest.raises(
        ValueError, match=r"in test_split.py:\d+ .* a value that was True on the example, and is False now"
    ):
        pipe.step(torch.randn(8, 3, 64, 64), target=torch.zeros(8))


def test_rows_that_a_forward_iterates_over() -> None:
    forward = lambda m, x: ending(m, torch.stack([row * 2 for row in through(m, x)]))  # noqa: E731
    ids, target = batch(8)
    pipe = fastpipe.Pipeline(fastpipe.split(Wrong(forward), ids[:2]), "1f1b", 4, loss_fn, num_ranks=2)
    parity = fastpipe.check_parity(pipe, Wrong(forward), (ids, target))
    assert parity.ok, parity
    with pytest.raises(ValueError, match=r"in test_split.py:\d+ .* a value that was 2 on the example, and is 3 now"):
        pipe.step(batch(12)[0], target=batch(12)[1])


def test_a_list_of_rows_from_before_the_blocks() -> None:
    """A stage takes two of its tensors from the forward's variable, and would leave out further ones."""

    class Listed(Decoder):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x = self.embed(ids, 0)
            rows = {"rows": list(x.mean(1))}
            return ending(self, through(self, x)) + torch.stack(rows["rows"]).sum()

    ids, target = batch(8)
    pipe = fastpipe.Pipeline(fastpipe.split(Listed(), ids[:2]), "1f1b", 4, loss_fn, num_ranks=2)
    assert fastpipe.check_parity(pipe, Listed(), (ids, target)).ok
    with pytest.raises(ValueError, match="get other arguments than on the example.*like the step's inputs"):
        pipe.step(batch(12)[0], target=batch(12)[1])


def test_integers_that_modules_return() -> None:
    """Such as the height of an image, which the forward uses afterwards: they differ from those on the example."""

    class Counting(Block):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:  # type: ignore[override]
            return super().forward(x), x.shape[1]

    class Counted(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.inner["blocks"] = nn.ModuleList(Counting() for _ in range(3))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x = self.embed(ids, 0)
            for block in self.inner["blocks"]:
                x, count = block(x)
                x = x.flatten(0, 1).unflatten(0, (-1, count)) / count
            return ending(self, x)

    layers = fastpipe.split(Counted(), batch()[0][:2, :5])
    assert len(layers) == 6
    pipe = fastpipe.Pipeline(layers, "1f1b", 3, loss_fn, num_ranks=2)
    assert fastpipe.check_parity(pipe, Counted(), batch()).ok


def test_what_a_blocks_class_says() -> None:
    """The forward reads a constant of the class and a property before it calls the first block."""

    class Scaled(Block):
        factor = 0.5

        @property
        def shift(self) -> float:
            return self.factor * 2

        @property
        def unknown(self) -> float:
            raise RuntimeError("not here")

    class Scaling(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.inner["blocks"] = nn.ModuleList(Scaled() for _ in range(3))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x = self.embed(ids, 0)
            for block in self.inner["blocks"]:
                x = block(x * block.factor + block.shift)
            return ending(self, x)

    layers = fastpipe.split(Scaling(), batch()[0][:2])
    assert len(layers) == 6
    assert fastpipe.check_parity(fastpipe.Pipeline(layers, "1f1b", 3, loss_fn, num_ranks=2), Scaling(), batch()).ok


def test_compiled_blocks_in_the_list(executor: str) -> None:
    """By torch.compile(block): split runs them as they are written, and stages the compiled ones."""
    compiled = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model = Decoder()
    blocks: Any = model.inner["blocks"]
    for i in range(len(blocks)):
        blocks[i] = torch.compile(blocks[i], backend=backend)
    layers = fastpipe.split(model, batch()[0][:2])
    assert len(layers) == 9 and not compiled
    pipe = fastpipe.Pipeline(layers, "1f1b", 3, loss_fn, num_ranks=2, executor=executor)
    assert fastpipe.check_parity(pipe, model, batch()).ok and compiled
    assert pipe.state_dict().keys() == model.state_dict().keys()


def test_masks_drawn_by_numpy_before_the_blocks() -> None:
    """As in models of speech: the model and its layers, one after the other, draw the same ones."""

    class Masked(Decoder):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x = self.embed(ids, 0)
            mask = torch.from_numpy(np.random.rand(*x.shape) < 0.9)
            return ending(self, through(self, x * mask))

    state = np.random.get_state()[1].copy()
    assert len(fastpipe.split(Masked(), batch()[0][:2])) == 9
    assert (np.random.get_state()[1] == state).all()


def test_a_value_that_is_read_before_the_blocks_is_refused() -> None:
    class Masked(Decoder):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            has_padding = bool((mask == 0).any())
            return ending(self, through(self, self.embed(ids, 0))) * (2 if has_padding else 1)

    with pytest.raises(ValueError, match="with other values in the example"):
        fastpipe.split(Masked(), batch()[0][:2], torch.ones(2, TOKENS))


def test_a_function_that_returns_its_input_on_the_example(executor: str) -> None:
    """Under autocast it does not."""
    forward = lambda m, x: ending(m, through(m, x, lambda x: x.float())).float()  # noqa: E731
    ids, target = batch()
    pipe = fastpipe.Pipeline(fastpipe.split(Wrong(forward), ids[:2]), "zbv", 3, loss_fn, num_ranks=2, executor=executor)
    with torch.autocast("cpu", torch.bfloat16):
        parity = fastpipe.check_parity(pipe, Wrong(forward), (ids, target))
        assert parity.ok, parity
        assert pipe.eval_step(ids).outputs.dtype == torch.float32


def test_an_example_on_which_the_model_cannot_be_trained_is_refused() -> None:
    """It is in evaluation, and what it does in training cannot be seen."""
    model = Wrong(lambda m, x: m.head(m.norm(torch.dropout(through(m, x)[:, 0], 0.5, m.training)))).eval()
    model.norm = nn.BatchNorm1d(WIDTH).eval()
    ids = batch()[0]
    with pytest.raises(ValueError, match="in training, Wrong fails on the example, .* such as one of several rows"):
        fastpipe.split(model, ids[:1])
    with pytest.raises(ValueError, match="in training, its layers in sequence"):
        fastpipe.split(model, ids[:2])


@dataclass
class Returned:
    y: torch.Tensor
    gates: torch.Tensor


class Sums(nn.Module):
    """Before its first block it iterates over a generator, asks a block for its state, and runs generated code."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Stateful() for _ in range(4))
        self.register_buffer("adjacent", torch.eye(WIDTH).to_sparse())
        names: dict[str, Any] = {}  # without a __name__
        exec("def double(x): return x.mul(2)", names)
        self.double = [names["double"]]

    def forward(self, x: torch.Tensor) -> Returned:
        gates = self.gate(self.double[0](x)) + self.blocks[0].state()  # type: ignore[operator]
        y = sum(gates[:, i : i + 1] * block(x) for i, block in enumerate(self.blocks))
        return Returned(torch.sparse.mm(self.adjacent, y.t()).t(), gates)


class Stateful(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.parts = nn.ModuleList([nn.Tanh(), None])  # type: ignore[list-item]

    def state(self) -> float:
        return self.out_features / 2


def test_what_a_forward_does_before_its_first_block() -> None:
    """It may be in a generator, in generated code and in methods of blocks; the output may be a dataclass."""
    model, x = Sums(), torch.randn(8, WIDTH)
    layers = fastpipe.split(model, x[:2])
    for _ in range(20):  # Python specializes code that runs often
        layers[0](x[:2])
    pipe = fastpipe.Pipeline(layers, "zbv", 4, lambda out, _: (out.y * out.gates[:, :1]).sum(), num_ranks=2)
    parity = fastpipe.check_parity(pipe, model, (x, torch.zeros(8)))
    assert parity.ok, parity


def test_a_named_member_of_a_block_that_is_asked_for_its_dtype() -> None:
    """As open_clip's encoders do before their first block."""

    class Named(Block):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(OrderedDict(c_fc=nn.Linear(WIDTH, WIDTH), gelu=nn.GELU()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(super().forward(x))

    class Casting(Decoder):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            mlp = self.inner["blocks"][0].mlp
            return ending(self, through(self, self.embed(ids, 0).to(mlp.c_fc.weight.dtype) / len(mlp)))

    model, ids = Casting(), batch()[0]
    model.inner["blocks"] = nn.ModuleList(Named() for _ in range(4))
    pipe = fastpipe.Pipeline(fastpipe.split(model, ids[:2]), "1f1b", 3, num_ranks=2)
    assert same_bits(pipe.eval_step(ids).outputs, torch.cat([model(part) for part in ids.chunk(3)]))


def test_attributes_of_what_a_block_returned() -> None:
    """Of x-transformers' attention, the forward notes the kind in what it returned."""

    class Marked(Block):
        def forward(self, x: torch.Tensor) -> Returned:  # type: ignore[override]
            return Returned(super().forward(x), x)

    class Marking(Decoder):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x = self.embed(ids, 0)
            for block in self.inner["blocks"]:
                returned = block(x)
                returned.kind, returned.gates = "attention", None
                x = returned.y
            return ending(self, x)

    model, unsplit = Marking(), Marking()
    for part in (model, unsplit):
        part.inner["blocks"] = nn.ModuleList(Marked() for _ in range(4))
    unsplit.load_state_dict(model.state_dict())
    ids, target = batch()
    layers = fastpipe.split(model, ids[:2])
    assert len(layers) == 7
    pipe = fastpipe.Pipeline(layers, "1f1b", 4, loss_fn, num_ranks=2)
    assert fastpipe.check_parity(pipe, unsplit, (ids, target)).ok


def test_what_fails_while_it_is_recorded_is_refused() -> None:
    class Packs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            lengths = torch.full((len(x),), 3)
            return self.rnn(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[1][0]

    with pytest.raises(ValueError, match="after .* that split cannot follow"):
        fastpipe.split(Packs(), torch.randn(2, 3, WIDTH))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):  # the model's own
        fastpipe.split(Packs(), torch.randn(2, 3, WIDTH + 1))
