"""Data parallelism: replicas that start equal, and step with the mean of their gradients.

Problem. W ranks hold the same model and each sees other data. If all of them start from the same
values and step with the same gradient, they stay the same without ever comparing. If they start
from unequal ones, they stay unequal, with a loss that falls all the same. And the network should
work while the backward still computes.

    model = ddp_bucketed(model, bucket_size_mb=25)
    with model.no_sync():
        loss(model(first)).backward()       # stays on this rank
    loss(model(last)).backward()            # sends both, while it computes
    model.finish_gradient_synchronization()
    optimizer.step()

`Replica`, the shared base class:
1. At construction all ranks compare names, shapes, dtypes and what is frozen (`agreement.py`).
2. Then they take the first rank's values, of frozen parameters and buffers too, since these shape
   every gradient.
3. During backward, and in `finish_gradient_synchronization`, gradients become means
   (`reducer.py`); a subclass chooses the reducer.
4. Buffers are changed by the forward itself (running statistics), from each rank's own data. So a
   training forward outside `no_sync` takes the first rank's before it starts.

`DDPIndividualParameters`, the naive solution, already overlapped: a gradient that is complete is
multiplied by 1/W where it lies, without a copy (unless its memory is shared), and its own
all-reduce is launched, in reverse order of registration: last layers are ready first.

`DDPBucketed`. A collective has a cost before it moves a byte: about a millisecond with gloo, tens
of microseconds with NCCL. So a message per parameter wastes most of its time on small ones; one
message for all gradients could only start when backward is over. The one idea added: gradients are
kept in flat buffers, the buckets.
1. Parameters are assigned to buckets in reverse order of registration, so that a bucket fills with
   gradients that are complete at about the same time (`flat.plan_buckets`).
2. When a gradient is complete it is written, times 1/W, to its slot, a view of the bucket's buffer,
   and the slot becomes `.grad`. This one pass is all the copying there is: nothing is unpacked.

Invariants. With buckets, after `finish_gradient_synchronization` every `.grad` is a view of its
bucket, with the strides of its parameter. The next round writes to the same memory: clone a
gradient to keep it. Without buckets a `.grad` whose memory is shared, say that of a flat buffer of
the caller's, is replaced by a tensor of its own.

Cost. With n bytes of gradients 2n(W-1)/W bytes per step and rank, in a message for each parameter
or bucket; one broadcast more for a model that has buffers. Buckets take n bytes, plus the gradient
that backward has just produced, and plus n for local sums inside a `no_sync` window. At
construction one collective of 16 bytes, and the values once.

Paper: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
sections 3.1, 3.2 and 4.1. PyTorch counterpart: `DistributedDataParallel`, with
`gradient_as_bucket_view=True` for the buckets. Those of its first step are one bucket; later ones
close by the same rule, in the order in which gradients were ready. Buckets here never change. With
both, backwards of `module` called alone stay local. Where they differ:

    DistributedDataParallel                    here
    waits at the end of a backward             waits in `finish_gradient_synchronization`
    its forward decides what is reduced        the backward does: `no_sync` goes around both
    compares shapes at construction            names, dtypes and what is frozen as well
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from solution import comm, flat
from solution.parallel.agreement import on_all_ranks, send_values
from solution.parallel.inventory import Inventory
from solution.parallel.reducer import Reducer


class Replica(nn.Module):
    """This rank's copy of a model whose gradients are averaged over a process group.

    `module` must keep its Parameter objects, which have the hooks: a training forward that finds
    others raises. A `process_group` of None is the default group.
    """

    _reducer: Reducer  # set by the subclass when this constructor has returned

    def __init__(
        self, module: nn.Module, *, options: tuple[object, ...], process_group: comm.Group
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"expected an nn.Module to wrap, got {type(module).__name__}")
        name = type(self).__name__
        comm.require_group(process_group, caller=name)

        def describe() -> Iterator[str]:
            _require_replicable(module)
            yield f"{name} with options {options}"
            for where, tensor in (*module.named_parameters(), *module.named_buffers()):
                kind = f"{tuple(tensor.shape)} {tensor.dtype}"
                yield f"{where!r}: {kind}, requires_grad={tensor.requires_grad}"

        expected = "the same module on all ranks (names, shapes, dtypes, what is frozen)"
        on_all_ranks(describe, [process_group], expected=f"{expected} and the same wrapper")
        self.module = module
        self.process_group = process_group
        self._named = list(module.named_parameters())
        self._inventory = Inventory(partial(_parts_of, module), module.parameters())
        # Places, not tensors: a forward may put another tensor in a buffer's place.
        self._buffer_places = [
            (owner, name)
            for owner in module.modules()
            for name, _ in owner.named_buffers(recurse=False)
        ]
        send_values([p for _, p in self._named] + self._present_buffers(), 0, process_group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; in training outside `no_sync`, on the first rank's buffers."""
        self._before_forward()
        return self.module(*args, **kwargs)

    @torch._disable_dynamo  # so that a compiled forward is one graph: the module's
    def _before_forward(self) -> None:
        if not self._reducer.begin():
            return
        self._inventory.require_nothing_new(type(self.module).__name__)
        if self._reducer.is_sending and self.module.training:
            send_values(self._present_buffers(), 0, self.process_group)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for forward and backward: `.grad` is a local sum, nothing is sent."""
        return self._reducer.no_sync()

    def finish_gradient_synchronization(self) -> None:
        """Return when `.grad` is the mean over the group: see the function of this name.

        Raises:
            RuntimeError: inside `no_sync`, or when the backward before it was interrupted after its
                first gradient. Other ranks get no error, but NaN in gradients that this one had not
                sent.
        """
        self._reducer.finish()

    def __getstate__(self) -> NoReturn:
        """Refuse to be copied: the copy's parameters would have no hooks, and train alone."""
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled; copy its `.module`, or save its "
            "state_dict"
        )

    def _present_buffers(self) -> list[torch.Tensor]:
        present = (owner._buffers[name] for owner, name in self._buffer_places)
        return [buffer for buffer in present if buffer is not None]


def _parts_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((f"{name}." if name else "", part) for name, part in module.named_modules())


def _require_replicable(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.is_meta:
            raise ValueError(f"expected {name!r} to have values, got none; materialise it first")
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise NotImplementedError(f"expected dense gradients, got sparse=True in {name!r}")


class DDPIndividualParameters(Replica):
    """A replica that sends each gradient as soon as it and those before it are complete."""

    def __init__(self, module: nn.Module, *, process_group: comm.Group = None) -> None:
        super().__init__(module, options=(), process_group=process_group)
        self._reducer = Reducer(self._named, process_group)


class DDPBucketed(Replica):
    """A replica whose gradients live in buckets and are sent a bucket at a time.

    A bucket is closed once it holds `bucket_size_mb` MiB; 0 means a bucket per parameter.

    Raises:
        ValueError: a negative bucket size, or a group that this rank does not belong to.
    """

    def __init__(
        self, module: nn.Module, *, bucket_size_mb: float, process_group: comm.Group = None
    ) -> None:
        if not bucket_size_mb >= 0:  # also refuses NaN
            raise ValueError(f"expected bucket_size_mb of at least 0, got {bucket_size_mb}")
        super().__init__(module, options=(bucket_size_mb,), process_group=process_group)
        cap_bytes = bucket_size_mb * flat.MIB
        self._reducer = _Slots(self._named, process_group, cap_bytes=cap_bytes)


class _Slots(Reducer):
    """A reducer that sends each gradient from its slot, a view of its bucket's buffer."""

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], group: comm.Group, *, cap_bytes: float
    ) -> None:
        super().__init__(named, group, cap_bytes=cap_bytes)
        self.buffers: list[torch.Tensor] = []
        self.slots: dict[int, torch.Tensor] = {}
        for bucket in self.buckets:
            members = [self.parameters[index] for index in bucket]
            numel = sum(parameter.numel() for parameter in members)
            buffer = torch.zeros(numel, dtype=members[0].dtype, device=members[0].device)
            self.buffers.append(buffer)
            self.slots.update(zip(bucket, flat.cut(buffer, members), strict=True))

    def place(self, index: int) -> torch.Tensor:
        return self.slots[index]

    def buffer(self, bucket: int) -> torch.Tensor:
        return self.buffers[bucket]


ddp, ddp_bucketed = DDPIndividualParameters, DDPBucketed  # the contract's names
