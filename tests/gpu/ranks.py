"""One rank of pipelines on a GPU that it shares: ``python -m tests.gpu.ranks SCHEDULE:DTYPE ...``.

The cases run one after the other in the same processes, since to start these takes longer than most cases. Of each a
line is printed: the case, a tab, and ``ok`` or ``failed`` with the details.

NCCL refuses two ranks on one device of a host. With another NCCL_HOSTID each they pass for several hosts and talk over
sockets: that is for correctness, and says nothing about speed.
"""

import copy
import ctypes
import gc
import os
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fastpipe
from fastpipe.runtime.transport.process_group import ProcessGroups
from fastpipe.testing import reference_step
from tests.gpu.models import batch, layers, loss_fn
from tests.runtime.checks import same_bits

TIMEOUT = 40.0
NOTE = Path(os.environ.get("NOTE", ""))
"""When that was."""
RECORDED = "RECORDED" in os.environ


def main() -> None:
    torch.cuda.set_device(0)
    for case in sys.argv[1:]:
        try:
            said = f"ok {run(*case.split(':'))}"
        except Exception as error:  # the others have failed with it, or time out; all go on with the next case
            traceback.print_exc()
            said = f"failed {type(error).__name__}: {' '.join(str(error).split())}"
        print(case, said, sep="\t", flush=True)
        gc.collect()  # of a pipeline the groups, too
        if "VICTIM" not in os.environ:
            meet(case)


def meet(case: str) -> None:
    """Wait for the other ranks: the one where a case fails is through with it before they are."""
    store = dist.distributed_c10d._get_default_store()
    if store.add(f"through with {case}", 1) == dist.get_world_size():
        store.set(f"all are through with {case}", "")
    store.wait([f"all are through with {case}"], timedelta(seconds=2 * TIMEOUT))


def run(schedule: str, name: str) -> str:
    """Steps that must have the bits of the unsplit model's; gives what the transport, and recordings, say of them."""
    dtype = getattr(torch, name)
    model = layers(4 * int(os.environ["WORLD_SIZE"]), dtype)
    unsplit = nn.Sequential(*copy.deepcopy(model))
    pipe = fastpipe.Pipeline(model, schedule, 8, loss_fn, device="cuda", timeout=TIMEOUT, cuda_graph=RECORDED)
    x, target = batch(32, dtype)
    if os.environ.get("WHEN") == "connecting":
        return lose(pipe, x, target)
    reference = reference_step(unsplit, (x, target), pipe.schedule, loss_fn)
    expected = {key: parameter.grad for key, parameter in unsplit.named_parameters()}
    wrong = []
    for step in range(8 if RECORDED else 3):
        for parameter in pipe.parameters():
            parameter.grad = None
        result = pipe.step(x, target=target)
        found = {key: (parameter.grad, expected[key]) for key, parameter in pipe.named_parameters()}
        found["loss"] = (result.loss, reference.loss)
        wrong += [f"{key} in step {step}" for key, pair in found.items() if not same_bits(*(t.cpu() for t in pair))]
    assert not wrong, f"other bits, or no gradient, of {wrong}"
    if "VICTIM" in os.environ:
        return lose(pipe, x, target)
    return " ".join([pipe.transport.describe(), *(pipe.describe().split() if RECORDED else [])])


def lose(pipe: fastpipe.Pipeline, x: torch.Tensor, target: torch.Tensor) -> str:
    """One more step, which the rank VICTIM does not live to end: WHEN its first stage begins, when the others wait for
    its first message, or when only its device has still to do what they wait for."""
    is_victim, late = os.environ["RANK"] == os.environ["VICTIM"], os.environ["WHEN"] == "late"
    if is_victim and os.environ["WHEN"] == "connecting":
        ProcessGroups._connect = die  # type: ignore[method-assign]
    elif is_victim:
        module = next(iter(pipe.stage_modules.values()))
        module.register_forward_pre_hook(hold_up if late else die)
    try:
        result = pipe.step(x, target=target)
        if late and is_victim:
            die()
        float(result.loss)
    except fastpipe.StepError as error:
        torch.cuda.synchronize()
        seconds = time.monotonic() - float(NOTE.read_text())
        return f"lost {error.rank} {seconds < 60 or seconds}"
    return "lost nobody"


def die(*_: object) -> None:
    """Write down when; the others have come to wait by then."""
    time.sleep(0.3)
    NOTE.write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def hold_up(*_: object) -> None:
    """The current stream comes to nothing behind this any more; the host goes on."""
    runtime = ctypes.CDLL(None)  # torch makes its CUDA runtime known to the whole process
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    code = runtime.cudaLaunchHostFunc(stream, NEVER_ENDS, None)
    assert code == 0, f"cudaLaunchHostFunc gives {code}"


NEVER_ENDS = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: threading.Event().wait())


if __name__ == "__main__":
    main()
