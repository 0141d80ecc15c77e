"""Near-misses of a training loop: sizes, data, NaN, traffic, records; lines of the reference."""

import contextlib

from torch.nn.parallel import DistributedDataParallel

from spec_tests.museum.card import Source, near_miss
from spec_tests.plain.train import PlainTrain

TRAIN = Source("spec_tests.plain.train")
TRAINER = Source("solution.trainer")

TRAIN.near_miss(
    "training.floors",
    ("training.accumulation.refuses-a-remainder", "training.data.refuses-a-remainder"),
    "- if whole % (micro * size):",
    '-     raise ValueError(f"{whole} does not divide by {micro} * {size}")',
    "- return whole // (micro * size)",
    "+ return max(1, whole // (micro * size))",
    does="Rounds the number of micro-batches down.",
    seen="A course's trainer: global 6, micro 2, two ranks trains with 4.",
    unseen="It trains.",
)

TRAIN.near_miss(
    "training.says-indivisible",
    "training.accumulation.names-the-numbers",
    '- raise ValueError(f"{whole} does not divide by {micro} * {size}")',
    '+ raise ValueError("the batch does not divide into micro-batches")',
    does="Refuses a remainder without saying of what.",
    seen="assert global_batch % micro_batch == 0, and a word to it.",
    unseen="It is an error, as it should be.",
)

TRAIN.near_miss(
    "training.forgets-ranks",
    ("training.accumulation.fills-the-global-batch", "training.data.takes-what-it-uses"),
    "- return whole // (micro * size)",
    "+ return whole // micro",
    does="Each rank runs the whole global batch.",
    seen="global_batch // micro_batch.",
    unseen="The loss falls faster per step.",
)


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


TRAIN.near_miss(
    "training.steps-on-nan",
    "training.finite.spares-the-weights",
    "- if norm != norm:  # the same on all ranks: gradients are",
    '-     raise RuntimeError("the gradient is NaN")',
    does="Updates with NaN, and reports it.",
    seen="clip_grad_norm_ without a look at its result.",
    unseen="It shows in the next line of the log, when the weights are gone.",
)


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


TRAIN.near_miss(
    "training.ends-alone",
    "training.data.ranks-end-together",
    does="A rank whose data end raises by itself.",
    seen="StopIteration on one rank, as in most loops.",
    unseen="Loaders give every rank equally many batches.",
    outcomes=("hang", "failed"),
)

TRAINER.near_miss(
    "training.patched-leftovers",
    "training.gradient.leftovers-do-not-count",
    "- _drop_gradients(model, optimizer)",
    "  try:",
    does="Gradients from before enter the first step.",
    seen="One line of the reference, changed.",
    unseen="Tests begin with fresh parameters.",
)

TRAIN.near_miss(
    "training.norm-after-clipping",
    "training.records.norm-before-clipping",
    "- return norm",
    "+ return min(norm, limit)",
    does="Reports the norm after clipping.",
    seen="A norm that is computed once more for the log.",
    unseen="It is max_norm in every line, and looks calm.",
)

TRAIN.near_miss(
    "training.last-loss",
    "training.records.loss",
    "- loss += self.micro_batch(index, batch, tokens)",
    "+ share = tokens / max(1, self.count(batch)) / self.size",
    "+ loss = share * self.micro_batch(index, batch, tokens)",
    does="Reports the last micro-batch's mean.",
    seen="loss.item() after the loop: transformers issue 35438.",
    unseen="It is an honest loss of something.",
)

TRAIN.near_miss(
    "training.counts-padding",
    "training.records.tokens",
    "- return self.record(loss=self.report(loss, tokens), lr=rate, grad_norm=norm, tokens=tokens)",
    "+ loss = self.report(loss, tokens)",
    "+ tokens = float(self.size * sum(batch[1].numel() for batch in micros))",
    "+ return self.record(loss=loss, lr=rate, grad_norm=norm, tokens=tokens)",
    does="Padding counts as tokens.",
    seen="targets.numel().",
    unseen="Without padding it is right.",
)

TRAIN.near_miss(
    "training.last-record",
    "training.records.one-per-step",
    "- return [self.step(number) for number in range(self.steps)]",
    "+ return [self.step(number) for number in range(self.steps)][-1:]",
    does="Returns the last step's record only.",
    seen="A list that is made anew inside the loop: efficient-dl-systems, week 5.",
    unseen="A parity test compared one step and believed it was five.",
)

TRAIN.near_miss(
    "training.rate-per-micro-batch",
    "training.rate.pure-function-of-the-step",
    "- self.set_rate(number)",
    "+ self.set_rate(number * self.accumulate)",
    does="The schedule counts micro-batches.",
    seen="accelerate issue 963.",
    unseen="Without accumulation it is right.",
)

TRAIN.near_miss(
    "training.rate-per-rank",
    "training.rate.pure-function-of-the-step",
    "- self.set_rate(number)",
    "+ self.set_rate(number * self.size)",
    does="The schedule runs W times as fast.",
    seen="accelerate issue 1382, diffusers issue 3954.",
    unseen="On one process it is right.",
)

TRAIN.near_miss(
    "training.reports-next-rate",
    "training.rate.reported-is-used",
    "  self.optimizer.step()",
    "+ self.set_rate(number + 1)",
    "+ rate = self.rate()",
    does="Reports the rate of the next step.",
    seen="get_last_lr() after scheduler.step(), in a course's loop.",
    unseen="The curve is shifted by one.",
)
