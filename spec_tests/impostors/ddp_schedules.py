"""Near-misses of data parallelism that only another order of events can show.

On one quiet machine operations complete in the order of their launch and long before anyone looks,
so each of these gives right gradients there, again and again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.plain_ddp import PlainDdp, offer

SAME = "ddp.schedule.same-gradients"
WAITS = "ddp.schedule.waits-for-every-launch"


class WaitsForLastOnly(PlainDdp):
    def finish(self) -> None:
        while self.has_news and self.launched < len(self.buckets):
            self.launch(self.buckets[self.launched])
        if self.flying:
            self.flying[-1][2].wait()
        super().finish()

    def wait(self, handle: Any) -> None:
        pass


class ReadsBeforeWait(PlainDdp):
    """Waits for all reductions once everything is written back."""

    def finish(self) -> None:
        self.late: list[Any] = []
        super().finish()
        for handle in self.late:
            handle.wait()

    def wait(self, handle: Any) -> None:
        self.late.append(handle)


class ReordersByCompletion(PlainDdp):
    """The bucket that was done first in this step goes first in the next one."""

    def finish(self) -> None:
        while self.has_news and self.launched < len(self.buckets):
            self.launch(self.buckets[self.launched])
        left, done = list(self.flying), []
        while left:
            for each in list(left):
                if each[2].is_completed():
                    left.remove(each)
                    done.append(each[0])
        self.buckets = done or self.buckets
        super().finish()


class DoubleBuffers(PlainDdp):
    """Two scratch buffers, taken in turns."""

    def new_round(self) -> None:
        super().new_round()
        self.scratch: dict[Any, list[torch.Tensor]] = getattr(self, "scratch", {})

    def scale(self, flat: torch.Tensor) -> torch.Tensor:
        key = (flat.dtype, self.launched % 2)
        room = self.scratch.setdefault(key, [flat.new_empty(1 << 16)])[0]
        piece = room[: flat.numel()]
        torch.div(flat, self.size(), out=piece)
        return piece

    def send(self, flat: torch.Tensor) -> Any:
        handle = super().send(flat)
        self.result = flat.new_empty(flat.numel())
        return _CopiesOut(handle, flat, self.result)

    def launch(self, bucket: list[int]) -> None:
        super().launch(bucket)
        _, _, handle = self.flying[-1]
        self.flying[-1] = (bucket, self.result, handle)
        if len(self.flying) > 2:  # the one before the last is surely done: its buffer is next
            self.flying[-3][2].take()


class _CopiesOut:
    """Takes the result out of the scratch buffer, once."""

    def __init__(self, handle: Any, flat: torch.Tensor, result: torch.Tensor) -> None:
        self.handle, self.flat, self.result, self.is_taken = handle, flat, result, False

    def take(self) -> None:
        if not self.is_taken:
            self.is_taken = True
            self.result.copy_(self.flat)

    def wait(self) -> None:
        self.handle.wait()
        self.take()


class SecondPhaseByCompletion(PlainDdp):
    """Sums by reduce-scatter; gathers whichever bucket is done first."""

    def send(self, flat: torch.Tensor) -> Any:
        size = self.size()
        padded = torch.cat([flat, flat.new_zeros(-flat.numel() % size)])
        rows = list(padded.view(size, -1))
        own = torch.empty_like(rows[0])
        return _TwoPhases(
            dist.reduce_scatter(
                own, [row.clone() for row in rows], group=self.group, async_op=True
            ),
            own,
            flat,
        )

    def finish(self) -> None:
        while self.has_news and self.launched < len(self.buckets):
            self.launch(self.buckets[self.launched])
        left = [handle for _, _, handle in self.flying]
        while left:
            for handle in list(left):
                if handle.first.is_completed():
                    handle.gather(self.group, self.size())
                    left.remove(handle)
        super().finish()


class _TwoPhases:
    def __init__(self, first: Any, own: torch.Tensor, flat: torch.Tensor) -> None:
        self.first, self.own, self.flat = first, own, flat

    def gather(self, group: Any, size: int) -> None:
        self.first.wait()
        rows = [torch.empty_like(self.own) for _ in range(size)]
        dist.all_gather(rows, self.own, group=group)
        self.flat.copy_(torch.cat(rows)[: self.flat.numel()])

    def wait(self) -> None:
        pass


def _card(
    wrapper: type[PlainDdp], name: str, does: str, seen: str, unseen: str, *clauses: str
) -> Impostor:
    return Impostor(
        f"ddp.{name}",
        does,
        seen,
        unseen,
        clauses,
        lambda: offer(wrapper),
        outcomes=("failed", "hang"),
    )


IMPOSTORS = (
    _card(
        WaitsForLastOnly,
        "waits-for-last-only",
        "Waits for the reduction that was launched last and takes the others for done.",
        "On one NCCL stream it is so; gloo and several streams promise nothing.",
        "Equal sizes and punctual ranks: what was launched first is done first.",
        WAITS,
    ),
    _card(
        ReadsBeforeWait,
        "reads-before-wait",
        "Writes the means back and waits for their reductions afterwards.",
        "The waits were moved behind the loop, to have them all in one place.",
        "The message about unused parameters goes last, and what went before it has arrived.",
        SAME,
        WAITS,
    ),
    _card(
        ReordersByCompletion,
        "reorders-by-completion",
        "Launches buckets in the order in which this rank saw them complete in the step before.",
        "PyTorch rebuilds its buckets by what the first step saw, and sends rank 0's order to all.",
        "On one machine all ranks see the same order, nearly always.",
        SAME,
    ),
    _card(
        DoubleBuffers,
        "double-buffers-in-flight",
        "Fills a scratch buffer again while the reduction before the last may still use it.",
        "Double buffering without a wait: 'two in flight are enough'.",
        "A reduction of a toy takes less time than the next gradient.",
        SAME,
    ),
    _card(
        SecondPhaseByCompletion,
        "gathers-by-completion",
        "Launches the second phase of whichever bucket has completed first.",
        "Polling `is_completed` to keep the wire busy; order then is each rank's own.",
        "Over loopback operations complete in the order of their launch, on all ranks.",
        SAME,
    ),
)
