"""Near-misses of reductions: not finished, not begun, begun anew, or in another order."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.plain_ddp import PlainDdp, offer


class DropsLastBucket(PlainDdp):
    def finish(self) -> None:
        if not self.has_news:
            return
        used = self.used_anywhere()
        for bucket, flat, handle in self.flying[: max(1, len(self.flying) - 1)]:
            handle.wait()
            self.write_back(bucket, flat, used)
        for _, _, handle in self.flying:
            handle.wait()
        self.new_round()


class SumsAgainInFinish(PlainDdp):
    """Divides in the hook, sums in finish, and does not ask whether there is anything new."""

    def on_gradient(self, index: int) -> None:
        if self.is_synchronised:
            gradient = self.trainable[index].grad
            assert gradient is not None
            gradient /= self.size()

    @torch.no_grad()
    def finish(self) -> None:
        used = self.used_anywhere()
        for index, parameter in enumerate(self.trainable):
            if used[index]:
                whole = self.local(index).contiguous()
                dist.all_reduce(whole, group=self.group)
                parameter.grad = whole.clone()


class _NoSecondMessage(PlainDdp):
    """Without the message about unused parameters, which waits for all that was sent before."""

    def used_anywhere(self) -> list[bool]:
        return [p.grad is not None for p in self.trainable]


class DropsHandles(_NoSecondMessage):
    def wait(self, handle: Any) -> None:
        pass


class WaitsForFirstOnly(_NoSecondMessage):
    def wait(self, handle: Any) -> None:
        if handle is self.flying[0][2]:
            handle.wait()


class StaleBucket(PlainDdp):
    """Adds into persistent buffers that nobody clears."""

    def launch(self, bucket: list[int]) -> None:
        self.launched += 1
        if not hasattr(self, "store"):
            self.store: dict[int, torch.Tensor] = {}
        fresh = self.scale(self.flatten(bucket))
        kept = self.store.setdefault(bucket[0], torch.zeros_like(fresh))
        kept += fresh
        self.flying.append((bucket, kept, self.send(kept)))


class SumsZeroedViews(PlainDdp):
    """Takes a gradient that was set to zero for one that was set to None: keeps the old mean."""

    def __init__(self, *args: Any) -> None:
        self.means: dict[int, torch.Tensor] = {}
        super().__init__(*args)

    def register(self, index: int, parameter: nn.Parameter) -> None:
        def before(gradient: torch.Tensor) -> torch.Tensor:
            # In-place mode: "the gradient is still there, so the bucket still holds it too".
            if parameter.grad is not None and index in self.means and self.is_synchronised:
                return gradient + self.means[index]
            return gradient

        parameter.register_hook(before)
        super().register(index, parameter)

    def write_back(self, bucket: list[int], flat: torch.Tensor, used: list[bool]) -> None:
        super().write_back(bucket, flat, used)
        for index in bucket:
            self.means[index] = self.local(index).detach().clone()


class WaitsForUnused(PlainDdp):
    def finish(self) -> None:
        while self.has_news and len(self.ready) < len(self.trainable):
            time.sleep(0.01)
        super().finish()


class ReducesWhatItHas(PlainDdp):
    def launch_what_is_ready(self) -> None:
        pass

    @torch.no_grad()
    def finish(self) -> None:
        for parameter in self.trainable:
            if parameter.grad is not None and self.has_news:
                whole = parameter.grad.contiguous()
                dist.all_reduce(whole, group=self.group)
                parameter.grad.copy_(whole / self.size())
        self.new_round()


class DividesByContributors(PlainDdp):
    def launch_what_is_ready(self) -> None:
        pass

    @torch.no_grad()
    def finish(self) -> None:
        if not self.has_news:
            return
        for index, parameter in enumerate(self.trainable):
            whole = self.local(index).contiguous()
            count = torch.tensor(float(parameter.grad is not None))
            dist.all_reduce(whole, group=self.group)
            dist.all_reduce(count, group=self.group)
            if count:
                parameter.grad = whole / count
        self.new_round()


class LaunchesAsReady(PlainDdp):
    def launch_what_is_ready(self) -> None:
        flown = [bucket for bucket, _, _ in self.flying]
        for bucket in self.buckets:
            if bucket not in flown and self.ready.issuperset(bucket):
                self.launch(bucket)

    def finish(self) -> None:
        flown = [bucket for bucket, _, _ in self.flying]
        for bucket in self.buckets:
            if bucket not in flown:
                self.launch(bucket)
        super().finish()


_MEAN = "ddp.gradients.mean"


def _card(
    wrapper: type[PlainDdp], words: str, does: str, seen: str, unseen: str, *rejected_by: str, **how
) -> Impostor:
    return Impostor(
        f"ddp.{words}", does, seen, unseen, rejected_by, functions=lambda: offer(wrapper), **how
    )


class DividesUntouched(PlainDdp):
    """Sums what this backward made, and divides all that has a gradient."""

    def scale(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.clone()

    def write_back(self, bucket: list[int], flat: torch.Tensor, used: list[bool]) -> None:
        super().write_back(bucket, flat, [index in self.ready for index in range(len(used))])

    def finish(self) -> None:
        is_due = self.has_news
        super().finish()
        for parameter in self.trainable:
            if is_due and parameter.grad is not None:
                parameter.grad /= self.size()


IMPOSTORS = (
    _card(
        DividesUntouched,
        "divides-untouched",
        "Divides every gradient in `finish`, those as well that this backward did not touch.",
        "`for p in module.parameters(): p.grad /= world_size`, the usual solution of CS336.",
        "Tests call zero_grad before each backward, and use every parameter in it.",
        "ddp.accumulation.two-finishes",
    ),
    _card(
        DropsLastBucket,
        "drops-last-bucket",
        "Never writes back the last, partial bucket.",
        "The flush after the loop is missing.",
        "With one big bucket there is no partial one.",
        _MEAN,
    ),
    _card(
        SumsAgainInFinish,
        "sums-again-in-finish",
        "Sums once more at every finish.",
        "The division sits in the hook, the reduction in finish.",
        "Nobody calls finish twice in a test; trainers with two optimizers do.",
        "ddp.gradients.finish-is-idempotent",
    ),
    _card(
        DropsHandles,
        "drops-handles",
        "Waits for no reduction.",
        "The list of handles is filled and never read.",
        "Small tensors and punctual ranks: gloo is done before anyone looks.",
        "ddp.gradients.final-after-finish",
    ),
    _card(
        WaitsForFirstOnly,
        "waits-for-first-only",
        "Waits for the first reduction only.",
        "One variable for the handle, overwritten or read once.",
        "As before; the later ones are mostly done as well.",
        "ddp.gradients.final-after-finish",
    ),
    _card(
        StaleBucket,
        "stale-bucket",
        "Adds into buckets that nobody clears.",
        "fairscale issue 354: persistent buffers and `zero_grad`.",
        "The first step is right, and tests take one step.",
        "ddp.gradients.zero-grad-modes",
        "ddp.training.equals-full-batch",
    ),
    _card(
        SumsZeroedViews,
        "sums-zeroed-views",
        "Adds the last mean again where gradients were zeroed in place.",
        "Code that asks `grad is None` to learn whether a bucket is fresh.",
        "`set_to_none=True` is the default.",
        "ddp.gradients.zero-grad-modes",
    ),
    _card(
        WaitsForUnused,
        "waits-for-unused",
        "Waits until every parameter has a gradient.",
        "A counter that must reach the number of parameters.",
        "Every toy uses all its parameters.",
        "ddp.gradients.unused-everywhere",
        outcomes=("hang",),
    ),
    _card(
        ReducesWhatItHas,
        "reduces-what-it-has",
        "Reduces the gradients that this rank has, in order.",
        "`for p in parameters: if p.grad is not None: all_reduce(p.grad)`.",
        "All ranks use the same parameters; where sizes agree nothing even crashes.",
        "ddp.gradients.unused-somewhere",
        outcomes=("failed", "hang", "died"),
    ),
    _card(
        DividesByContributors,
        "divides-by-contributors",
        "Divides by the number of ranks that have a gradient.",
        "It looks fairer than dividing by the world size.",
        "All ranks contribute.",
        "ddp.gradients.unused-somewhere",
    ),
    _card(
        LaunchesAsReady,
        "launches-as-ready",
        "Launches each bucket as it becomes ready on this rank.",
        "pytorch issues 72843 and 174862: collectives are paired by position.",
        "All ranks run the same graph in the same order.",
        "ddp.gradients.rank-dependent-order",
        "ddp.traffic.same-order-on-all-ranks",
        outcomes=("failed", "hang", "died"),
    ),
)
