"""Near-misses of a measured rate: warm-up, clock, middle, spread, errors."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.plain_throughput import PlainThroughput, card, offer_throughput


class MeanWithWarmUp(PlainThroughput):
    def warm_up(self) -> tuple[int, bool]:
        return 0, True

    def middle(self, timed: Sequence[float]) -> float:
        return statistics.fmean(timed)


class Mean(PlainThroughput):
    def middle(self, timed: Sequence[float]) -> float:
        return statistics.fmean(timed)


class OwnClock(PlainThroughput):
    def __init__(self, step: Any, tokens: int, clock: Any) -> None:
        super().__init__(step, tokens, time.perf_counter)


class FiveStepsOfWarmUp(PlainThroughput):
    def warm_up(self) -> tuple[int, bool]:
        for _ in range(5):
            self.step()
        return 5, True


class WaitsForEver(PlainThroughput):
    def warm_up(self) -> tuple[int, bool]:
        seen = [self.seconds() for _ in range(15)]
        while not self.is_level(seen):
            seen.append(self.seconds())
        return len(seen), True


class AlwaysSteady(PlainThroughput):
    def warm_up(self) -> tuple[int, bool]:
        return super().warm_up()[0], True


class Swallows(PlainThroughput):
    def seconds(self) -> float:
        begun = self.clock()
        try:
            self.step()
        except Exception:
            return 0.0
        return self.clock() - begun


class RangeAsSpread(PlainThroughput):
    def spread(self, timed: Sequence[float]) -> float:
        return max(timed) - min(timed)


class TakesNoTokens(PlainThroughput):
    def check(self, tokens: int) -> None:
        pass


COURSE = "A course's throughput.py."


def _rate(kind: type[PlainThroughput], *words: str) -> Impostor:
    return card(lambda: offer_throughput(kind), *words)


IMPOSTORS = (
    _rate(
        MeanWithWarmUp,
        "mean-with-warm-up",
        "Tokens over time from the first step on.",
        "The progress bar's own rate, copied into a table.",
        "After a thousand steps the first three are lost in them.",
        "throughput.without-warm-up",
        "throughput.median",
    ),
    _rate(
        Mean,
        "mean-of-steps",
        "The mean of the timed steps.",
        COURSE,
        "On a quiet machine mean and median agree.",
        "throughput.median",
    ),
    _rate(
        OwnClock,
        "own-clock",
        "Reads a clock of its own.",
        "time.perf_counter() in the body, the argument added later.",
        "With the usual argument it is the same clock.",
        "throughput.rate",
    ),
    _rate(
        FiveStepsOfWarmUp,
        "five-steps-of-warm-up",
        "Five steps of warm-up, whatever they take.",
        COURSE,
        "Without compilation five are enough.",
        "throughput.warms-up-until-steady",
    ),
    _rate(
        WaitsForEver,
        "waits-for-ever",
        "Warms up until it is steady, without an end.",
        "A while loop on a machine that was quiet.",
        "Most runs settle.",
        "throughput.says-when-unsteady",
    ),
    _rate(
        AlwaysSteady,
        "always-steady",
        "Gives up the warm-up, and does not say so.",
        "A cap that was added when a run did not end.",
        "Most runs settle.",
        "throughput.says-when-unsteady",
    ),
    _rate(
        Swallows,
        "swallows-errors",
        "Goes on after an error in a step.",
        "`except Exception: continue`, so that a sweep reaches its end.",
        "The median is of the steps that worked.",
        "throughput.errors-are-the-callers",
    ),
    _rate(
        RangeAsSpread,
        "range-as-spread",
        "The range from the fastest to the slowest for quartiles.",
        "max - min, called spread.",
        "On a quiet machine it is as small.",
        "throughput.spread",
    ),
    _rate(
        TakesNoTokens,
        "takes-no-tokens",
        "A rate of zero or less.",
        "No check.",
        "Nobody asks for it on purpose.",
        "throughput.refuses-no-tokens",
    ),
    Impostor(
        "benign.throughput-plain",
        "Fifteen steps of warm-up at least.",
        "",
        "",
        (),
        functions=lambda: offer_throughput(PlainThroughput),
    ),
)
