"""Near-misses of a measured rate, of a sweep over batch sizes, and of the arithmetic on top."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

from spec_tests.museum.card import FreeStanding, benign, near_miss
from spec_tests.plain.throughput import PlainExtrapolation, PlainMfu, PlainSweep, PlainThroughput


@near_miss(
    "measure.mean-with-warm-up",
    rejected_by=("measure.throughput.without-warm-up", "measure.throughput.median"),
)
class MeanWithWarmUp(PlainThroughput):
    """Tokens over time from the first step on.

    From: The progress bar's own rate, copied into a table.
    Unseen: After a thousand steps the first three are lost in them.
    """

    def warm_up(self):
        return 0, True

    def middle(self, timed):
        return statistics.fmean(timed)


@near_miss("measure.mean-of-steps", rejected_by="measure.throughput.median")
class Mean(PlainThroughput):
    """The mean of the timed steps.

    From: A course's throughput.py.
    Unseen: On a quiet machine mean and median agree.
    """

    def middle(self, timed):
        return statistics.fmean(timed)


@near_miss("measure.own-clock", rejected_by="measure.throughput.rate")
class OwnClock(PlainThroughput):
    """Reads a clock of its own.

    From: time.perf_counter() in the body, the argument added later.
    Unseen: With the usual argument it is the same clock.
    """

    def __init__(self, step, tokens, clock):
        super().__init__(step, tokens, time.perf_counter)


@near_miss("measure.five-steps-of-warm-up", rejected_by="measure.throughput.warms-up-until-steady")
class FiveStepsOfWarmUp(PlainThroughput):
    """Five steps of warm-up, whatever they take.

    From: A course's throughput.py.
    Unseen: Without compilation five are enough.
    """

    def warm_up(self):
        for _ in range(5):
            self.step()
        return 5, True


@near_miss("measure.always-steady", rejected_by="measure.throughput.says-when-unsteady")
class AlwaysSteady(PlainThroughput):
    """Gives up the warm-up, and does not say so.

    From: A cap that was added when a run did not end.
    Unseen: Most runs settle.
    """

    def warm_up(self):
        return super().warm_up()[0], True


@near_miss("measure.swallows-errors", rejected_by="measure.throughput.errors-are-the-callers")
class Swallows(PlainThroughput):
    """Goes on after an error in a step.

    From: `except Exception: continue`, so that a sweep reaches its end.
    Unseen: The median is of the steps that worked.
    """

    def seconds(self):
        begun = self.clock()
        try:
            self.step()
        except Exception:
            return 0.0
        return self.clock() - begun


@near_miss("measure.range-as-spread", rejected_by="measure.throughput.spread")
class RangeAsSpread(PlainThroughput):
    """The range from the fastest to the slowest for quartiles.

    From: max - min, called spread.
    Unseen: On a quiet machine it is as small.
    """

    def spread(self, timed):
        return max(timed) - min(timed)


@near_miss("measure.takes-no-tokens", rejected_by="measure.throughput.refuses-no-tokens")
class TakesNoTokens(PlainThroughput):
    """A rate of zero or less.

    From: No check.
    Unseen: Nobody asks for it on purpose.
    """

    def check(self, tokens):
        pass


@benign("benign.throughput-plain")
class ThroughputPlain(PlainThroughput):
    """Fifteen steps of warm-up at least."""


@near_miss("measure.sweep-never-resets", rejected_by="measure.sweep.resets-peaks")
class NeverResets(PlainSweep):
    """Reads a peak that nobody reset.

    From: A course's throughput.py. Batches 1 and 4 show 15,619 MB, the peak of 8.
    Unseen: Rising sizes have rising peaks.
    """

    def reset(self):
        pass


@near_miss("measure.sweep-resets-first", rejected_by="measure.sweep.peaks-of-steps")
class ResetsFirst(PlainSweep):
    """Resets the peak before the model is built.

    From: reset at the top of the loop.
    Unseen: Building a model in place takes no more than the model.
    """

    def measure(self, size):
        self.memory.reset_peak()
        return super().measure(size)

    def reset(self):
        pass


@near_miss("measure.sweep-stale-model", rejected_by="measure.sweep.one-model-at-a-time")
class StaleModel(PlainSweep):
    """The first model stays alive.

    From: A course's throughput.py. A variable of `main`: 475 MB more in every row.
    Unseen: It fits, and the rate is right.
    """

    first: Any = None

    def measure(self, size):
        build = self.build

        def kept(size):
            step = build(size)
            self.first = self.first or step
            return step

        self.build = kept
        try:
            return super().measure(size)
        finally:
            self.build = build


@near_miss("measure.sweep-never-collects", rejected_by="measure.sweep.frees-cycles")
class NeverCollects(PlainSweep):
    """Leaves models in cycles to the collector's own time.

    From: `del model` taken for freeing.
    Unseen: A model without hooks has no cycle.
    """

    def release(self):
        pass


@near_miss("measure.sweep-stops-at-the-first", rejected_by="measure.sweep.survives-out-of-memory")
class StopsAtTheFirst(PlainSweep):
    """Ends at the first size that does not fit.

    From: A course's throughput.py. `break`.
    Unseen: In rising order nothing smaller follows.
    """

    def rows(self):
        found = []
        for size in self.sizes:
            found.append(self.row(size))
            if found[-1]["is_oom"]:
                break
        return found


@near_miss(
    "measure.sweep-any-error-is-oom", rejected_by="measure.sweep.other-errors-reach-the-caller"
)
class AnyErrorIsOutOfMemory(PlainSweep):
    """Takes every RuntimeError for out of memory.

    From: `except RuntimeError`, of which OutOfMemoryError is one.
    Unseen: A shape that does not fit is a large batch then.
    """

    def attempt(self, size):
        try:
            return self.measure(size)
        except RuntimeError:
            return None


@near_miss("measure.sweep-tokens-of-the-first", rejected_by="measure.sweep.rows")
class TokensOfTheFirst(PlainSweep):
    """Counts the tokens of the first batch size.

    From: Tokens per step computed outside of the loop.
    Unseen: The rate falls with the size, as a slow machine's would.
    """

    def tokens(self, size):
        return self.sizes[0] * self.length


# -------------------------------------------------------------------------------------- arithmetic


@near_miss("measure.mfu-sparse", rejected_by="measure.mfu.dense-peak")
class Sparse(PlainMfu):
    """Peaks with structured sparsity.

    From: The largest number of a data sheet.
    Unseen: Half of the utilisation is a believable one.
    """

    peaks = (("H200", 1979.0), ("H100", 1979.0), ("A100", 624.0))


@near_miss("measure.mfu-guesses", rejected_by="measure.mfu.unknown-is-none")
class GuessesA100(PlainMfu):
    """An A100's peak for what it does not know.

    From: nanoGPT: 104 % on an H100.
    Unseen: On an A100 it is right.
    """

    def peak(self, name):
        return super().peak(name) or 312.0


@near_miss("measure.mfu-part-of-a-name", rejected_by="measure.mfu.similar-names")
class PartOfAName(PlainMfu):
    """Finds a device by a part of its name.

    From: `if "H20" in name`, the shortest first.
    Unseen: Nobody has both devices.
    """

    peaks = (("H20", 989.4), ("H100 80GB HBM3", 989.4), ("A100-SXM4", 312.0))


@near_miss("measure.mfu-knows-nothing", rejected_by="measure.mfu.knows-a-device")
class KnowsNothing(PlainMfu):
    """None for every device.

    From: A table that was to be filled in.
    Unseen: It never says anything wrong.
    """

    peaks = ()


@near_miss("measure.flops-six-n", rejected_by="measure.flops.of-matrix-products")
class FlopsSixN(FreeStanding):
    """6 per parameter.

    From: Kaplan et al. 2020, without section 2.1: embeddings left in, attention left out.
    Unseen: For a large model it is a few percent off.
    """

    @staticmethod
    def flops_per_token(model, *, sequence_length):
        return 6 * sum(p.numel() for p in model.parameters())


@near_miss("measure.years-of-365-25", rejected_by="measure.extrapolation.larger-model")
class YearsOf36525(PlainExtrapolation):
    """Years of another length than the contract's.

    From: Astronomy.
    Unseen: 0.07 % is less than anyone looks at.
    """

    days_per_year = 365.25


@near_miss(
    "measure.devices-rounded-down", rejected_by="measure.extrapolation.operations-and-devices"
)
class DevicesRoundedDown(PlainExtrapolation):
    """Rounds the number of devices down.

    From: `//`.
    Unseen: One device in two hundred is missing, and only a part of its memory.
    """

    rounded = staticmethod(math.floor)


@benign("benign.sweep-plain")
class SweepPlain(PlainSweep):
    """Collects once per size."""


@benign("benign.mfu-plain")
class MfuPlain(PlainMfu):
    """Knows three devices."""
