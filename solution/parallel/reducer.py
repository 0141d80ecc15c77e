"""The reducer of the data-parallel wrappers: gradients become means, in one order on all ranks.

Problem. Gradients should be sent while the backward still computes others. A collective pairs up
with its peers by its place in the order, so all ranks must send the same buckets in the same order,
although autograd finishes parameters in any order, and although a parameter may be unused on one
rank and used on another.

The life of a gradient, from one `finish` to the next (a *round*):
1. A hook runs when a parameter's gradient is complete. It *stages* the gradient: writes it, times
   1/W, to the place it is sent from, and makes that place the new `.grad`.
2. Buckets have a fixed order on all ranks. A bucket is *launched* (one asynchronous all-reduce)
   when all its gradients are staged and all earlier buckets are launched.
3. When the backward ends, what it did not touch is staged and launched too: a gradient kept from
   earlier micro-batches as it is, an absent one as a place full of -0.0. So every rank sends every
   bucket exactly once a round, whatever its graph was.
4. `finish` waits, and gives an absent gradient its mean.

      backward   |grad 3|grad 2|grad 1|grad 0|
      network           |  bucket 0   |  bucket 1   |  <- `finish` returns here

A parameter that was unused on all ranks. -0.0 is the identity of IEEE addition: x + -0.0 is x for
every x, +0.0 included. The first number of a staged gradient is never -0.0: 0.0 is added to it. A
place that is all -0.0 after the sum was absent on every rank and its `.grad` stays None; any other
holds the mean, with zero for the absent. Ranks read the same bits, so they agree. (A network that
sums by itself must keep the sign of zero, as IEEE 754 has it; else the unused get zeros.)

Invariants. Between rounds `.grad` is a mean, equal on all ranks, or a local sum since the last
mean, or both added up. The mean over ranks of any of these is right: with a mean of 3 on both of
two ranks and local gradients of 1 and 5 since, it is (4 + 8) / 2 = 6 = 3 + (1 + 5) / 2. So
accumulating first and reducing once gives the same as reducing every micro-batch. Nothing is kept
beside `.grad`, so `zero_grad` discards all that is pending.

After an exception in a backward some buckets are launched and others not. `abandon` ends that round
for all ranks: what was not launched is sent as NaN (a gradient that lacks a rank's part must not
pass for a mean), and this rank drops its gradients. Other ranks get the NaN, and no error.

Paper: Li et al. 2020 (see `ddp.py`), sections 3.2 and 4.2. PyTorch counterpart: the `Reducer`
in C++ behind `DistributedDataParallel`. It finds unused parameters by a walk over the graph and one
more all-reduce, refuses to go on after an interrupted backward, and reorders buckets after the
first step; here overlap is best when parameters are used in roughly their order of registration.
Left out: sparse gradients and communication hooks. Where ranks disagree on what is unused, no other
collective may run in the same backward over the same group: not that of a second replica, nor that
of a layer (SyncBatchNorm). Give the replica a process group of its own.
"""

import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from solution import comm, flat

logger = logging.getLogger(__name__)

_ZERO = torch.zeros(())


class Reducer:
    """Averages the gradients of those of `named` that are trained, over `group`, a round at a time.

    It sends each gradient by itself, from its own memory. A subclass that sends more of them in a
    bucket defines where a gradient is sent from (`place`) and a bucket's memory (`buffer`). With a
    cap of 0 bytes each parameter is a bucket of its own (`flat.plan_buckets`).
    """

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], group: comm.Group, *, cap_bytes: float = 0
    ) -> None:
        self.group = group
        self._frozen = [(name, p) for name, p in named if not p.requires_grad]
        self.names = [name for name, p in named if p.requires_grad]
        self.parameters = [p for _, p in named if p.requires_grad]
        # Indices into `parameters`, in the order in which buckets are sent.
        self.buckets = flat.plan_buckets(self.parameters, cap_bytes=cap_bytes)
        self.is_sending = True  # False inside `no_sync`: gradients then stay local
        self._scale = 1.0 / comm.size(group)
        self._strides = [flat.strides_for(parameter) for parameter in self.parameters]
        self._bucket_of = {i: number for number, bucket in enumerate(self.buckets) for i in bucket}
        self._lock = threading.Lock()  # autograd has a thread for each device
        self.rearm()
        self._register_hooks()

    def place(self, index: int) -> torch.Tensor:
        """Return where gradient `index` is sent from: itself, if it may be written to."""
        parameter, strides = self.parameters[index], self._strides[index]
        gradient = parameter.grad
        if gradient is not None and gradient.stride() == strides and _has_own_memory(gradient):
            # With create_graph=True gradients have a history and cannot be written to.
            return gradient.detach() if gradient.requires_grad else gradient
        # The gradient is absent, an expanded or transposed view, or a view of another's memory.
        return torch.empty_strided(
            parameter.shape, strides, dtype=parameter.dtype, device=parameter.device
        )

    def buffer(self, bucket: int) -> torch.Tensor:
        """Return the 1-D memory of a bucket whose gradients are all staged."""
        [index] = self.buckets[bucket]
        gradient = self.staged[index]
        return gradient.as_strided((gradient.numel(),), (1,))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context for forward and backward: gradients stay local."""
        previous, self.is_sending = self.is_sending, False
        try:
            yield
        finally:
            self.is_sending = previous

    @torch._disable_dynamo
    def begin(self) -> bool:
        """Called before every forward; return whether it begins a training pass.

        A forward that activation checkpointing repeats inside a backward does not.

        Raises:
            RuntimeError: a parameter was thawed, which no hook watches.
        """
        if not torch.is_grad_enabled() or is_inside_backward():
            return False
        if self.is_in_backward:
            self.abandon()
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"{name!r} was frozen when the module was wrapped and requires a gradient now, "
                    "which nothing would reduce; wrap after choosing what is trained"
                )
        # Even if this rank's loss turns out to use no parameter: its peers' may.
        self.has_news = self.is_armed = True
        return True

    @torch._disable_dynamo
    def finish(self) -> None:
        """Return when every `.grad` is the mean over the group; without news send nothing.

        Raises:
            RuntimeError: inside `no_sync`, or after an interrupted backward.
        """
        if not self.is_sending:
            raise RuntimeError(
                "finish_gradient_synchronization was called inside no_sync, where nothing is sent; "
                "call it after the last micro-batch, whose forward and backward are outside"
            )
        if self.is_in_backward:
            self.abandon()
            raise RuntimeError(
                f"rank {comm.rank(self.group)}: the backward before this call was interrupted by "
                "an exception; its gradients are dropped here, and NaN on ranks where it was not; "
                "run the step again on all of them"
            )
        if not self.has_news:
            return
        try:
            self._launch_rest()
            for handle in self._handles:
                handle.wait()
            for index in self._absent:
                if not _is_absent(self.staged[index]):
                    self.parameters[index].grad = self.staged[index]
        finally:
            self.rearm()

    def abandon(self) -> None:
        """End an interrupted round: complete all collectives, drop this rank's gradients."""
        logger.warning("a backward was interrupted: its gradients are dropped on this rank")
        try:
            for bucket in self.buckets[len(self._handles) :]:
                for index in bucket:
                    self.staged.setdefault(index, self.place(index)).fill_(float("nan"))
                self._launch_next()
            for handle in self._handles:
                handle.wait()
        finally:
            self.rearm()
            for parameter in self.parameters:
                parameter.grad = None

    # ------------------------------------------------------------------------- inside a backward

    def _register_hooks(self) -> None:
        # Weak references, removed with the reducer: parameters outlive it, and the hooks of a dead
        # replica would go on sending.
        on_gradient = weakref.WeakMethod(self._on_gradient)
        for index, parameter in enumerate(self.parameters):
            hook = partial(_call, on_gradient, index)
            handle = parameter.register_post_accumulate_grad_hook(hook)
            weakref.finalize(self, handle.remove).atexit = False

    def _on_gradient(self, index: int) -> None:
        with self._lock:
            self._take(index)

    def _take(self, index: int) -> None:
        if index in self.staged:
            # It was added to memory that is being sent, so this round's results are invalid.
            self.is_in_backward = True
            raise RuntimeError(
                f"rank {comm.rank(self.group)}: expected one gradient of {self.names[index]!r} "
                "between two calls of finish_gradient_synchronization, got a second while the "
                "first is being reduced; call it after every backward outside no_sync (reentrant "
                "activation checkpointing also runs backwards of its own: use use_reentrant=False)"
            )
        self.has_news = True
        if not (self.is_sending and self.is_armed):
            return
        if not self.is_in_backward:
            self.is_in_backward = True
            # Runs when this backward has succeeded.
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)
        self._stage(index)
        self._num_missing[self._bucket_of[index]] -= 1
        while self._num_missing[len(self._handles)] == 0:
            self._launch_next()

    @torch._disable_dynamo
    def _on_backward_end(self) -> None:
        self.is_in_backward = False
        self._launch_rest()

    # ----------------------------------------------------------------------------------- a round

    def rearm(self) -> None:
        """Begin a round in which nothing is staged."""
        self.has_news = False  # whether a gradient may have changed since the last mean
        # Whether backwards send: a training forward of the wrapper came in this round. Those of the
        # module alone stay local; if `finish` is called after them, it sends.
        self.is_armed = False
        self.staged: dict[int, torch.Tensor] = {}  # where gradients of this round are sent from
        self._absent: list[int] = []
        self._num_missing = [*map(len, self.buckets), -1]  # the last ends the search
        self._handles: list[comm.Handle] = []  # of the buckets launched, always the first ones
        self.is_in_backward = False  # a backward that is interrupted leaves it set

    def _stage(self, index: int) -> None:
        parameter = self.parameters[index]
        gradient = parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            raise NotImplementedError(
                f"expected a dense gradient, got {gradient.layout} for {self.names[index]!r}; "
                "build its module with sparse=False"
            )
        place = self.staged[index] = self.place(index)
        if gradient is None:
            self._absent.append(index)
            _real(place).fill_(-0.0)
            return
        if gradient.requires_grad:  # create_graph=True: the history is not sent
            gradient = gradient.detach()
        # In one pass, in which an underflow gives -0.0. Added once more, 0.0 makes that 0.0.
        torch.add(_ZERO, gradient, alpha=self._scale, out=place)
        place.as_strided((min(1, place.numel()),), (1,)).add_(_ZERO)
        if gradient is not place:
            parameter.grad = place

    def _launch_next(self) -> None:
        buffer = self.buffer(len(self._handles))
        # Waited for in `finish` (or `abandon`).
        self._handles.append(comm.all_reduce_sum(buffer, self.group))

    def _launch_rest(self) -> None:
        for bucket in self.buckets[len(self._handles) :]:
            for index in bucket:
                if index not in self.staged:
                    self._stage(index)
            self._launch_next()


@torch._disable_dynamo
def _call(on_gradient: weakref.WeakMethod[Any], index: int, _parameter: torch.Tensor) -> None:
    if (method := on_gradient()) is not None:
        method(index)


def is_inside_backward() -> bool:
    """Whether a backward is running, as when activation checkpointing repeats a forward."""
    return torch._C._current_graph_task_id() != -1


def _has_own_memory(gradient: torch.Tensor) -> bool:
    """Whether no other tensor shares the memory of a gradient.

    Autograd takes a view as a gradient without a copy: in `a.view(4) + b.view(4)` the gradients of
    both are views of one tensor.
    """
    storage = gradient.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) <= 2  # its own, and that of `storage`


def _is_absent(place: torch.Tensor) -> bool:
    return bool(torch.signbit(_real(place)).all()) and not bool(_real(place).any())


def _real(place: torch.Tensor) -> torch.Tensor:
    # A complex zero has two signs.
    return torch.view_as_real(place) if place.is_complex() else place
