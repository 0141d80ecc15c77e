"""What the ranks of one run communicate: groups, posts, letters, and what is still in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from spec_tests.rig.sim.baton import Baton
from spec_tests.rig.sim.faults import BufferInFlight, CollectiveMismatch, NotSimulated
from spec_tests.rig.sim.meeting import (
    BehindAutograd,
    Combine,
    Extent,
    Letter,
    Place,
    Post,
    SimWork,
    Tensors,
    call_site,
    extent_of,
)

Many = Sequence[Sequence[torch.Tensor]]


class Collectives:
    """The meeting places of one run, and what each rank has launched."""

    def __init__(self, baton: Baton) -> None:
        self.baton = baton
        self._places: dict[tuple[str, tuple[int, ...]], Place] = {}
        self._here: list[dict[str, tuple[Place, int]]] = [{} for _ in baton.ranks]
        self.launched: list[list[SimWork]] = [[] for _ in baton.ranks]
        self._flying: list[list[SimWork]] = [[] for _ in baton.ranks]
        self._last: list[deque[tuple[Post, int, str]]] = [deque(maxlen=6) for _ in baton.ranks]
        self.issued: list[dict[str, int]] = [{} for _ in baton.ranks]

    def enter(self, rank: int, name: str, ranks: Sequence[int], own: int) -> None:
        """Rank `rank` has made the group `name` and is number `own` of it."""
        key = (name, tuple(ranks))
        self._here[rank][name] = self._places.setdefault(key, Place(*key)), own

    @property
    def is_tidy(self) -> bool:
        """Whether no operation is half begun."""
        return all(place.is_empty for place in self._places.values())

    def begin(self) -> None:
        """A new body: nothing has been launched."""
        for rank, last in enumerate(self._last):
            self.launched[rank].clear()
            self._flying[rank].clear()
            last.clear()

    def history(self, rank: int) -> tuple[str, ...]:
        """The last operations of a rank, in words."""
        return tuple(
            f"{post} #{number} of {name}" for post, number, name in tuple(self._last[rank])
        )

    def unwaited(self, rank: int, *, gathers: bool) -> list[str]:
        """What `rank` has launched and not waited for, in words; with `gathers` those as well."""
        return [
            f"{w.post}, launched at {w.post.where}"
            for w in self.launched[rank]
            if not w.is_done and (gathers or "gather" not in w.post.operation)
        ]

    def give_up_guard(self, rank: int) -> None:
        """Let what `rank` has in flight be written to: its owner could not wait for it."""
        for work in self._flying[rank]:
            work.is_guarded = False

    # ------------------------------------------------------------------------------ posting

    def post(
        self,
        group: Any,
        operation: str,
        inputs: Tensors,
        outputs: Tensors,
        combine: Combine,
        *,
        unit: Tensors = (),
        reduce: str | None = None,
        root: int | None = None,
        sizes: tuple[list[int], list[int]] = ([], []),
    ) -> Any:
        """Launch a collective; the boxed work. `unit` must be alike in numbers and dtypes."""
        me = self.baton.me().index
        place, rank = self._place(me, group)
        alike = {
            "sizes": tuple([tensor.numel() for tensor in unit]),
            "dtypes": tuple([tensor.dtype for tensor in unit]),
            "reduce operator": reduce,
            "root": root if root is None else f"rank {place.ranks[root]}",
        }

        def attend(post: Post) -> tuple[Callable[[], bool], Callable[[], str]]:
            meeting = place.attend(post, combine)

            def waits_for() -> str:
                absent = ", ".join(str(place.ranks[rank]) for rank in meeting.absent())
                return (
                    f"{post}, #{meeting.number} of {place}, launched at {post.where}; "
                    f"not come: rank {absent}"
                )

            return lambda: meeting.is_full, waits_for

        return self._launch(me, place, rank, operation, alike, inputs, outputs, attend, sizes)

    def send(self, group: Any, tensors: Tensors, peer: int, tag: int) -> Any:
        """Launch a send. It is complete once it is received, as with large messages."""
        return self._mail(group, "send", tensors, (), peer, tag)

    def receive(self, group: Any, tensors: Tensors, peer: int | None, tag: int) -> Any:
        """Launch a receive, from `peer` or from anybody."""
        return self._mail(group, "receive", (), tensors, peer, tag)

    def _mail(
        self,
        group: Any,
        operation: str,
        inputs: Tensors,
        outputs: Tensors,
        peer: int | None,
        tag: int,
    ) -> Any:
        me = self.baton.me().index
        place, rank = self._place(me, group)
        whom = "anybody" if peer is None else f"rank {place.ranks[peer]}"
        alike: dict[str, Any] = {"to" if operation == "send" else "from": whom, "tag": tag}

        def deliver(post: Post) -> tuple[Callable[[], bool], Callable[[], str]]:
            letter = Letter(rank, post, peer, tag)
            _deliver(place, letter)
            return (
                lambda: letter.other is not None,
                lambda: f"{post} in {place}, launched at {post.where}",
            )

        return self._launch(me, place, rank, operation, alike, inputs, outputs, deliver)

    def _launch(
        self,
        me: int,
        place: Place,
        rank: int,
        operation: str,
        alike: dict[str, Any],
        inputs: Tensors,
        outputs: Tensors,
        bring: Callable[[Post], tuple[Callable[[], bool], Callable[[], str]]],
        sizes: tuple[list[int], list[int]] = ([], []),
    ) -> Any:
        """Bring a post to the others; return the boxed work.

        Args:
            bring: posts it; returns what says that it is complete, and what it waits for in words.
        """
        self.baton.pause()
        with BehindAutograd():
            extents = self._require_free(me, operation, inputs, outputs)
            copies = [tensor.data.clone() for tensor in inputs]
            post = Post(rank, operation, alike, copies, call_site(), list(outputs), sizes)
            counts = self.issued[me]
            number = counts[place.name] = counts.get(place.name, 0) + 1
            self._last[me].append((post, number - 1, place.name))
            self.baton.progress()
            work = SimWork(self.baton, me, post, *bring(post))
            work.watch(inputs, extents)
            # Kept here: C++ holds a handle, and the Python half must live as long.
            self.launched[me].append(work)
            self._flying[me].append(work)
            return work.boxed()

    def _place(self, me: int, group: Any) -> tuple[Place, int]:
        found = dist.ProcessGroup.unbox(group)  # type: ignore[attr-defined]  # not in stubs
        return self._here[me][found.group_name]

    def _require_free(
        self, me: int, operation: str, inputs: Tensors, outputs: Tensors
    ) -> list[Extent]:
        """See that no buffer is in flight; the extents of the outputs."""
        extents = [extent for tensor in outputs if (extent := extent_of(tensor))]
        self._require_own_memory(me, extents)
        flying = self._flying[me] = [work for work in self._flying[me] if not work.is_done]
        if not flying:
            return extents
        wanted = extents
        if inputs is not outputs:
            wanted = [*extents, *(extent for tensor in inputs if (extent := extent_of(tensor)))]
        for work in flying:
            if work.holds_any(wanted):
                raise BufferInFlight(
                    f"rank {me} hands a buffer to {operation} at {call_site()} that still belongs "
                    f"to {work.post}, launched at {work.post.where} and not waited for"
                )
        return extents

    def _require_own_memory(self, me: int, extents: list[Extent]) -> None:
        """See that no two ranks receive into one buffer, such as one that a module keeps."""
        for other, works in enumerate(self._flying):
            for work in works if other != me else ():
                if not work.is_done and work.holds_any(extents):
                    raise NotSimulated(
                        f"simulated ranks are of one process, and ranks {other} and {me} share the "
                        f"buffer that is handed over at {call_site()}"
                    )


def _deliver(place: Place, letter: Letter) -> None:
    """Bring a send and a receive together, first come first served."""
    is_send = letter.post.operation == "send"
    waiting = [
        other
        for other in place.empty_handed
        if (other.post.operation == "send") is not is_send and _fit(letter, other)
    ]
    if not waiting:
        place.empty_handed.append(letter)
        return
    other = waiting[0]
    place.empty_handed.remove(other)
    sent, received = (letter, other) if is_send else (other, letter)
    _require_alike(place, sent.post, received)
    received.post.results = sent.post.inputs
    received.post.alike["source"] = sent.owner
    letter.other, other.other = other, letter


def _fit(one: Letter, other: Letter) -> bool:
    return (
        one.tag == other.tag and one.peer in (None, other.owner) and other.peer in (None, one.owner)
    )


def _require_alike(place: Place, sent: Post, letter: Letter) -> None:
    received = letter.post
    for tensor, output in zip(sent.inputs, received.outputs, strict=True):
        if tensor.numel() != output.numel() or tensor.dtype != output.dtype:
            raise CollectiveMismatch(
                f"rank {place.ranks[sent.rank]} sent {_words(tensor)} at {sent.where}, and rank "
                f"{place.ranks[received.rank]} receives into {_words(output)} at {received.where}"
            )


def _words(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
