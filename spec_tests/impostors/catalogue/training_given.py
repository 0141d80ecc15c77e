"""Near-misses of a training loop: what it is given, and what it says."""

from __future__ import annotations

import itertools

import torch.nn.functional as F

from spec_tests.impostors.card import near_miss
from spec_tests.plain.train import PlainTrain


@near_miss("training.reports-the-default", rejected_by="training.rate.reported-is-used")
class ReportsTheDefault(PlainTrain):
    """Reports the rate that the optimizer was built with.

    From: `optimizer.defaults["lr"]`
    Unseen: It is the rate of the groups, until somebody sets another.
    """

    def rate(self):
        return super().rate() if self.lr is not None else self.optimizer.defaults["lr"]


@near_miss("training.fills-up-the-step", rejected_by="training.data.no-partial-step-in-silence")
class FillsUpTheStep(PlainTrain):
    """Repeats the last micro-batch where the data end within a step.

    From: A loader that pads the last batch, done in the loop.
    Unseen: With one micro-batch left it is the mean over what there is.
    """

    def fetch(self):
        found = list(itertools.islice(self.batches, self.accumulate))
        if not found:
            raise StopIteration
        return found + found[-1:] * (self.accumulate - len(found))


@near_miss("training.writes-into-targets", rejected_by="training.data.stays-the-callers")
class WritesIntoTargets(PlainTrain):
    """Replaces -100 by 0 in the targets that it is given, to gather by them.

    From: A loss of one's own, `logprobs.gather(-1, targets)`.
    Unseen: A loader makes new tensors for each batch.
    """

    def losses(self, batch):
        counts = batch[1] != -100
        losses = F.cross_entropy(
            self.model(batch[0]).float().flatten(0, 1),
            batch[1].clamp_(min=0).flatten(),
            reduction="none",
        )
        return (losses * counts.flatten()).sum()
