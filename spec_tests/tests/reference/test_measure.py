"""The commands that measure: predictions to the byte, and what they refuse."""

import functools
import importlib
import json
import re
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from spec_tests.tests.reference.launch import on_ranks, run, solution

SIZES = {"vocab_size": 65, "max_sequence_length": 32, "num_heads": 4, "embedding_dim": 16}
CONFIGS = {
    "GPT2Config": {**SIZES, "num_layers": 2},
    "LlamaConfig": {**SIZES, "num_layers": 3, "num_kv_heads": 2, "ffn_multiple_of": 8},
}
BATCH = {"batch_size": 3, "sequence_length": 16}


@pytest.mark.parametrize("kind", CONFIGS)
@on_ranks(1)
def test_predictions_are_exact(ctx, kind):
    config = getattr(solution("config"), kind)(**CONFIGS[kind])
    model = solution("models.families").build(config)
    predicted = solution("measure.memory").predict(model, **BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = torch.zeros(3, 16, dtype=torch.int64)
    measured = solution("measure.memory").measured_step(model, optimizer, ids)
    for term in ("parameters", "gradients", "optimizer", "activations"):
        assert predicted.terms[term] == measured[term]
    # The loss, the number of its targets, and the ids, which MemTracker may count.
    assert abs(predicted.peak_bytes - measured["peak"]) <= 8 * 3 * 16 + 64


# The peaks that a course prints for so many sequences of 1024 tokens, in MiB. They depend on the
# course's own model: attention scores are in memory, dropout is on, the logits live on in a
# variable, and checkpoints keep the outputs of all matrix products, scores included. Beyond 8
# sequences the course's script had a second model alive.
PUBLISHED_MIB, SECOND_MODEL_MIB = {8: 15_619, 32: 58_438}, 475


class CourseModel(torch.nn.Module):
    """The GPT-2 small of `transformers`, as the course trains it: ids to logits."""

    def __init__(self) -> None:
        super().__init__()
        transformers: Any = importlib.import_module("transformers")
        config = transformers.GPT2Config(attn_implementation="eager")
        self.model = transformers.GPT2LMHeadModel(config).train()
        products = [getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm")]
        contexts = functools.partial(create_selective_checkpoint_contexts, products)
        newer = getattr(self.model, "activation_checkpointing_enable", None)  # its name since 5
        enable = newer or self.model.gradient_checkpointing_enable
        enable({"use_reentrant": False, "context_fn": contexts})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.logits = self.model(ids, use_cache=False).logits
        return self.logits


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@on_ranks(1)
def test_the_courses_peaks_are_met(ctx):
    with torch.device("meta"):
        model = CourseModel()
    foreach = functools.partial(torch.optim.AdamW, foreach=True)
    options = {"sequence_length": 1024, "make_optimizer": foreach}
    predict = solution("measure.memory").predict
    for size, published in PUBLISHED_MIB.items():
        predicted = predict(model, batch_size=size, **options).peak_bytes
        second_model = SECOND_MODEL_MIB if size > 8 else 0
        error = predicted / 2**20 + second_model - published
        assert abs(error) <= 0.01 * published, size


TINY = ("--preset", "tiny", "--vocab-size", "64", "--batch-size", "1", "--sequence-length", "16")


def test_memory_is_predicted_measured_and_kept(tmp_path):
    ended = run("solution.memory_analysis", *TINY, "--out", "kept", folder=tmp_path)

    kept = json.loads((tmp_path / "kept" / "memory.json").read_text())
    assert kept["predicted"]["terms"]["activations"] == kept["measured"]["activations"]
    assert "written: " in ended.out
    rows = dict(re.findall(r"^  ([a-z, -]+?)  +(\d+\.\d+)$", ended.out, re.M))
    shown = {name: float(size) for name, size in rows.items()}
    parts = ("parameters", "gradients", "optimizer states")
    total = sum(shown[f"estimated {part}"] for part in parts)
    assert shown["estimated total"] == pytest.approx(total, abs=0.02)
    difference = shown["difference, actual peak - estimated total"]
    assert shown["actual peak"] - total == pytest.approx(difference, abs=0.02)


def test_throughput_is_measured_and_swept(tmp_path):
    options = ("--steps", "3", "--batch-sizes", "2", "1")
    ended = run("solution.throughput", *TINY, *options, "--out", "kept", folder=tmp_path)

    kept = json.loads((tmp_path / "kept" / "throughput.json").read_text())
    assert [row["batch_size"] for row in kept["sweep"]] == [2, 1]
    assert kept["sweep"][0]["peak_bytes"] > kept["sweep"][1]["peak_bytes"]
    assert kept["found"]["mfu"] is None, "a CPU's peak is not known"
    assert "1T parameters, 10T tokens" in ended.out


HUGE = 10**12  # sequences, more than memory has
REFUSED = {
    f"memory_analysis --batch-size {HUGE}": (3, "expected a step that fits into"),
    "memory_analysis --no-measure --out /dev/null": (2, "/dev/null"),
    f"throughput --batch-size {HUGE}": (3, f"out of memory with batch {HUGE}; take a smaller"),
    "memory_analysis --preset huge": (2, "expected preset to be one of"),
    "throughput --attention none": (2, "expected attention among"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_fit_or_be_is_said(tmp_path, words):
    (command, *flags), (status, says) = words.split(), REFUSED[words]
    run(f"solution.{command}", *TINY, *flags, folder=tmp_path, status=status, says=says)
