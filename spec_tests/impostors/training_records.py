"""Near-misses of what a training loop reports, and of its learning rate."""

from __future__ import annotations

from spec_tests.impostors.plain_train import Batch, PlainTrain, card


class NormAfterClipping(PlainTrain):
    def clip(self) -> float:
        norm = super().clip()
        return norm if self.max_norm is None else min(norm, self.max_norm)


class NormOfLargest(PlainTrain):
    def clip(self) -> float:
        super().clip()
        norms = [float(p.grad.norm()) for p in self.model.parameters() if p.grad is not None]
        return max(norms)


class OwnLoss(PlainTrain):
    def report(self, loss: float, tokens: float) -> float:
        return self.size * loss / tokens


class LastLoss(PlainTrain):
    """The last micro-batch's mean."""

    def micro_batch(self, index: int, batch: Batch, tokens: float) -> float:
        loss = super().micro_batch(index, batch, tokens)
        share = tokens / max(1, self.count(batch)) / self.size
        return loss * share if index == self.accumulate - 1 else 0.0


class AllTokens(PlainTrain):
    """Padding counts as tokens."""

    def record(self, **fields: float) -> dict[str, float]:
        return fields | {"tokens": float(self.size * self.accumulate * self.numel)}

    def count(self, batch: Batch) -> int:
        self.numel = batch[1].numel()
        return super().count(batch)


class OwnTokensReported(PlainTrain):
    def record(self, **fields: float) -> dict[str, float]:
        return fields | {"tokens": float(self.own)}

    def fetch(self) -> list[Batch]:
        found = super().fetch()
        self.own = sum(self.count(batch) for batch in found)
        return found


class LastRecord(PlainTrain):
    def run(self) -> list[dict[str, float]]:
        return super().run()[-1:]


class StepsPerMicroBatch(PlainTrain):
    """The schedule counts micro-batches."""

    def set_rate(self, number: int) -> None:
        super().set_rate(number * self.accumulate)


class StepsPerRank(PlainTrain):
    def set_rate(self, number: int) -> None:
        super().set_rate(number * self.size)


class ReportsNextRate(PlainTrain):
    """The scheduler moves on before its rate is read."""

    def step(self, number: int) -> dict[str, float]:
        found = super().step(number)
        super().set_rate(number + 1)
        return found | {"lr": self.rate()}


_LOSS = "training.records.loss"

IMPOSTORS = (
    card(
        NormAfterClipping,
        "norm-after-clipping",
        "Reports the norm after clipping.",
        "A norm that is computed once more for the log.",
        "It is max_norm in every line, and looks calm.",
        "training.records.norm-before-clipping",
    ),
    card(
        NormOfLargest,
        "norm-of-largest",
        "Reports the largest parameter's norm.",
        "max() where a norm of norms belongs.",
        "The order of magnitude is right.",
        "training.records.grad-norm",
    ),
    card(
        OwnLoss,
        "own-loss",
        "Reports the rank's own loss.",
        "nanoGPT logs rank 0's.",
        "Curves look alike.",
        _LOSS,
    ),
    card(
        LastLoss,
        "last-loss",
        "Reports the last micro-batch's mean.",
        "loss.item() after the loop: transformers issue 35438.",
        "It is an honest loss of something.",
        _LOSS,
    ),
    card(
        AllTokens,
        "counts-padding",
        "Padding counts as tokens.",
        "targets.numel().",
        "Without padding it is right.",
        "training.records.tokens",
    ),
    card(
        OwnTokensReported,
        "own-tokens",
        "Reports the rank's own tokens.",
        "Throughput per rank, labelled as that of the job.",
        "On one process it is right.",
        "training.records.tokens",
    ),
    card(
        LastRecord,
        "last-record",
        "Returns the last step's record only.",
        "A list that is made anew inside the loop: efficient-dl-systems, week 5.",
        "A parity test compared one step and believed it was five.",
        "training.records.one-per-step",
    ),
    card(
        StepsPerMicroBatch,
        "rate-per-micro-batch",
        "The schedule counts micro-batches.",
        "accelerate issue 963.",
        "Without accumulation it is right.",
        "training.rate.pure-function-of-the-step",
    ),
    card(
        StepsPerRank,
        "rate-per-rank",
        "The schedule runs W times as fast.",
        "accelerate issue 1382, diffusers issue 3954.",
        "On one process it is right.",
        "training.rate.pure-function-of-the-step",
    ),
    card(
        ReportsNextRate,
        "reports-next-rate",
        "Reports the rate of the next step.",
        "get_last_lr() after scheduler.step(), in a course's loop.",
        "The curve is shifted by one.",
        "training.rate.reported-is-used",
    ),
)
