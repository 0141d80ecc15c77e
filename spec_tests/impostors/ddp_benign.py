"""Right but unusual: every clause up to level `correct` must accept these."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.plain_ddp import PlainDdp, offer


class AfterBackward(PlainDdp):
    """One flat all-reduce per dtype after backward, as in the courses' naive version."""

    def plan(self) -> list[list[int]]:
        self.bucket_bytes = float("inf")
        return super().plan()

    def launch_what_is_ready(self) -> None:
        pass


class ReduceThenDivide(PlainDdp):
    """Sums first and divides afterwards."""

    def scale(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.clone()

    def write_back(self, bucket: list[int], flat: torch.Tensor, used: list[bool]) -> None:
        super().write_back(bucket, flat / self.size(), used)


class Blocking(PlainDdp):
    """Waits for every reduction where it is launched."""

    def send(self, flat: torch.Tensor) -> Any:
        handle = super().send(flat)
        handle.wait()
        return handle


class GatherAndSum(PlainDdp):
    """Gathers everyone's bucket and sums it in rank order: slow, and deterministic by design."""

    def send(self, flat: torch.Tensor) -> Any:
        parts = [torch.empty_like(flat) for _ in range(self.size())]
        dist.all_gather(parts, flat, group=self.group)
        flat.copy_(torch.stack(parts).sum(dim=0))
        return _Done()


class ReduceScatter(PlainDdp):
    """Reduce-scatter and gather in place of an all-reduce."""

    def send(self, flat: torch.Tensor) -> Any:
        size = self.size()
        padded = torch.cat([flat, flat.new_zeros(-flat.numel() % size)])
        own = torch.empty_like(padded[: padded.numel() // size])
        dist.reduce_scatter_tensor(own, padded, group=self.group)
        dist.all_gather_into_tensor(padded, own, group=self.group)
        flat.copy_(padded[: flat.numel()])
        return _Done()


class RefusesUnused(PlainDdp):
    """Refuses parameters without a gradient, by name, on the rank that lacks it."""

    def finish(self) -> None:
        names = [name for name, p in self.module.named_parameters() if p.requires_grad]
        absent = [name for name, p in zip(names, self.trainable, strict=True) if p.grad is None]
        if self.has_news and absent:
            raise RuntimeError(f"no gradient for {', '.join(absent)}; use them or freeze them")
        super().finish()


class ObjectBroadcast(PlainDdp):
    """Starts from a pickled state of the first rank."""

    @torch.no_grad()
    def start_equal(self) -> None:
        tensors = [*self.module.parameters(), *self.module.buffers()]
        parcel = [[t.detach().clone() for t in tensors]]
        dist.broadcast_object_list(parcel, src=self.first_rank(), group=self.group)
        for tensor, value in zip(tensors, parcel[0], strict=True):
            tensor.copy_(value)


class _Done:
    def wait(self) -> None:
        pass


def _card(wrapper: type[PlainDdp], words: str, does: str) -> Impostor:
    return Impostor(f"benign.{words}", does, "", "", (), functions=lambda: offer(wrapper))


IMPOSTORS = (
    _card(PlainDdp, "plain", "The base of the impostors, with nothing overridden: the null one."),
    _card(AfterBackward, "after-backward", "One flat all-reduce after backward."),
    _card(ReduceThenDivide, "reduce-then-divide", "Sums first, divides afterwards."),
    _card(Blocking, "blocking", "Waits inside the hook."),
    _card(GatherAndSum, "gather-and-sum", "Gathers and sums in rank order."),
    _card(ReduceScatter, "reduce-scatter", "Reduce-scatter and gather."),
    _card(RefusesUnused, "refuses-unused", "Raises for parameters without a gradient."),
    _card(ObjectBroadcast, "object-broadcast", "Broadcasts a pickled state at construction."),
)
