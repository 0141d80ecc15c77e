"""Near-misses of sharded data parallelism that touch a buffer while it is in flight."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from spec_tests.impostors.fsdp_offer import card
from spec_tests.impostors.plain_fsdp import Unit


class DropsReductions(Unit):
    """Launches each reduction and lets go of its handle."""

    def send_reduction(self, flat: torch.Tensor) -> torch.Tensor:
        own = flat.new_empty(flat.numel() // self.size())
        self.launched(dist.reduce_scatter_tensor(own, flat, group=self.group, async_op=True))
        return own

    def launched(self, handle: Any) -> None:
        pass


class ReadsBeforeWait(DropsReductions):
    """Waits for all of them where the backward ends."""

    def launched(self, handle: Any) -> None:
        self.__dict__.setdefault("late", []).append(handle)

    def end_of_backward(self) -> None:
        super().end_of_backward()
        assert self.run is not None
        for unit in self.run.units:
            for handle in unit.__dict__.pop("late", []):
                handle.wait()


IMPOSTORS = (
    card(
        DropsReductions,
        "drops-reductions",
        "Launches each reduction and waits for none.",
        "A blocking call was made asynchronous, and its result is a handle now.",
        "Nothing raises: the shard has its shape, and what lay in the buffer is small.",
        "fsdp.schedule.waits-for-every-launch",
    ),
    card(
        ReadsBeforeWait,
        "reads-before-wait",
        "Divides and assigns each reduced shard at once and waits at the end of the backward.",
        "All waits in one place, and the division stayed where it was.",
        "Every handle is waited for, as a review would ask.",
        "fsdp.schedule.same-gradients",
    ),
)
