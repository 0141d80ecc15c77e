"""Tensors of a model and its optimizer by the names that the bare model gives them.

Canonical means: no prefix of a wrapper (`module.` of data parallelism, `_orig_mod.` of the
compiler), and one name for a tied tensor, its first. Optimizer state and options go by the name of
the parameter that they belong to, so that neither order nor grouping matters.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from solution.parallel.fsdp.module import FSDPModule

_PREFIXES = re.compile(r"(_orig_mod|_checkpoint_wrapped_module)\.")  # of wrappers inside the model


def unwrapped(model: nn.Module) -> nn.Module:
    """The bare model inside data-parallel wrappers (known by their `no_sync`) and the compiler's.

    A model of the user's that has a child called `module` is no wrapper, sharded or not.
    """
    while True:
        if isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]  # checked above
        elif (
            hasattr(model, "no_sync")
            and not isinstance(model, FSDPModule)
            and isinstance(getattr(model, "module", None), nn.Module)
        ):
            model = model.module  # type: ignore[assignment]  # checked above
        else:
            return model


@dataclass(frozen=True)
class ModelTensors:
    """The content of the bare model's `state_dict`."""

    module: nn.Module
    tensors: dict[str, torch.Tensor]  # live parameters and buffers, each once, by canonical name
    buffers: frozenset[str]  # names of those that are buffers
    objects: dict[str, Any]  # what modules save beside tensors (`get_extra_state`)
    actual: dict[str, str]  # every key of the state dict, aliases too, to the canonical name

    @classmethod
    def of(cls, model: nn.Module) -> ModelTensors:
        """Build the map of a model, looking through wrappers; nothing is copied."""
        module = unwrapped(model)
        tensors: dict[str, torch.Tensor] = {}
        objects: dict[str, Any] = {}
        actual: dict[str, str] = {}
        first: dict[int, str] = {}
        for key, value in module.state_dict(keep_vars=True).items():
            if not isinstance(value, torch.Tensor):
                objects[key] = value
                continue
            name = actual[key] = first.setdefault(id(value), _PREFIXES.sub("", key))
            tensors.setdefault(name, value)
        buffers = frozenset(n for n, t in tensors.items() if not isinstance(t, nn.Parameter))
        return cls(module, tensors, buffers, objects, actual)

    def load(self, tensors: dict[str, torch.Tensor], objects: dict[str, Any]) -> None:
        """Copy values into the live tensors, through the module's own `load_state_dict`."""
        state = {key: tensors[name] for key, name in self.actual.items()}
        self.module.load_state_dict(state | objects)


@dataclass(frozen=True)
class OptimizerTensors:
    """The state of an optimizer by parameter name."""

    optimizer: torch.optim.Optimizer
    names: list[list[str]]  # of each parameter, group by group

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, model: ModelTensors) -> OptimizerTensors:
        """Build the map of an optimizer over parameters of that model.

        Raises:
            ValueError: it holds a parameter that the model does not.
        """
        known = {id(tensor): name for name, tensor in model.tensors.items()}
        names = []
        for number, group in enumerate(optimizer.param_groups):
            strange = [tuple(p.shape) for p in group["params"] if id(p) not in known]
            if strange:
                raise ValueError(
                    f"expected every parameter of the optimizer to be one of the model's, got "
                    f"others of shapes {strange[:3]} in parameter group {number}; pass the "
                    "optimizer together with the model that it trains"
                )
            names.append([known[id(p)] for p in group["params"]])
        return cls(optimizer, names)

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter with its name."""
        for names, group in zip(self.names, self.optimizer.param_groups, strict=True):
            yield from zip(names, group["params"], strict=True)

    def capture(self) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
        """The live state tensors by name and key; and what else there is, plain."""
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        others: dict[str, dict[str, Any]] = {}
        kind_of_optimizer = type(self.optimizer).__name__
        if hasattr(self.optimizer, "consolidate_state_dict"):  # PyTorch's ZeroRedundancyOptimizer
            raise ValueError(
                "expected an optimizer with all its state, or solution's sharded_optimizer, got a "
                f"{kind_of_optimizer}, which keeps its state in another optimizer, in parts"
            )
        unknown = self.optimizer.state.keys() - {parameter for _, parameter in self.parameters()}
        if unknown:
            raise ValueError(
                f"expected a {kind_of_optimizer} with state of its parameters alone, got state of "
                f"{[*map(type, unknown)][:3]}, which has no name to be saved under"
            )
        for name, parameter in self.parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(parameter, DTensor):
                    _require_alike(f"{name}.{key}", value, parameter)
                kind = tensors if isinstance(value, torch.Tensor) else others
                kind.setdefault(name, {})[key] = value
        options = {
            name: {k: v for k, v in group.items() if k not in ("params", "param_names")}
            for names, group in zip(self.names, self.optimizer.param_groups, strict=True)
            for name in names
        }
        keys = {name: list(found) for name, found in tensors.items()}
        return tensors, {"keys": keys, "others": others, "options": options}

    def mismatch(self, saved: dict[str, Any]) -> str:
        """Return why a saved state does not fit this optimizer; "" if it does."""
        own, theirs = {name for name, _ in self.parameters()}, set(saved["options"])
        if own != theirs:
            return (
                f"optimizer: expected state for its {len(own)} parameters, got other ones: "
                f"missing {sorted(own - theirs)[:5]}, unexpected {sorted(theirs - own)[:5]}"
            )
        for number, names in enumerate(self.names):
            options = [saved["options"][name] for name in names]
            lacking = sorted(set(self.optimizer.defaults) - set(options[0] if options else ()))
            if options and lacking:
                return (
                    f"optimizer: expected options of {type(self.optimizer).__name__}, got none of "
                    f"{lacking}; it was saved from another kind of optimizer"
                )
            other = [n for n, o in zip(names, options, strict=True) if not same(o, options[0])]
            if other:
                return (
                    f"optimizer: expected equal options for all of parameter group {number}, got "
                    f"others for {other[0]!r} than for {names[0]!r}; group them as they were saved"
                )
        return ""

    def empty(self, saved: dict[str, Any], sizes: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Tensors to read the saved state into: of the parameter's layout where it has its size."""
        found: dict[str, dict[str, Any]] = {}
        owns = getattr(self.optimizer, "owns", lambda parameter: True)  # of a sharded optimizer
        for name, parameter in self.parameters():
            if not owns(parameter):
                continue
            for key in saved["keys"].get(name, ()):
                like = sizes[f"optimizer.state.{name}.{key}"]
                dtype = like.properties.dtype
                if isinstance(parameter, DTensor) and like.size == parameter.size():
                    fresh = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                else:
                    fresh = torch.empty(like.size, dtype=dtype)
                found.setdefault(name, {})[key] = fresh
        return found

    def load(self, tensors: dict[str, dict[str, Any]], saved: dict[str, Any]) -> None:
        """Give the optimizer its state, through its own `load_state_dict`.

        PyTorch's casts state to its parameter's dtype, in lists too. It gets back what it had.
        """
        groups, state, index = [], {}, 0
        for names, group in zip(self.names, self.optimizer.param_groups, strict=True):
            kept = {k: v for k, v in group.items() if k == "param_names"}
            options = saved["options"][names[0]] if names else {**group}
            numbers = range(index, index + len(names))
            groups.append({**options, **kept, "params": list(numbers)})
            for number, name in zip(numbers, names, strict=True):
                entries = {**tensors.get(name, {}), **saved["others"].get(name, {})}
                if entries:
                    state[number] = entries
            index += len(names)
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        for name, parameter in self.parameters():
            for key, value in tensors.get(name, {}).items():
                live = self.optimizer.state[parameter]
                if live[key].dtype != value.dtype:
                    live[key] = value.to(live[key].device)
            entries = self.optimizer.state.get(parameter, {})  # none where another rank owns it
            to_device = operator.methodcaller("to", parameter.device)
            for key, value in saved["others"].get(name, {}).items():
                if key in entries and _tensors_in(value):
                    entries[key] = tree_map_only(torch.Tensor, to_device, value)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _require_alike(name: str, value: Any, parameter: DTensor) -> None:
    """Refuse state of a shard that cannot be told from state that all ranks share.

    Raises:
        ValueError: it holds tensors, and is neither one number nor sharded as the parameter.
    """
    is_sharded = isinstance(value, DTensor) and value.size() == parameter.size()
    is_number = isinstance(value, torch.Tensor) and value.numel() == 1
    if not is_sharded and not is_number and _tensors_in(value):
        raise ValueError(
            f"expected optimizer state of {name!r}, whose parameter is sharded, to be one number "
            f"or a DTensor of the parameter's size {tuple(parameter.size())}, got a "
            f"{type(value).__name__} of sizes {[tuple(t.size()) for t in _tensors_in(value)][:3]}; "
            "other state may differ from rank to rank, and one rank's would be saved for all"
        )


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join what `capture` returns beside tensors, over ranks; the first that has a name counts."""
    whole: dict[str, Any] = {}
    for part in reversed(parts):
        for kind, by_name in part.items():
            whole[kind] = {**whole.get(kind, {}), **by_name}
    return whole


def same(one: Any, other: Any) -> bool:
    """Return whether two plain states are equal, tensors in them by value."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
