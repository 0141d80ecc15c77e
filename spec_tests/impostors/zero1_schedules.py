"""Near-misses of the sharded optimizer that only another order of events can show."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from spec_tests.impostors.plain_zero1 import PlainZero1, card


class Overlaps(PlainZero1):
    """Right: all messages at once, each waited for before it is read."""

    @torch.no_grad()
    def exchange(self) -> None:
        self.flying: list[tuple[torch.Tensor, torch.Tensor, Any]] = []
        for number, (parameter, owner) in enumerate(self.owners.items()):
            whole = self.room(number, parameter)
            whole.copy_(parameter.reshape(-1))
            handle = dist.broadcast(whole, group=self.group, group_src=owner, async_op=True)
            self.flying.append((parameter, whole, handle))
        self.land(len(self.flying))

    def room(self, number: int, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.new_empty(parameter.numel())

    def land(self, count: int) -> None:
        """Take the first `count` messages in."""
        for parameter, whole, handle in self.flying[:count]:
            self.wait(handle)
            parameter.copy_(whole.view(parameter.shape))
        del self.flying[:count]

    def wait(self, handle: Any) -> None:
        handle.wait()


class WaitsForLastOnly(Overlaps):
    """Right on one stream, where the last to be launched is the last to be done."""

    def land(self, count: int) -> None:
        if self.flying:
            self.flying[-1][2].wait()
        super().land(count)

    def wait(self, handle: Any) -> None:
        pass


class DoubleBuffers(Overlaps):
    """Two buffers in turns; the message before the last one is taken for done."""

    def room(self, number: int, parameter: torch.Tensor) -> torch.Tensor:
        rooms = self.__dict__.setdefault("rooms", {})
        key = (parameter.dtype, number % 2)
        if key not in rooms:
            largest = max(p.numel() for p in self.owners)
            rooms[key] = parameter.new_empty(largest)
        if len(self.flying) > 1:
            self.is_early = True
            self.land(1)
            self.is_early = False
        return rooms[key][: parameter.numel()]

    is_early = False

    def wait(self, handle: Any) -> None:
        if not self.is_early:
            handle.wait()


IMPOSTORS = (
    card(
        WaitsForLastOnly,
        "waits-for-last-only",
        "Waits for the message that was launched last and takes the others for arrived.",
        "On one NCCL stream it is so; gloo and several streams promise nothing.",
        "Small messages over loopback arrive in the order of their launch.",
        "zero1.schedule.waits-for-every-launch",
    ),
    card(
        DoubleBuffers,
        "double-buffers-in-flight",
        "Fills a buffer again while the message before the last may still be under way.",
        "Double buffering without a wait: 'two in flight are enough'.",
        "A small message takes less time than the copy of the next parameter.",
        "zero1.schedule.same-weights",
    ),
)
