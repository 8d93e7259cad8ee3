"""fused_weight_grad: W adds to `.grad` by the products themselves; near the plain sum, and no hook is passed over."""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastpipe import Pipeline
from tests.conftest import skip_without_native
from tests.runtime.checks import same_bits

ROWS, WIDTH, COUNT = 24, 12, 6


@pytest.fixture(params=["native", "python"])
def executor(request: pytest.FixtureRequest) -> str:
    """Each executor, with the extension; its name."""
    skip_without_native()
    name: str = request.param
    return name


def layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(4)]


def trained(
    executor: str, fused: bool, prepare: Any = None, dtype: torch.dtype | None = None, num_ranks: int = 2
) -> Pipeline:
    """Two steps whose gradients add up."""
    made = layers()
    if dtype is not None:
        made = [layer.to(dtype) for layer in made]
    if prepare is not None:
        prepare(made)
    options: dict[str, Any] = {"grad_dtype": torch.float32} if dtype is not None else {}
    pipe = Pipeline(
        made,
        "zb_h1",
        COUNT,
        nn.functional.mse_loss,
        num_ranks=num_ranks,
        executor=executor,
        fused_weight_grad=fused,
        **options,
    )
    torch.manual_seed(5)
    for _ in range(2):
        x = torch.randn(ROWS, WIDTH, dtype=dtype)
        pipe.step(x, target=x)
    return pipe


def grads(pipe: Pipeline) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}


def added_in_place(call: Any) -> int:
    """How many products were added to what they are given."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sum(event.count for event in profile.key_averages() if event.key == "aten::addmm_")


def test_the_sums_are_near_and_made_in_place(executor: str) -> None:
    plain, fused = trained(executor, False), trained(executor, True)
    expected = grads(plain)
    for name, grad in grads(fused).items():
        largest = float(expected[name].abs().max())
        torch.testing.assert_close(grad, expected[name], rtol=0, atol=2e-6 * largest)
    assert "added to .grad in place" in fused.describe() and "in place" not in plain.describe()


def test_products_are_added_where_the_gradient_lies(executor: str) -> None:
    plain, fused = (trained(executor, which, num_ranks=1) for which in (False, True))  # profilers see one thread
    x = torch.randn(ROWS, WIDTH)
    before = {name: grad.data_ptr() for name, grad in grads(fused).items()}
    # eight weights, six microbatches, and a gradient to add to from the first one on
    assert added_in_place(lambda: fused.step(x, target=x)) == 8 * COUNT
    assert added_in_place(lambda: plain.step(x, target=x)) == 0
    assert before == {name: grad.data_ptr() for name, grad in grads(fused).items()}


def test_every_executor_makes_the_same_bits(executor: str) -> None:
    found, reference = grads(trained(executor, True)), grads(trained("python", True))
    assert all(same_bits(found[name], reference[name]) for name in reference) and len(found) == len(reference)


def test_a_hook_sees_every_contribution(executor: str) -> None:
    def seen_by(fused: bool) -> tuple[int, dict[str, torch.Tensor]]:
        seen: list[torch.Tensor] = []

        def prepare(made: list[nn.Module]) -> None:
            made[0].get_parameter("0.weight").register_hook(seen.append)

        pipe = trained(executor, fused, prepare)
        return len(seen), grads(pipe)

    plain, fused = seen_by(False), seen_by(True)
    assert plain[0] == fused[0] == 2 * COUNT
    assert same_bits(plain[1]["0.0.weight"], fused[1]["0.0.weight"])


def test_post_accumulate_hooks_run_each_time(executor: str) -> None:
    called: list[str] = []

    def prepare(made: list[nn.Module]) -> None:
        weight = made[1].get_parameter("2.weight")
        weight.register_post_accumulate_grad_hook(lambda p: called.append(str(tuple(p.grad.shape))))

    trained(executor, True, prepare)
    assert called == [str((WIDTH, 2 * WIDTH))] * (2 * COUNT)


def test_no_product_on_a_cpu_adds_16_bits_to_32(executor: str) -> None:
    """Then the plain sum is taken, and says so by its bits."""
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("grad_dtype needs torch 2.11: a sum in another dtype than the operands' is left unchecked")
    plain, fused = (grads(trained(executor, which, dtype=torch.bfloat16)) for which in (False, True))
    assert all(same_bits(plain[name], fused[name]) for name in plain)


def test_a_weight_that_is_made_of_another_is_left_to_the_engine(executor: str) -> None:
    def prepare(made: list[nn.Module]) -> None:
        nn.utils.parametrizations.weight_norm(made[2].get_submodule("0"))

    plain, fused = (grads(trained(executor, which, prepare)) for which in (False, True))
    normed = [name for name in plain if "parametrizations" in name]
    assert len(normed) == 2 and all(same_bits(plain[name], fused[name]) for name in normed)


def test_it_may_change_to_a_gradient_that_is_given(executor: str) -> None:
    """What `.grad` is when W comes is added to: also a view, as of one flat buffer."""
    pipe, other = trained(executor, True), trained(executor, False)
    flat = {name: torch.zeros(2, *p.shape) for name, p in pipe.named_parameters()}
    for name, parameter in pipe.named_parameters():
        parameter.grad = flat[name][1]
    for parameter in other.parameters():
        parameter.grad = None
    x = torch.randn(ROWS, WIDTH)
    for one in (pipe, other):
        one.step(copy.deepcopy(x), target=x)
    for name, grad in grads(other).items():
        torch.testing.assert_close(flat[name][1], grad, rtol=0, atol=2e-6 * float(grad.abs().max()))
        assert not flat[name][0].any()


@pytest.mark.usefixtures("without_extension")
def test_without_the_extension_the_engine_adds() -> None:
    plain, fused = trained("python", False), trained("python", True)
    assert all(same_bits(grad, grads(fused)[name]) for name, grad in grads(plain).items())
    assert "in place" not in fused.describe()


def test_the_engine_adds_to_the_same_weight_at_another_time(extension: Any) -> None:
    """A thread may run the backward of another stage, whose loss uses the weight."""
    weight, x = nn.Parameter(torch.ones(3, 3)), torch.ones(2, 3, requires_grad=True)
    weight.grad = torch.zeros(3, 3)
    weights = extension.WeightGradients(True)
    with weights.armed(backward=False):
        y = nn.functional.linear(x, weight)
    weights.split([y], [x])
    with weights.armed(backward=True):
        y.sum().backward()
    adds, may_end = threading.Event(), threading.Event()

    class Slow(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.add_.Tensor:
                adds.set()
                may_end.wait()
            return func(*args, **(kwargs or {}))

    def backward() -> None:
        penalty = weight.sum()
        with Slow():
            penalty.backward()

    threads = [threading.Thread(target=run) for run in (backward, weights.compute)]
    threads[0].start()
    adds.wait()
    threads[1].start()
    threads[1].join(0.1)  # where nothing holds it up it ends
    has_added = bool(weight.grad.any())
    may_end.set()
    for thread in threads:
        thread.join()
    assert not has_added
    assert torch.equal(weight.grad, torch.full((3, 3), 3.0))


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_what_is_no_flag_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"fused_weight_grad = .*: give True or False"):
        Pipeline(layers(), "zb_h1", 2, nn.functional.mse_loss, num_ranks=2, fused_weight_grad=value)
