"""A plain, right sharded-data-parallel module with every decision in a method of its own.

The near-misses of the fsdp chapter are subclasses of `Unit` that override one decision. It is
itself a benign variant: slow (one padded copy per gather, everything waited for where it is
launched), right, and so every clause up to level `correct` must accept it. It is written apart from
any solution, so an impostor stays what it is however a solution is rewritten.

A unit is what is gathered together. Its parameters are registered as sharded DTensors at all times
except while its module computes: then full tensors stand in their place. What autograd saves
are views of those full tensors, so freeing them is emptying their storage, and a gather in backward
fills the same storage again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from spec_tests.impostors.plain_fsdp_storage import Piece, Storage, written


@dataclass
class Pass:
    """What the units of one model share between forward and backward."""

    order: list[Unit] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    is_callback_queued: bool = False


class PostBackward(torch.autograd.Function):
    """The identity on a unit's inputs, whose backward runs once the unit's own is done."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, *tensors: torch.Tensor) -> Any:
        ctx.unit = unit
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.unit.post_backward()
        return (None, *gradients)


class Unit(Storage):
    """What a unit does in forward and backward."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.reshard_after_backward = True
        self.is_synchronised = True
        self.all_reduces = True
        self.is_last_backward = True
        self.factor: float | None = None
        self.in_backward = False
        self.is_root = False
        self.num_running = 0
        self.run: Pass | None = None
        self.forward_prefetch: list[Unit] = []
        self.backward_prefetch: list[Unit] | None = None
        self.module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
        self.module.register_forward_hook(self.post_forward, always_call=True)
        self.module.register_state_dict_pre_hook(self.before_state_dict)
        self.module.register_load_state_dict_pre_hook(self.before_load)

    refuses = True
    registers = True  # methods beside forward
    leaves_attention = True  # whose inner layer is not called
    replicates_rest = True  # what belongs to no layer of a whole model
    shards_itself = True  # a whole model that is a layer
    layers: Any = nn.Linear | nn.Embedding  # that are sharded in a whole model

    def finish(self) -> None:
        """Whatever is left after a backward of a whole model: nothing."""

    def before_state_dict(self, *ignored: Any) -> None:
        self.reshard()

    def before_load(self, *ignored: Any) -> None:
        self.reshard()

    # --------------------------------------------------------------------------------- forward

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.find_root()
        self.recover()
        if self.policy.cast_forward_inputs and self.policy.param_dtype is not None:
            args, kwargs = self.cast((args, kwargs), self.policy.param_dtype)
        self.unshard()
        for unit in self.forward_prefetch:
            unit.prefetch()
        self.register(sharded=False)
        self.num_running += 1
        if not torch.is_grad_enabled():
            return args, kwargs
        return self.watch_inputs(args, kwargs)

    def find_root(self) -> None:
        if self.run is not None:
            return
        run = Pass()
        for module in self.module.modules():
            unit = getattr(module, "_plain_fsdp", None)
            if unit is not None:
                unit.run = run
                unit.is_root = unit is self
                run.units.append(unit)

    def recover(self) -> None:
        """A backward that is still on when the model is called anew was interrupted."""
        assert self.run is not None
        if self.is_root and self.run.is_callback_queued:
            for unit in self.run.units:
                unit.in_backward, unit.num_running = False, 0
                for piece in unit.pieces:
                    if piece.full is not None:
                        piece.full.grad = None
            self.run.order.clear()
            self.run.is_callback_queued = False

    def cast(self, values: Any, dtype: torch.dtype) -> Any:
        return tree_map_only(
            torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values
        )

    def watch_inputs(self, args: Any, kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        where = [i for i, t in enumerate(leaves) if isinstance(t, torch.Tensor) and t.requires_grad]
        if where:
            passed = PostBackward.apply(self, *[leaves[i] for i in where])
            for index, tensor in zip(where, passed, strict=True):
                leaves[index] = tensor
        return tree_unflatten(leaves, spec)

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        assert self.run is not None
        self.num_running -= 1
        if self.num_running > 0:
            return output  # of a forward that a method of the same module has called
        self.num_running = 0
        if torch.is_grad_enabled() and not self.in_backward:
            self.run.order.append(self)
        self.register(sharded=True)
        if self.reshards_after_forward() and not self.in_backward:
            self.reshard()
        for tensor in tree_flatten(output)[0]:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self.pre_backward)
        if self.policy.output_dtype is not None:
            output = self.cast(output, self.policy.output_dtype)
        return output

    def reshards_after_forward(self) -> bool:
        return not self.is_root if self.raf is None else bool(self.raf)

    # -------------------------------------------------------------------------------- backward

    def pre_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        assert self.run is not None
        if not self.run.is_callback_queued:
            self.run.is_callback_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_of_backward)  # type: ignore[attr-defined]  # not in stubs
        if not self.in_backward:
            self.in_backward = True
            self.forget_what_was_cleared()
        self.unshard()
        for unit in self.next_in_backward():
            unit.prefetch()
        return gradient

    def next_in_backward(self) -> list[Unit]:
        assert self.run is not None
        if self.backward_prefetch is not None:
            return self.backward_prefetch
        order = self.run.order
        if self in order and order.index(self) > 0:
            return [order[order.index(self) - 1]]
        return []

    def post_backward(self) -> None:
        trainable = [p for p in self.pieces if p.parameter.requires_grad]
        arrived = [p for p in trainable if p.full is not None and p.full.grad is not None]
        if trainable and not arrived:
            return  # used again further up, or not at all: the end of backward sees to it
        self.take_gradients(arrived)
        if self.reshard_after_backward:
            self.reshard()

    def take_gradients(self, pieces: list[Piece]) -> None:
        with torch.no_grad():
            for piece in pieces:
                if piece.full is not None and piece.full.grad is not None:
                    self.add_pending(piece, piece.full.grad)
                    piece.full.grad = None
            if self.is_synchronised:
                self.reduce([p for p in pieces if p.pending is not None])
            else:
                self.hold(pieces)

    def add_pending(self, piece: Piece, gradient: torch.Tensor) -> None:
        gradient = gradient.to(self.policy.reduce_dtype or gradient.dtype)
        piece.pending = gradient if piece.pending is None else piece.pending + gradient

    def hold(self, pieces: list[Piece]) -> None:
        """Leave a gradient of zeros behind: who clears it, clears what is pending."""
        for piece in pieces:
            if piece.parameter.grad is None:
                zeros = torch.zeros_like(piece.local)
                piece.parameter.grad = self.as_dtensor(zeros, piece.parameter)
            token: Any = piece.parameter.grad
            piece.token = (token, written(token))

    def forget_what_was_cleared(self) -> None:
        for piece in self.pieces:
            token, version = piece.token
            if token is None:
                continue
            if piece.parameter.grad is not token or written(token) != version:
                piece.pending, piece.token = None, (None, None)

    def reduce(self, pieces: list[Piece]) -> None:
        for dtype in {p.pending.dtype for p in pieces if p.pending is not None}:
            same = [p for p in pieces if p.pending is not None and p.pending.dtype == dtype]
            shards = self.cut_flat(same, self.mean(self.flatten(same)))
            for piece, shard in zip(same, shards, strict=True):
                self.assign(piece, shard.to(piece.parameter.dtype))
                piece.pending, piece.token = None, (None, None)

    def flatten(self, pieces: list[Piece]) -> torch.Tensor:
        blocks = []
        for piece in pieces:
            assert piece.pending is not None
            missing = self.size() * self.rows(piece.parameter) - piece.pending.shape[0]
            zeros = piece.pending.new_zeros(missing, *piece.pending.shape[1:])
            blocks.append(torch.cat([piece.pending, zeros]).view(self.size(), -1))
        return self.cast_for_reduce(torch.cat(blocks, dim=1))

    def cast_for_reduce(self, flat: torch.Tensor) -> torch.Tensor:
        return flat

    def mean(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's segment of the mean."""
        if self.size() == 1:
            own = flat.reshape(-1)
        else:
            own = self.send_reduction(flat)
        if self.replicas is not None:
            dist.all_reduce(own, group=self.replicas)
        return own / (self.factor or self.divisor())

    def send_reduction(self, flat: torch.Tensor) -> torch.Tensor:
        own = flat.new_empty(flat.numel() // self.size())
        dist.reduce_scatter_tensor(own, flat.reshape(-1), group=self.group)
        return own

    def divisor(self) -> int:
        return self.mesh.size()

    def cut_flat(self, pieces: list[Piece], own: torch.Tensor) -> list[torch.Tensor]:
        sizes = [self.rows(p.parameter) * p.parameter.shape[1:].numel() for p in pieces]
        return [
            part.view(-1, *p.parameter.shape[1:])[: p.local.shape[0]].clone()
            for part, p in zip(own.split(sizes), pieces, strict=True)
        ]

    def assign(self, piece: Piece, shard: torch.Tensor) -> None:
        if piece.parameter.grad is None:
            piece.parameter.grad = self.as_dtensor(shard, piece.parameter)
        else:
            gradient: Any = piece.parameter.grad
            gradient._local_tensor.add_(shard)
        self.tell(piece)

    def tell(self, piece: Piece) -> None:
        hooks = piece.parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]  # torch's
        for hook in list((hooks or {}).values()):
            hook(piece.parameter)

    def end_of_backward(self) -> None:
        assert self.run is not None
        for unit in self.run.units:
            if not unit.in_backward:
                unit.forget_what_was_cleared()
            unit.take_gradients([p for p in unit.pieces if p.parameter.requires_grad])
            if unit.in_backward and unit.reshard_after_backward:
                unit.reshard()
            unit.in_backward = False
        self.run.order.clear()
        self.run.is_callback_queued = False
