"""Everything that runs a Program. The only part of fastpipe, beside `fastpipe.testing`, that imports torch.

Each package below has its contract in its docstring. Imports go down only: `Pipeline` and what is built on it,
``tune``, ``step``, ``executor``, ``stage``, ``transport``, ``split``, ``model``, ``data_parallel``, ``coordination``,
``common``; and `native`, which loads the extension and imports none of them.
"""
