"""A plain copy of a model: full weights, and neither wrappers nor hooks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .layout import Names, local_of

_WRAPPERS = {
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}
_INTERNAL = set(nn.Module().__dict__)  # what every module has, and is copied by itself
_MAKE_WEIGHTS = ("torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


class CannotReplayError(Exception):
    """Why a step cannot be computed again."""


class Copy:
    """Builds a plain copy of a model: full weights, and neither wrappers nor hooks."""

    def __init__(
        self, names: Names, weights: dict[tuple[int, str], Tensor], buffers: dict[int, Tensor]
    ) -> None:
        self._names, self._weights, self._buffers = names, weights, buffers
        self._memo: dict[Any, Any] = {}
        self._alive: list[Any] = []
        self._twins: list[nn.Module] = []
        self.parameters: dict[str, nn.Parameter] = {}
        self.dtype: torch.dtype | None = None

    def of(self, module: nn.Module) -> nn.Module:
        """Return the copy of a module and all that is in it."""
        copied = self._twin(module)
        with refusing_freed_memory():
            for twin in self._twins:  # when each is known: an attribute may hold a sibling
                self._own_attributes(twin)
        return copied

    def _twin(self, module: nn.Module) -> nn.Module:
        """Return the copy of a module; one that occurs twice is copied once."""
        kind = type(module)
        if any(base.__name__ == "FSDPModule" for base in kind.__bases__[:-1]):
            kind = kind.__bases__[-1]  # fully_shard made a class of both
        inner = _WRAPPERS.get(kind.__name__)
        if inner:
            return self._twin(getattr(module, inner))
        if id(module) in self._memo:
            return self._memo[id(module)]
        if isinstance(module, torch.jit.ScriptModule):
            raise CannotReplayError("a ScriptModule cannot be copied")
        if "SyncBatchNorm" in kind.__name__ or kind.__name__ == "FullyShardedDataParallel":
            raise CannotReplayError(f"{kind.__name__} communicates in its forward")
        _refuse_hooks(module)
        twin = self._memo[id(module)] = kind.__new__(kind)
        self._twins.append(twin)
        state = module.__dict__
        # A tensor that the last forward left behind is missing: a forward that reads it says so.
        left = [n for n, v in state.items() if isinstance(v, Tensor) and v.grad_fn is not None]
        twin.__dict__.update(
            {n: type(v)() if n.endswith("_hooks") else v for n, v in state.items() if n not in left}
        )
        twin._forward_pre_hooks.update(_reparametrisations(module))
        twin.__dict__["_compiled_call_impl"] = None
        twin.__dict__["_modules"] = {n: m and self._twin(m) for n, m in state["_modules"].items()}
        twin.__dict__["_parameters"] = {
            n: self._parameter(module, n, p) for n, p in state["_parameters"].items()
        }
        twin.__dict__["_buffers"] = {
            n: b if b is None else self._buffers.get(id(b), b).clone()
            for n, b in state["_buffers"].items()
        }
        return twin

    def _parameter(self, module: nn.Module, name: str, parameter: Any) -> nn.Parameter | None:
        if parameter is None:
            return None
        if id(parameter) not in self._memo:
            weight = self._weights.get((id(module), name))
            if weight is None:
                full = self._names.of(parameter).name or name
                raise CannotReplayError(f"full weights of {full!r} were not seen")
            shard = self._names.shards.get((id(module), name))
            known = shard[1]() if shard else parameter
            full = name if known is None else self._names.of(known).name or name
            if shard and weight.dtype != local_of(parameter).dtype:
                self.dtype = weight.dtype
            if getattr(parameter, "_backward_hooks", None):
                raise CannotReplayError(f"{full!r} has a hook that may change its gradient")
            twin = nn.Parameter(weight.clone(), requires_grad=parameter.requires_grad)
            self._memo[id(parameter)] = self.parameters[full] = twin
        return self._memo[id(parameter)]

    def _own_attributes(self, twin: nn.Module) -> None:
        """Let attributes that hold modules or parameters hold the copies."""
        for name in twin.__dict__.keys() - _INTERNAL:
            value = twin.__dict__[name]
            if value is None or isinstance(value, bool | int | float | str):
                continue
            # Its own: what a copy that fails has begun, nothing else may be made of.
            memo = {**self._memo, "torch": dict(self._memo.get("torch", {}))}
            try:
                twin.__dict__[name] = copy.deepcopy(value, memo)
            except Exception:  # a process group, a lock, freed weights: the copy shares it
                continue
            self._alive.append(memo.pop(id(memo), None))  # whose ids the memo has
            self._memo = memo


def _reparametrisations(module: nn.Module) -> dict[int, Any]:
    """Return the hooks that make a weight from other parameters, which hold no tensor."""
    hooks = module._forward_pre_hooks.items()
    return {key: hook for key, hook in hooks if type(hook).__module__ in _MAKE_WEIGHTS}


def _refuse_hooks(module: nn.Module) -> None:
    wrapper = next((k for k in type(module).__mro__ if k.__name__ == "FSDPModule"), None)
    package = wrapper.__module__.rpartition(".")[0] if wrapper is not None else ""
    for kind in _HOOKS:
        for hook in getattr(module, kind).values():
            while isinstance(hook, functools.partial):
                hook = hook.func
            place = getattr(hook, "__module__", None) or ""
            if type(hook).__module__ in _MAKE_WEIGHTS:
                continue
            if not place.startswith(("torch.distributed.", package or "torch.distributed.")):
                raise CannotReplayError(
                    f"a {type(module).__name__} has a hook of {place or 'its own'}"
                )


class Refusing(TorchDispatchMode):
    """Refuses operations for a reason, if `is_refused(operation, arguments)`."""

    def __init__(self, reason: str, is_refused: Callable[[Any, Any], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it bare
        self._reason, self._is_refused = reason, is_refused

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._is_refused(func, (args, kwargs)):
            raise CannotReplayError(self._reason)
        return func(*args, **(kwargs or {}))


def refusing_freed_memory() -> Refusing:
    """Refuse to read weights that a wrapper has freed: PyTorch's kernels do not look."""
    return Refusing(
        "it reads weights whose memory is freed",
        lambda _, given: any(map(_is_freed, torch.utils._pytree.tree_leaves(given))),
    )


def refusing_collectives() -> Refusing:
    """Refuse a forward that communicates: it would do so in the script's groups."""
    return Refusing(
        "the model communicates in its forward",
        lambda operation, _: operation.namespace in ("c10d", "_c10d_functional"),
    )


def _is_freed(value: object) -> bool:
    local: Any = getattr(value, "_local_tensor", value)
    try:
        is_tensor = isinstance(local, Tensor) and local.numel() > 0
        return bool(is_tensor and not local.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError):  # sparse, or of a class that has no storage
        return False
