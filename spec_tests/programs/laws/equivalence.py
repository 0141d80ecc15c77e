"""Equivalence: ranks that each train on a part of the batch get the weights of one process."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spec_tests.programs.faults import FAULTS
from spec_tests.programs.uses import forward_that_counts
from spec_tests.rig import judge
from spec_tests.rig.judge import oracle
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.judge.tolerance import Tolerance
from spec_tests.rig.toys import TOYS, sum_of_squares


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
    size = len(observed)

    def by(
        factor: float = 1.0, use: int | None = None, is_untied: bool = False, thaws: bool = False
    ) -> oracle.Named:
        """Return the weights of training by so many times the mean, by one use of each weight."""
        module = TOYS[toy].build(seed)
        if thaws:
            module.requires_grad_(True)
        for part in module.modules() if is_untied else ():
            for name, p in part.named_parameters(recurse=False):
                setattr(part, name, torch.nn.Parameter(p.detach().clone(), p.requires_grad))
        options: Any = {"lr": factor * lr, "momentum": 0.9, "weight_decay": weight_decay / factor}
        optimizer = torch.optim.SGD(module.parameters(), **options)
        for step in range(steps):
            optimizer.zero_grad()
            for rank in range(size):
                forward = functools.partial(module, TOYS[toy].batch(seed, rank=rank, micro=step))
                sum_of_squares(forward_that_counts(forward, module.parameters(), use)).backward()
            optimizer.step()
        return {name: p.detach() for name, p in module.named_parameters()}

    wrong = {
        "summed and not divided by the world size": float(size),
        "divided by the world size twice": 1 / size,
    }
    wrong |= {f"divided by 2, and the group has {size}": size / 2} if size > 2 else {}
    judge.tensors(
        observed,
        by(),
        quantity="weight after training",
        within=within,
        hints=[
            Hint("the weights did not move", oracle.parameters(toy, seed)),
            *[Hint(means, functools.partial(by, factor)) for means, factor in wrong.items()],
            *[
                Hint(fault.means, functools.partial(by, use=fault.counts))
                for fault in FAULTS.values()
                if fault.counts is not None
            ],
            Hint("a tied weight became two weights", functools.partial(by, is_untied=True)),
            Hint(FAULTS["frozen-trains"].means, functools.partial(by, thaws=True)),
        ],
        given=f"toy {toy!r}, seed {seed}, {steps} steps of SGD with momentum",
    )
