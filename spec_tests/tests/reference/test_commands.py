"""The examples in docstrings are true; those of commands run, with the published numbers.

Presets of a named size are too large for a test to train: an example is run as far as its first
step, which is replaced by a fixed rate.
"""

import contextlib
import doctest
import importlib
import io
import pkgutil
import re
import shlex
from typing import Any
from unittest import mock

from spec_tests.tests.reference.launch import ROOT, on_ranks, run, solution
from spec_tests.tests.reference.test_models import PUBLISHED
from spec_tests.tests.reference.training import BASELINE, DDP, FSDP

NAMES = {
    "": "gpt2 small",
    "--model llama --preset debug": "llama debug",
    "--model llama --preset 1b": "llama 1b",
}
"""How an example begins, and the model that it means."""


def said_by_examples(name, patches, extra):
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
    """The name and the published number of the model of the longest beginning."""
    name = NAMES[max((flags for flags in NAMES if words.startswith(flags)), key=len)]
    return name, PUBLISHED[name]


@on_ranks(1)
def test_memory_of_the_examples(ctx, tmp_path):
    extra = ("--no-measure", "--device", "cpu", "--out", str(tmp_path), "--batch-size", "1")
    said = said_by_examples("memory_analysis", {}, extra)

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


@on_ranks(1)
def test_throughput_of_the_examples(ctx, tmp_path):
    patches: dict[str, Any] = {"measure_throughput": RATE, "_build": None, "_sweep": []}
    extra = ("--device", "cpu", "--out", str(tmp_path))
    said = said_by_examples("throughput", patches, extra)

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


# --------------------------------------------------------------------- examples of other docstrings


@on_ranks(1)
def test_every_example_says_what_it_shows(ctx):
    number = 0
    with contextlib.redirect_stdout(io.StringIO()) as said:
        for found in pkgutil.walk_packages(
            importlib.import_module("solution").__path__, "solution."
        ):
            if "__main__" not in found.name and "triton" not in found.name:
                number += doctest.testmod(importlib.import_module(found.name)).attempted
    assert said.getvalue() == ""
    assert number > 10
