"""`fully_shard`, as PyTorch's FSDP2 offers it, on top of the units of `fsdp`.

Problem: a model is sharded unit by unit, in place, and must still look like the user's module.

Idea: `fully_shard(module)` makes a unit of what no unit further down has taken and gives the
module's class the methods of `FSDPModule`. The unit knows what a user may do between passes.

Steps
    1. Refuse what cannot be sharded, by name: scalars, containers, classes with own gathers.
    2. Cast inputs to `param_dtype` and outputs to `output_dtype`; gather in `param_dtype`.
    3. A call of the root while a backward is still on means that an exception ended it: start anew.
    4. Before a state dict is made or loaded, register the shards; after a load adopt new ones.
    5. Count the steps of optimizers: their foreach and fused updates move no version counter.

Use
    fully_shard = PlainFsdp.functions()["fully_shard"]
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)                                  # the rest
    optimizer = torch.optim.AdamW(model.parameters())   # afterwards: it gets the shards
    loss(model(x)).backward()
    optimizer.step()

`fsdp` is CS336's whole-model shape: each Linear and Embedding whose weight nobody shares is a unit,
the rest is replicated, and its gradients are averaged.

Source: torch.distributed.fsdp.fully_shard; CS336, assignment 2.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map_only

from spec_tests.plain.fsdp import Done, Piece, Unit, modules_without_units


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """In which dtypes a unit computes, reduces and returns; None means that of its input."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


ALIVE: weakref.WeakSet[PlainFsdp] = weakref.WeakSet()


@functools.cache
def watch_optimizers() -> None:
    """Tell all units of every step, from now on."""

    def tell(optimizer: Any, *ignored: Any) -> None:
        for unit in list(ALIVE):
            unit.after_step(optimizer.param_groups)

    register_optimizer_step_post_hook(tell)


class PlainFsdp(Unit):
    """A unit with casts, prefetch hints, loads between steps, and recovery after an exception."""

    refuses = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.forward_prefetch: list[PlainFsdp] = []
        self.backward_prefetch: list[PlainFsdp] | None = None
        self.num_steps = 0
        ALIVE.add(self)
        watch_optimizers()
        self.module.register_state_dict_pre_hook(self.before_state_dict)
        self.module.register_load_state_dict_pre_hook(self.before_load)

    def version(self) -> Any:
        return super().version(), self.num_steps

    def after_step(self, groups: list[dict[str, Any]]) -> None:
        """An optimizer with these groups of parameters has stepped."""
        stepped = {id(parameter) for group in groups for parameter in group["params"]}
        self.num_steps += any(id(piece.parameter) in stepped for piece in self.pieces)

    def before_state_dict(self, *ignored: Any) -> None:
        self.adopt()
        self.reshard()

    def before_load(self, *ignored: Any) -> None:
        self.before_state_dict()

    def shard(self, parameter: nn.Parameter, places: Any) -> Piece:
        if hasattr(parameter, "fsdp_pre_all_gather"):
            raise ValueError(f"{places[0][1]} has fsdp_pre_all_gather: not called here")
        return super().shard(parameter, places)

    def compute_dtype(self, piece: Piece) -> torch.dtype:
        is_float = piece.parameter.is_floating_point()
        return super().compute_dtype(piece) if is_float else piece.parameter.dtype

    def launch_gather(self) -> None:
        self.adopt()
        super().launch_gather()

    def adopt(self) -> None:
        """Whatever is registered now is the parameter: a load may have put a new one there."""
        for piece in self.pieces:
            for owner, name in piece.places:
                current = owner._parameters[name]
                if current is not piece.parameter and isinstance(current, DTensor):
                    piece.parameter = current  # type: ignore[assignment]  # a DTensor Parameter
                    for other, word in piece.places:
                        other._parameters[word] = piece.parameter
                    break
            if piece.full is not None:
                piece.full.requires_grad_(piece.parameter.requires_grad)

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.find_root()
        self.require_no_others()
        self.recover()
        if self.policy.cast_forward_inputs and self.policy.param_dtype is not None:
            args, kwargs = self.cast((args, kwargs), self.policy.param_dtype)
        args, kwargs = super().pre_forward(module, args, kwargs)
        for unit in self.forward_prefetch:
            unit.prefetch()
        return args, kwargs

    def require_no_others(self) -> None:
        known = {id(form) for piece in self.pieces for form in (piece.parameter, piece.full)}
        for parameter, places in self.managed().items():
            is_ours = isinstance(parameter, DTensor) or id(parameter) in known
            if parameter.requires_grad and not is_ours:
                raise RuntimeError(f"{places[0][1]} was added after sharding")

    def recover(self) -> None:
        """A backward that is still on when the model is called anew was interrupted."""
        if self.is_root and self.run.is_callback_queued:
            for unit in self.run.units:
                unit.in_backward, unit.num_running = False, 0
                for piece in unit.pieces:
                    if piece.full is not None:
                        piece.full.grad = None
            self.run.order.clear()
            self.run.is_callback_queued = False

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if is_dataclass(output) and not isinstance(output, dict):
            kind = type(output).__name__
            raise TypeError(f"{type(module).__name__} returns {kind}, whose tensors are not seen")
        output = super().post_forward(module, args, output)
        if self.num_running == 0 and self.policy.output_dtype is not None:
            output = self.cast(output, self.policy.output_dtype)
        return output

    def cast(self, values: Any, dtype: torch.dtype) -> Any:
        return tree_map_only(
            torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values
        )

    def next_in_backward(self) -> list[Unit]:
        hints = self.backward_prefetch
        return super().next_in_backward() if hints is None else [*hints]

    def end_of_backward(self) -> None:
        missed = [u for u in self.run.units if not u.in_backward and u.reshard_after_backward]
        super().end_of_backward()
        for unit in missed:  # by this backward, and kept or gathered ahead for it
            if unit.flying is not None:
                unit.unshard()
            unit.reshard()

    def finish(self) -> None:
        """Whatever is left after a backward of a whole model: nothing."""

    @classmethod
    def functions(cls) -> dict[str, Any]:
        """Return the contract's functions for this class of units."""

        def fully_shard(
            module, *, mesh=None, reshard_after_forward=None, mp_policy=None, ignored_params=()
        ):
            if mesh is None:
                mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            policy = mp_policy or MixedPrecisionPolicy()
            for part in module if isinstance(module, list) else [module]:
                if cls.refuses:
                    require_shardable(part, mesh, reshard_after_forward, policy)
                part._plain_fsdp = cls(part, mesh, reshard_after_forward, policy, ignored_params)
                part.__class__ = cls.class_of(type(part))
            return module

        def fsdp(module, *, compute_dtype=None):
            policy = MixedPrecisionPolicy(param_dtype=compute_dtype)
            uses = Counter(
                id(p) for m in module.modules() for p in m._parameters.values() if p is not None
            )
            for layer in layers_of(module):
                if uses[id(layer.weight)] == 1:
                    fully_shard(layer, mp_policy=policy)
            if not hasattr(module, "_plain_fsdp"):
                rest = [p for p in module.parameters() if not isinstance(p, DTensor)]
                fully_shard(module, ignored_params=rest)
            return WholeModel(module)

        return {
            "finish_gradient_synchronization": finish,
            "fully_shard": fully_shard,
            "register_fsdp_forward_method": register_fsdp_forward_method,
            "fsdp": fsdp,
            "full_parameters": full_parameters,
            "MixedPrecisionPolicy": MixedPrecisionPolicy,
        }

    @classmethod
    def class_of(cls, kind: type) -> type:
        """The class that a sharded module of this kind becomes."""
        return type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})


def layers_of(module: nn.Module) -> list[Any]:
    """Return the layers of a whole model that become units."""
    inside = {
        part
        for attention in module.modules()
        if isinstance(attention, nn.MultiheadAttention)  # its inner layer is not called
        for part in attention.modules()
    }
    layers = [part for part in module.modules() if isinstance(part, nn.Linear | nn.Embedding)]
    return [layer for layer in layers if layer not in inside]


class FSDPModule:
    """The methods that a sharded module gains."""

    _plain_fsdp: PlainFsdp

    def _units(self, recurse: bool = True) -> list[PlainFsdp]:
        modules = self.modules() if recurse else [self]  # type: ignore[attr-defined]  # a Module
        return [m._plain_fsdp for m in modules if hasattr(m, "_plain_fsdp")]

    def unshard(self, async_op: bool = False) -> Any:
        self._plain_fsdp.unshard()
        self._plain_fsdp.register(sharded=False)
        return Done() if async_op else None

    def reshard(self) -> None:
        self._plain_fsdp.adopt()
        self._plain_fsdp.reshard()

    def set_requires_gradient_sync(self, flag: bool, *, recurse: bool = True) -> None:
        for unit in self._units(recurse):
            unit.is_synchronised = flag

    def set_reshard_after_backward(self, flag: bool, *, recurse: bool = True) -> None:
        for unit in self._units(recurse):
            unit.reshard_after_backward = flag

    def set_reshard_after_forward(self, flag: bool, recurse: bool = True) -> None:
        for unit in self._units(recurse):
            unit.reshard_after_forward = flag

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


def require_shardable(
    module: nn.Module, mesh: Any, reshard_after_forward: Any, policy: Any
) -> None:
    """Raise ValueError where the base cannot shard, by name."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise ValueError(f"{type(module).__name__} has no forward: shard what it holds")
    if hasattr(module, "_plain_fsdp"):
        raise ValueError(f"{type(module).__name__} is sharded already; call fully_shard once")
    if not isinstance(mesh, DeviceMesh) or mesh.ndim > 2:
        raise ValueError(f"mesh: expected a DeviceMesh of one or two dimensions, got {mesh!r}")
    _require_options(reshard_after_forward, policy)
    size = mesh.size(mesh.ndim - 1)
    if type(reshard_after_forward) is int and reshard_after_forward not in (1, size):
        raise ValueError(
            f"reshard_after_forward: expected a bool, 1 or {size}, got {reshard_after_forward}"
        )
    for part in modules_without_units(module):
        for name, parameter in part.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                raise ValueError(f"{name} is distributed already: shard plain parameters")
    _require_plain_parameters(module)


def _require_options(reshard_after_forward: Any, policy: Any) -> None:
    if not isinstance(reshard_after_forward, bool | int | None):
        raise ValueError(
            f"reshard_after_forward: expected a bool or an int, got {reshard_after_forward!r}"
        )
    if policy.param_dtype is not None and not policy.param_dtype.is_floating_point:
        raise ValueError(f"param_dtype: expected a floating-point dtype, got {policy.param_dtype}")


def _require_plain_parameters(module: nn.Module) -> None:
    if len({parameter.is_meta for parameter in module.parameters()}) > 1:
        raise ValueError("some weights have values and some are on the meta device")
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            raise ValueError(f"{name} is a scalar: give it a dimension, as in torch.ones(1)")
        if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
            raise ValueError(f"{name} is not contiguous: call contiguous() first")


class WholeModel(nn.Module):
    """The CS336 shape: a wrapper with `.module`, which averages gradients of what is replicated."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.units: list[Any] = [
            m._plain_fsdp for m in module.modules() if hasattr(m, "_plain_fsdp")
        ]
        for parameter in module.parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.register_post_accumulate_grad_hook(average)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def finish(self) -> None:
        for unit in self.units:
            unit.finish()


def finish(wrapped: Any) -> None:
    """End a backward; what others have wrapped, say the reference's DDP, ends it by itself."""
    theirs = getattr(wrapped, "finish_gradient_synchronization", bool)
    getattr(wrapped, "finish", theirs)()


def average(parameter: torch.Tensor) -> None:
    """Average the gradient of a replicated parameter over all ranks."""
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather and free around a call of this method too."""
    method = getattr(module, method_name)
    own: PlainFsdp = module._plain_fsdp  # type: ignore[assignment]  # a mark of ours

    def like_forward(*args: Any, **kwargs: Any) -> Any:
        if own.num_running:
            return method(*args, **kwargs)
        args, kwargs = own.pre_forward(module, args, kwargs)
        output = None
        try:
            output = method(*args, **kwargs)
        finally:
            output = own.post_forward(module, args, output)
        return output

    setattr(module, method_name, like_forward)


@torch.no_grad()
def full_parameters(model: Any) -> dict[str, torch.Tensor]:
    """Return whole copies of all parameters by the names of the model that was wrapped."""
    model = getattr(model, "module", model)
    return {
        name: p.full_tensor() if isinstance(p, DTensor) else p.detach().clone()
        for name, p in model.named_parameters()
    }
