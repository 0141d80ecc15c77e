"""Rendezvous: what a rank posts waits until every rank of the group has posted the like.

The n-th collective of a group on one rank meets the n-th on every other. Inputs are copied when
they are posted and outputs are overwritten with poison; the results are computed when the last rank
arrives and copied in when the owner waits. So who reads too early computes with NaN, whatever the
timing, and who writes too early is caught at the wait.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from spec_tests.rig.sim.baton import Baton
from spec_tests.rig.sim.faults import BufferInFlight, CollectiveMismatch, NotSimulated, SimError

Tensors = Sequence[torch.Tensor]


@dataclass
class Post:
    """What one rank brings to a meeting.

    Attributes:
        rank: its number in the group.
        operation: as a reader knows it, "all_reduce".
        alike: what must be the same on all ranks, name to value.
        inputs: copies of what it sends.
        sizes: for operations whose parts differ between ranks.
        where: file and line outside of torch.
        ranks: how many the group has.
    """

    rank: int
    operation: str
    alike: dict[str, Any]
    inputs: list[torch.Tensor]
    where: str
    outputs: list[torch.Tensor] = field(default_factory=list)
    sizes: tuple[list[int], list[int]] = ([], [])
    results: list[torch.Tensor] = field(default_factory=list)
    ranks: int = 1

    def __str__(self) -> str:
        given = {name: value for name, value in self.alike.items() if value not in (None, ())}
        if "dtypes" in given:
            given["dtypes"] = tuple(str(d).removeprefix("torch.") for d in given["dtypes"])
        words = [f"{name} {value}" for name, value in given.items()]
        return f"{self.operation} ({', '.join(words)})" if words else self.operation


Combine = Callable[[list[Post]], list[Tensors]]
"""From the posts in order of rank to the results of each, in the order of its outputs."""


@dataclass
class Meeting:
    """One collective of one group, while not everybody has come."""

    number: int
    size: int
    posts: dict[int, Post] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        """Whether every rank has posted."""
        return len(self.posts) == self.size

    def absent(self) -> list[int]:
        """Ranks of the group that have not come yet."""
        return [rank for rank in range(self.size) if rank not in self.posts]


@dataclass
class Place:
    """One process group: its ranks, and the meetings that are not full."""

    name: str
    ranks: tuple[int, ...]
    arrived: list[int] = field(default_factory=list)
    open: dict[int, Meeting] = field(default_factory=dict)
    empty_handed: list[Letter] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arrived = [0] * len(self.ranks)

    def __str__(self) -> str:
        return f"group {self.name} of ranks {list(self.ranks)}"

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits for anybody."""
        return not self.open and not self.empty_handed

    def attend(self, post: Post, combine: Combine) -> Meeting:
        """Bring `post` to this rank's next meeting; whoever comes last computes.

        Raises:
            CollectiveMismatch: somebody came with something else.
        """
        number = self.arrived[post.rank]
        self.arrived[post.rank] += 1
        meeting = self.open.setdefault(number, Meeting(number, len(self.ranks)))
        for first in meeting.posts.values():
            if first.operation != post.operation or first.alike != post.alike:
                self._refuse(first, post, number)
            break
        meeting.posts[post.rank] = post
        if meeting.is_full:
            del self.open[number]
            posts = [meeting.posts[rank] for rank in range(meeting.size)]
            for each, results in zip(posts, combine(posts), strict=True):
                each.results = list(results)
        return meeting

    def _refuse(self, first: Post, post: Post, number: int) -> NoReturn:
        if first.operation != post.operation:
            differs = "another operation"
        else:
            names = [name for name in post.alike if first.alike[name] != post.alike[name]]
            differs = f"other {names[0]}" if names[0].endswith("s") else f"another {names[0]}"
        raise CollectiveMismatch(
            f"rank {self.ranks[post.rank]} came with {differs} to collective #{number} of {self}:\n"
            f"  rank {self.ranks[first.rank]} posted first: {first}, at {first.where}\n"
            f"  rank {self.ranks[post.rank]} posted now: {post}, at {post.where}"
        )


@dataclass
class Letter:
    """A send, or a receive, and the other half once there is one."""

    owner: int
    post: Post
    peer: int | None
    tag: int
    other: Letter | None = None


# ------------------------------------------------------------- buffers of an operation in flight


class BehindAutograd:
    """A block in which torch neither records gradients nor calls dispatch modes.

    As `torch.no_grad` and `_DisableTorchDispatch` together, in a third of their time: an operation
    enters it twice.
    """

    __slots__ = ("_guard", "_was_on")

    def __enter__(self) -> None:
        self._was_on = torch.is_grad_enabled()
        self._guard = torch._C._DisableTorchDispatch()
        self._guard.__enter__()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        torch._C._set_grad_enabled(self._was_on)
        self._guard.__exit__(*error)


def poison(tensor: torch.Tensor) -> None:
    """Overwrite with what no computation survives: NaN, or the smallest integer."""
    value = _poison_of(tensor.dtype)
    if value is not None:
        tensor.data.fill_(value)


def is_poison(tensor: torch.Tensor) -> bool:
    """Whether nothing has been written to it since."""
    value = _poison_of(tensor.dtype)
    if value is None or tensor.numel() == 0:
        return True
    data = tensor.data
    return bool((data == value).all() if value == value else data.isnan().all())


def version_of(tensor: torch.Tensor) -> int | None:
    """How often it was written to in place, poison that stays poison included; None for a part.

    The counter is that of all views of a memory: a write to another part counts as well.
    """
    is_whole = tensor._base is None and tensor.nbytes == tensor.untyped_storage().nbytes()
    return tensor._version if is_whole and not tensor.is_inference() else None


@functools.cache
def _poison_of(dtype: torch.dtype) -> float | int | None:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool:
        return None
    return torch.iinfo(dtype).min or torch.iinfo(dtype).max


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both hold the same, NaN included."""
    if one.numel() == 0 or torch.equal(one.data, other):
        return True
    return torch.equal(
        one.data.contiguous().view(-1).view(torch.uint8),
        other.contiguous().view(-1).view(torch.uint8),
    )


Extent = tuple[int, int, int]
"""Of a tensor in memory: its storage, its first byte and the one after its last."""


def extent_of(tensor: torch.Tensor) -> Extent | None:
    """Where its elements lie; None without any."""
    if tensor.numel() == 0:
        return None
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        length = tensor.numel()
    else:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        length = 1 + sum((n - 1) * stride for n, stride in steps)
    end = begin + length * tensor.element_size()
    return tensor.untyped_storage().data_ptr(), begin, end


def overlap(one: Extent, other: Extent) -> bool:
    """Whether they share memory."""
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]


# ------------------------------------------------------------------------------------- the handle


class SimWork(dist.Work):
    """The handle of an operation. `wait` brings the results in."""

    def __init__(
        self,
        baton: Baton,
        owner: int,
        post: Post,
        is_complete: Callable[[], bool],
        waits_for: Callable[[], str],
    ) -> None:
        super().__init__()
        self.post, self.is_done, self.is_guarded = post, False, True
        self.owner = owner
        self._baton, self._is_complete, self._waits_for = baton, is_complete, waits_for
        self._denials = baton.chooser.delay()
        self._inputs: Tensors = ()
        self._sent: Tensors = ()
        self._extents: list[Extent] = []
        self._versions: list[int | None] = []
        self._held: list[weakref.ref[torch.Tensor]] = []

    def watch(self, inputs: Tensors, extents: list[Extent]) -> None:
        """Keep an eye on the buffers until the wait; poison what will be overwritten.

        Args:
            extents: those of the outputs, without the empty ones.
        """
        self._inputs, self._sent = inputs, self.post.inputs
        self._extents = extents
        own = self.post.outputs or (() if self.post.operation == "gather" else inputs)
        # Weak: this object lives until the body ends, and the caller's memory must not.
        self._held = [weakref.ref(tensor) for tensor in own]
        for tensor in self.post.outputs:
            poison(tensor)
        self._versions = [version_of(tensor) for tensor in self.post.outputs]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the results are in place; others run meanwhile."""
        if not self.is_done:
            self._baton.wait_until(self._is_complete, self._waits_for)
            self._deliver()
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is complete; if so, the results are in place."""
        if self.is_done:
            return True
        if self._baton.poll(self._is_complete, self._waits_for):
            if self._denials <= 0:
                self._deliver()
            self._denials -= 1
        return self.is_done

    def is_success(self) -> bool:
        """As `is_completed`: here operations do not fail."""
        return self.is_completed()

    def exception(self) -> None:
        """None: here operations do not fail."""

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that hold the result, as gloo does; they are the caller's.

        Raises:
            SimError: Nobody has waited. On gloo that depends on the timing.
            NotSimulated: gloo gives no result of this operation, or the caller kept no tensor.
        """
        if self.post.operation.startswith(("reduce_scatter", "send", "receive")):
            raise NotSimulated(f"gloo implements no result() of {self.post.operation}")
        if not self.is_done:
            raise SimError(
                f"rank {self.owner} called result() of {self.post}, launched at {self.post.where}, "
                "before wait()"
            )
        return self._tensors()

    def get_future(self) -> Any:
        """A future that is complete: C++ waits for it without giving the baton away."""
        tensors = self._tensors()
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(tensors)
        return future

    def _tensors(self) -> list[torch.Tensor]:
        found = [tensor for held in self._held if (tensor := held()) is not None]
        if len(found) < len(self._held):
            raise NotSimulated("a simulated handle does not keep the tensors of an operation alive")
        if self.post.operation == "all_gather_single":  # gloo has a view for each rank
            return list(found[0].detach().chunk(self.post.ranks))
        return found

    def source_rank(self) -> int:
        """Who sent what was received."""
        return int(self.post.alike.get("source", -1))

    _source_rank = source_rank

    def holds_any(self, wanted: Sequence[Extent]) -> bool:
        """Whether one of `wanted` shares memory with an output in flight."""
        return any(overlap(one, own) for own in self._extents for one in wanted)

    def _deliver(self) -> None:
        self.is_done = True
        post = self.post
        with BehindAutograd():
            if self.is_guarded:
                self._require_untouched()
            for output, result in zip(post.outputs, post.results, strict=True):
                # `.data`: backends write behind autograd's back, so no version may be counted.
                output.data.copy_(
                    result if result.shape == output.shape else result.view_as(output)
                )
        # The handle lives on until the body ends; what it held must not.
        self._inputs = self._sent = ()
        post.inputs, post.outputs, post.results = [], [], []

    def _require_untouched(self) -> None:
        outputs = self.post.outputs
        versions = self._versions or [None] * len(outputs)
        for tensor, version in zip(outputs, versions, strict=True):
            if not is_poison(tensor) or (version is not None and version != version_of(tensor)):
                raise self._touched("wrote to a buffer that will receive the result")
        for tensor, sent in zip(self._inputs, self._sent, strict=True):
            # What is reduced in place is its own output.
            if any(tensor is output for output in outputs) or same_bits(tensor, sent):
                continue
            # What is sent may lie in what is received: a row of the gathered matrix, say.
            extent = extent_of(tensor)
            if extent is not None and not self.holds_any([extent]):
                raise self._touched("changed what it sends")

    def _touched(self, what: str) -> BufferInFlight:
        return BufferInFlight(
            f"rank {self.owner} {what} between the launch and the wait of {self.post}, launched at "
            f"{self.post.where}; the buffers of an operation belong to it until wait() returns"
        )


_NO_CALL_SITES = ("/torch/", "/rig/sim/", "/rig/ranks/", "/typing_extensions.py")


def call_site() -> str:
    """File and line of the innermost frame that is neither torch's nor the rig's, nor a wrapper's.

    Deprecated functions of torch are wrapped by typing_extensions.
    """
    frame = sys._getframe(1)
    found = frame
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in _NO_CALL_SITES):
            found = frame
            break
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    path = found.f_code.co_filename.split("/")
    return f"{'/'.join(path[-2:])}:{found.f_lineno}"
