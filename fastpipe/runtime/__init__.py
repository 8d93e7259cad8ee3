"""Runs programs. Only this package, and `fastpipe.testing` and `fastpipe.integrations` above it, import torch.

The docstring of each package is its contract. Imports go down only: `Pipeline` and what is built on it, ``tune``,
``step``, ``executor``, ``stage``, ``transport``, ``model``, ``data_parallel``, ``coordination``,
``common``. `native` loads the extension and imports none of them.
"""
