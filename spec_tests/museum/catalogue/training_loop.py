"""Near-misses of a training loop: sizes, data, NaN, traffic, records; lines of the reference."""

import contextlib
import math

from torch.nn.parallel import DistributedDataParallel

from spec_tests.museum.card import Patched, near_miss
from spec_tests.plain.train import PlainTrain


@near_miss("training.fetches-one-more", rejected_by="training.data.takes-what-it-uses")
class FetchesOneMore(PlainTrain):
    """Takes a batch that nobody uses.

    From: `for batch in loader: if step == steps: break`.
    Unseen: The steps are right.
    """

    def run(self):
        found = super().run()
        next(self.batches, None)
        return found


@near_miss(
    "training.floors",
    rejected_by=("training.accumulation.refuses-a-remainder", "training.data.refuses-a-remainder"),
)
class Floors(PlainTrain):
    """Rounds the number of micro-batches down.

    From: A course's trainer: global 6, micro 2, two ranks trains with 4.
    Unseen: It trains.
    """

    @staticmethod
    def accumulation_steps(whole, micro, size):
        return max(1, whole // (micro * size))


@near_miss("training.says-indivisible", rejected_by="training.accumulation.names-the-numbers")
class SaysIndivisible(PlainTrain):
    """Refuses a remainder without saying of what.

    From: assert global_batch % micro_batch == 0, and a word to it.
    Unseen: It is an error, as it should be.
    """

    @staticmethod
    def accumulation_steps(whole, micro, size):
        if whole % (micro * size):
            raise ValueError("the batch does not divide into micro-batches")
        return whole // (micro * size)


@near_miss(
    "training.forgets-ranks",
    rejected_by=(
        "training.accumulation.fills-the-global-batch",
        "training.data.takes-what-it-uses",
    ),
)
class ForgetsRanks(PlainTrain):
    """Each rank runs the whole global batch.

    From: global_batch // micro_batch.
    Unseen: The loss falls faster per step.
    """

    @staticmethod
    def accumulation_steps(whole, micro, size):
        if whole % (micro * size):
            raise ValueError(f"{whole} does not divide by {micro} * {size}")
        return whole // micro


@near_miss("training.takes-partial-step", rejected_by="training.data.no-partial-step-in-silence")
class TakesPartialStep(PlainTrain):
    """A step with a third of its data is scaled as a whole one.

    From: Lightning issue 19987: 1/N on a window of fewer.
    Unseen: Only the last step of an epoch is like that.
    """

    def fetch(self):
        found = [b for b in (next(self.batches, None) for _ in range(self.accumulate)) if b]
        if not found:
            raise RuntimeError("the data have ended")
        self.missing = self.accumulate - len(found)
        return found

    def scale(self, batch, tokens):
        share = (self.accumulate - self.missing) / self.accumulate
        return share * super().scale(batch, tokens)

    def window(self, index):
        return super().window(index + self.missing)


@near_miss("training.steps-on-nan", rejected_by="training.finite.spares-the-weights")
class StepsOnNan(PlainTrain):
    """Updates with NaN, and reports it.

    From: clip_grad_norm_ without a look at what it returns.
    Unseen: It shows in the next line of the log, when the weights are gone.
    """

    def clip(self):
        with contextlib.suppress(RuntimeError):
            return super().clip()
        return math.nan


class WithTorchDdp(PlainTrain):
    """The plain loop around PyTorch's wrapper."""

    @classmethod
    def wrapper_functions(cls):
        def ddp(module, *, process_group=None):
            return DistributedDataParallel(module, process_group=process_group)

        def ddp_bucketed(module, *, bucket_size_mb, process_group=None):
            return DistributedDataParallel(
                module, process_group=process_group, bucket_cap_mb=bucket_size_mb
            )

        return {"ddp": ddp, "ddp_bucketed": ddp_bucketed}


@near_miss("training.never-inside", rejected_by="training.traffic.one-reduction-per-step")
class NeverInside(WithTorchDdp):
    """no_sync is not used.

    From: sentence-transformers issue 4027, PiPPy issue 1133.
    Unseen: The numbers are right.
    """

    def window(self, index):
        return contextlib.nullcontext()


@near_miss(
    "training.ends-alone",
    rejected_by="training.data.ranks-end-together",
    outcomes=("hang", "failed"),
)
class EndsAlone(PlainTrain):
    """A rank whose data end raises by itself.

    From: StopIteration on one rank, as in most loops.
    Unseen: Loaders give every rank equally many batches.
    """


@near_miss("training.patched-no-compensation", rejected_by="training.gradient.equals-one-process")
class NoCompensation(Patched):
    """The mean over ranks divides a second time.

    From: One line of the reference, changed.
    Unseen: Adam does not feel a factor.
    """

    module = "solution.trainer"
    find = "scale = ranks.size / count"
    replace = "scale = 1 / count"


@near_miss("training.patched-leftovers", rejected_by="training.gradient.leftovers-do-not-count")
class Leftovers(Patched):
    """Gradients from before enter the first step.

    From: One line of the reference, changed.
    Unseen: Tests begin with fresh parameters.
    """

    module = "solution.trainer"
    find = "    _drop_gradients(model, optimizer)\n    try:"
    replace = "    try:"


@near_miss("training.patched-own-loss", rejected_by="training.records.loss")
class PatchedOwnLoss(Patched):
    """Reports this rank's part of the loss.

    From: One line of the reference, changed.
    Unseen: With one rank it is the loss.
    """

    module = "solution.trainer"
    find = "loss = total / count"
    replace = "loss = own.item() / count"


@near_miss("training.norm-after-clipping", rejected_by="training.records.norm-before-clipping")
class NormAfterClipping(PlainTrain):
    """Reports the norm after clipping.

    From: A norm that is computed once more for the log.
    Unseen: It is max_norm in every line, and looks calm.
    """

    def clip(self):
        norm = super().clip()
        return norm if self.max_norm is None else min(norm, self.max_norm)


@near_miss("training.norm-of-largest", rejected_by="training.records.grad-norm")
class NormOfLargest(PlainTrain):
    """Reports the largest parameter's norm.

    From: max() where a norm of norms belongs.
    Unseen: The order of magnitude is right.
    """

    def clip(self):
        super().clip()
        norms = [float(p.grad.norm()) for p in self.model.parameters() if p.grad is not None]
        return max(norms)


@near_miss("training.last-loss", rejected_by="training.records.loss")
class LastLoss(PlainTrain):
    """Reports the last micro-batch's mean.

    From: loss.item() after the loop: transformers issue 35438.
    Unseen: It is an honest loss of something.
    """

    def micro_batch(self, index, batch, tokens):
        loss = super().micro_batch(index, batch, tokens)
        share = tokens / max(1, self.count(batch)) / self.size
        return loss * share if index == self.accumulate - 1 else 0.0


@near_miss("training.counts-padding", rejected_by="training.records.tokens")
class AllTokens(PlainTrain):
    """Padding counts as tokens.

    From: targets.numel().
    Unseen: Without padding it is right.
    """

    def record(self, **fields):
        return fields | {"tokens": float(self.size * self.accumulate * self.numel)}

    def count(self, batch):
        self.numel = batch[1].numel()
        return super().count(batch)


@near_miss("training.last-record", rejected_by="training.records.one-per-step")
class LastRecord(PlainTrain):
    """Returns the last step's record only.

    From: A list that is made anew inside the loop: efficient-dl-systems, week 5.
    Unseen: A parity test compared one step and believed it was five.
    """

    def run(self):
        return super().run()[-1:]


@near_miss("training.rate-per-micro-batch", rejected_by="training.rate.pure-function-of-the-step")
class StepsPerMicroBatch(PlainTrain):
    """The schedule counts micro-batches.

    From: accelerate issue 963.
    Unseen: Without accumulation it is right.
    """

    def set_rate(self, number):
        super().set_rate(number * self.accumulate)


@near_miss("training.rate-per-rank", rejected_by="training.rate.pure-function-of-the-step")
class StepsPerRank(PlainTrain):
    """The schedule runs W times as fast.

    From: accelerate issue 1382, diffusers issue 3954.
    Unseen: On one process it is right.
    """

    def set_rate(self, number):
        super().set_rate(number * self.size)


@near_miss("training.reports-next-rate", rejected_by="training.rate.reported-is-used")
class ReportsNextRate(PlainTrain):
    """Reports the rate of the next step.

    From: get_last_lr() after scheduler.step(), in a course's loop.
    Unseen: The curve is shifted by one.

    The scheduler moves on before its rate is read.
    """

    def step(self, number):
        found = super().step(number)
        super().set_rate(number + 1)
        return found | {"lr": self.rate()}
