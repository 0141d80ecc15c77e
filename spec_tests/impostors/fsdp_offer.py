"""The contract's functions for a class of units: fully_shard in place, fsdp as a wrapper."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.plain_fsdp import Unit
from spec_tests.impostors.plain_fsdp_storage import (
    Done,
    MixedPrecisionPolicy,
    modules_without_units,
)


class FSDPModule:
    """What a sharded module can do besides."""

    _plain_fsdp: Unit

    def _units(self, recurse: bool = True) -> list[Unit]:
        modules = self.modules() if recurse else [self]  # type: ignore[attr-defined]  # a Module
        return [m._plain_fsdp for m in modules if hasattr(m, "_plain_fsdp")]

    def unshard(self, async_op: bool = False) -> Any:
        self._plain_fsdp.unshard()
        self._plain_fsdp.register(sharded=False)
        return Done() if async_op else None

    def reshard(self) -> None:
        self._plain_fsdp.reshard()

    def set_requires_gradient_sync(self, flag: bool, *, recurse: bool = True) -> None:
        for unit in self._units(recurse):
            unit.is_synchronised = flag

    def set_reshard_after_backward(self, flag: bool, *, recurse: bool = True) -> None:
        for unit in self._units(recurse):
            unit.reshard_after_backward = flag

    def set_requires_all_reduce(self, flag: bool, *, recurse: bool = True) -> None:
        for unit in self._units(recurse):
            unit.all_reduces = flag

    def set_is_last_backward(self, flag: bool) -> None:
        for unit in self._units():
            unit.is_last_backward = flag

    def set_gradient_divide_factor(self, factor: float) -> None:
        self._plain_fsdp.factor = factor

    def reset_iter_state(self) -> None:
        """The base recovers by itself."""

    def set_unshard_in_backward(self, flag: bool) -> None:
        """The base gathers whatever a backward may need."""

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        self._plain_fsdp.forward_prefetch = [m._plain_fsdp for m in modules]

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        self._plain_fsdp.backward_prefetch = [m._plain_fsdp for m in modules]


def require_shardable(module: nn.Module, mesh: Any, raf: Any, policy: Any) -> None:
    """Raise ValueError where the base cannot shard, by name."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise ValueError(f"{type(module).__name__} has no forward: shard what it holds")
    if hasattr(module, "_plain_fsdp"):
        raise ValueError(f"{type(module).__name__} is sharded already; call fully_shard once")
    if not isinstance(mesh, DeviceMesh) or mesh.ndim > 2:
        raise ValueError(f"mesh: expected a DeviceMesh of one or two dimensions, got {mesh!r}")
    _require_options(raf, policy)
    for part in modules_without_units(module):
        for name, parameter in part.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                raise ValueError(f"{name} is distributed already: shard plain parameters")
    _require_plain_parameters(module)


def _require_options(raf: Any, policy: Any) -> None:
    if not isinstance(raf, bool | int | None):
        raise ValueError(f"reshard_after_forward: expected a bool or an int, got {raf!r}")
    if policy.param_dtype is not None and not policy.param_dtype.is_floating_point:
        raise ValueError(f"param_dtype: expected a floating-point dtype, got {policy.param_dtype}")


def _require_plain_parameters(module: nn.Module) -> None:
    if len({parameter.is_meta for parameter in module.parameters()}) > 1:
        raise ValueError("some weights have values and some are on the meta device")
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            raise ValueError(f"{name} is a scalar: give it a dimension, as in torch.ones(1)")
        if not parameter.is_floating_point():
            raise ValueError(f"{name} has dtype {parameter.dtype}: make it a buffer")
        if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
            raise ValueError(f"{name} is not contiguous: call contiguous() first")


class WholeModel(nn.Module):
    """The CS336 shape: a wrapper with `.module`, which averages gradients of what is replicated."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.units = [m._plain_fsdp for m in module.modules() if hasattr(m, "_plain_fsdp")]
        for parameter in module.parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.register_post_accumulate_grad_hook(_average)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _average(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


def _register(module: nn.Module, method_name: str) -> None:
    method = getattr(module, method_name)
    own: Unit = module._plain_fsdp  # type: ignore[assignment]  # a mark of ours

    def like_forward(*args: Any, **kwargs: Any) -> Any:
        if own.num_running or not own.registers:
            return method(*args, **kwargs)
        args, kwargs = own.pre_forward(module, args, kwargs)
        return own.post_forward(module, args, method(*args, **kwargs))

    setattr(module, method_name, like_forward)


@torch.no_grad()
def _full_parameters(model: Any) -> dict[str, torch.Tensor]:
    model = getattr(model, "module", model)
    return {
        name: p.full_tensor() if isinstance(p, DTensor) else p.detach().clone()
        for name, p in model.named_parameters()
    }


def _layers(module: nn.Module, unit: type[Unit]) -> list[Any]:
    inside = {
        part
        for attention in module.modules()
        if isinstance(attention, nn.MultiheadAttention) and unit.leaves_attention
        for part in attention.modules()
    }
    layers = [part for part in module.modules() if isinstance(part, unit.layers)]
    if not unit.shards_itself:
        inside.add(module)
    return [layer for layer in layers if layer not in inside]


def _finish(model: Any) -> None:
    for unit in model.units:
        unit.finish()


def offer(unit: type[Unit]) -> dict[str, Any]:
    """The contract's functions."""

    def fully_shard(
        module,
        *,
        mesh=None,
        reshard_after_forward=None,
        mp_policy=None,
        ignored_params=(),
        **options,
    ):
        if isinstance(module, list):
            for part in module:
                fully_shard(part, mesh=mesh, reshard_after_forward=reshard_after_forward)
            return module
        if mesh is None:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = mp_policy or MixedPrecisionPolicy()
        if unit.refuses:
            require_shardable(module, mesh, reshard_after_forward, policy)
        module._plain_fsdp = unit(module, mesh, reshard_after_forward, policy, ignored_params)
        kind = type(module)
        module.__class__ = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})
        return module

    def fsdp(module, *, compute_dtype=None):
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype)
        uses = Counter(
            id(p) for m in module.modules() for p in m._parameters.values() if p is not None
        )
        for layer in _layers(module, unit):
            if uses[id(layer.weight)] == 1:
                fully_shard(layer, mp_policy=policy)
        if not hasattr(module, "_plain_fsdp"):
            plain = [p for p in module.parameters() if not isinstance(p, DTensor)]
            fully_shard(module, ignored_params=plain if unit.replicates_rest else ())
        return WholeModel(module)

    return {
        "finish_gradient_synchronization": _finish,
        "fully_shard": fully_shard,
        "register_fsdp_forward_method": _register,
        "fsdp": fsdp,
        "full_parameters": _full_parameters,
        "MixedPrecisionPolicy": MixedPrecisionPolicy,
    }


def card(
    unit: type[Unit], words: str, does: str, seen: str, unseen: str, *rejected_by: str, **how: Any
) -> Impostor:
    """The card of a near-miss of the chapter."""
    return Impostor(
        f"fsdp.{words}", does, seen, unseen, rejected_by, functions=lambda: offer(unit), **how
    )
