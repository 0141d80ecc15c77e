"""Memory of a rank, measured: what a step took, what a rank holds, the peak, a GPU's history.

    with Holdings(model, optimizer) as holdings:
        next(steps)
    holdings.num_bytes      # by name: parameters, gradients, optimizer, activations

`Holdings` slows down what it watches, so watch one step and time the others.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from solution.measure.memory import optimizer_tensors, training_loss

MAX_HISTORY = 100_000  # events, a ring of some 50 MB: unbounded histories are gigabytes


class Holdings(ExitStack):
    """What a rank holds at the update, by component, and what a forward leaves for its backward.

    Each storage counts once, however many tensors share it. Parameters, gradients and optimizer
    state are counted between the last reduction and the update: of a sharded model that is this
    rank's part. Activations are what autograd saves in one micro-batch, parameters excluded; the
    largest micro-batch counts.

    Args:
        model: what is called with each micro-batch; wrapped or not.
        optimizer: what updates it; its state is counted before the update.

    Attributes:
        num_bytes: by component; empty before the first update.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.num_bytes: dict[str, int] = {}
        self._model, self._optimizer = model, optimizer
        self._saved: dict[int, int] = {}  # storage's address -> bytes, of this micro-batch
        self._most_saved = 0

    def __enter__(self) -> Self:
        for handle in (
            self._model.register_forward_pre_hook(lambda *_: self._saved.clear()),
            self._optimizer.register_step_pre_hook(lambda *_: self._count()),
        ):
            self.callback(handle.remove)
        keep = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
        self.enter_context(keep)
        return self

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = _local(tensor).untyped_storage()
        own = {_local(p).untyped_storage().data_ptr() for p in self._model.parameters()}
        if storage.data_ptr() not in own:
            self._saved[storage.data_ptr()] = storage.nbytes()
            self._most_saved = max(self._most_saved, sum(self._saved.values()))
        return tensor

    def _count(self) -> None:
        parameters = list(self._model.parameters())
        self.num_bytes = {
            "parameters": _num_bytes(parameters),
            "gradients": _num_bytes(p.grad for p in parameters if p.grad is not None),
            "optimizer": _num_bytes(optimizer_tensors(self._optimizer)),
            "activations": self._most_saved,
        }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the elements, each part of a storage once: shards are views."""
    parts = {(local.data_ptr(), local.numel()): local.nbytes for local in map(_local, tensors)}
    return sum(parts.values())


def measured_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    *,
    autocast: torch.dtype | None = None,
) -> dict[str, int]:
    """Return the bytes of the second of two steps, each with a cross-entropy over all places.

    On a GPU CUDA's allocator is asked; on the CPU, whose allocator keeps no peak, PyTorch's
    MemTracker, which books real tensors as operators return them and does not see scratch space.

    Returns:
        `parameters`, `gradients`, `optimizer`, `activations`, `peak`, `after_step`; on a GPU also
        `reserved`, what the allocator took from the device.
    """

    def used(moment: str) -> int:
        """Return the bytes in use: `current`, or at the `peak`."""
        if ids.device.type == "cuda":
            torch.cuda.synchronize()
            current = moment == "current"
            return torch.cuda.memory_allocated() if current else torch.cuda.max_memory_allocated()
        return int(tracker.get_tracker_snapshot(moment)[ids.device]["Total"]) - ids.nbytes

    training_loss(model, ids, autocast).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    found = {
        "parameters": sum(p.nbytes for p in model.parameters()),
        "optimizer": sum(value.nbytes for value in optimizer_tensors(optimizer)),
    }
    with ExitStack() as stack:
        if ids.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:
            # Private to PyTorch, so here and not at the top: predictions do without it.
            from torch.distributed._tools.mem_tracker import MemTracker

            tracker = MemTracker()
            tracker.track_external(model, optimizer, ids)
            stack.enter_context(tracker)
        begun = used("current")
        value = training_loss(model, ids, autocast)
        found["activations"] = used("current") - begun
        value.backward()
        del value
        found["gradients"] = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found["after_step"] = used("current")
    found["peak"] = used("peak")
    if ids.device.type == "cuda":
        found["reserved"] = torch.cuda.memory_reserved()
    return found


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that this process has used so far, in bytes.

    On a GPU: the peak of what PyTorch allocated (not what it reserved, and not what is allocated
    now). On the CPU: the peak resident set of this process, interpreter and libraries included.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # getrusage inherits the peak of the process that started this one, torchrun's for instance; the
    # kernel's own line does not.
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def memory_history(path: Path | None) -> Iterator[None]:
    """Record every allocation on the GPU; the snapshot at `path` opens at pytorch.org/memory_viz.

    At most `MAX_HISTORY` events are kept, with Python's stacks. However the block ends, out of
    memory above all, the file is written and recording is off afterwards.

    Args:
        path: of the pickle; None, where there is no GPU for instance, records nothing.
    """
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._record_memory_history(max_entries=MAX_HISTORY, stacks="python")
    try:
        yield
    finally:
        try:
            torch.cuda.memory._dump_snapshot(str(path))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
