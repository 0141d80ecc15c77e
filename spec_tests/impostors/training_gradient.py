"""Near-misses of the training loop's gradient: the loss falls, a little otherwise."""

from __future__ import annotations

import math
import os
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from spec_tests.impostors.plain_train import Batch, PlainTrain, card


class MeanOfMeans(PlainTrain):
    """Each micro-batch's mean, divided by their number, as every trainer did until 2024."""

    def scale(self, batch: Batch, tokens: float) -> float:
        return 1 / max(1, self.count(batch)) / self.accumulate


class OwnTokens(PlainTrain):
    """Divides by the rank's own count of the step."""

    def step(self, number: int) -> dict[str, float]:
        self.own = 0
        return super().step(number)

    def fetch(self) -> list[Batch]:
        found = super().fetch()
        self.own = max(1, sum(self.count(batch) for batch in found))
        return found

    def scale(self, batch: Batch, tokens: float) -> float:
        return 1 / self.own


class NoCompensation(PlainTrain):
    def scale(self, batch: Batch, tokens: float) -> float:
        return 1 / tokens


class CountsByEnvironment(PlainTrain):
    """Takes the number of ranks from the launcher's variable."""

    def scale(self, batch: Batch, tokens: float) -> float:
        size = int(os.environ.get("WORLD_SIZE", "1")) if self.is_wrapped() else 1
        return size / tokens


class ViewsTargets(PlainTrain):
    """Flattens targets with view."""

    def losses(self, batch: Batch) -> torch.Tensor:
        return super().losses((batch[0], batch[1].view(-1).view_as(batch[1])))


class NoDivision(PlainTrain):
    def scale(self, batch: Batch, tokens: float) -> float:
        return self.accumulate * super().scale(batch, tokens)


class DividesTwice(PlainTrain):
    def scale(self, batch: Batch, tokens: float) -> float:
        return super().scale(batch, tokens) / self.accumulate


class NeverReduces(PlainTrain):
    """Every backward is inside no_sync, and nothing is finished."""

    def window(self, index: int) -> AbstractContextManager[Any]:
        return super().window(index - 1)

    def finish(self) -> None:
        pass


class NanForNothing(PlainTrain):
    """A mean over no target is NaN, and NaN times zero targets is NaN."""

    def losses(self, batch: Batch) -> torch.Tensor:
        count = self.count(batch)
        return super().losses(batch) / count * count


class SkipsEmpty(PlainTrain):
    """Leaves out what has no target, and with it the reduction of the last micro-batch."""

    def micro_batch(self, index: int, batch: Batch, tokens: float) -> float:
        return super().micro_batch(index, batch, tokens) if self.count(batch) else 0.0


class NoZeroGrad(PlainTrain):
    def clear(self) -> None:
        pass


class ClearsAfterwards(PlainTrain):
    def clear(self) -> None:
        pass

    def after_step(self, number: int) -> None:
        self.optimizer.zero_grad()


class LeavesLastGradient(ClearsAfterwards):
    """Clears between steps, and neither before the first nor after the last."""

    def after_step(self, number: int) -> None:
        if number < self.steps - 1:
            self.optimizer.zero_grad()


class ClipsEach(PlainTrain):
    """Clips after every micro-batch."""

    def micro_batch(self, index: int, batch: Batch, tokens: float) -> float:
        loss = super().micro_batch(index, batch, tokens)
        if self.max_norm is not None and index < self.accumulate - 1:
            self.clip()
        return loss


class ClipsEachParameter(PlainTrain):
    def clip(self) -> float:
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), math.inf))
        if self.max_norm is not None:
            for parameter in self.model.parameters():
                nn.utils.clip_grad_norm_([parameter], self.max_norm)
        return norm


class Normalises(PlainTrain):
    """Stretches small gradients to the bound."""

    def clip(self) -> float:
        norm = super().clip()
        if self.max_norm is not None and norm < self.max_norm:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= self.max_norm / norm
        return norm


class NeverClips(PlainTrain):
    def clip(self) -> float:
        self.max_norm = None
        return super().clip()


_ONE = "training.gradient.equals-one-process"
_WEIGHTED = "training.gradient.token-weighted"
_HANG = ("hang", "failed", "died")  # died: gloo aborts when collectives of unlike sizes meet

IMPOSTORS = (
    card(
        MeanOfMeans,
        "mean-of-means",
        "Averages the means of the micro-batches.",
        "transformers issues 34191 and 34242, torchtune issue 1875: everybody, until 2024.",
        "Without padding it is right.",
        _WEIGHTED,
    ),
    card(
        OwnTokens,
        "own-token-count",
        "Divides by the rank's own number of targets.",
        "The fix of 2024, without the sum over ranks: transformers issue 35203.",
        "On one process it is right.",
        _WEIGHTED,
        "training.gradient.nothing-to-learn-here",
    ),
    card(
        NoCompensation,
        "no-compensation",
        "Divides by all ranks' targets, and the wrapper by the ranks once more.",
        "torchtitan issues 1803 and 2206; transformers issue 37766.",
        "Adam does not see a gradient that is W times too small.",
        _ONE,
        _WEIGHTED,
    ),
    card(
        NoDivision,
        "no-division",
        "Micro-batches are added up and not averaged.",
        "A loop that was written for one micro-batch.",
        "Adam, again.",
        "training.gradient.plain-model",
        _ONE,
    ),
    card(
        NeverReduces,
        "never-reduces",
        "The last micro-batch is inside no_sync as well.",
        "An off-by-one in the index of the last micro-batch: FunASR issue 3472.",
        "Rank 0's loss falls.",
        _ONE,
        "training.gradient.several-steps",
    ),
    card(
        NanForNothing,
        "nan-for-nothing",
        "A micro-batch without a target makes the step NaN.",
        "cross_entropy with reduction='mean' over ignored targets only.",
        "Data sets rarely have such rows, per GPU.",
        "training.gradient.nothing-to-learn-here",
    ),
    card(
        SkipsEmpty,
        "skips-empty",
        "A micro-batch without a target is left out, and its reduction with it.",
        "`if not mask.any(): continue`.",
        "The others wait for a rank that has gone on.",
        "training.gradient.nothing-to-learn-here",
        outcomes=_HANG,
    ),
    card(
        CountsByEnvironment,
        "counts-by-environment",
        "Takes the number of ranks from WORLD_SIZE.",
        "A course's trainer: os.environ where dist.get_world_size() belongs.",
        "Under torchrun the two agree.",
        "training.gradient.world-of-the-group",
    ),
    card(
        ViewsTargets,
        "views-targets",
        "Flattens targets with `.view(-1)`.",
        "A course's trainer.",
        "Its loader copies before it yields, so its own targets are contiguous.",
        "training.gradient.slices",
    ),
    card(
        NoZeroGrad,
        "no-zero-grad",
        "Gradients pile up from step to step.",
        "A zero_grad that got lost with a refactoring.",
        "It looks like momentum.",
        "training.gradient.several-steps",
    ),
    card(
        ClearsAfterwards,
        "clears-afterwards",
        "Gradients that were there before the call enter its first step.",
        "optimizer.zero_grad() at the end of the loop body.",
        "Models are fresh in tests.",
        "training.gradient.leftovers-do-not-count",
    ),
    card(
        LeavesLastGradient,
        "leaves-last-gradient",
        "The last step's gradient is still there for the next call.",
        "A course's trainer.",
        "train() is called once.",
        "training.gradient.two-calls-are-one",
    ),
    card(
        ClipsEach,
        "clips-each-micro-batch",
        "Clips after every micro-batch, before the reduction.",
        "clip_grad_norm_ right after backward.",
        "Without accumulation it is right.",
        "training.clip.once-per-step",
    ),
    card(
        ClipsEachParameter,
        "clips-each-parameter",
        "Clips every parameter by its own norm.",
        "A loop over parameters around clip_grad_norm_.",
        "The norms are bounded, and the loss falls.",
        "training.clip.once-per-step",
    ),
    card(
        NeverClips,
        "never-clips",
        "max_norm is taken and not used.",
        "An argument that no one passes on.",
        "The loss falls.",
        "training.clip.once-per-step",
    ),
    card(
        Normalises,
        "normalises",
        "Stretches a small gradient to the bound.",
        "max_norm / norm, without the min(1, .).",
        "With a small bound everything is clipped.",
        "training.clip.leaves-small-gradients",
    ),
)
