"""Hugging Face decoder models whose stages are processes, and cuts on which processes have to agree."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import fastpipe
from fastpipe.testing import reference_step
from tests.conftest import executors_in_turn
from tests.distributed.meshes import WRAPS, mesh, whole_grad
from tests.distributed.ranks import GroupOf, on_ranks
from tests.distributed.test_step import caught
from tests.runtime.checks import same_bits
from tests.runtime.decoders import LAYERS, decoder, padded_batch, train_decoder
from tests.runtime.test_bits import OF_A_KIND, microbatches_for
from tests.runtime.test_split import Dictionary, batch


@pytest.mark.parametrize(
    ("kind", "executor", "schedules"),
    [("llama", "python", OF_A_KIND[:2]), ("gpt2", "native", OF_A_KIND[2:])],
    indirect=["executor"],
)
@on_ranks(2)
def test_schedules_of_each_kind(kind: str, schedules: list[str], executor: str) -> None:
    """test_bits.py has all schedules between processes."""
    for schedule in schedules:
        count = microbatches_for(schedule, dist.get_world_size())
        assert count is not None
        # both ways between processes
        transport = "process_group" if executor == "python" else "auto"
        train_decoder(kind, schedule, count, steps=1, executor=executor, transport=transport)


@on_ranks(2)
def test_the_layers_of_other_processes_can_be_freed(executor: str) -> None:
    """A Pipeline keeps neither them nor the model, also with the model's own loss and number of labels."""
    model = decoder("llama")
    layers = fastpipe.split(model)
    options: Any = {"loss_reduction": layers.num_tokens, "executor": executor}
    pipe = fastpipe.Pipeline(layers, "1f1b", 2, layers.loss_fn, **options)
    kept = {id(parameter) for parameter in pipe.parameters()}
    others = [weakref.ref(parameter) for parameter in model.parameters() if id(parameter) not in kept]
    ids, mask, labels = padded_batch(4)
    expected = model(ids, attention_mask=mask, labels=labels).loss.detach()
    del model, layers, options
    gc.collect()
    assert others and not any(other() is not None for other in others)
    torch.testing.assert_close(pipe.step(ids, attention_mask=mask, target=labels).loss, expected)


def cut_apart(folder: str) -> dict[str, Any]:
    """Costs that differ from process to process, a checkpoint, and what is refused."""
    rank = dist.get_rank()
    model = decoder("llama")
    layers = fastpipe.split(model)
    ids, mask, labels = padded_batch(8)
    seconds = [1.0, 1, 1, 1, 9, 1, 1, 1] if rank else [9.0, 1, 1, 1, 1, 1, 1, 1]
    measured = fastpipe.runtime.model.cuts.layer_costs
    fastpipe.runtime.model.cuts.layer_costs = lambda given, *args, by: (
        seconds if by == "seconds" else measured(given, by=by)
    )
    try:
        pipe = fastpipe.Pipeline(layers, "1f1b", 4, layers.loss_fn, partition="seconds", example=ids[:2])
    finally:
        fastpipe.runtime.model.cuts.layer_costs = measured
    pipe.step(ids, attention_mask=mask, target=labels)
    fastpipe.save_checkpoint(folder, pipe)
    options = {"partition": "flops", "example": ids[:2]}

    def build(**over: Any) -> Any:
        return caught(lambda: fastpipe.Pipeline(layers, "1f1b", 4, layers.loss_fn, **{**options, **over}))

    return {
        "cut": [line for line in pipe.describe().splitlines() if line.startswith("partition")],
        "keys": list(pipe.state_dict()),
        "flops": build(),
        "one differs": build(**({"partition": "memory"} if rank else {})),
        "one has no example": build(**({} if rank else {"example": None})),
        "one wrong later": build(**({"executor": "none"} if rank else {})),
    }


def test_processes_cut_alike(group_of: GroupOf, tmp_path: Any) -> None:
    zero, one = group_of(2).run(cut_apart, str(tmp_path / "saved"))
    assert zero["cut"] == one["cut"] == ["partition   layers 0 | 1-7; stage 0 has most seconds, 12.5% above the mean"]
    assert zero["flops"][0] == one["flops"][0] == "nothing"
    for answer in (zero, one):
        assert answer["one differs"][0] == "ValueError" and "do not build the same pipeline" in answer["one differs"][1]
    assert zero["one has no example"][0] == "ValueError" and one["one has no example"][0] == "StepError"
    assert one["one wrong later"][0] == "ValueError" and zero["one wrong later"][0] == "StepError"
    keys = decoder("llama").state_dict().keys()
    assert set(zero["keys"]) | set(one["keys"]) == set(keys) and len(one["keys"]) > LAYERS - 2
    plain = decoder("llama", initializer_range=0.5)
    state = {"model": plain.state_dict()}
    torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    plain.load_state_dict(state["model"])
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), decoder("llama").parameters(), strict=True))


@on_ranks(2)
def test_a_mask_that_some_ranks_do_not_give_is_refused(executor: str) -> None:
    """And a step after each of them works; the last process has the mask."""
    rank = dist.get_rank()
    layers = fastpipe.split(decoder("llama"))
    options = {"loss_reduction": layers.num_tokens, "executor": executor}
    pipe = fastpipe.Pipeline(layers, "1f1b", 4, layers.loss_fn, **options)
    ids, mask, labels = padded_batch(8)
    parts = list(mask.split(2))
    missing = r"attention_mask is None on ranks \[0\] but not on ranks \[1\]"
    for own, said in (
        (mask if rank else 1 - mask, r"attention_mask has other values on ranks \[1\] than on rank 0"),
        (mask if rank else None, missing),
        (parts if rank else [*parts[:3], None], missing),
    ):
        with pytest.raises(ValueError, match=said):
            pipe.step(ids, attention_mask=own, target=labels)
        pipe.step(ids, attention_mask=mask, target=labels)
    pipe.step(ids, attention_mask=None, target=labels)


TIED = "model.embed_tokens.weight"


def replicas_of(wrap: str, executor: str) -> list[str]:
    """Two replicas: the averages of two unsplit models' gradients, the tied weight's too; and the norm."""
    over = mesh()
    model = decoder("llama")
    if wrap == "modules":  # each with a Parameter of its own then
        base = model.model
        for module in (base.embed_tokens, *base.layers, base.norm, model.lm_head):
            fully_shard(module, mesh=over["dp"])
    layers = fastpipe.split(model)
    options: dict[str, Any] = {"group": over["pp"], "executor": executor, "loss_reduction": layers.num_tokens}
    schedule, num_stages = ("1f1b", 2) if wrap == "ddp" else ("zbv", 4)
    if wrap in ("argument", "modules"):
        options |= {"data_parallel": over["dp"]} if wrap == "argument" else {}
        pipe = fastpipe.Pipeline(layers, schedule, 4, layers.loss_fn, **options)
    else:
        parts = fastpipe.partition(LAYERS, num_stages)

        def stage(index: int) -> Any:
            return WRAPS[wrap](layers.chain(parts[index]), over["dp"])

        tied = [(f"0.{TIED}", f"{num_stages - 1}.lm_head.weight")]
        pipe = fastpipe.Pipeline(stage, schedule, 4, layers.loss_fn, tied=tied, **options)
    own = over.get_local_rank("dp")
    unsplit = [decoder("llama") for _ in range(2)]
    for replica, plain in enumerate(unsplit):
        ids, mask, labels = padded_batch(9 + replica)
        kwargs = {"attention_mask": mask}
        reduction = {"loss_reduction": layers.num_tokens}
        expected = reference_step(plain, (ids, labels), pipe.schedule, layers.loss_fn, kwargs=kwargs, **reduction)
        if replica == own:
            assert same_bits(pipe.step(ids, attention_mask=mask, target=labels).loss, expected.loss)
    means = {n: (a.grad + b.grad) / 2 for (n, a), (_, b) in zip(*(m.named_parameters() for m in unsplit), strict=True)}
    names = []
    for name, parameter in pipe.named_parameters():
        names.append(name)
        torch.testing.assert_close(whole_grad(parameter), means[name], rtol=1e-5, atol=1e-7)
    norm = torch.nn.utils.get_total_norm(list(means.values()))
    torch.testing.assert_close(pipe.clip_grad_norm_(1.0), norm, rtol=1e-5, atol=0)
    return names


@executors_in_turn("wrap", ["argument", "ddp", "fsdp", "modules"])
def test_replicas_of_a_model_with_tied_weights(wrap: str, executor: str, group_of: GroupOf) -> None:
    zero, one, *others = group_of(4).run(replicas_of, wrap, executor)
    # each rank of a V has the first and the last stage or neither
    assert others == [zero, one] and TIED in zero and (TIED in one) == (wrap == "ddp")
    assert {*zero, *one} == {name for name, _ in decoder("llama").named_parameters()}


def load_apart(folder: str) -> list[torch.Tensor]:
    """Outputs after a state, and a checkpoint, with another buffer, which the blocks of both processes get."""
    ids, _ = batch()

    def build(factor: float) -> tuple[Dictionary, fastpipe.Pipeline]:
        model = Dictionary()
        model.turns.mul_(factor)
        return model, fastpipe.Pipeline(fastpipe.split(model, ids[:2]), "1f1b", 4)

    other, saved = build(-2.0)
    fastpipe.save_checkpoint(folder, saved)
    loaded, restored = build(1.0)[1], build(1.0)[1]
    loaded.load_state_dict(other.state_dict())
    fastpipe.load_checkpoint(folder, restored)
    return [pipe.eval_step(ids, gather_outputs=True).outputs for pipe in (saved, loaded, restored)]


def test_a_buffer_that_blocks_get_is_loaded_on_every_process(group_of: GroupOf, tmp_path: Any) -> None:
    for answer in group_of(2).run(load_apart, str(tmp_path / "saved")):
        assert all(same_bits(answer[0], output) for output in answer)
