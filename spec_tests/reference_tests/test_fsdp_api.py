"""The reference's `fully_shard` has every name of PyTorch's, or says in its README which it lacks.

Names, parameters and defaults are compared one by one. The list of differences stands once, in the
table of `solution/README.md`; what stands there without being different is an error as well.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import Worlds
from spec_tests.target import REPOSITORY_ROOT, parse

THEIRS = "torch.distributed.fsdp"
OURS = "solution.parallel.fsdp"
OPTIONS = {"shard_placement_fn", "offload_policy", "dp_mesh_dims"}
"""Taken by both, and refused by ours unless they say what is done anyway."""

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="the table is about torch 2.13"
)


def public() -> dict[str, Any]:
    """What PyTorch offers for `fully_shard`; its older FSDP is in the same place."""
    offered = importlib.import_module(THEIRS)
    newer = importlib.import_module(f"{THEIRS}._fully_shard").__all__
    return {name: getattr(offered, name) for name in offered.__all__ if name in newer}


def listed() -> set[str]:
    """Names in the first column of the README's first table."""
    text = (REPOSITORY_ROOT / "solution" / "README.md").read_text()
    (section,) = re.findall(r"## Where `fully_shard` differs.*?\n(.*?)\n## ", text, re.DOTALL)
    table, _ = section.split("\n| situation |")
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def methods(kind: type) -> dict[str, Any]:
    """Public ones, by name."""
    functions = inspect.getmembers(kind, inspect.isfunction)
    return {name: method for name, method in functions if not name.startswith("_")}


def parameters(function: Any) -> list[tuple[str, Any, str]]:
    """Name, kind and default of each; defaults are compared by what they print."""
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, repr(p.default)) for p in found]


def differences() -> Iterator[str]:
    """Names of PyTorch's that ours lacks or has otherwise."""
    ours = importlib.import_module(OURS)
    for name, their in public().items():
        own = getattr(ours, name, None)
        is_called = inspect.isfunction(their) or dataclasses.is_dataclass(their)
        if own is None or (is_called and parameters(their) != parameters(own)):
            yield name
        elif not is_called:
            for word, method in methods(their).items():
                same = methods(own).get(word)
                if same is None or parameters(method) != parameters(same):
                    yield word


def test_every_name_parameter_and_default_of_pytorchs_is_here_or_in_the_table():
    assert {"fully_shard", "FSDPModule", "register_fsdp_forward_method"} <= public().keys()
    assert len(methods(public()["FSDPModule"])) >= 20

    assert sorted(differences()) == sorted(listed() - OPTIONS)
    assert listed() >= OPTIONS


def refusals(ctx: Context) -> dict[str, str]:
    """What each option that is not offered comes to."""
    api = importlib.import_module(OURS)
    offload = type("CPUOffloadPolicy", (api.OffloadPolicy,), {})()
    options: dict[str, Any] = {
        "shard_placement_fn": lambda parameter: Shard(parameter.ndim - 1),
        "offload_policy": offload,
        "dp_mesh_dims": ("replicate", "shard"),
    }
    found = {}
    for name, value in options.items():
        with pytest.raises(NotImplementedError) as refusal:
            api.fully_shard(nn.Linear(4, 4, bias=False, device=ctx.device), **{name: value})
        found[name] = str(refusal.value)
    api.fully_shard(nn.Linear(4, 4, device=ctx.device), shard_placement_fn=lambda p: Shard(0))
    return found


def test_options_that_are_not_offered_are_refused_by_name(worlds: Worlds):
    (found,) = worlds.world(1, parse("solution")).run(refusals)
    assert found.keys() == OPTIONS
    for name, said in found.items():
        assert said.startswith("expected ")
        assert name in said
        assert "Linear" in said
