"""What a training step really took: CUDA's allocator on a GPU, PyTorch's MemTracker on the CPU.

Both are asked about the second step, when the optimizer has its state, and both give the highest
moment and not what is left at the end. MemTracker books real tensors as operators return them (the
CPU's allocator keeps no peak); it does not see scratch space inside an operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["history", "measured_step"]

MAX_HISTORY = 100_000  # events: unbounded histories of long runs are gigabytes


def measured_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    *,
    autocast: torch.dtype | None = None,
) -> dict[str, int]:
    """Bytes of the second of two steps, each with a cross-entropy over all places.

    Returns:
        `parameters`, `gradients`, `optimizer`, `activations`, `peak`, `after_step`; on a GPU also
        `reserved`, what the allocator took from the device.
    """

    def loss() -> torch.Tensor:
        with torch.autocast(ids.device.type, dtype=autocast, enabled=autocast is not None):
            return F.cross_entropy(model(ids).flatten(0, -2), ids.flatten())

    loss().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    state = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    found = {
        "parameters": sum(p.nbytes for p in model.parameters()),
        "optimizer": sum(v.nbytes for v in state),
    }
    if ids.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begun = torch.cuda.memory_allocated()
        value = loss()
        found["activations"] = torch.cuda.memory_allocated() - begun
        value.backward()
        del value
        found["gradients"] = _gradients(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        found["peak"] = torch.cuda.max_memory_allocated()
        found["after_step"] = torch.cuda.memory_allocated()
        found["reserved"] = torch.cuda.memory_reserved()
        return found
    # Private to PyTorch, so here and not at the top: whoever only predicts does without.
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(model, optimizer, ids)

    def total(kind: str) -> int:
        return int(tracker.get_tracker_snapshot(kind)[ids.device]["Total"])

    with tracker:
        begun = total("current")
        value = loss()
        found["activations"] = total("current") - begun
        value.backward()
        del value
        found["gradients"] = _gradients(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found["after_step"] = total("current") - ids.nbytes
    found["peak"] = total("peak") - ids.nbytes
    return found


def _gradients(model: nn.Module) -> int:
    return sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


@contextlib.contextmanager
def history(path: Path | None) -> Iterator[None]:
    """Record a GPU's allocations inside the block into `path`, for pytorch.org/memory_viz.

    At most `MAX_HISTORY` events, with Python's stacks. Recording ends, and the file is written,
    also when the block raises: out of memory is when one wants it. None records nothing.
    """
    if path is None:
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=MAX_HISTORY, stacks="python")
    try:
        yield
    finally:
        try:
            torch.cuda.memory._dump_snapshot(str(path))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
