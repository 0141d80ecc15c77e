"""Pairs of settings: what each does right alone, two of them may do wrong together.

A covering array: a few rows, each a value of every setting, in which any two values of any two
settings meet at least once. Each row is two steps on the cheapest toy that has units in units.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch

from spec_tests.clause import clauses
from spec_tests.fsdp.sharded import FULLY_SHARD, SEED, Sharded
from spec_tests.rig import judge
from spec_tests.rig.toys import TOYS, sum_of_squares

clause = clauses(judges=FULLY_SHARD, level="production", worlds=(4,))

SGD = partial(torch.optim.SGD, lr=1.0)
SETTINGS: dict[str, dict[str, Any]] = {
    "reshard_after_forward": {"freed": True, "held": False, "usual": None},
    "after backward": {"resharded": False, "kept": True},
    "optimizer": {
        "loop": partial(SGD, foreach=False),
        "foreach": partial(SGD, foreach=True),
        # The step of SGD: without moments, beside an eps that no gradient reaches.
        "fused": partial(torch.optim.Adam, lr=2.0**40, betas=(0.0, 0.0), eps=2.0**40, fused=True),
    },
    "micro-batches": {"one": 1, "two": 2},
    # Wide, for what is exact in float32 is so in float64, and in nothing narrower.
    "precision": {
        "plain": {},
        "wide": dict.fromkeys(("param_dtype", "reduce_dtype"), torch.double),
    },
    "mesh": {"line": (4,), "square": (2, 2), "replicas": (4, 1), "shards": (1, 4)},
    "frozen": {"trained": (), "frozen": ("blocks.1.up.weight", "blocks.1.up.bias", "head.bias")},
    "output": {
        # how it is wrapped, and how the loss reads it
        "tensor": (lambda y: y, lambda found: found),
        "dict": (lambda y: {"y": y}, lambda found: found["y"]),
        "second": (lambda y: (y.detach(), [y, None]), lambda found: found[1][0]),
    },
}
Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs_of(row: dict[str, str]) -> set[Pair]:
    """Every two values of a row; a row has them in the order of `SETTINGS`."""
    return {*itertools.combinations([(name, row[name]) for name in SETTINGS if name in row], 2)}


def covering() -> list[dict[str, str]]:
    """Rows in which every pair of values meets, chosen greedily."""
    missing: dict[Pair, None] = {}
    for one, other in itertools.combinations(SETTINGS, 2):
        for values in itertools.product(SETTINGS[one], SETTINGS[other]):
            missing[(one, values[0]), (other, values[1])] = None
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for name in SETTINGS:
            if name not in row:
                news = [{**row, name: value} for value in SETTINGS[name]]
                row = max(news, key=lambda new: len(pairs_of(new) & missing.keys()))
        rows.append({name: row[name] for name in SETTINGS})
        for pair in pairs_of(row):
            missing.pop(pair, None)
    return rows


ROWS = ["-".join(row.values()) for row in covering()]


def values_of(row: str) -> dict[str, Any]:
    """The values of a row by setting."""
    return {n: SETTINGS[n][word] for n, word in zip(SETTINGS, row.split("-"), strict=True)}


def two_steps(ctx, subject, row):
    """Gradients of two steps, between which an update turns the sign of every weight."""
    values = values_of(row)
    shape = values["mesh"]
    names = ("replicate", "shard")[-len(shape) :]
    options: dict[str, Any] = {
        "mesh": ctx.mesh(shape, names),
        "reshard_after_forward": values["reshard_after_forward"],
    }
    if values["precision"]:
        options["mp_policy"] = ctx.impl.MixedPrecisionPolicy(**values["precision"])
    frozen = values["frozen"]
    sharded = Sharded(ctx, subject, "stack", units="nested", frozen=frozen, **options)
    give, read = values["output"]
    sharded.module.register_forward_hook(lambda module, args, y: give(y), prepend=True)
    trained = [p for p in sharded.held if p.requires_grad]
    optimizer = values["optimizer"]([{"params": trained[:1]}, {"params": trained[1:]}])
    sharded.keep(values["after backward"])
    found = []
    for step in range(2):
        for micro in range(values["micro-batches"]):
            sharded.synchronise(micro == values["micro-batches"] - 1)
            output = read(sharded.wrapped(sharded.batch(2 * step + micro)))
            (ctx.world_size * sum_of_squares(output)).backward()
        gradients = [None if p.grad is None else p.grad.full_tensor() for p in sharded.held]
        found.append(dict(zip(sharded.names, gradients, strict=True)))
        for parameter in trained:
            parameter.grad = 2 * parameter.detach()
        optimizer.step()
        optimizer.zero_grad()
    return found


def two_plain_steps(row, size):
    """The same in one process with the whole batch."""
    values = values_of(row)
    plain = TOYS["stack"].build(SEED)
    for name in values["frozen"]:
        plain.get_parameter(name).requires_grad_(False)
    found = []
    for step in range(2):
        plain.zero_grad()
        for micro, rank in itertools.product(range(values["micro-batches"]), range(size)):
            batch = TOYS["stack"].batch(SEED, rank=rank, micro=2 * step + micro)
            sum_of_squares(plain(batch)).backward()
        found.append({name: p.grad for name, p in plain.named_parameters()})
        for parameter in plain.parameters():
            parameter.data.mul_(-1 if parameter.requires_grad else 1)
    return found


@clause(
    "fsdp.programs.pairs-of-settings",
    needs=("MixedPrecisionPolicy",),
    source="contract: mean-gradient, fresh-weights; "
    "Cohen et al. 1997, The AETG system: most faults need two values to meet, and no more",
)
@pytest.mark.parametrize("row", ROWS)
def test_any_two_settings_work_together(world, subject, row):
    """Whatever two settings meet, two steps MUST use mean gradients, the second at new weights."""
    ranks = world.run(two_steps, subject, row)

    for step, wanted in enumerate(two_plain_steps(row, world.size)):
        seen = [rank[step] for rank in ranks]
        judge.tensors(seen, wanted, quantity="mean gradient", given=f"step {step}, {row}")
