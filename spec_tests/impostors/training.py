"""Near-misses of the loop itself: sizes, data, NaN, traffic; and changed lines of the reference."""

from __future__ import annotations

import contextlib
import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from spec_tests.impostors.card import Functions, Impostor
from spec_tests.impostors.plain_train import Batch, PlainTrain, card, offer


class FetchesOneMore(PlainTrain):
    """`for batch in batches: if done: break`."""

    def run(self) -> list[dict[str, float]]:
        found = super().run()
        next(self.batches, None)
        return found


class Floors(PlainTrain):
    @staticmethod
    def accumulation_steps(whole: int, micro: int, size: int) -> int:
        return max(1, whole // (micro * size))


class SaysIndivisible(PlainTrain):
    @staticmethod
    def accumulation_steps(whole: int, micro: int, size: int) -> int:
        if whole % (micro * size):
            raise ValueError("the batch does not divide into micro-batches")
        return whole // (micro * size)


class ForgetsRanks(PlainTrain):
    @staticmethod
    def accumulation_steps(whole: int, micro: int, size: int) -> int:
        if whole % (micro * size):
            raise ValueError(f"{whole} does not divide by {micro} * {size}")
        return whole // micro


class TakesPartialStep(PlainTrain):
    """A short step is scaled as a full one: 1/N on a window of fewer."""

    def fetch(self) -> list[Batch]:
        found = [b for b in (next(self.batches, None) for _ in range(self.accumulate)) if b]
        if not found:
            raise RuntimeError("the data have ended")
        self.missing = self.accumulate - len(found)
        return found

    def scale(self, batch: Batch, tokens: float) -> float:
        share = (self.accumulate - self.missing) / self.accumulate
        return share * super().scale(batch, tokens)

    def window(self, index: int) -> AbstractContextManager[Any]:
        return super().window(index + self.missing)


class JudgesOwnLoss(PlainTrain):
    """A rank with a NaN raises by itself, before the reduction."""

    def losses(self, batch: Batch) -> torch.Tensor:
        loss = super().losses(batch)
        if math.isnan(float(loss.detach())):
            raise RuntimeError("the loss is NaN")
        return loss


class SkipsOwnNan(PlainTrain):
    """A rank whose own loss is NaN leaves the update out; the others do it."""

    def step(self, number: int) -> dict[str, float]:
        self.is_bad = False
        return super().step(number)

    def losses(self, batch: Batch) -> torch.Tensor:
        loss = super().losses(batch)
        self.is_bad |= not bool(loss.isfinite())
        return loss

    def clip(self) -> float:
        if self.is_bad:
            self.optimizer.zero_grad()
        return 1.0


class StepsOnNan(PlainTrain):
    def clip(self) -> float:
        with contextlib.suppress(RuntimeError):
            return super().clip()
        return math.nan


class BackwardInsideOnly(PlainTrain):
    """Forward outside of no_sync, backward inside: DistributedDataParallel reduces every time."""

    def micro_batch(self, index: int, batch: Batch, tokens: float) -> float:
        loss = self.losses(batch)
        with self.window(index):
            self.backward(loss * self.scale(batch, tokens))
        return float(loss.detach())

    def finish(self) -> None:
        pass


class NeverInside(PlainTrain):
    """no_sync is not used at all."""

    def window(self, index: int) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()


def _with_torch_ddp(loop: type[PlainTrain]) -> Functions:
    def ddp(module, *, process_group=None):
        return DistributedDataParallel(module, process_group=process_group)

    def ddp_bucketed(module, *, bucket_size_mb, process_group=None):
        return DistributedDataParallel(
            module, process_group=process_group, bucket_cap_mb=bucket_size_mb
        )

    return offer(loop, None) | {"ddp": ddp, "ddp_bucketed": ddp_bucketed}


def _patch(
    words: str, module: str, find: str, replace: str, does: str, unseen: str, clause: str
) -> Impostor:
    return Impostor(
        f"training.patched-{words}",
        does,
        "One line of the reference, changed.",
        unseen,
        (clause,),
        patches=((module, find, replace),),
    )


_TRAFFIC = "training.traffic.one-reduction-per-step"
_HANG = ("hang", "failed")

IMPOSTORS = (
    card(
        FetchesOneMore,
        "fetches-one-more",
        "Takes a batch that nobody uses.",
        "`for batch in loader: if step == steps: break`.",
        "The steps are right.",
        "training.data.takes-what-it-uses",
    ),
    card(
        Floors,
        "floors",
        "Rounds the number of micro-batches down.",
        "A course's trainer: global 6, micro 2, two ranks trains with 4.",
        "It trains.",
        "training.accumulation.refuses-a-remainder",
        "training.data.refuses-a-remainder",
    ),
    card(
        SaysIndivisible,
        "says-indivisible",
        "Refuses a remainder without saying of what.",
        "assert global_batch % micro_batch == 0, and a word to it.",
        "It is an error, as it should be.",
        "training.accumulation.names-the-numbers",
    ),
    card(
        ForgetsRanks,
        "forgets-ranks",
        "Each rank runs the whole global batch.",
        "global_batch // micro_batch.",
        "The loss falls faster per step.",
        "training.accumulation.fills-the-global-batch",
        "training.data.takes-what-it-uses",
    ),
    card(
        TakesPartialStep,
        "takes-partial-step",
        "A step with a third of its data is scaled as a whole one.",
        "Lightning issue 19987: 1/N on a window of fewer.",
        "Only the last step of an epoch is like that.",
        "training.data.no-partial-step-in-silence",
    ),
    card(
        PlainTrain,
        "ends-alone",
        "A rank whose data end raises by itself.",
        "StopIteration on one rank, as in most loops.",
        "Loaders give every rank equally many batches.",
        "training.data.ranks-end-together",
        outcomes=_HANG,
    ),
    card(
        JudgesOwnLoss,
        "judges-own-loss",
        "A rank whose loss is NaN raises before the reduction.",
        "`if torch.isnan(loss): raise`, on whichever rank it is.",
        "The job dies as well, after the time-out of the others.",
        "training.finite.decided-together",
        outcomes=_HANG,
    ),
    card(
        SkipsOwnNan,
        "skips-own-nan",
        "The rank with the NaN leaves the update out, the others do it.",
        "`if loss.isfinite(): optimizer.step()`.",
        "The run goes on.",
        "training.finite.decided-together",
    ),
    card(
        StepsOnNan,
        "steps-on-nan",
        "Updates with NaN, and reports it.",
        "clip_grad_norm_ without a look at what it returns.",
        "It shows in the next line of the log, when the weights are gone.",
        "training.finite.spares-the-weights",
    ),
    Impostor(
        "training.backward-inside-only",
        "no_sync is around the backward alone; DistributedDataParallel reduces every time.",
        "A course's trainer: 12 reductions for 3 steps; accelerate issue 1726.",
        "The numbers are right.",
        (_TRAFFIC,),
        functions=lambda: _with_torch_ddp(BackwardInsideOnly),
    ),
    Impostor(
        "training.never-inside",
        "no_sync is not used.",
        "sentence-transformers issue 4027, PiPPy issue 1133.",
        "The numbers are right.",
        (_TRAFFIC,),
        functions=lambda: _with_torch_ddp(NeverInside),
    ),
    _patch(
        "no-compensation",
        "solution.trainer",
        "scale=self.ranks.size / count",
        "scale=1 / count",
        "The mean over ranks divides a second time.",
        "Adam does not feel a factor.",
        "training.gradient.equals-one-process",
    ),
    _patch(
        "leftovers",
        "solution.trainer",
        "self._drop_gradients()  # what the caller left behind",
        "pass  # what the caller left behind",
        "Gradients from before enter the first step.",
        "Tests begin with fresh parameters.",
        "training.gradient.leftovers-do-not-count",
    ),
    _patch(
        "rate-of-next-step",
        "solution.trainer",
        "self._set_learning_rate(finished)\n",
        "self._set_learning_rate(finished + 1)\n",
        "Every update uses the rate of the next one.",
        "The curve of a schedule is shifted by one step.",
        "training.rate.pure-function-of-the-step",
    ),
    _patch(
        "own-loss",
        "solution.trainer",
        "loss = total / count",
        "loss = loss_sum.item() / count",
        "Reports this rank's part of the loss.",
        "With one rank it is the loss.",
        "training.records.loss",
    ),
    _patch(
        "floors",
        "solution.trainer",
        "if global_batch_size % per_pass:",
        "if global_batch_size < per_pass:",
        "Rounds down.",
        "It trains, with fewer tokens than were asked for.",
        "training.accumulation.refuses-a-remainder",
    ),
)
