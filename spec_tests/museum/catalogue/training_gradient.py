"""Near-misses of the gradient of a step, and right but unusual training loops."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from spec_tests.museum.card import Source, benign
from spec_tests.plain.train import PlainTrain

TRAIN = Source("spec_tests.plain.train")
TRAINER = Source("solution.trainer")

TRAIN.near_miss(
    "training.mean-of-means",
    "training.gradient.token-weighted",
    "- return self.size / tokens",
    "+ return 1 / max(1, self.count(batch)) / self.accumulate",
    does="Averages the means of the micro-batches.",
    seen="transformers issues 34191 and 34242, torchtune issue 1875: everybody, until 2024.",
    unseen="Without padding it is right.",
)

TRAIN.near_miss(
    "training.own-token-count",
    ("training.gradient.token-weighted", "training.gradient.nothing-to-learn-here"),
    "  micros = self.fetch()",
    "+ self.own = max(1, sum(self.count(batch) for batch in micros))",
    "...",
    "- return self.size / tokens",
    "+ return 1 / self.own",
    does="Divides by the rank's own number of targets.",
    seen="The fix of 2024, without the sum over ranks: transformers issue 35203.",
    unseen="On one process it is right.",
)

TRAIN.near_miss(
    "training.counts-by-environment",
    "training.gradient.world-of-the-group",
    "- return self.size / tokens",
    "+ import os",
    '+ size = os.environ.get("WORLD_SIZE", "1") if self.is_wrapped() else "1"',
    "+ return int(size) / tokens",
    does="Takes the number of ranks from WORLD_SIZE.",
    seen="A course's trainer: os.environ where dist.get_world_size() belongs.",
    unseen="Under torchrun the two agree.",
)

TRAIN.near_miss(
    "training.views-targets",
    "training.gradient.slices",
    '- return F.cross_entropy(logits, batch[1].flatten(), ignore_index=-100, reduction="sum")',
    '+ return F.cross_entropy(logits, batch[1].view(-1), ignore_index=-100, reduction="sum")',
    does="Flattens targets with `.view(-1)`.",
    seen="A course's trainer.",
    unseen="Its loader copies before it yields, so its own targets are contiguous.",
)

TRAIN.near_miss(
    "training.no-division",
    ("training.gradient.plain-model", "training.gradient.equals-one-process"),
    "- return self.size / tokens",
    "+ return self.accumulate * self.size / tokens",
    does="Micro-batches are added up and not averaged.",
    seen="A loop that was written for one micro-batch.",
    unseen="Adam, again.",
)

TRAIN.near_miss(
    "training.never-reduces",
    ("training.gradient.equals-one-process", "training.gradient.several-steps"),
    "- self.finish()",
    "...",
    "- is_last = index == self.accumulate - 1",
    "+ is_last = False",
    does="The last micro-batch is inside no_sync as well.",
    seen="An off-by-one in the index of the last micro-batch: FunASR issue 3472.",
    unseen="Rank 0's loss falls.",
)

TRAIN.near_miss(
    "training.leaves-last-gradient",
    "training.gradient.two-calls-are-one",
    "- self.clear()",
    "...",
    "  self.optimizer.step()",
    "+ if number < self.steps - 1:",
    "+     self.clear()",
    does="The last step's gradient is still there for the next call.",
    seen="A course's trainer.",
    unseen="train() is called once.",
)

TRAIN.near_miss(
    "training.clips-each-micro-batch",
    "training.clip.once-per-step",
    "  loss += self.micro_batch(index, batch, tokens)",
    "+ if self.max_norm is not None and index < self.accumulate - 1:",
    "+     self.clip()",
    does="Clips after every micro-batch, before the reduction.",
    seen="clip_grad_norm_ right after backward.",
    unseen="Without accumulation it is right.",
)


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


TRAINER.near_miss(
    "training.shards-own-norm",
    "training.clip.of-shards",
    "- norm = clip.total_norm(model.parameters())",
    "+ held = [p.grad for p in model.parameters() if p.grad is not None]",
    "+ local = [g.to_local() if hasattr(g, 'to_local') else g for g in held]",
    "+ norm = torch.nn.utils.get_total_norm(local)",
    does="Clips shards by the norm of this rank's part.",
    seen="`p.grad.to_local()` in a loop over parameters",
    unseen="All ranks clip, each by a little less than it should.",
)

TRAINER.near_miss(
    "training.own-loss-decides",
    "training.finite.decided-together",
    "- if not math.isfinite(loss) or num_bad:",
    "+ if not math.isfinite(own.item()) or num_bad:",
    does="Looks at this rank's part of the loss, where a gradient that is not finite shows on all.",
    seen="The NaN is in the gradient as well, and the gradient is reduced.",
    unseen="It takes an infinite loss whose gradient is finite: a target that is masked out.",
    outcomes=("hang",),
)
