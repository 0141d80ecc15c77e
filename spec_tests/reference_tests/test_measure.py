"""The commands that measure: predictions to the byte, and what they refuse."""

import importlib.util
import json

from spec_tests.reference_tests.course_model import (
    OUT_OF_MEMORY_AT,
    PUBLISHED_MIB,
    SECOND_MODEL_MIB,
)
from spec_tests.reference_tests.launch import answer, run

PROGRAM = """
import functools
import json

import torch

from solution.config import GPT2Config, LlamaConfig
from solution.measure.flops import flops_per_token
from solution.measure.memory import predict
from solution.measure.memory_used import measured_step
from solution.models import families
from spec_tests.reference_tests.course_model import CourseModel

SIZES = {"batch_size": 3, "sequence_length": 16}
CONFIGS = {
    "gpt2": GPT2Config(
        vocab_size=65, max_sequence_length=32, num_layers=2, num_heads=2, embedding_dim=16
    ),
    "llama": LlamaConfig(
        vocab_size=40, max_sequence_length=32, num_layers=3, num_heads=4, num_kv_heads=2,
        embedding_dim=16, ffn_multiple_of=8,
    ),
}
found = {}
for name, config in CONFIGS.items():
    model = families.build(config)
    predicted = predict(model, **SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = torch.zeros(3, 16, dtype=torch.int64)
    found[name] = {
        "closed": families.activation_bytes(config, **SIZES),
        "predicted": {**predicted.terms, "peak": predicted.peak_bytes},
        "measured": measured_step(model, optimizer, ids),
        "flops": [
            flops_per_token(model, sequence_length=16),
            families.flops_per_token(config, sequence_length=16),
        ],
    }
with torch.device("meta"):
    model = CourseModel()
foreach = functools.partial(torch.optim.AdamW, foreach=True)
options = {"sequence_length": 1024, "keeps_logits": True, "make_optimizer": foreach}
found["course"] = {
    size: predict(model, batch_size=size, **options).peak_bytes for size in (8, 16, 32, 64)
}
print(json.dumps(found))
"""


def test_predictions_are_exact_and_the_courses_peak_is_met(tmp_path):
    found = answer(PROGRAM, folder=tmp_path)
    predicted = {int(size): peak for size, peak in found.pop("course").items()}
    assert predicted[OUT_OF_MEMORY_AT] > 80 * 2**30
    for size, published in PUBLISHED_MIB.items():
        second_model = SECOND_MODEL_MIB if size > 8 else 0
        error = predicted[size] / 2**20 + second_model - published
        assert abs(error) <= 0.01 * published + 128, size
    for model in found.values():
        measured = model["measured"]
        assert model["flops"][0] == model["flops"][1]
        assert model["closed"] == model["predicted"]["activations"] == measured["activations"]
        for term in ("parameters", "gradients", "optimizer"):
            assert model["predicted"][term] == measured[term]
        # The loss, the number of its targets, and the ids, which MemTracker may count.
        assert abs(model["predicted"]["peak"] - measured["peak"]) <= 8 * 3 * 16 + 64


TINY = ("--preset", "tiny", "--vocab-size", "64", "--batch-size", "1", "--sequence-length", "16")


def test_memory_is_predicted_measured_and_kept(tmp_path):
    ended = run("solution.memory_analysis", *TINY, "--out", "kept", folder=tmp_path)

    assert ended.status == 0, ended.err
    kept = json.loads((tmp_path / "kept" / "memory.json").read_text())
    assert kept["fits"]
    assert kept["predicted"]["terms"]["activations"] == kept["closed_form_activations"]
    assert "written: " in ended.out


def test_what_cannot_fit_or_be_is_said(tmp_path):
    small = run("solution.memory_analysis", *TINY, "--device-memory-gib", "0.001", folder=tmp_path)
    unknown = run("solution.memory_analysis", "--preset", "huge", folder=tmp_path)

    assert small.status == 3
    assert "expected a step that fits into 1 MiB" in small.err
    assert unknown.status == 2
    assert "expected preset to be one of" in unknown.err


def test_throughput_is_measured_and_swept(tmp_path):
    options = ("--steps", "3", "--batch-sizes", "2", "1", "--attentions", "plain")
    ended = run("solution.throughput", *TINY, *options, "--out", "kept", folder=tmp_path)

    assert ended.status == 0, ended.err
    kept = json.loads((tmp_path / "kept" / "throughput.json").read_text())
    assert [row["batch_size"] for row in kept["sweep"]] == [2, 1]
    assert kept["sweep"][0]["peak_bytes"] > kept["sweep"][1]["peak_bytes"]
    assert kept["found"]["mfu"] is None, "a CPU's peak is not known"
    assert "1T parameters, 10T tokens" in ended.out
    can_plot = importlib.util.find_spec("matplotlib") is not None
    assert (tmp_path / "kept" / "throughput.png").is_file() == can_plot


def test_throughput_refuses_what_cannot_be(tmp_path):
    ended = run("solution.throughput", *TINY, "--attentions", "none", folder=tmp_path)

    assert ended.status == 2
    assert "expected attentions among" in ended.err
