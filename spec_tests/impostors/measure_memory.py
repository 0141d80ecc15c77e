"""Near-misses of an estimate of memory: terms left out, moments mixed up, models left alive."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from torch import nn

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.plain_memory import Books, PlainMemory, card, offer


class CurrentAsPeak(PlainMemory):
    def peak(self, terms: dict[str, int], above: int) -> int:
        return terms["parameter_bytes"] + terms["optimizer_bytes"]


class SumOfTerms(PlainMemory):
    def peak(self, terms: dict[str, int], above: int) -> int:
        return sum(terms.values())


class ForgetsTemporaries(PlainMemory):
    def peak(self, terms: dict[str, int], above: int) -> int:
        larger = max(terms["activation_bytes"], terms["gradient_bytes"])
        return terms["parameter_bytes"] + terms["optimizer_bytes"] + larger


class FourBytes(PlainMemory):
    def parameters(self) -> int:
        return sum(4 * p.numel() for p in self.model.parameters())

    def gradients(self) -> int:
        return sum(4 * p.numel() for p in self.trained())


class SharedTwice(PlainMemory):
    def parameters(self) -> int:
        return sum(p.nbytes for m in self.model.modules() for p in m.parameters(recurse=False))


class GradientsForFrozen(PlainMemory):
    def gradients(self) -> int:
        return self.parameters()


class OneMoment(PlainMemory):
    def optimizer(self) -> int:
        return self.gradients()


class NoActivations(PlainMemory):
    def activations(self, books: Books) -> int:
        return 0


class OneSequence(PlainMemory):
    def ids(self) -> torch.Tensor:
        return super().ids()[:1]


class AllThatWasMade(PlainMemory):
    def activations(self, books: Books) -> int:
        return books.made


class NoLogits(PlainMemory):
    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids)[..., :1].sum()


class NeverResets(PlainMemory):
    most: ClassVar[int] = 0

    def peak(self, terms: dict[str, int], above: int) -> int:
        NeverResets.most = max(NeverResets.most, super().peak(terms, above))
        return NeverResets.most


class ModelStaysAlive(PlainMemory):
    all_of_them: ClassVar[list[Any]] = []

    def copied(self, model: nn.Module) -> nn.Module:
        twin = super().copied(model)
        self.all_of_them.append(twin)
        return twin


class SumsLosses(PlainMemory):
    total: ClassVar[Any] = 0

    def activations(self, books: Books) -> int:
        found = super().activations(books)
        SumsLosses.total = SumsLosses.total + self.loss(self.ids())
        return found


class StepsWithTheModel(PlainMemory):
    def copied(self, model: nn.Module) -> nn.Module:
        return super().copied(model) if next(model.parameters()).is_meta else model


class Seeds(PlainMemory):
    def estimate(self) -> dict[str, int]:
        torch.manual_seed(0)
        return super().estimate()


class BuildsToCount(PlainMemory):
    def estimate(self) -> dict[str, int]:
        count = sum(p.nbytes for p in copy.deepcopy(self.model).parameters())
        return {"parameter_bytes": count, "peak_bytes": 4 * count}


class TakesAnyBatch(PlainMemory):
    def check(self, *sizes: int) -> None:
        pass

    def ids(self) -> torch.Tensor:
        self.batch_size, self.sequence_length = (
            max(1, self.batch_size),
            max(1, self.sequence_length),
        )
        return super().ids()


COURSE = "A course's memory_analysis.py."

IMPOSTORS = (
    card(
        CurrentAsPeak,
        "current-as-peak",
        "Reports what is allocated after the step as the peak.",
        COURSE + " It prints 3,076 MB for a step that takes 15,619.",
        "It is near the estimate, which leaves activations out as well.",
        "peak",
        "peak-covers-the-terms",
    ),
    card(
        SumOfTerms,
        "sum-of-terms",
        "Adds up all terms, which are never alive at once.",
        "Most calculators of training memory.",
        "It is on the safe side, but for what the loss takes.",
        "peak",
    ),
    card(
        ForgetsTemporaries,
        "forgets-temporaries",
        "The larger of activations and gradients, on top of the state.",
        "A formula that has the moments right, and no gradient of the logits.",
        "With a small vocabulary it is exact.",
        "peak",
    ),
    card(
        FourBytes,
        "four-bytes",
        "Four bytes for every element.",
        COURSE,
        "Everything is float32 there.",
        "static-terms-of-any-model",
    ),
    card(
        SharedTwice,
        "shared-twice",
        "Counts a tied matrix once per module.",
        "A sum over modules in place of `parameters()`.",
        "Untied models have none.",
        "static-terms",
    ),
    card(
        GradientsForFrozen,
        "gradients-for-frozen",
        "Gradients for frozen parameters.",
        "4 x parameters, as for a model that trains whole.",
        "Nobody freezes anything in pretraining.",
        "static-terms-of-any-model",
    ),
    card(
        OneMoment,
        "one-moment",
        "One moment for AdamW.",
        "SGD's momentum.",
        "The total is of the right order.",
        "static-terms",
    ),
    card(
        NoActivations,
        "no-activations",
        "Leaves activations out.",
        COURSE + " 'Ignored because of checkpointing'; they are two thirds of its peak.",
        "The other terms are exact.",
        "activations",
        "grows-with-the-batch",
    ),
    card(
        OneSequence,
        "one-sequence",
        "Estimates one sequence, whatever the batch.",
        "A step to try, with `ids[:1]` left in.",
        "At batch 1 it is exact.",
        "activations",
        "grows-with-the-batch",
    ),
    card(
        AllThatWasMade,
        "all-that-was-made",
        "Counts what the forward made, and not what it left.",
        "A sum over the outputs of all operators.",
        "Without checkpointing the two are near each other.",
        "activations",
    ),
    card(
        NoLogits,
        "no-logits",
        "Has another loss than the one that is trained with.",
        "`model(ids).sum()`, to have something to call backward on.",
        "Layers are counted right; the logits of a real vocabulary are more than a layer.",
        "activations",
        "peak",
    ),
    card(
        NeverResets,
        "never-resets",
        "The highest peak so far.",
        "A course's throughput.py: batches 1 and 4 show the peak of 8.",
        "Rising sizes give rising peaks.",
        "each-answer-its-own",
    ),
    card(
        ModelStaysAlive,
        "model-stays-alive",
        "Keeps every model that it measured.",
        "A course's throughput.py: `main`'s model lives on in the sweep, 475 MB in each row.",
        "A first answer is right.",
        "leaves-nothing-behind",
    ),
    card(
        SumsLosses,
        "sums-losses",
        "Adds up losses with their graphs.",
        "`loss_sum += loss`.",
        "The numbers are right; memory grows with each.",
        "leaves-nothing-behind",
    ),
    card(
        StepsWithTheModel,
        "steps-with-the-model",
        "Takes its steps with the model itself.",
        "A measurement in front of the training, in the same script.",
        "The estimate is right; training starts two steps later.",
        "leaves-the-model-alone",
    ),
    card(
        Seeds,
        "seeds-anew",
        "Seeds the generator, to be reproducible.",
        "manual_seed inside of a helper.",
        "Estimates are equal; so are, from then on, all ranks' masks.",
        "leaves-the-model-alone",
    ),
    card(
        BuildsToCount,
        "builds-to-count",
        "Builds the model in memory, to count its parameters.",
        COURSE,
        "A small model fits.",
        "before-anything-is-allocated",
    ),
    card(
        TakesAnyBatch,
        "takes-any-batch",
        "Takes a batch of none for one.",
        "max(1, ...) against a division by zero.",
        "Nobody asks for it on purpose.",
        "refuses-no-batch",
    ),
    Impostor(
        "benign.memory-real-step",
        "Takes a real step with a copy of the model.",
        "",
        "",
        (),
        functions=lambda: offer(PlainMemory),
    ),
)
