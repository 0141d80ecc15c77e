"""What the ranks of one run communicate: groups, posts, letters, and what is still in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from spec_tests.rig.sim.baton import Baton
from spec_tests.rig.sim.faults import BufferInFlight, CollectiveMismatch
from spec_tests.rig.sim.meeting import (
    Combine,
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
        self._here: list[dict[str, Place]] = [{} for _ in baton.ranks]
        self.launched: list[list[SimWork]] = [[] for _ in baton.ranks]
        self._flying: list[list[SimWork]] = [[] for _ in baton.ranks]
        self.history: list[deque[str]] = [deque(maxlen=6) for _ in baton.ranks]
        self.issued: list[dict[str, int]] = [{} for _ in baton.ranks]

    def enter(
        self, rank: int, name: str, ranks: Sequence[int], *, is_pretended: bool = False
    ) -> None:
        """Rank `rank` has made the group `name`; in a pretended one nobody else ever comes."""
        if is_pretended:
            self._here[rank][name] = Place(name, tuple(ranks), is_pretended=True)
            return
        key = (name, tuple(ranks))
        self._here[rank][name] = self._places.setdefault(key, Place(*key))

    @property
    def is_tidy(self) -> bool:
        """Whether no operation is half begun."""
        return all(place.is_empty for place in self._places.values())

    def begin(self) -> None:
        """A new body: nothing has been launched."""
        for rank, words in enumerate(self.history):
            self.launched[rank].clear()
            self._flying[rank].clear()
            words.clear()

    def unwaited(self, rank: int) -> list[str]:
        """What `rank` has launched and not waited for, in words."""
        return [
            f"{w.post}, launched at {w.post.where}" for w in self.launched[rank] if not w.is_done
        ]

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
        if place.is_pretended:
            if operation.startswith("all_gather"):
                _bring_alone(len(place.ranks), operation, inputs, outputs, combine)
            return self._nothing(me, rank, operation)
        self.baton.pause()
        alike = {
            "sizes": tuple(tensor.numel() for tensor in unit),
            "dtypes": tuple(str(tensor.dtype).removeprefix("torch.") for tensor in unit),
            "reduce operator": reduce,
            "root": root if root is None else f"rank {place.ranks[root]}",
        }
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            self._require_free(me, operation, [*inputs, *outputs])
            copies = [tensor.data.clone() for tensor in inputs]
            post = Post(rank, operation, alike, copies, call_site(), sizes=sizes)
            self._note(me, place, post)
            self.baton.progress()
            meeting = place.attend(post, combine)

            def waits_for() -> str:
                absent = ", ".join(str(place.ranks[rank]) for rank in meeting.absent())
                return (
                    f"{post}, #{meeting.number} of {place}, launched at {post.where}; "
                    f"not come: rank {absent}"
                )

            return self._launch(me, post, lambda: meeting.is_full, waits_for, inputs, outputs)

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
        if place.is_pretended:
            return self._nothing(me, rank, operation)
        self.baton.pause()
        whom = "anybody" if peer is None else f"rank {place.ranks[peer]}"
        alike: dict[str, Any] = {"to" if operation == "send" else "from": whom, "tag": tag}
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            self._require_free(me, operation, [*inputs, *outputs])
            copies = [tensor.data.clone() for tensor in inputs]
            post = Post(rank, operation, alike, copies, call_site())
            post.outputs = list(outputs)
            self._note(me, place, post)
            self.baton.progress()
            letter = Letter(rank, post, peer, tag)
            _deliver(place, letter)
            return self._launch(
                me,
                post,
                lambda: letter.other is not None,
                lambda: f"{post} in {place}, launched at {post.where}",
                inputs,
                outputs,
            )

    def _nothing(self, me: int, rank: int, operation: str) -> Any:
        """An operation of a pretended group: complete, and no tensor has changed."""
        post = Post(rank, operation, {}, [], call_site())
        work = SimWork(self.baton, post, lambda: True, lambda: operation)
        work.is_done = True
        self.launched[me].append(work)
        return work.boxed()

    def _launch(
        self,
        me: int,
        post: Post,
        is_complete: Callable[[], bool],
        waits_for: Callable[[], str],
        inputs: Tensors,
        outputs: Tensors,
    ) -> Any:
        work = SimWork(self.baton, post, is_complete, waits_for)
        work.watch(inputs, outputs)
        # Kept here: C++ holds a handle, and the Python half must live as long.
        self.launched[me].append(work)
        self._flying[me].append(work)
        return work.boxed()

    def _place(self, me: int, group: Any) -> tuple[Place, int]:
        found = dist.ProcessGroup.unbox(group)  # type: ignore[attr-defined]  # not in stubs
        return self._here[me][found.group_name], found.rank()

    def _require_free(self, me: int, operation: str, tensors: Tensors) -> None:
        flying = self._flying[me] = [work for work in self._flying[me] if not work.is_done]
        if not flying:
            return
        wanted = [extent for tensor in tensors if (extent := extent_of(tensor))]
        for work in flying:
            if work.holds_any(wanted):
                raise BufferInFlight(
                    f"rank {me} hands a buffer to {operation} at {call_site()} that still belongs "
                    f"to {work.post}, launched at {work.post.where} and not waited for"
                )

    def _note(self, me: int, place: Place, post: Post) -> None:
        counts = self.issued[me]
        counts[place.name] = counts.get(place.name, 0) + 1
        self.history[me].append(f"{post} #{counts[place.name] - 1} of {place.name}")


def _bring_alone(
    size: int, operation: str, inputs: Tensors, outputs: Tensors, combine: Combine
) -> None:
    """As torch's fake group does: whoever gathers gets its own from each of the others too."""
    posts = [Post(rank, operation, {}, list(inputs), "") for rank in range(size)]
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        for output, result in zip(outputs, combine(posts)[0], strict=True):
            output.data.copy_(result.view_as(output))


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
