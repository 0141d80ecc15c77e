"""Near-misses of a measured rate, of a sweep over batch sizes, and of the arithmetic on top."""

from __future__ import annotations

from spec_tests.museum.card import Source, near_miss
from spec_tests.plain.throughput import PlainExtrapolation, PlainMfu, PlainSweep, PlainThroughput

THROUGHPUT = Source("spec_tests.plain.throughput", PlainThroughput)
SWEEP = Source("spec_tests.plain.throughput", PlainSweep)
MFU = Source("spec_tests.plain.throughput", PlainMfu)
EXTRAPOLATION = Source("spec_tests.plain.throughput", PlainExtrapolation)

THROUGHPUT.near_miss(
    "measure.five-steps-of-warm-up",
    "measure.throughput.warms-up-until-steady",
    "- num_warmup_steps, is_steady = self.warm_up()",
    "+ num_warmup_steps, is_steady = 5, True",
    "+ for _ in range(5):",
    "+     self.step()",
    does="Five steps of warm-up, whatever they take.",
    seen="A course's throughput.py.",
    unseen="Without compilation five are enough.",
)

THROUGHPUT.near_miss(
    "measure.always-steady",
    "measure.throughput.says-when-unsteady",
    "- return len(seen), False",
    "+ return len(seen), True",
    does="Gives up the warm-up, and does not say so.",
    seen="A cap that was added when a run did not end.",
    unseen="Most runs settle.",
)

THROUGHPUT.near_miss(
    "measure.swallows-errors",
    "measure.throughput.errors-are-the-callers",
    "- self.step()",
    "+ try:",
    "+     self.step()",
    "+ except Exception:",
    "+     return 0.0",
    does="Goes on after an error in a step.",
    seen="`except Exception: continue`, so that a sweep reaches its end.",
    unseen="The median is of the steps that worked.",
)

THROUGHPUT.near_miss(
    "measure.range-as-spread",
    "measure.throughput.spread",
    "- lower, _, upper = statistics.quantiles(timed, n=4)",
    "+ lower, upper = min(timed), max(timed)",
    does="The range from the fastest to the slowest for quartiles.",
    seen="max - min, called spread.",
    unseen="On a quiet machine it is as small.",
)

THROUGHPUT.near_miss(
    "measure.takes-no-tokens",
    "measure.throughput.refuses-no-tokens",
    "- if tokens <= 0:",
    "+ if False:",
    does="A rate of zero or less.",
    seen="No check.",
    unseen="Nobody asks for it on purpose.",
)

THROUGHPUT.benign("benign.throughput-plain", does="Fifteen steps of warm-up at least.")

SWEEP.near_miss(
    "measure.sweep-resets-first",
    "measure.sweep.peaks-of-steps",
    "- step = self.build(size)",
    "- self.reset()",
    "+ self.reset()",
    "+ step = self.build(size)",
    does="Resets the peak before the model is built.",
    seen="reset at the top of the loop.",
    unseen="Building a model in place takes no more than the model.",
)

SWEEP.near_miss(
    "measure.sweep-never-collects",
    "measure.sweep.frees-cycles",
    "- gc.collect()",
    "+ pass",
    does="Leaves models in cycles to the collector's own time.",
    seen="`del model` taken for freeing.",
    unseen="A model without hooks has no cycle.",
)

SWEEP.near_miss(
    "measure.sweep-stops-at-the-first",
    "measure.sweep.survives-out-of-memory",
    "- return [self.row(size) for size in self.sizes]",
    "+ found = []",
    "+ for size in self.sizes:",
    "+     found.append(self.row(size))",
    '+     if found[-1]["is_oom"]:',
    "+         break",
    "+ return found",
    does="Ends at the first size that does not fit.",
    seen="A course's throughput.py. `break`.",
    unseen="In rising order nothing smaller follows.",
)

SWEEP.near_miss(
    "measure.sweep-any-error-is-oom",
    "measure.sweep.other-errors-reach-the-caller",
    "- except torch.OutOfMemoryError:",
    "+ except RuntimeError:",
    does="Takes every RuntimeError for out of memory.",
    seen="`except RuntimeError`, of which OutOfMemoryError is one.",
    unseen="A shape that does not fit is a large batch then.",
)

# -------------------------------------------------------------------------------------- arithmetic


@near_miss("measure.mfu-sparse", rejected_by="measure.mfu.dense-peak")
class Sparse(PlainMfu):
    """Peaks with structured sparsity.

    From: The largest number of a data sheet.
    Unseen: Half of the utilisation is a believable one.
    """

    peaks = (("H200", 1979.0), ("H100", 1979.0), ("A100", 624.0))


MFU.near_miss(
    "measure.mfu-guesses",
    "measure.mfu.unknown-is-none",
    "- return next((peak for part, peak in self.peaks if part in name), None)",
    "+ return next((peak for part, peak in self.peaks if part in name), 312.0)",
    does="An A100's peak for a device that it does not know.",
    seen="nanoGPT: 104 % on an H100.",
    unseen="On an A100 it is right.",
)

MFU.near_miss(
    "measure.mfu-part-of-a-name",
    "measure.mfu.similar-names",
    '- ("H200", 989.4),',
    '+ ("H20", 989.4),',
    does="Finds a device by a part of its name.",
    seen='`if "H20" in name`, the shortest first.',
    unseen="Nobody has both devices.",
)

MFU.near_miss(
    "measure.mfu-knows-nothing",
    "measure.mfu.knows-a-device",
    "- return next((peak for part, peak in self.peaks if part in name), None)",
    "+ return next((peak for part, peak in self.peaks if False), None)",
    does="None for every device.",
    seen="A table that was to be filled in.",
    unseen="It never says anything wrong.",
)

EXTRAPOLATION.near_miss(
    "measure.years-of-365-25",
    "measure.extrapolation.larger-model",
    "- days_per_year = 365.0",
    "+ days_per_year = 365.25",
    does="Years of another length than the contract's.",
    seen="Astronomy.",
    unseen="0.07 % is less than anyone looks at.",
)

EXTRAPOLATION.near_miss(
    "measure.devices-rounded-down",
    "measure.extrapolation.operations-and-devices",
    "- rounded: Any = staticmethod(math.ceil)",
    "+ rounded: Any = staticmethod(math.floor)",
    does="Rounds the number of devices down.",
    seen="`//`.",
    unseen="One device in two hundred is missing, and only a part of its memory.",
)

SWEEP.benign("benign.sweep-plain", does="Collects once per size.")

MFU.benign("benign.mfu-plain", does="Knows three devices.")
