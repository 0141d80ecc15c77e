"""Distributed data parallelism: every rank has the whole model and its own part of the batch.

Problem: ranks compute gradients of different micro-batches; all must step with the same mean.

Idea: start with equal weights, average each gradient over the ranks, step alike on all of them.

Steps
    1. Construction: broadcast parameters and buffers of the group's first rank; put parameters of
       one dtype into buckets, in reverse order of registration.
    2. A hook on each parameter marks its gradient as ready. A bucket whose gradients are ready, and
       whose predecessors are launched, is flattened, divided by the number of ranks, and
       all-reduced in the background: all ranks launch in one order, whatever their backward did.
    3. `finish`: launch what is left, agree on the parameters that any rank used, wait, copy back.
    Inside `no_sync` gradients accumulate locally; the next backward outside sends their sum.

Cost: 2 (n - 1) / n times the bytes of the gradients per step and rank, overlapped with backward;
one copy of the gradients while they are in flight, and one message about unused parameters.

Paper: Li et al. 2020, "PyTorch Distributed". Differs from DistributedDataParallel: gradients are
copied back in `finish`, and no backward ends by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class PlainDdp(nn.Module):
    """Buckets in a fixed order, launched when their turn has come, copied back in `finish`."""

    def __init__(self, module: nn.Module, group: Any = None, bucket_bytes: float = 0.0) -> None:
        super().__init__()
        self.module = module
        self.group = group
        self.bucket_bytes = bucket_bytes
        self.is_synchronised = True
        self.take_first(module.parameters())
        self.take_first(module.buffers())
        self.trainable = [p for p in module.parameters() if p.requires_grad]
        self.buckets = self.plan()
        self.new_round()
        for index, parameter in enumerate(self.trainable):
            self.register(index, parameter)

    # ---------------------------------------------------------------------------- construction

    @torch.no_grad()
    def take_first(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, group=self.group, group_src=0)
            tensor.copy_(whole)

    def size(self) -> int:
        return dist.get_world_size(self.group)

    def plan(self) -> list[list[int]]:
        """Reverse order of registration, one dtype each, closed once the size is reached."""
        buckets: list[list[int]] = []
        filled, dtype = 0.0, None
        for index in reversed(range(len(self.trainable))):
            parameter = self.trainable[index]
            if not buckets or filled >= self.bucket_bytes or parameter.dtype != dtype:
                buckets.append([])
                filled, dtype = 0.0, parameter.dtype
            buckets[-1].append(index)
            filled += parameter.numel() * parameter.element_size()
        return buckets

    def register(self, index: int, parameter: nn.Parameter) -> None:
        weak = weakref.WeakMethod(self.on_gradient)  # or a dropped model would never be freed
        parameter.register_post_accumulate_grad_hook(lambda p: (weak() or bool)(index))

    # ------------------------------------------------------------------------------- one round

    def new_round(self) -> None:
        self.ready: set[int] = set()
        self.flying: list[tuple[list[int], torch.Tensor, Any]] = []
        self.launched = 0
        self.has_news = self.is_armed = False

    def on_gradient(self, index: int) -> None:
        if self.is_synchronised and index in self.ready:  # one more backward of the same forward
            self.start_over()
        self.has_news = True
        if not (self.is_synchronised and self.is_armed):
            return  # inside no_sync, or of a forward of the module alone
        self.ready.add(index)
        self.launch_what_is_ready()

    def start_over(self) -> None:
        for _, _, handle in self.flying:
            handle.wait()
        self.new_round()

    def launch_what_is_ready(self) -> None:
        while self.launched < len(self.buckets) and self.ready.issuperset(
            self.buckets[self.launched]
        ):
            self.launch(self.buckets[self.launched])

    def launch(self, bucket: list[int]) -> None:
        self.launched += 1
        parts = [self.local(index).reshape(-1) for index in bucket]
        flat = torch.cat(parts) / self.size()
        handle = dist.all_reduce(flat, group=self.group, async_op=True)
        self.flying.append((bucket, flat, handle))

    def local(self, index: int) -> torch.Tensor:
        gradient = self.trainable[index].grad
        return torch.zeros_like(self.trainable[index]) if gradient is None else gradient

    def finish(self) -> None:
        if not self.has_news:
            return
        while self.launched < len(self.buckets):
            self.launch(self.buckets[self.launched])
        used = self.used_anywhere()
        for bucket, flat, handle in self.flying:
            handle.wait()
            self.write_back(bucket, flat, used)
        self.new_round()

    def used_anywhere(self) -> list[bool]:
        flags = torch.tensor([float(p.grad is not None) for p in self.trainable])
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in flags]

    @torch.no_grad()
    def write_back(self, bucket: list[int], flat: torch.Tensor, used: list[bool]) -> None:
        for index, mean in zip(bucket, self.cut(bucket, flat), strict=True):
            parameter = self.trainable[index]
            if not used[index]:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.copy_(mean)

    def cut(self, bucket: list[int], flat: torch.Tensor) -> list[torch.Tensor]:
        whole = [self.trainable[index] for index in bucket]
        pieces = flat.split([parameter.numel() for parameter in whole])
        return [piece.view(like.shape) for piece, like in zip(pieces, whole, strict=True)]

    # --------------------------------------------------------------------------------- forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self.require_no_others()
            self.has_news = True  # also where this rank's loss touches nothing: its peers' may
            if self.is_synchronised:
                self.before_training_forward()
            self.is_armed = True
        return self.module(*args, **kwargs)

    def require_no_others(self) -> None:
        known = {*map(id, self.trainable)}
        if any(p.requires_grad and id(p) not in known for p in self.module.parameters()):
            raise RuntimeError("parameters were added or thawed after wrapping")

    def before_training_forward(self) -> None:
        if self.flying:  # a backward was interrupted: what flies belongs to nobody
            self.start_over()
        if self.module.training:
            self.take_first(self.module.buffers())

    @contextmanager
    def no_sync(self) -> Any:
        previous, self.is_synchronised = self.is_synchronised, False
        try:
            yield
        finally:
            self.is_synchronised = previous

    @classmethod
    def functions(cls) -> dict[str, Any]:
        """Return the contract's functions for this class of wrappers."""

        def ddp(module, *, process_group=None):
            return cls(module, process_group, 0.0)

        def ddp_bucketed(module, *, bucket_size_mb, process_group=None):
            return cls(module, process_group, bucket_size_mb * 2**20)

        def finish_gradient_synchronization(wrapped):
            # What others have wrapped, say the reference's FSDP, finishes as it does by itself.
            theirs = getattr(wrapped, "finish_gradient_synchronization", bool)
            getattr(wrapped, "finish", theirs)()

        return {
            "ddp": ddp,
            "ddp_bucketed": ddp_bucketed,
            "no_sync": lambda wrapped: wrapped.no_sync(),
            "finish_gradient_synchronization": finish_gradient_synchronization,
        }
