"""What a rank did: every collective, in one stream with marks, whoever issued it.

A `TorchDispatchMode` sees each collective that reaches the dispatcher: those issued through
`torch.distributed`, those of DistributedDataParallel's C++ reducer, and the functional ones that
DTensor emits. Nobody has to cooperate. Marks (`recorder.mark("grad ready: fc1")`) from hooks stand
in the same stream, so *order relative to compute* is seen on a CPU without a clock.

Sizes are those of the data that a rank hands in or owns in the result, whichever is larger: an
all-gather counts its gathered output, a reduce-scatter its full input. Counting bytes by meaning
keeps an implementation free to choose its operations. What another thread sends is not seen, but
counted: c10d numbers the operations of each group.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


class Kind(StrEnum):
    """A collective by its meaning."""

    REDUCTION = "reduction"  # all-reduce, reduce, reduce-scatter
    GATHER = "gather"  # all-gather, gather
    BROADCAST = "broadcast"  # broadcast, scatter
    EXCHANGE = "exchange"  # all-to-all, other than of one tensor to all ranks: that is a gather
    SEND = "send"  # one half of a letter
    RECEIVE = "receive"  # the other
    BARRIER = "barrier"


# By the first word that the operator's name contains: a reduce-scatter is a reduction.
_KINDS = (
    ("reduce", Kind.REDUCTION),
    ("gather", Kind.GATHER),
    ("broadcast", Kind.BROADCAST),
    ("scatter", Kind.BROADCAST),
    ("alltoall", Kind.EXCHANGE),
    ("all_to_all", Kind.EXCHANGE),
    ("send", Kind.SEND),
    ("recv", Kind.RECEIVE),
    ("barrier", Kind.BARRIER),
)
_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")


@dataclass(frozen=True)
class Event:
    """One entry of the stream.

    Attributes:
        label: the operator ("c10d.allreduce_") or the mark's own words.
        kind: what the collective means; None for a mark.
        numel, bytes: size of the data; 0 for a mark.
        dtypes: names of the dtypes sent, sorted, without repetition.
    """

    label: str
    kind: Kind | None = None
    numel: int = 0
    bytes: int = 0
    dtypes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.kind is None:
            return self.label
        return f"{self.label}({self.numel} x {'+'.join(self.dtypes)})"


@dataclass(frozen=True)
class Log:
    """What a recorder saw; plain data that a body may return."""

    events: tuple[Event, ...]
    peak_bytes: int
    issued: int = 0
    """Collectives that c10d counted meanwhile on all groups, whichever thread issued them."""

    def collectives(self, *kinds: Kind) -> tuple[Event, ...]:
        """The collectives, all of them or those of the given kinds."""
        return tuple(
            e for e in self.events if e.kind is not None and (not kinds or e.kind in kinds)
        )

    def position(self, label: str) -> int:
        """Index of the first event called `label`.

        Raises:
            ValueError: if there is none.
        """
        for index, event in enumerate(self.events):
            if event.label == label:
                return index
        raise ValueError(f"no event {label!r} in {[str(e) for e in self.events]}")


@dataclass
class _Entry:
    """A storage that is alive: how large it was when first seen, and when last looked at."""

    storage: weakref.ref[torch.UntypedStorage]
    before: int
    size: int


@dataclass
class _StorageLedger:
    """Bytes of the storages that were made since the ledger opened and are still alive.

    A storage is new if it first appears as the output of an operator: one that first appears as an
    input (a parameter, say) was there before, and views of it are not counted either. Storages are
    resized without any operator, so a count looks at each of them; between counts there is a bound.
    """

    peak: int = 0
    _bound: int = 0
    _entries: dict[int, _Entry] = field(default_factory=dict)

    def see_inputs(self, tensors: Iterable[torch.Tensor]) -> None:
        """Whatever is unknown now was there before."""
        for tensor in tensors:
            self._admit(tensor.untyped_storage(), is_new=False)

    def see_outputs(self, tensors: Iterable[torch.Tensor]) -> None:
        """Whatever is unknown now is new."""
        for tensor in tensors:
            self._admit(tensor.untyped_storage(), is_new=True)
        if self._bound > self.peak:
            self.peak = max(self.peak, self.count())

    def count(self) -> int:
        """Bytes that are alive now, beyond what was there before."""
        self._bound = 0
        for entry in list(self._entries.values()):
            storage = entry.storage()
            entry.size = entry.before if storage is None else storage.nbytes()
            self._bound += entry.size - entry.before
        return self._bound

    def _admit(self, storage: torch.UntypedStorage, *, is_new: bool) -> None:
        key, size = storage._cdata, storage.nbytes()
        entry = self._entries.get(key)
        if entry is None:
            before = 0 if is_new else size
            watch = weakref.ref(storage, lambda _: self._forget(key))
            entry = self._entries[key] = _Entry(watch, before, before)
        self._bound += size - entry.size
        entry.size = size

    def _forget(self, key: int) -> None:
        entry = self._entries.pop(key)
        self._bound -= entry.size - entry.before


class Recorder(TorchDispatchMode):
    """Use as a context manager; read `log()` at the end, `live_bytes` at any time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it bare
        self._events: list[Event] = []
        self._ledger = _StorageLedger()
        self._issued_before = issued_by_all_groups()
        self._issued: int | None = None  # once the block has ended

    @property
    def live_bytes(self) -> int:
        """Bytes of storages created since the recorder was entered that are still alive."""
        return self._ledger.count()

    def forget_peak(self) -> None:
        """Let the peak begin anew at what is alive now."""
        self._ledger.peak = self._ledger.count()

    def mark(self, label: str) -> None:
        """Write `label` into the stream."""
        self._events.append(Event(label))

    def log(self) -> Log:
        """Everything up to now."""
        issued = self._issued
        if issued is None:
            issued = issued_by_all_groups() - self._issued_before
        return Log(tuple(self._events), self._ledger.peak, issued)

    def __exit__(self, *error: Any) -> None:
        """End the recording; what is sent later does not count."""
        self._issued = issued_by_all_groups() - self._issued_before
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch leaves it bare

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if types and any(t.__name__ == "DTensor" for t in types):
            return NotImplemented  # let it desugar: its collectives come back as plain calls
        self._ledger.see_inputs(_tensors_of((*args, *kwargs.values()) if kwargs else args))
        result = func(*args, **(kwargs or {}))
        outputs = _tensors_of(result)
        if func.namespace in _NAMESPACES:
            self._note(func, args, outputs)
        self._ledger.see_outputs(outputs)
        return result

    def _note(self, func: Any, args: tuple[Any, ...], outputs: list[torch.Tensor]) -> None:
        name = func._schema.name.split("::")[1]
        kind = next((kind for word, kind in _KINDS if word in name), None)
        if kind is None:  # wait_tensor and the like move nothing
            return
        if kind is Kind.EXCHANGE and _sends_one_to_all(args):
            kind = Kind.GATHER
        groups = [_tensors_of(arg) for arg in args] + [outputs]
        largest = max(groups, key=lambda group: sum(t.numel() for t in group))
        self._events.append(
            Event(
                label=f"{func.namespace}.{name}",
                kind=kind,
                numel=sum(t.numel() for t in largest),
                bytes=sum(t.numel() * t.element_size() for t in largest),
                dtypes=tuple(sorted({str(t.dtype).removeprefix("torch.") for t in largest})),
            )
        )


def _sends_one_to_all(args: tuple[Any, ...]) -> bool:
    """Whether an all-to-all sends every rank the same, and not zeros, which gradients may be."""
    sent = [a for a in args if isinstance(a, torch.Tensor) or _tensors_of(a)][-1]
    if isinstance(sent, torch.Tensor):
        sizes = [a for a in args if isinstance(a, list)][-1]
        sent = sent.split(sizes or len(sent) // dist.ProcessGroup.unbox(args[2]).size() or 1)
    first, *rest = [piece for piece in sent if piece.numel()] or [torch.empty(0)]
    return bool(rest and first.any() and all(torch.equal(first, piece) for piece in rest))


def issued_by_all_groups() -> int:
    """A number that grows with every collective on any group; -1 without any."""
    if not dist.is_initialized():
        return -1
    world = dist.distributed_c10d._world
    # A pretended world (pretended.py) does not number what it is given.
    groups = [group for group, (backend, _) in world.pg_map.items() if backend != "fake"]
    return sum(group._get_sequence_number_for_group() for group in groups)  # type: ignore[attr-defined]  # not in stubs


_PLAIN = frozenset((bool, int, float, torch.dtype, torch.device, torch.layout))


def _tensors_of(argument: object) -> list[torch.Tensor]:
    # Not torch's pytree, which asks each argument of each operator what kind of container it is: a
    # sixth of the time of a recorded step.
    found: list[torch.Tensor] = []
    _gather(argument, found)
    return found


def _gather(argument: object, found: list[torch.Tensor]) -> None:
    if isinstance(argument, torch.Tensor):
        found.append(argument)
    elif isinstance(argument, (list, tuple)):  # a union takes three times as long
        for each in argument:
            if each is not None and type(each) not in _PLAIN:
                _gather(each, found)
    elif isinstance(argument, dict):
        for each in argument.values():
            _gather(each, found)
