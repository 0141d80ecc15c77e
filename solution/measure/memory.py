"""Memory of a training step: predicted before anything is allocated, and measured.

`Ledger` is the accountant: a dispatch mode that sees what each operator returns. A new storage is
booked under the name that new storages have at the moment, and a weak reference takes it off the
books when the last tensor on it goes. So views cost nothing, and an output that nobody keeps is
gone at once. It works on real tensors and on fake ones (`torch._subclasses.FakeTensorMode`), which
have sizes and no memory.

`predict` copies the model with fake tensors, lets AdamW make its state in one step on fake
gradients, and runs one more step under a `Ledger`: forward and loss, backward, update. The peak is
a moment, not a sum: at the end of the loss activations are complete and there are no gradients yet;
at the end of the backward it is the other way round; in the update there may be a copy of all
parameters. Which of them is the highest depends on model and batch.

Not counted: the allocator's rounding, workspaces of libraries (some 50 MiB on CUDA), scratch space
inside kernels. PyTorch's MemTracker has the same idea, hooks into modules and optimizers, and is
private.

Measured are a step (`measured_step`), a process's peak (`peak_memory_bytes`) and a GPU's history
(`memory_history`).
"""

import copy
import re
import resource
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from solution.config import require_positive

MAX_HISTORY = 100_000  # events, a ring of some 50 MB: unbounded histories are gigabytes


class Ledger(TorchDispatchMode):
    """The books of all live storages while it is entered: bytes by name, and the most in all.

    New storages are booked under `new_name`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # unannotated in torch
        self.live: Counter[str] = Counter()
        self.peak = 0
        self.new_name = ""
        # Storage's address -> name, bytes, and the reference whose callback takes it off the books.
        self._booked: dict[int, tuple[str, int, weakref.ref[Any]]] = {}

    def own(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """Book the storages of `tensors` under `name`, under whatever name they were before."""
        for tensor in tensors:
            self._book(tensor, name, moves=True)
        self._note_peak()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._book(leaf, self.new_name, moves=False)
        self._note_peak()
        return out

    def _book(self, tensor: torch.Tensor, name: str, *, moves: bool) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        old_name, old_bytes, reference = self._booked.get(key, (name, 0, None))
        if not moves:
            name = old_name
        self.live[old_name] -= old_bytes
        self.live[name] += num_bytes
        if reference is None:
            reference = weakref.ref(storage, lambda _: self._strike_out(key))
        self._booked[key] = (name, num_bytes, reference)

    def _strike_out(self, key: int) -> None:
        name, num_bytes, _ = self._booked.pop(key)
        self.live[name] -= num_bytes

    def _note_peak(self) -> None:
        self.peak = max(self.peak, self.live.total())


@dataclass(frozen=True)
class Prediction:
    """Bytes of one training step."""

    terms: dict[str, int]  # parameters, buffers, gradients, optimizer, activations, when complete
    peak_bytes: int  # at the highest moment of the step
    after_step: int  # what is alive between steps


def memory_estimate(model: nn.Module, *, batch_size: int, sequence_length: int) -> dict[str, int]:
    """Return the bytes of one training step with cross-entropy and AdamW, whose state exists.

    Args:
        model: ids `[batch_size, sequence_length]` -> logits `[..., vocab]`, on any device, `meta`
            too. It is left as it was.
        batch_size, sequence_length: of the step.

    Returns:
        `parameter_bytes`, `gradient_bytes`, `optimizer_bytes`, `activation_bytes` (what forward and
        loss leave for the backward) and `peak_bytes`.

    Raises:
        ValueError: a size that is not a positive integer, or nothing to train.
    """
    found = predict(model, batch_size=batch_size, sequence_length=sequence_length)
    terms = {f"{name.removesuffix('s')}_bytes": size for name, size in found.terms.items()}
    del terms["buffer_bytes"]
    return {**terms, "peak_bytes": found.peak_bytes}


def predict(
    model: nn.Module,
    *,
    batch_size: int,
    sequence_length: int,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW,
    dtype: torch.dtype = torch.float32,
) -> Prediction:
    """Return what `memory_estimate` does, for any optimizer and dtype.

    `make_optimizer` is given the trainable parameters; `dtype` is that of matrix products in the
    forward.
    """
    require_positive("batch_size", batch_size)
    require_positive("sequence_length", sequence_length)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("expected a model with trainable parameters, got none")
    # A fake operator draws nothing, but a generator may advance.
    with torch.random.fork_rng(), FakeTensorMode(allow_non_fake_inputs=True):
        twin = fake_twin(model)
        trainable = [parameter for parameter in twin.parameters() if parameter.requires_grad]
        device = next(twin.parameters()).device
        ids = torch.zeros(batch_size, sequence_length, dtype=torch.int64, device=device)
        optimizer = make_optimizer(trainable)
        for parameter in trainable:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()  # makes the state
        optimizer.zero_grad(set_to_none=True)
        ledger = Ledger()
        for name, tensors in (
            ("parameters", twin.parameters()),
            ("buffers", twin.buffers()),
            ("optimizer", optimizer_tensors(optimizer)),
            ("inputs", [ids]),
        ):
            ledger.own(name, tensors)
        for parameter in trainable:
            # What a backward returned becomes a gradient when a parameter takes it.
            parameter.register_post_accumulate_grad_hook(
                lambda taken: ledger.own("gradients", [cast(torch.Tensor, taken.grad)])
            )
        with ledger:
            ledger.new_name = "activations"
            loss = training_loss(twin, ids, dtype)
            terms = {"activations": ledger.live["activations"]}
            ledger.new_name = "temporaries"
            loss.backward()
            terms["gradients"] = ledger.live["gradients"]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            del loss
        terms |= {name: ledger.live[name] for name in ("parameters", "buffers", "optimizer")}
        return Prediction(terms, ledger.peak, ledger.live.total())


def fake_twin(model: nn.Module, *, device: str | None = None) -> nn.Module:
    """Return a copy with fake parameters and buffers; those on `meta` are taken to the CPU.

    To be called, and used, under a FakeTensorMode.
    """
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        place = device or ("cpu" if tensor.is_meta else tensor.device)
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = fake  # one for all modules that share it
    return copy.deepcopy(model, memo)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all tensors of an optimizer's state."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, torch.Tensor)]


def training_loss(model: nn.Module, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the cross-entropy over all places of the ids themselves: measuring needs no more."""
    with torch.autocast(ids.device.type, dtype=dtype, enabled=dtype != torch.float32):
        return F.cross_entropy(model(ids).flatten(0, -2), ids.flatten())


# ----------------------------------------------------------------------------------- measured


def measured_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float32,
) -> dict[str, int]:
    """Return the bytes of the second of two steps, each with a cross-entropy over all places.

    On a GPU CUDA's allocator is asked; on the CPU, whose allocator keeps no peak, PyTorch's
    MemTracker. The keys are the terms of a `Prediction`, `peak` and `after_step`; on a GPU also
    `reserved`, what the allocator took from the device.
    """

    def used(moment: str) -> int:
        if ids.device.type == "cuda":
            torch.cuda.synchronize()
            current = moment == "current"
            return torch.cuda.memory_allocated() if current else torch.cuda.max_memory_allocated()
        return int(tracker.get_tracker_snapshot(moment)[ids.device]["Total"])

    training_loss(model, ids, dtype).backward()
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
        value = training_loss(model, ids, dtype)
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

    On a GPU: the peak of what PyTorch allocated, not of what it reserved. On the CPU: the peak
    resident set of this process, interpreter and libraries included.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # getrusage inherits the peak of the process that started this one, torchrun's for instance; the
    # kernel's own line does not.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kernel_bytes("/proc/self/status", "VmHWM") or peak


def kernel_bytes(path: str, key: str) -> int | None:
    """Return the value of `key`, which the kernel counts in kB; None on other systems."""
    text = Path(path).read_text() if Path(path).exists() else ""
    found = re.search(rf"^{key}:\s*(\d+) kB", text, re.MULTILINE)
    return 1024 * int(found[1]) if found else None


@contextmanager
def memory_history(path: Path | None) -> Iterator[None]:
    """Record every allocation on the GPU; the snapshot at `path` opens at pytorch.org/memory_viz.

    At most `MAX_HISTORY` events are kept, with Python's stacks. However the block ends, out of
    memory above all, the file is written and recording is off afterwards. With None for the path
    nothing is recorded.
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
