"""The modules within a module, as every step looks at them."""

from __future__ import annotations

from torch import nn


def walked(module: nn.Module) -> list[nn.Module]:
    """It and all that is in it, each once.

    ``modules()`` and ``parameters()``, which make names on their way, take several times as long.
    """
    pending, seen = [module], {module}
    for found in pending:
        for child in found._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                pending.append(child)
    return pending
