"""PyTorch's functions, typed: a type checker holds them against the contract's signatures.

Nothing runs this file. It shows that the contract's signatures accept what a user would write, a
subclass of what is promised too, and `make lint` fails when they no longer do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

from spec_tests import contract
from spec_tests.impls import torch

P = ParamSpec("P")
R = TypeVar("R")


class Promise(Generic[P, R]):
    """A function of the contract, to which a type checker holds others."""

    def __init__(self, function: Callable[P, R]) -> None:
        """`function` fixes the signature."""

    def kept_by(self, own: Callable[P, R]) -> None:
        """Accepted by a type checker if `own` can be called as promised."""


Promise(contract.parallel.ddp).kept_by(torch.ddp)
Promise(contract.parallel.ddp_bucketed).kept_by(torch.ddp_bucketed)
Promise(contract.parallel.sharded_optimizer).kept_by(torch.sharded_optimizer)
Promise(contract.sharding.fsdp).kept_by(torch.fsdp)
Promise(contract.sharding.full_parameters).kept_by(torch.full_parameters)
Promise(contract.sharding.clip_grad_norm_).kept_by(torch.clip_grad_norm_)
Promise(contract.measure.flops_per_token).kept_by(torch.flops_per_token)
