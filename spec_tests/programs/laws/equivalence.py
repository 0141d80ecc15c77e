"""Equivalence: many ranks, each with a part of the batch, do what one process does with all of it.

The law takes *how the batch is laid out*: which rank computes which micro-batch, with which flags.
The same law therefore serves replicas, shards and any mesh of the two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from spec_tests.rig import judge
from spec_tests.rig.judge import oracle
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.judge.tolerance import Tolerance
from spec_tests.rig.toys import TOYS

Flags = Callable[[int, int], dict[str, Any]]


def _no_flags(rank: int, micro: int) -> dict[str, Any]:
    return {}


def full_batch_gradients(
    toy: str,
    seed: int,
    *,
    ranks: Sequence[int],
    micros: Sequence[int] = (0,),
    flags: Flags = _no_flags,
) -> oracle.Gradients:
    """Gradients of the summed loss over the micro-batches of all `ranks`, in one process."""
    places = [(rank, micro) for rank in ranks for micro in micros]
    return oracle.gradients(
        toy,
        seed,
        [TOYS[toy].batch(seed, rank=rank, micro=micro) for rank, micro in places],
        [flags(rank, micro) for rank, micro in places],
    )


def scaled(gradients: oracle.Gradients, factor: float) -> oracle.Gradients:
    """Every gradient times `factor`."""
    return {name: None if g is None else g * factor for name, g in gradients.items()}


def mean_gradients(
    observed: Sequence[oracle.Gradients],
    toy: str,
    seed: int,
    *,
    micros: Sequence[int] = (0,),
    flags: Flags = _no_flags,
    absent_is_zero: bool = False,
    within: Tolerance | None = None,
    hints: Sequence[Hint] = (),
    given: str = "",
) -> None:
    """Every rank must hold the mean over ranks of `W * loss`: the gradient of the full batch.

    Args:
        observed: `.grad` by name, one mapping per rank.
        micros: the micro-batches that each rank computed since zero_grad.
        flags: keyword arguments of the model for a rank and micro-batch.
        absent_is_zero: a parameter that nobody used may hold zeros in place of None.
    """
    __tracebackhide__ = True
    size = len(observed)
    assert within or size * size * len(micros) <= TOYS[toy].reach, "no exact sums any more"
    expected = full_batch_gradients(toy, seed, ranks=range(size), micros=micros, flags=flags)
    if absent_is_zero:
        like = oracle.parameters(toy, seed)
        expected = dict(oracle.zeros_for_none(expected, like))
        observed = [dict(oracle.zeros_for_none(seen, like)) for seen in observed]
    judge.tensors(
        observed,
        expected,
        quantity="mean gradient",
        within=within,
        hints=[*hints, *_usual_suspects(toy, seed, size, micros, flags)],
        given=", ".join(filter(None, [f"toy {toy!r}, seed {seed}", given])),
    )


def trained_weights(
    observed: Sequence[Mapping[str, torch.Tensor]],
    toy: str,
    seed: int,
    *,
    steps: int,
    within: Tolerance,
    lr: float,
    weight_decay: float = 0.0,
) -> None:
    """On all ranks: the weights of one process after `steps` of SGD with momentum 0.9.

    Args:
        observed: full weights by name, one mapping per rank; step i used micro-batch i of each.
    """
    __tracebackhide__ = True
    ranks = range(len(observed))
    batches = [[TOYS[toy].batch(seed, rank=r, micro=step) for r in ranks] for step in range(steps)]

    def by(factor: float) -> oracle.Named:  # as with gradients that are so many times the mean
        decay = weight_decay / factor
        return oracle.trained(toy, seed, batches, lr=factor * lr, momentum=0.9, weight_decay=decay)

    size = len(observed)
    wrong = {
        "summed and not divided by the world size": float(size),
        "divided by the world size twice": 1 / size,
    }
    wrong |= {f"divided by 2, and the group has {size}": size / 2} if size > 2 else {}
    judge.tensors(
        observed,
        by(1.0),
        quantity="weight after training",
        within=within,
        hints=[
            Hint("the weights did not move", oracle.parameters(toy, seed)),
            *[Hint(means, functools.partial(by, factor)) for means, factor in wrong.items()],
        ],
        given=f"toy {toy!r}, seed {seed}, {steps} steps of SGD with momentum",
    )


def _usual_suspects(
    toy: str, seed: int, size: int, micros: Sequence[int], flags: Flags
) -> list[Hint]:
    def of(ranks: Sequence[int], which: Sequence[int], factor: float) -> oracle.Gradients:
        found = full_batch_gradients(toy, seed, ranks=ranks, micros=which, flags=flags)
        return scaled(found, factor)

    everyone = range(size)

    def local() -> list[oracle.Gradients]:
        return [of([rank], micros, size) for rank in everyone]

    def last() -> oracle.Gradients:
        return of(everyone, micros[-1:], 1.0)

    def mean_and_local() -> list[oracle.Gradients]:
        return [added(of(everyone, micros, 1.0), of([rank], micros, size)) for rank in everyone]

    def last_and_local() -> list[oracle.Gradients]:
        return [added(last(), of([rank], micros[:-1], size)) for rank in everyone]

    hints = []
    if size > 1:
        hints.append(Hint("the rank's own local gradient: it was never reduced", local))
        meaning = "the mean was added to the rank's own gradient, which it should replace"
        hints.append(Hint(meaning, mean_and_local))
    if len(micros) > 1:
        hints.append(Hint("the last micro-batch alone: the earlier ones were lost", last))
        twice = ", or by the world size twice" if len(micros) == size else ""
        divided = f"divided by the number of micro-batches{twice}"
        hints.append(Hint(divided, lambda: of(everyone, micros, 1.0 / len(micros))))
        hints.append(
            Hint("the last micro-batch was reduced, the earlier ones stayed local", last_and_local)
        )
    return hints


def added(one: oracle.Gradients, other: oracle.Gradients) -> oracle.Gradients:
    """The sum of both, where None adds nothing."""
    total: oracle.Gradients = {}
    for name, left in one.items():
        right = other[name]
        total[name] = right if left is None else left if right is None else left + right
    return total
