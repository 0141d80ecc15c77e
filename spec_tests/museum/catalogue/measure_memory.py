"""Near-misses of an estimate of memory: terms left out, moments mixed up, models left alive."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

from spec_tests.museum.card import benign, near_miss
from spec_tests.plain.memory import PlainMemory


@near_miss(
    "measure.current-as-peak",
    rejected_by=("measure.memory.peak", "measure.memory.peak-covers-the-terms"),
)
class CurrentAsPeak(PlainMemory):
    """Reports what is allocated after the step as the peak.

    From: A course's memory_analysis.py. It prints 3,076 MB for a step that takes 15,619.
    Unseen: It is near the estimate, which leaves activations out as well.
    """

    def peak(self, terms, above):
        return terms["parameter_bytes"] + terms["optimizer_bytes"]


@near_miss("measure.sum-of-terms", rejected_by="measure.memory.peak")
class SumOfTerms(PlainMemory):
    """Adds up all terms, which are never alive at once.

    From: Most calculators of training memory.
    Unseen: It is on the safe side, but for what the loss takes.
    """

    def peak(self, terms, above):
        return sum(terms.values())


@near_miss("measure.memory-four-bytes", rejected_by="measure.memory.static-terms-of-any-model")
class FourBytes(PlainMemory):
    """Four bytes for every element.

    From: A course's memory_analysis.py.
    Unseen: Everything is float32 there.
    """

    def parameters(self):
        return sum(4 * p.numel() for p in self.model.parameters())

    def gradients(self):
        return sum(4 * p.numel() for p in self.trained())


@near_miss("measure.shared-twice", rejected_by="measure.memory.static-terms")
class SharedTwice(PlainMemory):
    """Counts a tied matrix once per module.

    From: A sum over modules in place of `parameters()`.
    Unseen: Untied models have none.
    """

    def parameters(self):
        return sum(p.nbytes for m in self.model.modules() for p in m.parameters(recurse=False))


@near_miss(
    "measure.no-activations",
    rejected_by=("measure.memory.activations", "measure.memory.grows-with-the-batch"),
)
class NoActivations(PlainMemory):
    """Leaves activations out.

    From: A course's memory_analysis.py. 'Ignored because of checkpointing'; they are two thirds of
    its peak.
    Unseen: The other terms are exact.
    """

    def activations(self, books):
        return 0


@near_miss("measure.all-that-was-made", rejected_by="measure.memory.activations")
class AllThatWasMade(PlainMemory):
    """Counts what the forward made, and not what it left.

    From: A sum over the outputs of all operators.
    Unseen: Without checkpointing the two are near each other.
    """

    def activations(self, books):
        return books.made


@near_miss("measure.no-logits", rejected_by=("measure.memory.activations", "measure.memory.peak"))
class NoLogits(PlainMemory):
    """Has another loss than the one that is trained with.

    From: `model(ids).sum()`, to have something to call backward on.
    Unseen: Layers are counted right; the logits of a real vocabulary are more than a layer.
    """

    def loss(self, ids):
        return self.model(ids)[..., :1].sum()


@near_miss("measure.never-resets", rejected_by="measure.memory.each-answer-its-own")
class NeverResets(PlainMemory):
    """The highest peak so far.

    From: A course's throughput.py: batches 1 and 4 show the peak of 8.
    Unseen: Rising sizes give rising peaks.
    """

    most: ClassVar[int] = 0

    def peak(self, terms, above):
        NeverResets.most = max(NeverResets.most, super().peak(terms, above))
        return NeverResets.most


@near_miss("measure.model-stays-alive", rejected_by="measure.memory.leaves-nothing-behind")
class ModelStaysAlive(PlainMemory):
    """Keeps every model that it measured.

    From: A course's throughput.py: `main`'s model lives on in the sweep, 475 MB in each row.
    Unseen: A first answer is right.
    """

    all_of_them: ClassVar[list[Any]] = []

    def copied(self, model):
        twin = super().copied(model)
        self.all_of_them.append(twin)
        return twin


@near_miss("measure.sums-losses", rejected_by="measure.memory.leaves-nothing-behind")
class SumsLosses(PlainMemory):
    """Adds up losses with their graphs.

    From: `loss_sum += loss`.
    Unseen: The numbers are right; memory grows with each.
    """

    total: ClassVar[Any] = 0

    def activations(self, books):
        found = super().activations(books)
        SumsLosses.total = SumsLosses.total + self.loss(self.ids())
        return found


@near_miss("measure.steps-with-the-model", rejected_by="measure.memory.leaves-the-model-alone")
class StepsWithTheModel(PlainMemory):
    """Takes its steps with the model itself.

    From: A measurement in front of the training, in the same script.
    Unseen: The estimate is right; training starts two steps later.
    """

    def copied(self, model):
        return super().copied(model) if next(model.parameters()).is_meta else model


@near_miss("measure.builds-to-count", rejected_by="measure.memory.before-anything-is-allocated")
class BuildsToCount(PlainMemory):
    """Builds the model in memory, to count its parameters.

    From: A course's memory_analysis.py.
    Unseen: A small model fits.
    """

    def estimate(self):
        count = sum(p.nbytes for p in copy.deepcopy(self.model).parameters())
        return {"parameter_bytes": count, "peak_bytes": 4 * count}


@near_miss("measure.takes-any-batch", rejected_by="measure.memory.refuses-no-batch")
class TakesAnyBatch(PlainMemory):
    """Takes a batch of none for one.

    From: max(1, ...) against a division by zero.
    Unseen: Nobody asks for it on purpose.
    """

    def check(self, *sizes):
        pass

    def ids(self):
        self.batch_size, self.sequence_length = (
            max(1, self.batch_size),
            max(1, self.sequence_length),
        )
        return super().ids()


@benign("benign.memory-real-step")
class MemoryRealStep(PlainMemory):
    """Takes a real step with a copy of the model."""
