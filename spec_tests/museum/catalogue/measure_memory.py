"""Near-misses of an estimate of memory: terms left out, moments mixed up, models left alive."""

from __future__ import annotations

from spec_tests.museum.card import Source

MEMORY = Source("spec_tests.plain.memory")

MEMORY.near_miss(
    "measure.current-as-peak",
    ("measure.memory.peak", "measure.memory.peak-covers-the-terms"),
    '- "peak_bytes": parameters + 2 * gradients + books.most,',
    '+ "peak_bytes": parameters + 2 * gradients,',
    does="Reports the memory allocated after the step as the peak.",
    seen="A course's memory_analysis.py. It prints 3,076 MB for a step that takes 15,619.",
    unseen="It is near the estimate, which leaves activations out as well.",
)

MEMORY.near_miss(
    "measure.sum-of-terms",
    "measure.memory.peak",
    '- "peak_bytes": parameters + 2 * gradients + books.most,',
    '+ "peak_bytes": parameters + 3 * gradients + activations,',
    does="Adds up all terms, which are never alive at once.",
    seen="Most calculators of training memory.",
    unseen="It is on the safe side, except for the memory of the loss.",
)

MEMORY.near_miss(
    "measure.memory-four-bytes",
    "measure.memory.static-terms-of-any-model",
    "- parameters = sum(p.nbytes for p in model.parameters())",
    "- gradients = sum(p.nbytes for p in trained)",
    "+ parameters = sum(4 * p.numel() for p in model.parameters())",
    "+ gradients = sum(4 * p.numel() for p in trained)",
    does="Four bytes for every element.",
    seen="A course's memory_analysis.py.",
    unseen="Everything is float32 there.",
)

MEMORY.near_miss(
    "measure.shared-twice",
    "measure.memory.static-terms",
    "- parameters = sum(p.nbytes for p in model.parameters())",
    "+ parameters = sum(p.nbytes for m in model.modules() for p in m.parameters(recurse=False))",
    does="Counts a tied matrix once per module.",
    seen="A sum over modules in place of `parameters()`.",
    unseen="Untied models have none.",
)

MEMORY.near_miss(
    "measure.no-activations",
    ("measure.memory.activations", "measure.memory.grows-with-the-batch"),
    '- "activation_bytes": activations,',
    '+ "activation_bytes": 0,',
    does="Leaves activations out.",
    seen="A course's memory_analysis.py: 'ignored because of checkpointing'; two thirds of a peak.",
    unseen="The other terms are exact.",
)

MEMORY.near_miss(
    "measure.all-that-was-made",
    "measure.memory.activations",
    "- self.now = self.most = 0",
    "+ self.now = self.most = self.made = 0",
    "...",
    "  self.now += size",
    "+ self.made += size",
    "...",
    "- activations = books.now",
    "+ activations = books.made",
    does="Counts what the forward made, and not what it left.",
    seen="A sum over the outputs of all operators.",
    unseen="Without checkpointing the two are near each other.",
)

MEMORY.near_miss(
    "measure.never-resets",
    "measure.memory.each-answer-its-own",
    "  gradients = sum(p.nbytes for p in trained)",
    "+ peak = parameters + 2 * gradients + books.most",
    '+ PlainMemory.most = max(getattr(PlainMemory, "most", 0), peak)',
    "...",
    '- "peak_bytes": parameters + 2 * gradients + books.most,',
    '+ "peak_bytes": PlainMemory.most,',
    does="The highest peak so far.",
    seen="A course's throughput.py: batches 1 and 4 show the peak of 8.",
    unseen="Rising sizes give rising peaks.",
)

MEMORY.near_miss(
    "measure.model-stays-alive",
    "measure.memory.leaves-nothing-behind",
    "  model = copy.deepcopy(model)",
    '+ PlainMemory.kept = [*getattr(PlainMemory, "kept", []), model]',
    does="Keeps every model that it measured.",
    seen="A course's throughput.py: `main`'s model lives on in the sweep, 475 MB in each row.",
    unseen="A first answer is right.",
)

MEMORY.near_miss(
    "measure.steps-with-the-model",
    "measure.memory.leaves-the-model-alone",
    "- model = copy.deepcopy(model)",
    "+ model = copy.deepcopy(model) if next(model.parameters()).is_meta else model",
    does="Takes its steps with the model itself.",
    seen="A measurement in front of the training, in the same script.",
    unseen="The estimate is right; training starts two steps later.",
)

MEMORY.near_miss(
    "measure.builds-to-count",
    "measure.memory.before-anything-is-allocated",
    "  model.zero_grad()",
    "+ count = sum(p.nbytes for p in model.parameters())",
    '+ return {"parameter_bytes": count, "peak_bytes": 4 * count}',
    does="Builds the model in memory, to count its parameters.",
    seen="A course's memory_analysis.py.",
    unseen="A small model fits.",
)

MEMORY.near_miss(
    "measure.takes-any-batch",
    "measure.memory.refuses-no-batch",
    "- sizes = (batch_size, sequence_length)",
    "+ sizes = (max(1, batch_size), max(1, sequence_length))",
    does="Takes a batch of none for one.",
    seen="max(1, ...) against a division by zero.",
    unseen="Nobody asks for it on purpose.",
)

MEMORY.benign("benign.memory-real-step", does="Takes a real step with a copy of the model.")
