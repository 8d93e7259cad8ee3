"""Runs a command over CUDA on the host: ``python -m tests.host_cuda COMMAND...``."""

import os
import sys
from importlib.metadata import version

from tests.host_cuda.build import build, variables
from tests.native.build import kept_folder


def main() -> None:
    """Build what is not there, and become the command."""
    if not sys.argv[1:]:
        raise SystemExit("which command? As in: python -m tests.host_cuda python -m pytest tests/gpu")
    folder = kept_folder(version("torch"), of=["tests/host_cuda"])
    build(folder)
    os.execvpe(sys.argv[1], sys.argv[1:], os.environ | variables(folder))


if __name__ == "__main__":
    main()
