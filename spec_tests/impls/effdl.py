"""Efficient DL, week 5: one file `fsdp.py`, brought to the contract.

The file has `fully_shard(module, *, module_fqn, comm_ctx, mesh, reshard_after_forward, mp_policy)`,
an `FSDPCommContext(device_type)` that all units of a model share, and `FSDPModule` with the
attributes `reshard_after_backward` and `reduce_grads`. What the adapter adds:

    comm_ctx       one per model, as the exercise's script makes it: found by the outermost module
                   that holds a unit; one that was put around units later takes them into its own
    the root       the exercise shards leaves and blocks; units below a module are out of its sight
                   while it is sharded, so that only what they left is sharded with it
    setters        set_requires_gradient_sync and set_reshard_after_backward set the attributes
    by hand        `unshard` and `reshard` are steps of the exercise's hooks: the first launches a
                   gather, which `wait_for_unshard` finishes. No script calls them: not offered
    inputs         are cast to param_dtype, as the exercise's model does for itself
    mesh           the whole world, where none is given

The exercise shards dim 0 where it divides, and knows neither weights that modules share nor
`output_dtype` nor other placements: NotImplementedError, so "not offered". It assumes CUDA, which
is stood in for on a CPU (`rig.ranks.pretended_cuda`).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from spec_tests.impls.checkout import import_file, offered


def offer(file: Path, device: str) -> SimpleNamespace:
    """The contract's functions that this file brings.

    Raises:
        whatever the file raises when it is imported.
        ValueError: it lacks a class of the exercise.
    """
    module = import_file(file.parent, file.stem)
    missing = [
        name
        for name in ("FSDPCommContext", "FSDPModule", "MixedPrecisionPolicy")
        if not isinstance(getattr(module, name, None), type)
    ]
    if missing:
        raise ValueError(f"{file.name}: expected the exercise's classes, {missing} are missing")
    if offered(module, "fully_shard") is None:
        return SimpleNamespace(fully_shard=_left_open)
    return SimpleNamespace(
        fully_shard=_Sharder(module, device), MixedPrecisionPolicy=_policy_of(module)
    )


def _left_open(module: nn.Module) -> nn.Module:
    raise NotImplementedError


_PYTORCHS = (
    "set_is_last_backward",
    "set_requires_all_reduce",
    "set_gradient_divide_factor",
    "set_unshard_in_backward",
)


class _Policy:
    """The exercise's policy, and the one decision that it leaves to the model."""

    def __init__(self, theirs: Any, cast_forward_inputs: bool) -> None:
        self.theirs = theirs
        self.input_dtype = theirs.param_dtype if cast_forward_inputs else None


def _policy_of(module: ModuleType) -> Any:
    def policy(
        *,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        output_dtype: torch.dtype | None = None,
        cast_forward_inputs: bool = True,
    ) -> _Policy:
        if output_dtype is not None:
            raise NotImplementedError("the exercise's MixedPrecisionPolicy has no output_dtype")
        theirs = module.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        return _Policy(theirs, cast_forward_inputs)

    return policy


class _Sharder:
    """`fully_shard` as the contract calls it."""

    def __init__(self, file: ModuleType, device: str) -> None:
        self.file = file
        self.device = device

    def __call__(
        self,
        module: nn.Module,
        *,
        mesh: DeviceMesh | None = None,
        reshard_after_forward: bool | int | None = None,
        mp_policy: Any = None,
        **others: Any,
    ) -> nn.Module:
        if others or not isinstance(module, nn.Module):
            asked = ", ".join(others) or f"a {type(module).__name__} of modules"
            raise NotImplementedError(f"{asked}: the exercise takes one module, and no such option")
        if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
            raise NotImplementedError("reshard_after_forward: the exercise takes True or False")
        if isinstance(module, self.file.FSDPModule):
            raise ValueError(
                f"{type(module).__name__} is a unit already: fully_shard was called on it twice"
            )
        mesh = mesh or init_device_mesh(self.device, (dist.get_world_size(),))
        if mesh.ndim != 1:
            raise NotImplementedError(f"mesh: the exercise takes one axis, got {mesh}")
        _require_untied(_outermost(module))
        policy = mp_policy or _Policy(self.file.MixedPrecisionPolicy(), False)
        context = self._context_of(module, mesh.device_type)
        units = [part for part in module.modules() if isinstance(part, self.file.FSDPModule)]
        for unit in units:
            unit.comm_ctx = context  # type: ignore[assignment]  # an attribute of the exercise's
        with _out_of_sight(module, units):
            own = dict(module.named_parameters())
            _require_divisible(own, mesh)
            if own:
                if policy.input_dtype is not None:
                    cast = _casting_to(policy.input_dtype)
                    module.register_forward_pre_hook(cast, with_kwargs=True)
                self.file.fully_shard(
                    module,
                    module_fqn=type(module).__name__,
                    comm_ctx=context,
                    mesh=mesh,
                    reshard_after_forward=reshard_after_forward is not False,
                    mp_policy=policy.theirs,
                )
        self._add_setters(module)
        _keep_for_hooks(module)
        return module

    def _context_of(self, module: nn.Module, device: str) -> Any:
        """Return what all units of a model share, also what they leave in it as they are made."""
        model = _outermost(module)
        if _CONTEXT not in model.__dict__:
            model.__dict__[_CONTEXT] = self.file.FSDPCommContext(device)
        return model.__dict__[_CONTEXT]

    def _add_setters(self, module: nn.Module) -> None:
        """PyTorch's names for the exercise's attributes, on this unit and those below."""
        kind = self.file.FSDPModule

        def set_requires_gradient_sync(
            self: nn.Module, flag: bool, *, recurse: bool = True
        ) -> None:
            _set(_units(self, kind, recurse), "reduce_grads", flag)

        def set_reshard_after_backward(
            self: nn.Module, flag: bool, *, recurse: bool = True
        ) -> None:
            _set(_units(self, kind, recurse), "reshard_after_backward", flag)

        def set_prefetch(self: nn.Module, modules: list[nn.Module]) -> None:
            raise NotImplementedError("the exercise prefetches by itself, and takes no list")

        def set_else(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            raise NotImplementedError("the exercise has no such setter")

        setters: dict[str, Any] = {
            "set_requires_gradient_sync": set_requires_gradient_sync,
            "set_reshard_after_backward": set_reshard_after_backward,
            "set_modules_to_forward_prefetch": set_prefetch,
            "set_modules_to_backward_prefetch": set_prefetch,
            **dict.fromkeys(_PYTORCHS, set_else),
        }
        for name, function in setters.items():
            if not hasattr(module, name):
                object.__setattr__(module, name, MethodType(function, module))


def _keep_for_hooks(module: nn.Module) -> None:
    for name in ("unshard", "reshard"):
        if hasattr(module, name):
            object.__setattr__(module, name, _not_by_hand(getattr(module, name)))


def _not_by_hand(step: Any) -> Any:
    def method(*args: Any, **options: Any) -> Any:
        if str(sys._getframe(1).f_globals.get("__name__")).startswith("spec_tests."):
            raise NotImplementedError(
                f"{step.__name__} by hand: the exercise's hooks alone call it"
            )
        return step(*args, **options)

    return method


_CONTEXT = "_comm_ctx_of_all_units"


def _outermost(module: nn.Module) -> nn.Module:
    """Return the module that holds this one and that none holds: the model of a script."""
    holders: dict[int, nn.Module] = {}
    for each in gc.get_objects():
        if issubclass(type(each), nn.Module):
            children = each.__dict__.get("_modules") or {}  # none before its __init__ has run
            holders |= {id(child): each for child in children.values()}
    while id(module) in holders:
        module = holders[id(module)]
    return module


def _units(module: nn.Module, kind: type, recurse: bool) -> list[Any]:
    parts = module.modules() if recurse else [module]
    return [part for part in parts if isinstance(part, kind)]


def _set(units: list[Any], name: str, flag: bool) -> None:
    """Set an attribute of the exercise, which those of before 2026 had not."""
    if not all(hasattr(unit, name) for unit in units):
        raise NotImplementedError(f"{name}: the units of this file have no such attribute")
    for unit in units:
        setattr(unit, name, flag)


@contextmanager
def _out_of_sight(module: nn.Module, units: list[nn.Module]) -> Iterator[None]:
    """Take the units below `module` out of their parents, and put them back in the same order."""
    hidden = {id(unit) for unit in units} - {id(module)}
    parents = [(part, dict(part._modules)) for part in module.modules()]
    for part, children in parents:
        part._modules = {n: c for n, c in children.items() if id(c) not in hidden}
    try:
        yield
    finally:
        for part, children in parents:
            part._modules = children


def _require_divisible(parameters: dict[str, nn.Parameter], mesh: DeviceMesh) -> None:
    for name, parameter in parameters.items():
        if isinstance(parameter, DTensor) or not parameter.ndim or parameter.shape[0] % mesh.size():
            raise NotImplementedError(
                f"parameter {name!r} of shape {tuple(parameter.shape)}: the exercise shards dim 0, "
                f"where {mesh.size()} ranks divide it"
            )


def _require_untied(module: nn.Module) -> None:
    holders: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        other = holders.setdefault(id(parameter), name)
        if other != name:
            raise NotImplementedError(
                f"{name!r} is {other!r}: the exercise knows no shared weights"
            )


def _casting_to(dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        is_floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_floating else value

    def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return tree_map(cast, (inputs, named))

    return hook
