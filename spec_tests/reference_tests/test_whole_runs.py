"""Loader, model, trainer, wrapper and checkpoint of the reference in one run, on 1 to 4 ranks.

The chapters judge each of them; here they meet. A run is ten steps over shards whose ids say where
they stand, with the same global batch however many ranks share it. Every sequence that a rank takes
is written down. What was measured is printed: `pytest -rP` shows it.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from spec_tests.rig import shards
from spec_tests.rig.tolerance import rounding
from spec_tests.target import parse

STEPS, GLOBAL_BATCH, MICRO_STEPS, LENGTH, VOCABULARY = 10, 24, 2, 8, 3000
RATE = 1.0  # the weights shall move by more than any bound
LENGTHS = (1000, 3, 997, 500)
"""Tokens of the shards; 24 sequences of 8 end at no border of theirs."""


class Written:
    """The batches of a loader as they pass, and a list of their sequences."""

    def __init__(self, loader, steps):
        self.batches = itertools.islice(iter(loader), steps * MICRO_STEPS)
        self.taken: list[list[list[int]]] = []

    def __iter__(self):
        return self

    def __next__(self):
        inputs, targets = next(self.batches)
        self.taken.append(inputs.tolist())
        return inputs, targets


class Run:
    """One rank's parts of a run."""

    def __init__(self, ctx, paths, *, dtype, dropout=0.0, wrapper="ddp_bucketed"):
        self.impl, self.world_size = ctx.impl, ctx.world_size
        torch.manual_seed(0)
        decoder = ctx.impl.language_model(
            vocab_size=VOCABULARY,
            num_layers=1,
            num_heads=2,
            embedding_dim=8,
            max_sequence_length=LENGTH,
        )
        self.module = nn.Sequential(decoder, nn.Dropout(dropout)).to(dtype)
        self.micro_batch = GLOBAL_BATCH // MICRO_STEPS // ctx.world_size
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=RATE, momentum=0.9)
        self.model = self.module
        if ctx.world_size > 1:
            size = {"bucket_size_mb": 0.01} if wrapper == "ddp_bucketed" else {}
            self.model = getattr(ctx.impl, wrapper)(self.module, **size)
        self.loader = ctx.impl.token_loader(
            paths,
            batch_size=self.micro_batch,
            sequence_length=LENGTH,
            rank=ctx.rank,
            world_size=ctx.world_size,
        )
        self.parts = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}
        torch.manual_seed(100 + ctx.rank)  # of the dropout: another mask on every rank

    def train(self, steps):
        """So many steps; the sequences of each micro-batch."""
        written = Written(self.loader, steps)
        if steps:
            self.impl.train(
                self.model,
                self.optimizer,
                written,
                steps=steps,
                global_batch_size=GLOBAL_BATCH,
                micro_batch_size=self.micro_batch,
            )
        return written.taken

    def weights(self):
        """Copies, by name."""
        return {name: p.detach().clone() for name, p in self.module.named_parameters()}


def whole(ctx, paths, options):
    """A run from beginning to end."""
    run = Run(ctx, paths, **options)
    start, taken = run.weights(), run.train(STEPS)
    return {"taken": taken, "weights": run.weights(), "start": start}


def begun(ctx, paths, directory, stop, options):
    """A run that saves after `stop` steps and ends."""
    run = Run(ctx, paths, **options)
    taken = run.train(stop)
    ctx.impl.save_checkpoint(directory, step=stop, **run.parts)
    return {"taken": taken, "weights": run.weights()}


def gone_on(ctx, paths, directory, options):
    """A new run that takes up the save, and what it then had."""
    run = Run(ctx, paths, **options)
    step = ctx.impl.load_checkpoint(directory, **run.parts)
    loaded = run.weights()
    return {
        "step": step,
        "loaded": loaded,
        "taken": run.train(STEPS - step),
        "weights": run.weights(),
    }


def in_order(ranks):
    """The sequences in the order of the global batches: by micro-batch, then by rank."""
    of_ranks = zip(*(rank["taken"] for rank in ranks), strict=True)
    return [row for micro in of_ranks for rows in micro for row in rows]


def farthest(weights, others):
    """The largest difference between two sets of weights."""
    return max(float((weights[name] - others[name]).abs().max()) for name in weights)


@pytest.fixture
def paths(tmp_path):
    """Shards, as strings."""
    return [str(path) for path in shards.write_numbered(tmp_path, LENGTHS)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("wrapper", ["ddp", "ddp_bucketed"])
def test_any_number_of_ranks_takes_the_same_tokens_to_the_same_weights(
    worlds, paths, dtype, wrapper
):
    options = {"dtype": dtype, "wrapper": wrapper}
    # A mean over all tokens of a step, step by step; float64 asks for what is left of it at 1e-12.
    allowed = rounding(dtype, terms=GLOBAL_BATCH * LENGTH, depth=STEPS).relative
    bound = 1e-12 if dtype == torch.float64 else allowed
    [alone] = worlds.world(1, parse("solution")).run(whole, paths, options)
    assert farthest(alone["weights"], alone["start"]) > 100 * bound

    for size in (2, 4):
        ranks = worlds.world(size, parse("solution")).run(whole, paths, options)
        assert in_order(ranks) == in_order([alone])
        apart = max(farthest(rank["weights"], alone["weights"]) for rank in ranks)
        print(f"{wrapper}, {dtype}, {size} ranks: {apart:.1e} apart, allowed {bound:.1e}")  # noqa: T201
        assert apart <= bound


@pytest.mark.parametrize("other", [1, 3, 4])
def test_a_run_saved_on_two_ranks_goes_on_with_others(worlds, paths, tmp_path, other):
    options, directory = {"dtype": torch.float64}, str(tmp_path / "saved")
    uninterrupted = worlds.world(2, parse("solution")).run(whole, paths, options)

    first = worlds.world(2, parse("solution")).run(begun, paths, directory, 4, options)
    second = worlds.world(other, parse("solution")).run(gone_on, paths, directory, options)

    for rank in second:
        assert rank["step"] == 4
        assert farthest(rank["loaded"], first[0]["weights"]) == 0.0
    assert in_order(first) + in_order(second) == in_order(uninterrupted)
    apart = max(farthest(rank["weights"], uninterrupted[0]["weights"]) for rank in second)
    print(f"2 ranks -> {other}: loaded equal, in the end {apart:.1e} apart")  # noqa: T201
    assert apart <= 1e-12


STOPS = [0, 1, 5, STEPS]


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_with_dropout_may_stop_at_any_step(request, worlds, paths, tmp_path, size):
    is_deep = request.config.getoption("--profile") == "deep"
    options, solution = {"dtype": torch.float32, "dropout": 0.2}, parse("solution")
    uninterrupted = worlds.world(size, solution).run(whole, paths, options)

    for stop in range(STEPS + 1) if is_deep else STOPS:
        directory = str(tmp_path / f"stopped-{stop}")
        first = worlds.world(size, solution).run(begun, paths, directory, stop, options)
        worlds.drop(solution)  # what goes on are other processes
        second = worlds.world(size, solution).run(gone_on, paths, directory, options)
        assert [rank["step"] for rank in second] == [stop] * size
        assert in_order(first) + in_order(second) == in_order(uninterrupted)
        for rank, same in zip(second, uninterrupted, strict=True):
            assert all(torch.equal(rank["weights"][n], w) for n, w in same["weights"].items())
        print(f"{size} rank(s), stopped after {stop} of {STEPS} steps: equal bits")  # noqa: T201
