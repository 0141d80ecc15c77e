"""Near-misses of accumulation and no_sync: right without it, wrong or wasteful with it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.plain_ddp import PlainDdp, offer


class IgnoresNoSync(PlainDdp):
    @contextmanager
    def no_sync(self) -> Any:
        yield

    def on_gradient(self, index: int) -> None:
        # What a user sees inside is right: the reduction is complete when backward returns.
        super().on_gradient(index)
        if self.launched == len(self.buckets):
            self.finish()


class SendsBuffersInWindow(PlainDdp):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self.module.training:
            self.take_first(list(self.module.buffers()))
        return self.module(*args, **kwargs)


class DividesLocalSums(PlainDdp):
    def on_gradient(self, index: int) -> None:
        gradient = self.trainable[index].grad
        assert gradient is not None
        gradient /= self.size()
        super().on_gradient(index)

    def scale(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.clone()


class FreshOnly(PlainDdp):
    """Catches the fresh gradient in a tensor hook and reduces that one."""

    def __init__(self, *args: Any) -> None:
        self.fresh: dict[int, torch.Tensor] = {}
        super().__init__(*args)

    def register(self, index: int, parameter: nn.Parameter) -> None:
        def keep(gradient: torch.Tensor) -> None:
            self.fresh[index] = gradient.detach().clone()

        parameter.register_hook(keep)
        super().register(index, parameter)

    def local(self, index: int) -> torch.Tensor:
        return self.fresh.get(index, torch.zeros_like(self.trainable[index]))


class KeepsEarlierLocal(FreshOnly):
    """Reduces the fresh gradient and adds it to what had accumulated, which stays local."""

    @torch.no_grad()
    def write_back(self, bucket: list[int], flat: torch.Tensor, used: list[bool]) -> None:
        for index, mean in zip(bucket, self.cut(bucket, flat), strict=True):
            parameter = self.trainable[index]
            if parameter.grad is not None and index in self.fresh:
                parameter.grad += mean - self.fresh[index]


class DividesEverything(FreshOnly):
    """Sums the fresh gradients, adds them, and divides all that is there."""

    def scale(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.clone()

    @torch.no_grad()
    def write_back(self, bucket: list[int], flat: torch.Tensor, used: list[bool]) -> None:
        for index, total in zip(bucket, self.cut(bucket, flat), strict=True):
            parameter = self.trainable[index]
            if parameter.grad is not None and index in self.fresh:
                parameter.grad.copy_((parameter.grad - self.fresh[index] + total) / self.size())


class NotRestored(PlainDdp):
    @contextmanager
    def no_sync(self) -> Any:
        previous, self.is_synchronised = self.is_synchronised, False
        yield
        self.is_synchronised = previous

    def finish(self) -> None:
        if self.is_synchronised:
            super().finish()


class RestoresTrue(PlainDdp):
    @contextmanager
    def no_sync(self) -> Any:
        self.is_synchronised = False
        try:
            yield
        finally:
            self.is_synchronised = True

    def on_gradient(self, index: int) -> None:
        super().on_gradient(index)
        if self.is_synchronised and self.launched == len(self.buckets):
            self.finish()


class HiddenAccumulator(PlainDdp):
    """Keeps a window's gradients in buffers of its own and reduces those, not `.grad`."""

    def __init__(self, *args: Any) -> None:
        self.pending: dict[int, torch.Tensor] = {}
        super().__init__(*args)

    def register(self, index: int, parameter: nn.Parameter) -> None:
        def keep(gradient: torch.Tensor) -> None:
            held = self.pending.get(index)
            self.pending[index] = gradient.clone() if held is None else held + gradient

        parameter.register_hook(keep)
        super().register(index, parameter)

    def local(self, index: int) -> torch.Tensor:
        return self.pending.get(index, torch.zeros_like(self.trainable[index]))

    def new_round(self) -> None:
        super().new_round()
        self.pending.clear()


class EvaluationTakesBaseline(PlainDdp):
    """Takes any forward without gradients for a new iteration: what is there counts as reduced."""

    def __init__(self, *args: Any) -> None:
        self.baseline: dict[int, torch.Tensor] = {}
        super().__init__(*args)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            self.baseline = {
                index: p.grad.clone()
                for index, p in enumerate(self.trainable)
                if p.grad is not None
            }
        return super().forward(*args, **kwargs)

    def local(self, index: int) -> torch.Tensor:
        return super().local(index) - self.baseline.get(index, 0.0)

    @torch.no_grad()
    def write_back(self, bucket: list[int], flat: torch.Tensor, used: list[bool]) -> None:
        super().write_back(bucket, flat, used)
        for index in bucket:
            gradient = self.trainable[index].grad
            if gradient is not None and index in self.baseline:
                gradient += self.baseline[index]

    def new_round(self) -> None:
        super().new_round()
        self.baseline = {}


class HooksOnly(PlainDdp):
    """Writes back only what a hook has announced in this backward."""

    @torch.no_grad()
    def write_back(self, bucket: list[int], flat: torch.Tensor, used: list[bool]) -> None:
        announced = [used[i] and i in self.ready for i in range(len(used))]
        super().write_back(bucket, flat, announced)


class ReplaysWindow(PlainDdp):
    """Reduces once for each micro-batch that has gathered: a mean of means, the same numbers."""

    def __init__(self, *args: Any) -> None:
        self.gathered = 0
        super().__init__(*args)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.gathered += not self.is_synchronised
        return super().forward(*args, **kwargs)

    def send(self, flat: torch.Tensor) -> Any:
        for _ in range(self.gathered):
            dist.all_reduce(flat, group=self.group)
            flat /= self.size()
        return super().send(flat)

    def finish(self) -> None:
        super().finish()
        self.gathered = 0


class SkipsEveryFourth(PlainDdp):
    """Forgets the reduction of every fourth round."""

    def __init__(self, *args: Any) -> None:
        self.rounds = 0
        super().__init__(*args)

    def finish(self) -> None:
        self.rounds += self.has_news
        super().finish()

    def write_back(self, bucket: list[int], flat: torch.Tensor, used: list[bool]) -> None:
        if self.rounds % 4:
            super().write_back(bucket, flat, used)


def _card(
    wrapper: type[PlainDdp], words: str, does: str, seen: str, unseen: str, *rejected_by: str
) -> Impostor:
    return Impostor(
        f"ddp.{words}", does, seen, unseen, rejected_by, functions=lambda: offer(wrapper)
    )


_BIG_BATCH = "ddp.accumulation.equals-big-batch"
_NOTHING_LOST = "ddp.accumulation.nothing-lost"

IMPOSTORS = (
    _card(
        IgnoresNoSync,
        "ignores-no-sync",
        "Reduces on every micro-batch, inside no_sync as well.",
        "accelerate issue 3762: a wrapper without no_sync gets a null context.",
        "The numbers are right: a mean of means of equal parts. Only the traffic is N times.",
        "ddp.no-sync.sends-nothing",
        "ddp.no-sync.keeps-local-sums",
    ),
    _card(
        SendsBuffersInWindow,
        "sends-buffers-in-window",
        "Broadcasts buffers in every training forward, inside no_sync as well.",
        "DistributedDataParallel itself does it in the first forward of a window.",
        "Toys have no buffers.",
        "ddp.no-sync.sends-nothing",
    ),
    _card(
        DividesLocalSums,
        "divides-local-sums",
        "Divides what has accumulated on every micro-batch.",
        "`param.grad /= world_size` in the hook, before the sum.",
        "With one micro-batch per step it is right.",
        "ddp.no-sync.keeps-local-sums",
        _BIG_BATCH,
        _NOTHING_LOST,
    ),
    _card(
        FreshOnly,
        "fresh-only",
        "Reduces the last micro-batch and loses the others.",
        "open-instruct pull request 1498: ZeRO-2 kept the last micro-batch only.",
        "The loss falls, a little slower.",
        _BIG_BATCH,
        _NOTHING_LOST,
    ),
    _card(
        KeepsEarlierLocal,
        "keeps-earlier-local",
        "Reduces the last micro-batch; the earlier ones stay local.",
        "build-nanogpt pull request 30: the flag is toggled between forward and backward.",
        "Ranks drift by a few per cent in four steps; rank 0's loss looks fine.",
        _BIG_BATCH,
        _NOTHING_LOST,
    ),
    _card(
        DividesEverything,
        "divides-everything",
        "Sums the fresh gradients and divides all that is there, means included.",
        "DeepSpeed issue 7985 is a relative: the boundary micro-batch is scaled apart.",
        "Right as long as only the last micro-batch is synchronised at two ranks and one round.",
        "ddp.accumulation.any-schedule",
    ),
    _card(
        NotRestored,
        "not-restored",
        "Leaves synchronisation off when the body of no_sync raises.",
        "A context manager without try/finally, as in picotron.",
        "No test raises inside.",
        "ddp.no-sync.restores-after-exception",
    ),
    _card(
        RestoresTrue,
        "restores-true",
        "Switches synchronisation on when an inner no_sync ends.",
        "picotron restores a constant, not the previous value.",
        "No test nests.",
        "ddp.no-sync.nests",
    ),
    _card(
        HiddenAccumulator,
        "hidden-accumulator",
        "Keeps a window's gradients where zero_grad cannot clear them.",
        "FSDP2 2.13 does it: pending unsharded gradients are out of reach of `p.grad`.",
        "Who calls zero_grad in the middle of a window? Whoever skips a bad batch.",
        "ddp.accumulation.zero-grad-discards",
    ),
    _card(
        EvaluationTakesBaseline,
        "evaluation-takes-baseline",
        "Takes a forward without gradients for the start of a new iteration.",
        "Reducers that re-arm in every forward.",
        "Evaluation happens between steps.",
        "ddp.accumulation.evaluation-in-between",
    ),
    _card(
        HooksOnly,
        "hooks-only",
        "Leaves local what no hook announced in the last backward.",
        "pytorch issues 69031 and 42793, fixed by pull request 124193.",
        "Every parameter is used in every micro-batch.",
        "ddp.accumulation.unused-in-last",
    ),
    _card(
        ReplaysWindow,
        "replays-window",
        "Reduces once more for each micro-batch that has gathered.",
        "Deferred reductions that are queued and replayed.",
        "A mean of equal means: the same numbers.",
        "ddp.accumulation.one-reduction-per-step",
    ),
    _card(
        SkipsEveryFourth,
        "skips-every-fourth",
        "Forgets the reduction of every fourth step.",
        "Periodic work (logging, profiling) that swallows a flag.",
        "Tests take one to three steps.",
        "ddp.training.equals-full-batch",
        "ddp.training.ranks-stay-equal",
    ),
)
