"""What happened between two steps of a rank, and the optimizer that takes them, as plain data."""

from __future__ import annotations

import time
import weakref
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as optim

from .layout import (
    Entry,
    Names,
    fingerprint,
    is_dtensor,
    local_of,
    norms_of,
    not_finite,
    plain_name,
)
from .link import script_line

EARLY = 32  # steps in which it shows what a script does to weights between two steps
KEPT = 4096
"""Forwards, and losses, that are kept of one window."""
# Their updates are by element: that of a shard is the shard of the update.
_BY_ELEMENT = frozenset(
    ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD")
)
_NOT_PLAIN = ("params", "fused", "foreach", "capturable", "differentiable")
_MOST = 2**18  # elements of a sampled parameter
_MANY = 8  # parameters that are sampled
_SHARE = 1e-2  # of the largest update: what kernels that fuse operations are apart


def random_now() -> int:
    """Return a hash of the states that random numbers are drawn from."""
    states = [torch.get_rng_state()]
    states += [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return zlib.crc32(torch.cat(states).numpy().tobytes())


class Window:
    """What happened since the last step of any optimizer. Hashes stay on their device so long."""

    def __init__(self) -> None:
        self.forwards: list[dict[str, Any]] = []
        self.losses: list[dict[str, Any]] = []
        self.targets: list[Tensor] = []  # hashes of those that losses of torch were given
        self.stale: list[tuple[str, str, Tensor]] = []  # name, line, elements that are not current
        self.scheduled: dict[int, dict[int, str]] = {}  # schedule to lines, by forwards before
        self.called: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.roots: list[Tensor] = []  # what each backward began with
        self.is_low = False  # whether it computes in 16 bits
        self.feed: Any = None  # the loader that gave its batches
        self.is_cleared = False  # gradients, since the last backward
        self.by_hand: list[tuple[int, int]] = []  # elements and memory of the script's own sums
        self.has_dropped = False  # gradients of a backward that no step was taken with
        # Parameter to its backwards, those without sync, those that DDP is to reduce; and its size.
        self.counts: dict[int, list[int]] = {}
        self.made: dict[int, tuple[int, Tensor]] = {}  # parameter to its size, and gradient's norm
        self.summed: list[tuple[int, Tensor, Tensor]] = []  # size, norms before and after

    def forward(self, module: nn.Module, tensors: list[Tensor], names: Names) -> None:
        """A training forward at the top."""
        del self.forwards[:-KEPT]  # a script that never steps must not fill the memory
        ddp = names.wrapper(module)
        first = next(module.parameters())
        self.is_low |= torch.is_autocast_enabled(first.device.type) or first.element_size() == 2
        self.forwards.append(
            {
                "root": type(ddp.module if ddp else module).__name__,
                "inputs": [
                    [fingerprint(t, is_mixed=True), str(t.dtype)[6:], list(t.shape)]
                    for t in tensors
                    if t.grad_fn is None and t.numel() > 1
                ],
                "random": random_now(),
                "drops": False,
                "inside": ddp is None and any(names.of(p).ddp for p in module.parameters()),
                "syncs": None if ddp is None else bool(ddp.require_backward_grad_sync),
                "averages": ddp is not None and not getattr(ddp, "_comm_hooks", True),
                "buffers": None,
                "talks": False,
                "place": script_line(),
                "t": time.time_ns(),
                "first": names.of(first).number,
            }
        )

    def cleared(self, ids: set[int]) -> None:
        """Gradients were cleared: what came before does not go into the step."""
        self.is_cleared = bool(self.counts.keys() & ids)
        self.has_dropped |= self.is_cleared
        if self.is_cleared or not self.counts:
            for loss in self.losses:
                loss["is_cleared"] = loss["weight"] is not None

    def accumulated(self, parameter: Tensor, is_unsynced: bool, is_synced: bool) -> None:
        """A backward has added to the gradient of a parameter, and DDP will reduce it or not."""
        counted = self.counts.setdefault(id(parameter), [0, 0, 0, parameter.numel()])
        counted[0] += 1
        counted[1] += is_unsynced
        counted[2] += is_synced
        self.is_cleared = False

    def backwards(self, parameters: Iterable[Tensor]) -> int:
        """Return how often gradients were added to some parameters."""
        return max((self.counts.get(id(p), [0])[0] for p in parameters), default=0)

    def reduces(self, parameters: Iterable[Tensor]) -> list[bool]:
        """Return which parameters had a backward whose gradient DDP was to reduce, if it has it."""
        counts = (self.counts.get(id(p), [0, 0]) for p in parameters)
        return [times > unsynced for times, unsynced, *_ in counts]

    def unheld(self, names: Names, held: Iterable[Watched], steps: int) -> dict[str, list[int]]:
        """Hash the parameters that no optimizer holds, of each kind of model that was called."""
        found: dict[str, list[int]] = {}
        ids: set[int] = set().union(*(each.ids for each in held))
        for module in self.called if steps < 3 or not steps % 16 else ():
            free = [(p, names.of(p)) for p in module.parameters() if id(p) not in ids]
            own = [p for p, known in free if not known.is_fsdp and known.kind != "flat"]
            if own and not any(map(is_dtensor, module.parameters())):
                hashes = sum(numbers([fingerprint(p) for p in own]))
                found.setdefault(type(module).__name__, []).append(hashes)
        return {kind: sorted(hashes) for kind, hashes in found.items()}

    def take_buffers(self, inner: nn.Module) -> None:
        """Hash the buffers that a forward begins with: DDP has made them equal by then."""
        if self.forwards and self.forwards[-1]["buffers"] is None:
            floats = [(n, b) for n, b in inner.named_buffers() if b.is_floating_point()]
            self.forwards[-1]["buffers"] = {plain_name(n): fingerprint(b) for n, b in floats}

    def fields(self) -> dict[str, Any]:
        """Return everything as data, in which numbers may still be on their device."""
        counted, scheduled = [*self.counts.values()], self.scheduled.values()
        # Else the module inside was called: DDP has not prepared to reduce.
        is_through = not self.forwards or any(f["syncs"] is not None for f in self.forwards)
        return {
            "forwards": [{**each, "buffers": each["buffers"] or {}} for each in self.forwards],
            "loss": sum(float(root) for root in self.roots) if self.roots else None,
            "is_low": self.is_low,
            "losses": self.losses,
            "targets": self.targets,
            "dropped": self.has_dropped,
            "cleared": self.is_cleared,
            "stale": self.stale,
            "scheduled": max(([len(s), *s.values()][:2] for s in scheduled), default=None),
            "computed": sum(times * size for times, *_, size in counted),
            "distinct": sum(size for *_, size in counted),
            "synced": sum((times - left) * size for times, left, _, size in counted),
            "by_hand": sum(size for size, _ in self.by_hand),
            "by_ddp": sum(of_ddp * size for *_, of_ddp, size in counted) * is_through,
            "backwards": max((times for times, *_ in counted), default=0),
            "unsynced": max((times for _, times, *_ in counted), default=0),
        }


class Watched:
    """One optimizer: its parameters as they were last described, and how many steps it took."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.steps = 0
        self.usual: int | None = None  # forwards before its last step
        self.earlier: dict[int, Tensor] = {}  # gradients of the step before the replayed one
        self.entries: list[Entry] = []
        self.parameters: list[Tensor] = []
        self.last: list[Any] = []  # hashes of its parameters
        self.is_written = False  # whether the script changed them since its last step
        self.event: dict[str, Any] = {}
        self.factors: list[float] = []  # what clipping and unscaling multiplied each gradient by
        self.sample: Any = None  # parameters whose update is computed again
        self.ids: set[int] = set()
        self._seen: tuple[object, ...] = ()
        self._half: tuple[int, Tensor] | None = None

    def describe(self, groups: list[dict[str, Any]], names: Names) -> bool:
        """Read its parameters; returns whether anything is new."""
        labelled = [
            (f"param_groups[{g}][{i}]", parameter)
            for g, group in enumerate(groups)
            for i, parameter in enumerate(group["params"])
        ]
        seen = (tuple((id(p), p.requires_grad) for _, p in labelled), names.count)
        if seen == self._seen:
            return False
        if [id(p) for _, p in labelled] != [id(p) for p in self.parameters]:
            self.last = []
        self._seen, self.parameters = seen, [p for _, p in labelled]
        self.ids = {id(p) for p in self.parameters}
        names.tell_apart(labelled)
        self.entries = [names.entry(p, label) for label, p in labelled]
        return True

    def before(self) -> list[Any]:
        """Return the hashes of its parameters; later on, those that the last step left."""
        if self.last and self.steps > EARLY:
            return self.last
        return [fingerprint(p) for p in self.parameters]

    def not_finite(self) -> list[str]:
        """Return the names of its parameters that have numbers that are not finite."""
        tensors: list[Tensor | None] = [*self.parameters]
        return not_finite(self.entries, tensors, norms_of(tensors))

    def take_half(self) -> None:
        """Keep the largest 16-bit parameter, in the first steps."""
        halves = [(p.numel(), i) for i, p in enumerate(self.parameters) if p.element_size() == 2]
        if halves and self.steps < 2:
            self._half = (max(halves)[1], local_of(self.parameters[max(halves)[1]]).clone())

    def compare_half(self) -> list[Any] | None:
        """Return its name and the share of its elements that the step changed."""
        if self._half is None:
            return None
        (index, before), self._half = self._half, None
        changed = (local_of(self.parameters[index]) != before).double().mean()
        return [self.entries[index].name, float(changed)]


class Sample:
    """Some parameters of one optimizer as they are before a step, each with an optimizer of it.

    After the step the same class of optimizer, on plain copies of them, their gradients and their
    states, says what they should be: a shard that lies in memory of another one, or that is written
    over in the step, is something else.
    """

    def __init__(self, optimizer: Any, names: Names) -> None:
        self._copies: list[tuple[str, Tensor, Tensor, Tensor, Any]] = []
        found = [
            (group, p)
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and p.grad.layout is torch.strided and not p.is_complex()
            # Of a DTensor the gradient may be divided in another way, or not yet summed.
            if getattr(p, "placements", None) == getattr(p.grad, "placements", None)
            if 0 < local_of(p).numel() <= _MOST
        ]
        for group, p in found[:: max(1, len(found) // _MANY)] if _is_known(optimizer) else ():
            copy = local_of(p).clone().requires_grad_()
            copy.grad = local_of(p.grad).clone()
            plain = {n: v for n, v in group.items() if n not in _NOT_PLAIN}
            own = type(optimizer)([{**plain, "params": [copy], "foreach": False}])
            state = optimizer.state.get(p, {})
            own.state[copy] = {
                n: local_of(v).clone() if isinstance(v, Tensor) else v for n, v in state.items()
            }
            name = names.of(p).name or "a parameter of the optimizer"
            self._copies.append((name, p, copy, copy.detach().clone(), own))

    def compare(self) -> list[Any] | None:
        """Return name, elements that are something else, and all, of the first that is."""
        for name, p, copy, before, own in self._copies:
            step = type(own).step
            getattr(step, "__wrapped__", step)(own)  # without the script's hooks of all optimizers
            after = local_of(p)
            allowed = _SHARE * (copy.detach() - before).abs().max()
            allowed = allowed + 8 * torch.finfo(copy.dtype).eps * before.abs()
            off = int(((after - copy.detach()).abs() > allowed).sum())
            if off:
                return [name, off, after.numel()]
        return None


def _is_known(optimizer: Any) -> bool:
    kind = type(optimizer)
    is_torch = kind.__module__.startswith("torch.optim.") and kind.__name__ in _BY_ELEMENT
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    others = len(optim._global_optimizer_pre_hooks) > 1  # beside the watcher's
    return is_torch and not own and not others  # which may change gradients, or weights


def options_of(groups: list[dict[str, Any]]) -> list[list[Any]]:
    """Return the rate and the decay of each group of an optimizer, where they are plain numbers."""
    found = [[group.get(name) for name in ("lr", "weight_decay")] for group in groups]
    return [[v if isinstance(v, int | float) else None for v in each] for each in found]


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors of nested data, also of an object such as a library's `ModelOutput`."""
    if not isinstance(tree, Tensor | tuple | list | dict) and hasattr(tree, "__dict__"):
        tree = vars(tree)
    leaves, _ = torch.utils._pytree.tree_flatten(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def numbers(tensors: list[Tensor]) -> list[Any]:
    """Return the values of 0-d tensors, waiting for the device once."""
    if not tensors:
        return []
    parts = [local_of(tensor).reshape(()) for tensor in tensors]  # a loss may be a DTensor
    return torch.stack([part.to(parts[0].device) for part in parts]).tolist()


def plain(tree: Any) -> Any:
    """Return nested data with a number for each 0-d tensor, waiting for the device once."""
    leaves, shape = torch.utils._pytree.tree_flatten(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    whole = [t for t in tensors if not t.is_floating_point()]
    real = [t.double() for t in tensors if t.is_floating_point()]
    integers, floats = iter(numbers(whole)), iter(numbers(real))
    found = [
        next(floats if leaf.is_floating_point() else integers) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
    return torch.utils._pytree.tree_unflatten(found, shape)
