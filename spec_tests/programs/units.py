"""The units of a model: which modules are sharded before the whole, and what they hold."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn


def units_of(module: nn.Module, granularity: str = "children") -> list[str]:
    """Return the names of the modules to shard before the whole, innermost first.

    Args:
        granularity: "children" (the outermost modules that can be called), "layers" (those without
            children), "nested" (both), "root" (none), "listed" (the children, see `lists_of`).
    """
    names = [name for name, part in module.named_modules() if name and _can_be_unit(module, part)]
    if granularity == "root":
        return []
    if granularity == "layers":
        names = [n for n in names if not any(True for _ in module.get_submodule(n).children())]
    if granularity in ("children", "listed"):
        names = [n for n in names if not any(n.startswith(f"{other}.") for other in names)]
    return names[::-1]


def lists_of(module: nn.Module, granularity: str) -> list[list[nn.Module]]:
    """Return the modules of each unit: one, or two where units are "listed"."""
    parts = [module.get_submodule(name) for name in units_of(module, granularity)]
    width = 2 if granularity == "listed" else 1
    return [parts[n : n + width] for n in range(0, len(parts), width)]


def parameters_of_units(module: nn.Module, granularity: str) -> list[str]:
    """Return the names of the parameters of units below the outermost one."""
    units = units_of(module, granularity)
    return [n for n, _ in module.named_parameters() if any(n.startswith(f"{u}.") for u in units)]


def _can_be_unit(module: nn.Module, part: nn.Module) -> bool:
    """Has parameters, can be called, and shares none with the rest: a tie stays within one unit."""
    uses = Counter(id(p) for m in module.modules() for p in m._parameters.values())
    own = Counter(id(p) for m in part.modules() for p in m._parameters.values() if p is not None)
    is_container = isinstance(part, nn.ModuleList | nn.ModuleDict)
    return bool(own) and not is_container and all(uses[key] == n for key, n in own.items())


def having(module: nn.Module, method: str) -> list[Any]:
    """Return the modules inside that have `method`; `module` itself, which lacks it, if none has.

    A method that a sharded module may lack is then asked for, and not offered.
    """
    return [part for part in module.modules() if hasattr(part, method)] or [module]
