"""The examples in the docstrings of the commands run, and their numbers are those of a hand count.

Presets of a named size are too large for a test to train: an example is run as far as its first
step, which is replaced by a fixed rate.
"""

import contextlib
import importlib
import io
import re
import shlex
from typing import Any
from unittest import mock

from spec_tests.tests.reference.launch import ROOT, on_ranks, run, solution
from spec_tests.tests.reference.training import BASELINE, DDP, FSDP

# vocabulary x E + positions x E + layers x (12 E^2 + 13 E) + 2 E
GPT2_SMALL = 50_257 * 768 + 1024 * 768 + 12 * (12 * 768**2 + 13 * 768) + 2 * 768
# Two matrices of vocabulary x E; per layer: q, o and k, v, three of the MLP, two norms; a norm.
LLAMA_DEBUG = 2 * 2048 * 256 + 6 * (2 * 256**2 + 2 * 256**2 + 3 * 256 * 768 + 2 * 256) + 256
LLAMA_1B = (
    2 * 128_256 * 2048 + 16 * (2 * 2048**2 + 2 * 2048 * 8 * 64 + 3 * 2048 * 8192 + 2 * 2048) + 2048
)
COUNTS = {
    "": ("gpt2 small", GPT2_SMALL),
    "--model llama --preset debug": ("llama debug", LLAMA_DEBUG),
    "--model llama --preset 1b": ("llama 1b", LLAMA_1B),
}


def test_the_hand_counts_are_the_published_ones():
    assert (GPT2_SMALL, LLAMA_DEBUG, LLAMA_1B) == (124_439_808, 6_163_712, 1_498_482_688)


def said_by_examples(ctx, name, patches, extra):
    """Each example of a command's docstring to what `main` prints for it; all must end with 0."""
    module, found = importlib.import_module(f"solution.{name}"), {}
    for line in re.findall(rf"^    python -m solution\.{name}\b(.*)$", module.__doc__ or "", re.M):
        words = shlex.split(line, comments=True)
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            for function, value in patches.items():
                stack.enter_context(mock.patch.object(module, function, return_value=value))
            status = module.main([*words, *extra])
        assert status == 0, (line, out.getvalue())
        found[" ".join(words)] = out.getvalue()
    return found


def count_of(words):
    """The longest of `COUNTS` that the example begins with."""
    return COUNTS[max((flags for flags in COUNTS if words.startswith(flags)), key=len)]


def test_memory_of_the_examples(in_rank, tmp_path):
    room = ("--device-memory-gib", "100", "--batch-size", "1")
    extra = ("--no-measure", "--device", "cpu", "--out", str(tmp_path), *room)
    said = in_rank(said_by_examples, "memory_analysis", {}, extra)

    assert len(said) == 2
    for words, out in said.items():
        name, number = count_of(words)
        assert out.startswith(f"{name}: {number:,} parameters")
        state = 4 * number / 2**20  # float32; Adam has two moments, and a step count per tensor
        rows = dict(re.findall(r"^  (\w+) +([\d,]+\.\d\d)$", out, re.M))
        assert rows["parameters"] == rows["gradients"] == f"{state:,.2f}"
        assert rows["optimizer"] == f"{2 * state:,.2f}"


RATE = {
    "tokens_per_s": 1000.0,
    "steps_per_s": 1000 / 8192,
    "step_s": 8.192,
    "min_s": 8.1,
    "iqr_s": 0.01,
    "num_warmup_steps": 6,
    "num_steps": 20,
    "is_steady": True,
}


def test_throughput_of_the_examples(in_rank, tmp_path):
    patches: dict[str, Any] = {"measure_throughput": RATE, "_build": None, "sweep_batch_sizes": []}
    extra = ("--device", "cpu", "--out", str(tmp_path))
    said = in_rank(said_by_examples, "throughput", patches, extra)

    assert len(said) == 3
    for words, out in said.items():
        name, number = count_of(words)
        assert out.startswith(f"{name}: {number:,} parameters, 8 x 1024 tokens")
        rate = 1000 * number / 10**12  # of 1T parameters
        days = 10**13 / rate / 86_400
        ((shown_rate, shown_days),) = re.findall(r"\n  tokens/s +(\S+)\n  days +(\S+)", out)
        assert float(shown_rate) == float(f"{rate:.4g}"), "four significant digits"
        assert shown_days == f"{days:,.0f}"


@on_ranks(1)
def test_a_named_preset_keeps_what_it_says(ctx):
    """For every preset; a flag that is given wins over the preset."""
    config, workload = solution("config"), solution("measure.workload")
    tables = {"gpt2": config.PRESETS, "llama": config.LLAMA_PRESETS}
    kinds = {"gpt2": config.GPT2Config, "llama": config.LlamaConfig}
    for model, presets in tables.items():
        for preset in presets:
            for words in ([], ["--vocab-size", "64"]):
                flags = ["--model", model, "--preset", preset, *words]
                parsed = workload.parser("throughput", "").parse_args(flags)
                expected = kinds[model].preset(preset, vocab_size=64 if words else None)
                work = workload.Workload(parsed, is_run=False)
                assert repr(work.config) == repr(expected)


def test_the_training_scripts_examples_are_accepted(data, tmp_path):
    """`--dry-run`: every setting is checked and every number derived, and nothing is trained."""
    for module in (BASELINE, DDP, FSDP):
        text = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        lines = re.findall(rf"^    (?:python|torchrun) .*-m {module}\b(.*)$", text, re.M)
        assert lines, module
        for line in lines:
            words: list[object] = [
                word for word in shlex.split(line, comments=True) if word != "..."
            ]
            words += ["--data", data, "--device", "cpu", "--sequence-length", 8, "--steps", 2]
            said = run(module, *words, "--dry-run", folder=tmp_path).out
            assert " parameters, vocabulary " in said
