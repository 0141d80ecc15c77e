"""What both kinds of data-parallel wrapper share: equal starts, hooks, order, and an end.

Problem. W ranks hold the same model and each sees other data. Before every optimizer step all of
them must hold the mean of their gradients, and the time to send them should hide behind the
backward that is still computing others. What makes this hard is not the mean but agreement: a
collective pairs up by its place in the order, so ranks must send the same things in the same order
although autograd finishes parameters in whatever order it likes, and although a parameter may go
unused on one rank.

The life of a gradient, from one `finish_gradient_synchronization` to the next (a *round*):
1. A hook runs when a parameter's gradient is complete. It *stages* the gradient: writes it, times
   1/W, to the place it is sent from, and makes that place the new `.grad`.
2. Buckets have a fixed order on all ranks. A bucket is *launched* (one asynchronous all-reduce)
   when all its gradients are staged and all earlier buckets are launched: never as it becomes
   ready.
3. When the backward ends, what it did not touch is staged and launched too: a gradient kept from
   earlier micro-batches as it is, an absent one as a slot full of -0.0. So every rank sends every
   bucket exactly once a round, whatever its graph was.
4. `finish_gradient_synchronization` waits, and gives an absent gradient its mean.

      backward   |grad 3|grad 2|grad 1|grad 0|
      network           |  bucket 0   |  bucket 1   |      finish waits here

Who was absent everywhere? -0.0 is the identity of IEEE addition: x + -0.0 is x for every x, +0.0
included. A staged gradient is 0.0 + grad/W, which is never -0.0. So a slot that is still all -0.0
after the sum was absent on every rank and its `.grad` stays None; any other holds the mean, with
zero for the absent. Ranks read this off the same bits, so they agree without a further message.

Invariants. Outside rounds `.grad` is either a mean, equal on all ranks, or a local sum since the
last mean; the mean of the two together is right in both cases, so accumulating under `no_sync` and
reducing every micro-batch come to the same. Nothing is held back elsewhere: `zero_grad` discards
all.

After an exception in a backward some buckets are launched and others not. The next training forward
ends that round for all ranks (what was not launched is sent as NaN: a gradient that lacks a rank's
part must not pass for a mean) and drops its gradients.

Paper: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
section 3.2 and 4.2. PyTorch counterpart: `DistributedDataParallel`. It finds unused parameters by
a walk over the graph and one more all-reduce, refuses to go on after an interrupted backward, and
reorders buckets after the first step; here parameters that are used in about the order in which
they are registered overlap best. Left out: static graphs, communication hooks, uneven inputs,
sparse gradients, two interleaved backwards of two replicas that also disagree on unused parameters
(give each a process group of its own).
"""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from solution import comm, flat
from solution.parallel import equal_start

logger = logging.getLogger(__name__)

_ZERO = torch.zeros(())


class Replica(nn.Module, ABC):
    """This rank's copy of a model whose gradients are averaged over a process group.

    Subclasses say where a gradient is sent from (`_place`) and what memory a bucket is (`_buffer`).

    Attributes:
        module: the wrapped model, with its original Parameter objects.
    """

    module: nn.Module

    def __init__(self, module: nn.Module, *, cap_bytes: float, process_group: comm.Group) -> None:
        super().__init__()
        equal_start.require_replicable(module)
        comm.require_group(process_group, caller=type(self).__name__)
        equal_start.require_same_module(module, (type(self).__name__, cap_bytes), process_group)
        self.module = module
        self._group = process_group
        self._scale = 1.0 / comm.size(process_group)
        named = list(module.named_parameters())
        self._names = [name for name, parameter in named if parameter.requires_grad]
        self._trainable = [parameter for _, parameter in named if parameter.requires_grad]
        self._frozen = [(name, p) for name, p in named if not p.requires_grad]
        # Places, not tensors: a forward may put another tensor in a buffer's place.
        self._buffer_places = [
            (owner, name)
            for owner in module.modules()
            for name, _ in owner.named_buffers(recurse=False)
        ]
        equal_start.take_first_ranks([p for _, p in named] + self._module_buffers(), process_group)

        self._buckets = flat.plan_buckets(self._trainable, cap_bytes=cap_bytes)
        self._bucket_of = {i: number for number, bucket in enumerate(self._buckets) for i in bucket}
        self._reduces = True
        self._rearm()
        self._register_hooks()

    # ------------------------------------------------------------------------------------ public

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's; outside `no_sync` a training forward takes the first rank's
        buffers."""
        # A forward that activation checkpointing repeats inside backward is not a new one.
        if torch.is_grad_enabled() and not _inside_backward():
            self._before_training_forward()
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around forward and backward: `.grad` holds plain local sums and nothing is sent."""
        previous = self._reduces
        self._reduces = False
        try:
            yield
        finally:
            self._reduces = previous

    def finish_gradient_synchronization(self) -> None:
        """Returns when `.grad` is the mean over the group; a second call changes nothing.

        Raises:
            RuntimeError: inside `no_sync`, or when the backward before it was interrupted.
        """
        if not self._reduces:
            raise RuntimeError(
                "finish_gradient_synchronization was called inside no_sync, where nothing is sent; "
                "call it after the last micro-batch, whose forward and backward are outside"
            )
        if self._in_backward:
            self._abandon_round()
            raise RuntimeError(
                f"rank {comm.rank(self._group)}: the backward before this call was interrupted by "
                "an exception; its gradients are dropped, run the step again"
            )
        if not self._has_news:
            return
        try:
            self._launch_rest()
            for handle in self._handles:
                handle.wait()
            for index in self._absent:
                if not _is_absent(self._staged[index]):
                    self._trainable[index].grad = self._staged[index]
        finally:
            self._rearm()

    def __getstate__(self) -> NoReturn:
        # A copy would have parameters without hooks, and train alone without a word.
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled; copy its `.module`, or save its "
            "state_dict"
        )

    # --------------------------------------------------------------------------- for subclasses

    @abstractmethod
    def _place(self, index: int) -> torch.Tensor:
        """Where the gradient of trainable parameter `index` is sent from: dense, in the strides of
        `flat.strides_for`. May be its present `.grad`."""

    @abstractmethod
    def _buffer(self, bucket: int) -> torch.Tensor:
        """The 1-D memory of a bucket whose gradients are all staged."""

    # -------------------------------------------------------------------------------- the round

    def _rearm(self) -> None:
        self._has_news = False  # whether anything may have changed since the last mean
        self._in_backward = False
        self._staged: dict[int, torch.Tensor] = {}
        self._absent: list[int] = []
        self._num_missing = [len(bucket) for bucket in self._buckets]
        self._handles: list[comm.Handle] = []  # as many as buckets were launched

    def _register_hooks(self) -> None:
        # Weakly, and removed with the replica: parameters outlive it, and the hooks of a dead
        # replica would go on sending.
        this = weakref.ref(self)

        def hook_for(index: int) -> Callable[[torch.Tensor], None]:
            def hook(_parameter: torch.Tensor) -> None:
                replica = this()
                if replica is not None:
                    replica._on_gradient(index)

            return hook

        for index, parameter in enumerate(self._trainable):
            handle = parameter.register_post_accumulate_grad_hook(hook_for(index))
            weakref.finalize(self, handle.remove).atexit = False

    def _on_gradient(self, index: int) -> None:
        if index in self._staged:
            self._raise_second_gradient(index)
        self._has_news = True
        if not self._reduces:
            return
        if not self._in_backward:
            self._in_backward = True
            # Runs when this backward has succeeded; an interrupted one leaves the flag up.
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)
        self._stage(index)
        bucket = self._bucket_of[index]
        self._num_missing[bucket] -= 1
        while self._has_next() and self._num_missing[len(self._handles)] == 0:
            self._launch_next()

    def _on_backward_end(self) -> None:
        self._in_backward = False
        self._launch_rest()

    @torch.no_grad()
    def _stage(self, index: int) -> None:
        parameter = self._trainable[index]
        gradient = parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            raise NotImplementedError(
                f"expected a dense gradient, got {gradient.layout} for {self._names[index]!r}; "
                "build its module with sparse=False"
            )
        place = self._staged[index] = self._place(index)
        if gradient is None:
            self._absent.append(index)
            place.fill_(-0.0)
            return
        # 0.0 + gradient/W in one pass: what is present is never -0.0.
        torch.add(_ZERO, gradient, alpha=self._scale, out=place)
        parameter.grad = place

    def _has_next(self) -> bool:
        return len(self._handles) < len(self._buckets)

    def _launch_next(self) -> None:
        buffer = self._buffer(len(self._handles))
        # Waited for in `finish_gradient_synchronization` (or `_abandon_round`).
        self._handles.append(comm.all_reduce_sum(buffer, self._group))

    def _launch_rest(self) -> None:
        while self._has_next():
            for index in self._buckets[len(self._handles)]:
                if index not in self._staged:
                    self._stage(index)
            self._launch_next()

    def _abandon_round(self) -> None:
        logger.warning("a backward was interrupted: its gradients are dropped on this rank")
        try:
            while self._has_next():
                for index in self._buckets[len(self._handles)]:
                    self._staged.setdefault(index, self._place(index)).fill_(float("nan"))
                self._launch_next()
            for handle in self._handles:
                handle.wait()
        finally:
            self._rearm()
            for parameter in self._trainable:
                parameter.grad = None

    def _raise_second_gradient(self, index: int) -> NoReturn:
        # It was added to memory that is being sent: this round holds nothing of use any more.
        self._in_backward = True
        raise RuntimeError(
            f"rank {comm.rank(self._group)}: expected one gradient of {self._names[index]!r} "
            "between two calls of finish_gradient_synchronization, got a second while the first "
            "is being reduced; call it after every backward outside no_sync (reentrant activation "
            "checkpointing also runs backwards of its own: use use_reentrant=False)"
        )

    # -------------------------------------------------------------------------------- forward

    def _before_training_forward(self) -> None:
        if self._in_backward:
            self._abandon_round()
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"{name!r} was frozen when the module was wrapped and requires a gradient now, "
                    "which nothing would reduce; wrap after choosing what is trained"
                )
        self._has_news = True
        if self._reduces and self.module.training:
            equal_start.take_first_ranks(self._module_buffers(), self._group)

    def _module_buffers(self) -> list[torch.Tensor]:
        present = (owner._buffers[name] for owner, name in self._buffer_places)
        return [buffer for buffer in present if buffer is not None]


def _inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _is_absent(place: torch.Tensor) -> bool:
    numbers = torch.view_as_real(place) if place.is_complex() else place
    return bool(torch.signbit(numbers).all()) and not bool(numbers.any())
