"""Arithmetic: operations of a model, the part of a device that they use, and a larger model.

A tool that had the peak of another GPU printed 104 %; one that took the data sheet's largest number
halves everybody's utilisation. These are pure functions: each has one right answer.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from spec_tests.chapters.measure.machine import numbers
from spec_tests.chapters.measure.models import Case, Stack
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

FLOPS, MFU, LARGER = ("flops_per_token",), ("model_flops_utilization",), ("extrapolate_training",)
clause = clauses(judges=MFU, level="correct", worlds=(1,))
PALM = "Chowdhery et al. 2022, appendix B"
# Data sheets round to three digits.
SHARE = 0.005


class OneHead(Stack):
    """A stack with one causal head of attention in the middle."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        head = x.unsqueeze(1)
        x = F.scaled_dot_product_attention(head, head, head, is_causal=True).squeeze(1)
        return self.head(x)


PLAIN = Case(words=40, width=16, num_layers=3, batch_size=1, sequence_length=1)
MODELS = {
    "plain": PLAIN,
    "tied": replace(PLAIN, ties=True),
    "attention": replace(PLAIN, kind=OneHead),
}


def counted(ctx, kind, length):
    """The implementation's count."""
    return ctx.impl.flops_per_token(MODELS[kind].build(ctx.device), sequence_length=length)


@clause(
    "measure.flops.of-matrix-products",
    judges=FLOPS,
    source="contract: weights, attention, products-only; " + PALM,
)
@pytest.mark.parametrize("length", [8, 32])
@pytest.mark.parametrize("kind", MODELS)
def test_operations_are_those_of_products(world, subject, kind, length):
    """Operations per token MUST be 6 per multiplying weight and 12 per element of attention."""
    [found] = world.run(counted, kind, length)

    weights = PLAIN.num_layers * PLAIN.width**2 + PLAIN.width * PLAIN.words
    attention = 12 * PLAIN.width * length if kind == "attention" else 0
    likely = "attention left out or halved, or a forward alone"
    if found == 6 * sum(p.numel() for p in MODELS[kind].build("meta").parameters()):
        likely = "6 per parameter: lookups and biases multiply nothing"
    given = f"{kind}, {weights} multiplying weights, {length} tokens"
    expected = {"operations per token": 6 * weights + attention}
    numbers({"operations per token": found}, expected, within=0, likely=likely, given=given)


KNOWN = {
    "H100-SXM": ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4e12),
    "H200": ("NVIDIA H200", torch.bfloat16, 989.4e12),
    "A100": ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312e12),
    "A100-half": ("NVIDIA A100-SXM4-40GB", torch.float16, 312e12),
    "A100-single": ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5e12),
    "V100-PCIe": ("Tesla V100-PCIE-16GB", torch.float16, 112e12),
    "H100-single": ("NVIDIA H100 80GB HBM3", torch.float32, 66.9e12),
}


def used(ctx, device_name, dtype=torch.bfloat16):
    """The implementation's answer for 1000 tokens/s of 1 GFLOP."""
    return ctx.impl.model_flops_utilization(
        tokens_per_s=1000.0, flops_per_token=10**9, device_name=device_name, dtype=dtype
    )


@clause(
    "measure.mfu.dense-peak",
    source="contract: dense-peak, tensor-cores; "
    + PALM
    + "; vendors' data sheets, columns without sparsity",
)
@pytest.mark.parametrize("device", list(KNOWN))
def test_the_part_of_a_known_device_is_of_its_dense_peak(world, subject, device):
    """Utilisation of a known device MUST be of its dense peak in that dtype; None is allowed."""
    name, dtype, peak = KNOWN[device]
    [found] = world.run(used, name, dtype)

    if found is not None:
        allowed = ((1 - SHARE) * 1e12 / peak, (1 + SHARE) * 1e12 / peak)
        likely = "the peak with structured sparsity, of another dtype, or of another device"
        given = f"{name}, {dtype}, 1000 tokens/s of 1 GFLOP"
        numbers({"utilisation": found}, {"utilisation": allowed}, likely=likely, given=given)


@clause("measure.mfu.knows-a-device", level="production", source="contract: known; " + PALM)
def test_the_common_devices_are_known(world, subject):
    """At least one of A100, H100 and H200 MUST be known in bfloat16."""
    names = [name for name, dtype, _ in KNOWN.values() if dtype == torch.bfloat16]
    found = [world.run(used, name)[0] for name in names]

    judge.holds(
        any(part is not None for part in found), f"rank 0: expected a number for any of {names}"
    )


UNKNOWN = ("NVIDIA GeForce GTX 9999", "cpu", "NVIDIA A1000 Laptop GPU", "")


@clause(
    "measure.mfu.unknown-is-none",
    source="contract: unknown; nanoGPT pull request 464: 104 % on an H100, of an A100's peak",
)
@pytest.mark.parametrize("device", UNKNOWN, ids=["0", "1", "2", "3"])
def test_an_unknown_device_has_no_utilisation(world, subject, device):
    """A device that is not known MUST have no utilisation: None, and no guess."""
    ranks = world.run(used, device)

    judge.equal(ranks, None, quantity="utilisation", given=f"a device called {device!r}")


@clause(
    "measure.mfu.similar-names",
    source="contract: unknown; "
    "an H20 has a seventh of an H200's peak, and the beginning of its name",
)
def test_a_device_is_not_taken_for_one_with_a_longer_name(world, subject):
    """An H20 MUST NOT be taken for an H200, nor an H200 for an H20."""
    small, large = (world.run(used, name)[0] for name in ("NVIDIA H20", "NVIDIA H200"))

    judge.holds(
        None in (small, large) or small > 5 * large,
        f"rank 0: expected an H20's part to be 6.7 times that of an H200, got {small} and {large}",
        likely="a device is found by a part of its name",
    )


# By argument: a course's own number, and another.
TRAININGS = {
    "tokens_per_s": (32_582.4, 1000.0),
    "num_parameters": (124_439_808, 10**9),
    "target_parameters": (10**12, 2 * 10**9),
    "target_tokens": (10**13, 86_400 * 10**6),
    "device_memory_bytes": (80 * 10**9, 3 * 10**9),
}


def extrapolated(ctx, keys):
    """Some of the answers, for each of the trainings."""
    found = []
    for number in range(2):
        given = {name: values[number] for name, values in TRAININGS.items()}
        said = ctx.impl.extrapolate_training(**given)
        found.append({key: said[key] for key in keys})
    return found


def judge_extrapolation(world, *expected):
    """The answers for both trainings."""
    __tracebackhide__ = True
    [found] = world.run(extrapolated, tuple(expected[0]))

    likely = "years of 365.25 days, thousands for 1024s, or a number rounded down"
    for said, wanted in zip(found, expected, strict=True):
        numbers(said, wanted, within=1e-9, likely=likely)


@clause(
    "measure.extrapolation.larger-model",
    level="course",
    judges=LARGER,
    source="contract: rate, days; a course prints 4.055 tokens/s and 78,208 years",
)
def test_a_larger_model_takes_in_proportion(world, subject):
    """Rate, days and years MUST follow from the numbers that are given."""
    days = 10**25 / (32_582.4 * 124_439_808) / 86_400
    judge_extrapolation(
        world,
        {"tokens_per_s": 10**13 / (86_400 * days), "days": days, "years": days / 365},
        {"tokens_per_s": 500.0, "days": 2000.0, "years": 2000 / 365},
    )


@clause(
    "measure.extrapolation.operations-and-devices",
    judges=LARGER,
    source="contract: flops, devices; Rajbhandari et al. 2020, section 3.1",
)
def test_a_larger_model_takes_operations_and_devices(world, subject):
    """Operations MUST be 6 per parameter and token; devices as many as hold 16 bytes for each."""
    judge_extrapolation(
        world,
        {"flops": 6e25, "num_devices_for_memory": 200},
        {"flops": 12 * 86_400e15, "num_devices_for_memory": 11},
    )
