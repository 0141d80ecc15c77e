"""One rank's view of a replicated toy: what the bodies of this chapter are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from spec_tests.programs.laws import refusal, wrapped
from spec_tests.programs.laws.wrapped import SEED as SEED  # the chapter takes it from here
from spec_tests.rig.judge.oracle import Gradients
from spec_tests.rig.ranks.rank import Context

DDP = ("ddp", "ddp_bucketed")
# Small enough that every toy needs several buckets: 32 float32 elements.
SMALL_BUCKET_MB = 32 * 4 / 2**20


def wrap(
    ctx: Context,
    subject: str,
    module: nn.Module,
    *,
    bucket_size_mb: float = SMALL_BUCKET_MB,
    process_group: ProcessGroup | None = None,
) -> nn.Module:
    """Wrap `module` with the function under test; the bucketed one gets small buckets."""
    # Left out where it is the default: whoever knows no groups fails in the clauses on groups only.
    group = {} if process_group is None else {"process_group": process_group}
    if subject == "ddp_bucketed":
        return ctx.impl.ddp_bucketed(module, bucket_size_mb=bucket_size_mb, **group)
    return ctx.impl.ddp(module, **group)


class Replica(wrapped.WrappedToy):
    """A toy, wrapped, whose gradients are read from the Parameter objects of *before* wrapping."""

    def __init__(
        self,
        ctx: Context,
        subject: str,
        toy: str,
        seed: int = SEED,
        *,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(ctx, toy, seed, seed, dtype)
        self.parameters = dict(self.module.named_parameters())
        # Built before wrapping, over the original objects, as users do.
        self.optimizer = torch.optim.SGD(self.parameters.values(), lr=2.0**-16)
        self.wrapped = self.wrap(subject, **options)

    def wrap(self, subject: str, **options: Any) -> nn.Module:
        """Wrap the toy."""
        return wrap(self.ctx, subject, self.module, **options)

    def accumulate(self, micro: int = 0) -> None:
        """Forward and backward of a micro-batch inside no_sync."""
        with self.ctx.impl.no_sync(self.wrapped):
            self.loss(micro).backward()

    def finish(self) -> None:
        """End the synchronisation of a backward pass."""
        self.ctx.impl.finish_gradient_synchronization(self.wrapped)

    def gradients(self) -> Gradients:
        """`.grad` of the original Parameter objects, by name."""
        return {
            name: None if p.grad is None else p.grad.detach().clone()
            for name, p in self.parameters.items()
        }

    def weights(self) -> dict[str, torch.Tensor]:
        """Values of the original Parameter objects, by name."""
        return {name: p.detach().clone() for name, p in self.parameters.items()}


def gradients_after(ctx, subject, toy, seed, calls, **options):
    """Gradients of a replicated toy after these calls."""
    return Replica(ctx, subject, toy, seed, **options).gradients_after(calls)


def two_steps_beside_unused(ctx, subject, **options):
    """Gradients of the second step, and what it raised once its forward had returned."""
    replica = Replica(ctx, subject, "unused", SEED, **options)
    replica.follow("backward 0, zero_grad")
    loss = replica.loss(1)
    with refusal.caught() as late:
        loss.backward()
        replica.finish()
    return replica.gradients(), late["error"]
