"""Near-misses of the gradient of a step, and right but unusual training loops."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spec_tests.museum.card import Patched, benign, near_miss
from spec_tests.plain.train import PlainTrain


@near_miss("training.mean-of-means", rejected_by="training.gradient.token-weighted")
class MeanOfMeans(PlainTrain):
    """Averages the means of the micro-batches.

    From: transformers issues 34191 and 34242, torchtune issue 1875: everybody, until 2024.
    Unseen: Without padding it is right.

    Each micro-batch's mean, divided by their number, as every trainer did until 2024.
    """

    def scale(self, batch, tokens):
        return 1 / max(1, self.count(batch)) / self.accumulate


@near_miss(
    "training.own-token-count",
    rejected_by=("training.gradient.token-weighted", "training.gradient.nothing-to-learn-here"),
)
class OwnTokens(PlainTrain):
    """Divides by the rank's own number of targets.

    From: The fix of 2024, without the sum over ranks: transformers issue 35203.
    Unseen: On one process it is right.
    """

    def step(self, number):
        self.own = 0
        return super().step(number)

    def fetch(self):
        found = super().fetch()
        self.own = max(1, sum(self.count(batch) for batch in found))
        return found

    def scale(self, batch, tokens):
        return 1 / self.own


@near_miss("training.counts-by-environment", rejected_by="training.gradient.world-of-the-group")
class CountsByEnvironment(PlainTrain):
    """Takes the number of ranks from WORLD_SIZE.

    From: A course's trainer: os.environ where dist.get_world_size() belongs.
    Unseen: Under torchrun the two agree.
    """

    def scale(self, batch, tokens):
        size = int(os.environ.get("WORLD_SIZE", "1")) if self.is_wrapped() else 1
        return size / tokens


@near_miss("training.views-targets", rejected_by="training.gradient.slices")
class ViewsTargets(PlainTrain):
    """Flattens targets with `.view(-1)`.

    From: A course's trainer.
    Unseen: Its loader copies before it yields, so its own targets are contiguous.
    """

    def losses(self, batch):
        return super().losses((batch[0], batch[1].view(-1).view_as(batch[1])))


@near_miss(
    "training.no-division",
    rejected_by=("training.gradient.plain-model", "training.gradient.equals-one-process"),
)
class NoDivision(PlainTrain):
    """Micro-batches are added up and not averaged.

    From: A loop that was written for one micro-batch.
    Unseen: Adam, again.
    """

    def scale(self, batch, tokens):
        return self.accumulate * super().scale(batch, tokens)


class DividesTwice(PlainTrain):
    def scale(self, batch, tokens):
        return super().scale(batch, tokens) / self.accumulate


@near_miss(
    "training.never-reduces",
    rejected_by=("training.gradient.equals-one-process", "training.gradient.several-steps"),
)
class NeverReduces(PlainTrain):
    """The last micro-batch is inside no_sync as well.

    From: An off-by-one in the index of the last micro-batch: FunASR issue 3472.
    Unseen: Rank 0's loss falls.

    Every backward is inside no_sync, and nothing is finished.
    """

    def window(self, index):
        return super().window(index - 1)

    def finish(self):
        pass


@near_miss("training.nan-for-nothing", rejected_by="training.records.loss")
class NanForNothing(PlainTrain):
    """A micro-batch without a target makes the step NaN.

    From: cross_entropy with reduction='mean' over ignored targets only.
    Unseen: Data sets rarely have such rows, per GPU.
    """

    def losses(self, batch):
        count = self.count(batch)
        return super().losses(batch) / count * count


@near_miss("training.no-zero-grad", rejected_by="training.gradient.several-steps")
class NoZeroGrad(PlainTrain):
    """Gradients pile up from step to step.

    From: A zero_grad that got lost with a refactoring.
    Unseen: It looks like momentum.
    """

    def clear(self):
        pass


@near_miss("training.clears-afterwards", rejected_by="training.gradient.leftovers-do-not-count")
class ClearsAfterwards(PlainTrain):
    """Gradients that were there before the call enter its first step.

    From: optimizer.zero_grad() at the end of the loop body.
    Unseen: Models are fresh in tests.
    """

    def clear(self):
        pass

    def after_step(self, number):
        self.optimizer.zero_grad()


@near_miss("training.leaves-last-gradient", rejected_by="training.gradient.two-calls-are-one")
class LeavesLastGradient(ClearsAfterwards):
    """The last step's gradient is still there for the next call.

    From: A course's trainer.
    Unseen: train() is called once.

    Clears between steps, and neither before the first nor after the last.
    """

    def after_step(self, number):
        if number < self.steps - 1:
            self.optimizer.zero_grad()


@near_miss("training.clips-each-micro-batch", rejected_by="training.clip.once-per-step")
class ClipsEach(PlainTrain):
    """Clips after every micro-batch, before the reduction.

    From: clip_grad_norm_ right after backward.
    Unseen: Without accumulation it is right.
    """

    def micro_batch(self, index, batch, tokens):
        loss = super().micro_batch(index, batch, tokens)
        if self.max_norm is not None and index < self.accumulate - 1:
            self.clip()
        return loss


@near_miss("training.clips-each-parameter", rejected_by="training.clip.once-per-step")
class ClipsEachParameter(PlainTrain):
    """Clips every parameter by its own norm.

    From: A loop over parameters around clip_grad_norm_.
    Unseen: The norms are bounded, and the loss falls.
    """

    def clip(self):
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), math.inf))
        if self.max_norm is not None:
            for parameter in self.model.parameters():
                nn.utils.clip_grad_norm_([parameter], self.max_norm)
        return norm


@near_miss("training.normalises", rejected_by="training.clip.leaves-small-gradients")
class Normalises(PlainTrain):
    """Stretches a small gradient to the bound.

    From: max_norm / norm, without the min(1, .).
    Unseen: With a small bound everything is clipped.
    """

    def clip(self):
        norm = super().clip()
        if self.max_norm is not None and norm < self.max_norm:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= self.max_norm / norm
        return norm


@near_miss("training.never-clips", rejected_by="training.clip.once-per-step")
class NeverClips(PlainTrain):
    """max_norm is taken and not used.

    From: An argument that no one passes on.
    Unseen: The loss falls.
    """

    def clip(self):
        self.max_norm = None
        return super().clip()


class BareTrain(PlainTrain):
    """The plain loop without a wrapper."""

    @classmethod
    def wrapper_functions(cls):
        return {}


@benign("benign.train-scales-afterwards")
class ScalesAfterwards(BareTrain):
    """Sums, counts per micro-batch, divides at last."""

    def step(self, number):
        self.seen = 0.0
        return super().step(number)

    def scale(self, batch, tokens):
        self.seen += self.total(float(self.count(batch)))
        return 1.0

    def finish(self):
        super().finish()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad *= self.size / self.seen


@benign("benign.train-reports-objects")
class ReportsObjects(BareTrain):
    """Records have attributes, and tensors in them."""

    def run(self):
        return [_Record({n: torch.tensor(v) for n, v in r.items()}) for r in super().run()]


@benign("benign.train-looks-ahead")
class LooksAhead(BareTrain):
    """Takes the data of all steps before the first.

    Has all micro-batches in hand before the first update; records are named tuples.
    """

    def run(self):
        whole = [next(self.batches) for _ in range(self.steps * self.accumulate)]
        self.batches = iter(whole)
        return [_Fields(**record) for record in super().run()]


class _Fields(NamedTuple):
    loss: float
    lr: float
    grad_norm: float
    tokens: float


class _Record:
    def __init__(self, fields):
        self.__dict__.update(fields)


@benign("benign.train-barriers")
class Barriers(BareTrain):
    """Ranks wait for each other in every step."""

    def clear(self):
        if self.is_wrapped():
            dist.barrier()
        super().clear()


@benign("benign.train-plain")
class TrainPlain(BareTrain):
    """The base of the training impostors; the loss is in float32."""


@near_miss("training.knows-own-wrappers", rejected_by="training.gradient.in-pytorchs-wrapper")
class KnowsOwnWrappers(PlainTrain):
    """Takes a model for one process's where it is in no wrapper of its own.

    From: `hasattr(model, "finish_gradient_synchronization")` to tell what is wrapped.
    Unseen: A loop is tested with the wrapper that comes with it.
    """

    def is_wrapped(self):
        return super().is_wrapped() and not isinstance(self.model, DistributedDataParallel)


@near_miss("training.shards-own-norm", rejected_by="training.clip.of-shards")
class ShardsOwnNorm(Patched):
    """Clips shards by the norm of this rank's part.

    From: `p.grad.to_local()` in a loop over parameters
    Unseen: All ranks clip, each by a little less than it should.
    """

    module = "solution.trainer"
    find = "norm = clip.total_norm(model.parameters())"
    replace = (
        "norm = torch.nn.utils.get_total_norm([g.to_local() if hasattr(g, 'to_local') else g "
        "for p in model.parameters() if (g := p.grad) is not None])"
    )


@near_miss(
    "training.own-loss-decides",
    rejected_by="training.finite.decided-together",
    outcomes=("hang",),
)
class OwnLossDecides(Patched):
    """Looks at this rank's part of the loss, where a gradient that is not finite shows on all.

    From: The NaN is in the gradient as well, and the gradient is reduced.
    Unseen: It takes an infinite loss whose gradient is finite: a target that is masked out.
    """

    module = "solution.trainer"
    find = "if not math.isfinite(loss) or num_bad:"
    replace = "if not math.isfinite(own.item()) or num_bad:"
