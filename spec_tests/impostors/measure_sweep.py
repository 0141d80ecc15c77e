"""Near-misses of a sweep over batch sizes, and of the arithmetic on top of a rate."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from spec_tests.impostors.card import Functions, Impostor
from spec_tests.impostors.plain_throughput import (
    PlainMfu,
    PlainSweep,
    Rows,
    card,
    offer_mfu,
    offer_sweep,
)


class NeverResets(PlainSweep):
    def reset(self) -> None:
        pass


class ResetsFirst(PlainSweep):
    def measure(self, size: int) -> dict[str, Any]:
        self.memory.reset_peak()
        return super().measure(size)

    def reset(self) -> None:
        pass


class StaleModel(PlainSweep):
    first: Any = None

    def measure(self, size: int) -> dict[str, Any]:
        build = self.build

        def kept(size: int) -> Any:
            step = build(size)
            self.first = self.first or step
            return step

        self.build = kept
        try:
            return super().measure(size)
        finally:
            self.build = build


class NeverCollects(PlainSweep):
    def release(self) -> None:
        pass


class KeepsTheError(PlainSweep):
    error: BaseException | None = None

    def attempt(self, size: int) -> dict[str, Any] | None:
        try:
            return self.measure(size)
        except torch.OutOfMemoryError as error:
            self.error = error
            self.release()
            return None


class StopsAtTheFirst(PlainSweep):
    def rows(self) -> Rows:
        found = []
        for size in self.sizes:
            found.append(self.row(size))
            if found[-1]["is_oom"]:
                break
        return found


class AnyErrorIsOutOfMemory(PlainSweep):
    def attempt(self, size: int) -> dict[str, Any] | None:
        try:
            return self.measure(size)
        except RuntimeError:
            return None


class TokensOfTheFirst(PlainSweep):
    def tokens(self, size: int) -> int:
        return self.sizes[0] * self.length


# -------------------------------------------------------------------------------------- arithmetic


class Sparse(PlainMfu):
    peaks = (("H200", 1979.0), ("H100", 1979.0), ("A100", 624.0))


class GuessesA100(PlainMfu):
    def peak(self, name: str) -> float | None:
        return super().peak(name) or 312.0


class PartOfAName(PlainMfu):
    peaks = (("H20", 989.4), ("H100 80GB HBM3", 989.4), ("A100-SXM4", 312.0))


class KnowsNothing(PlainMfu):
    peaks = ()


def six_n() -> Functions:
    """6 per parameter."""

    def flops_per_token(model: nn.Module, *, sequence_length: int) -> int:
        return 6 * sum(p.numel() for p in model.parameters())

    return {"flops_per_token": flops_per_token}


def extrapolating(*, days_per_year: float = 365, rounded: Any = math.ceil) -> Functions:
    """Right with what is given by default."""

    def extrapolate_training(**given: Any) -> dict[str, Any]:
        size = given["target_parameters"]
        rate = given["tokens_per_s"] * given["num_parameters"] / size
        days = given["target_tokens"] / rate / 86_400
        return {
            "tokens_per_s": rate,
            "days": days,
            "years": days / days_per_year,
            "flops": 6 * size * given["target_tokens"],
            "num_devices_for_memory": rounded(16 * size / given["device_memory_bytes"]),
        }

    return {"extrapolate_training": extrapolate_training}


COURSE = "A course's throughput.py."


def _sweep(kind: type[PlainSweep], *words: str) -> Impostor:
    return card(lambda: offer_sweep(kind), *words)


def _mfu(kind: type[PlainMfu], *words: str) -> Impostor:
    return card(lambda: offer_mfu(kind), *words)


IMPOSTORS = (
    _sweep(
        NeverResets,
        "sweep-never-resets",
        "Reads a peak that nobody reset.",
        COURSE + " Batches 1 and 4 show 15,619 MB, the peak of 8.",
        "Rising sizes have rising peaks.",
        "sweep.resets-peaks",
    ),
    _sweep(
        ResetsFirst,
        "sweep-resets-first",
        "Resets the peak before the model is built.",
        "reset at the top of the loop.",
        "Building a model in place takes no more than the model.",
        "sweep.peaks-of-steps",
    ),
    _sweep(
        StaleModel,
        "sweep-stale-model",
        "The first model stays alive.",
        COURSE + " A variable of `main`: 475 MB more in every row.",
        "It fits, and the rate is right.",
        "sweep.one-model-at-a-time",
    ),
    _sweep(
        NeverCollects,
        "sweep-never-collects",
        "Leaves models in cycles to the collector's own time.",
        "`del model` taken for freeing.",
        "A model without hooks has no cycle.",
        "sweep.frees-cycles",
    ),
    _sweep(
        KeepsTheError,
        "sweep-keeps-the-error",
        "Frees memory inside the `except` block, and keeps the error.",
        "PyTorch FAQ: my out of memory exception handler can't allocate memory.",
        "The row says OOM; the next one does, too.",
        "sweep.survives-out-of-memory",
    ),
    _sweep(
        StopsAtTheFirst,
        "sweep-stops-at-the-first",
        "Ends at the first size that does not fit.",
        COURSE + " `break`.",
        "In rising order nothing smaller follows.",
        "sweep.survives-out-of-memory",
    ),
    _sweep(
        AnyErrorIsOutOfMemory,
        "sweep-any-error-is-oom",
        "Takes every RuntimeError for out of memory.",
        "`except RuntimeError`, of which OutOfMemoryError is one.",
        "A shape that does not fit is a large batch then.",
        "sweep.other-errors-reach-the-caller",
    ),
    _sweep(
        TokensOfTheFirst,
        "sweep-tokens-of-the-first",
        "Counts the tokens of the first batch size.",
        "Tokens per step computed outside of the loop.",
        "The rate falls with the size, as a slow machine's would.",
        "sweep.rows",
    ),
    _mfu(
        Sparse,
        "mfu-sparse",
        "Peaks with structured sparsity.",
        "The largest number of a data sheet.",
        "Half of the utilisation is a believable one.",
        "mfu.dense-peak",
    ),
    _mfu(
        GuessesA100,
        "mfu-guesses",
        "An A100's peak for what it does not know.",
        "nanoGPT: 104 % on an H100.",
        "On an A100 it is right.",
        "mfu.unknown-is-none",
    ),
    _mfu(
        PartOfAName,
        "mfu-part-of-a-name",
        "Finds a device by a part of its name.",
        '`if "H20" in name`, the shortest first.',
        "Nobody has both devices.",
        "mfu.similar-names",
    ),
    _mfu(
        KnowsNothing,
        "mfu-knows-nothing",
        "None for every device.",
        "A table that was to be filled in.",
        "It never says anything wrong.",
        "mfu.knows-a-device",
    ),
    card(
        six_n,
        "flops-six-n",
        "6 per parameter.",
        "Kaplan et al. 2020, without section 2.1: embeddings left in, attention left out.",
        "For a large model it is a few percent off.",
        "flops.of-matrix-products",
    ),
    card(
        lambda: extrapolating(days_per_year=365.25),
        "years-of-365-25",
        "Years of another length than the contract's.",
        "Astronomy.",
        "0.07 % is less than anyone looks at.",
        "extrapolation.larger-model",
    ),
    card(
        lambda: extrapolating(rounded=math.floor),
        "devices-rounded-down",
        "Rounds the number of devices down.",
        "`//`.",
        "One device in two hundred is missing, and only a part of its memory.",
        "extrapolation.operations-and-devices",
    ),
    Impostor(
        "benign.sweep-plain",
        "Collects once per size.",
        "",
        "",
        (),
        functions=lambda: offer_sweep(PlainSweep),
    ),
    Impostor(
        "benign.mfu-plain",
        "Knows three devices.",
        "",
        "",
        (),
        functions=lambda: offer_mfu(PlainMfu),
    ),
)
