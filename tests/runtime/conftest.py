"""What the tests of one process share."""

from collections.abc import Iterator

import pytest

from fastpipe.runtime import native
from fastpipe.runtime.stage import weight_grad
from tests import scripts  # noqa: F401 - has had a store of torch's before any test
from tests.conftest import skip_without_native


def unregister() -> None:
    """Take the pure-Python kernel away again."""
    while weight_grad._libraries:
        weight_grad._libraries.pop()._destroy()


@pytest.fixture(autouse=True)
def the_kernel_is_the_extensions() -> Iterator[None]:
    """A test that runs without the extension puts the pure-Python kernel in its place: those after it would not test
    the extension's."""
    yield
    if native.load() is not None:
        unregister()


KERNELS = ["native", "python with the extension", "python alone"]


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each executor with each kernel; yields the executor's name."""
    if request.param == "python alone":
        monkeypatch.setattr(native, "load", lambda: None)
        yield "python"
        return
    skip_without_native()
    yield request.param.split()[0]
