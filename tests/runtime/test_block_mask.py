"""FlexAttention's BlockMask as an argument of a step: each microbatch gets that of its rows."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention
from torch.utils import _pytree as pytree

import fastpipe
from fastpipe import Pipeline
from fastpipe.runtime.model.chain import Chain
from fastpipe.runtime.step.agreement import batch_digests, check_batches
from fastpipe.runtime.step.inputs import Inputs, Request
from fastpipe.runtime.step.microbatch import split
from fastpipe.testing import reference_step
from tests.conftest import executors_in_turn
from tests.runtime.checks import assert_same, same_bits
from tests.runtime.models import squared

LENGTH, BLOCK, HEADS, WIDTH = 32, 8, 2, 8
ROWS = 7


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask) -> Any:
    """flex_attention, and where it has no backward, on a CPU, the attention that mask_mod and blocks define."""
    if not q.requires_grad:
        return flex_attention(q, k, v, block_mask=mask)
    visible = create_mask(mask.mask_mod, len(q), 1, LENGTH, LENGTH, device="cpu")
    blocks = mask.to_dense().repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible & blocks.bool())


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor, block_mask: BlockMask) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (HEADS, -1)).transpose(1, 2).chunk(3, -1)
        found: Any = attention(q, k, v, block_mask)
        return x + found.transpose(1, 2).flatten(-2)


def documents(rows: int) -> torch.Tensor:
    """Documents packed into rows, cut elsewhere in each of them."""
    torch.manual_seed(11)
    return torch.rand(rows, LENGTH).lt(0.15).cumsum(-1)


def mask_of(document: torch.Tensor) -> BlockMask:
    """Of the documents of a batch, causal: with partial, full and empty blocks."""

    def same_document(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (document[b, q] == document[b, kv]) & (q >= kv)

    return create_block_mask(same_document, len(document), None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)


def causal() -> BlockMask:
    return create_block_mask(lambda b, h, q, kv: q >= kv, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)


def layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [Attends() for _ in range(4)]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    return torch.randn(ROWS, LENGTH, WIDTH), torch.randn(ROWS, LENGTH, WIDTH)


@executors_in_turn(
    "kind, schedule", [("documents", "1f1b"), ("documents", "zbv"), ("causal", "zbv"), ("causal", "1f1b")]
)
def test_the_unsplit_models_bits(kind: str, schedule: str, executor: str) -> None:
    """The expected masks are made of each microbatch's rows, by create_block_mask."""
    x, target = batch()
    given = causal() if kind == "causal" else mask_of(documents(ROWS))
    masks = [causal()] * 3 if kind == "causal" else [mask_of(rows) for rows in documents(ROWS).tensor_split(3)]
    pipe = Pipeline(layers(), schedule, 3, squared, num_ranks=2, executor=executor)
    unsplit = Chain(dict(enumerate(layers())))
    for _ in range(2):
        result = pipe.step(x, block_mask=given, target=target)
        reference = reference_step(unsplit, (x, target), pipe.schedule, squared, kwargs={"block_mask": masks})
        assert_same(pipe, result, unsplit, reference)
    with torch.no_grad():
        whole = unsplit(x, block_mask=given)
    torch.testing.assert_close(pipe.eval_step(x, block_mask=given, target=target).outputs, whole)


def test_parts_have_all_blocks() -> None:
    """Those of the backward as well; a mask in a tree is cut with it; one of a single row is shared."""
    document = documents(ROWS)
    parts = split({"mask": mask_of(document), "documents": document}, 3, 0, "masks")
    for part, rows in zip(parts, document.tensor_split(3), strict=True):
        mask, expected = part["mask"], mask_of(rows)
        assert mask.shape == expected.shape and same_bits(mask.to_dense(), expected.to_dense())
        for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            assert same_bits(getattr(mask, name), getattr(expected, name)), name
        index = torch.meshgrid(*map(torch.arange, (len(rows), 1, LENGTH, LENGTH)), indexing="ij")
        assert torch.equal(mask.mask_mod(*index), expected.mask_mod(*index))
    one = causal()
    assert all(part is one for part in split(one, 3, 0, "mask"))


def test_a_registered_class_is_cut_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some libraries register BlockMask with pytree, and a tree is cut leaf by leaf."""
    before = dict(pytree.SUPPORTED_NODES)
    pytree.register_pytree_node(BlockMask, lambda mask: mask._flatten(), lambda *given: BlockMask._unflatten(*given))
    try:
        parts = split([mask_of(documents(3))][0], 3, 0, "mask")
        assert all(part.kv_num_blocks.shape[0] == 1 and part.mask_mod.__closure__ for part in parts)
        x, target = batch()
        pipe = Pipeline(layers(), "1f1b", 3, squared, num_ranks=2)
        assert pipe.step(x, block_mask=mask_of(documents(ROWS)), target=target).loss is not None
    finally:
        for nodes in (pytree.SUPPORTED_NODES, pytree.SUPPORTED_SERIALIZED_TYPES):
            nodes.pop(BlockMask, None)
        assert before.keys() == pytree.SUPPORTED_NODES.keys()


def test_other_masks_on_other_ranks_are_refused() -> None:
    requests = [Request((), {"block_mask": mask_of(rows)}, None, None, 3, True) for rows in documents(6).split(3)]
    with pytest.raises(ValueError, match="block_mask has other values on ranks"):
        check_batches({str(i): batch_digests(request, Inputs(), whole=False) for i, request in enumerate(requests)})


class Makes(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return fastpipe.carry(x, block_mask=causal())


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("few", "block_mask is a BlockMask of 2 rows but num_microbatches = 3: "),
        ("other", r"block_mask has 4 rows \(dimension 0\) but the input has 7"),
        ("rule", r"split\['block_mask'\] = 2: block_mask is a BlockMask, which is split along its batch only"),
    ],
)
def test_what_cannot_be_cut_is_refused(case: str, message: str) -> None:
    rows = {"few": 2, "other": 4, "rule": ROWS}[case]
    x, target = batch()
    pipe = Pipeline(layers(), "1f1b", 3, squared, num_ranks=2, split={"block_mask": 2} if case == "rule" else None)
    with pytest.raises(ValueError, match=message):
        pipe.step(x, block_mask=mask_of(documents(rows)), target=target)


def test_it_does_not_cross_a_boundary() -> None:
    """Within a stage it may be carried."""
    x, target = batch()
    one = Pipeline([Makes(), *layers()], "1f1b", 3, squared, num_ranks=1)
    assert one.step(x, target=target).loss is not None
    pipe = Pipeline([Makes(), *layers()], "1f1b", 3, squared, num_ranks=2)
    with pytest.raises(ValueError, match=r"stage 0 returned or carries a BlockMask.*give the mask to step by keyword"):
        pipe.step(x, target=target)


def test_compiled_once_for_all_microbatches() -> None:
    graphs = []

    def counts(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled: Any = torch.compile(flex_attention, backend=counts, fullgraph=True)
    q, k, v = torch.randn(3, 2, HEADS, LENGTH, WIDTH).unbind(0)
    for mask in split(mask_of(documents(6)), 3, 0, "mask"):
        expected: Any = flex_attention(q, k, v, block_mask=mask)
        torch.testing.assert_close(compiled(q, k, v, block_mask=mask), expected)
    assert len(graphs) == 1
