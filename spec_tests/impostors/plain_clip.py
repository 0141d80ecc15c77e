"""A plain, right gradient clipping with every decision in a method of its own.

The near-misses of the clip chapter are subclasses that override one decision. It is itself a benign
variant: unusual (it gathers every rank's part and adds them up in order of rank), right, and so
every clause up to level `correct` must accept it. It is written apart from any solution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from spec_tests.impostors.card import Impostor


class PlainClip:
    """One call: `run` is the algorithm, line by line."""

    def __init__(self, parameters: Any, max_norm: float, order: float, strict: bool) -> None:
        self.tensors = self.listed(parameters)
        self.gradients = self.present()
        self.max_norm, self.order, self.strict = max_norm, float(order), strict

    def run(self) -> Any:
        norm = self.norm()
        self.check(norm)
        self.scale(norm)
        return self.told(norm)

    def listed(self, parameters: Any) -> list[torch.Tensor]:
        return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)

    def present(self) -> list[torch.Tensor]:
        return [p.grad for p in self.tensors if p.grad is not None]

    # ---------------------------------------------------------------------------- the norm

    @torch.no_grad()
    def norm(self) -> torch.Tensor:
        copies = [g for g in self.gradients if not self.is_divided(g)]
        divided = [g for g in self.gradients if self.is_divided(g)]
        parts = [self.part(copies)]
        if divided:
            parts += self.gathered(self.part(divided), divided)
        return self.root(self.combined(parts))

    def is_divided(self, gradient: torch.Tensor) -> bool:
        return isinstance(gradient, DTensor) and any(
            isinstance(placement, Shard) for placement in gradient.placements
        )

    def local(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient

    def part(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum of |x|^p, or the largest |x|, of what this rank holds."""
        flat = torch.cat([torch.zeros(1), *[self.local(g).reshape(-1) for g in gradients]]).double()
        return flat.abs().max() if self.order == math.inf else flat.abs().pow(self.order).sum()

    def gathered(self, part: torch.Tensor, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parts of those who hold other elements, in order of rank."""
        group = self.group(gradients[0])
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part, group=group)
        return parts

    def group(self, gradient: Any) -> Any:
        return gradient.device_mesh.get_group(gradient.device_mesh.ndim - 1)

    def combined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        together = torch.stack(parts)
        return together.max() if self.order == math.inf else together.sum()

    def root(self, total: torch.Tensor) -> torch.Tensor:
        return total if self.order == math.inf else total.pow(1.0 / self.order)

    # ------------------------------------------------------------------------- the scaling

    def check(self, norm: torch.Tensor) -> None:
        if self.strict and not math.isfinite(norm):
            raise RuntimeError(f"the gradient norm is {norm.item()}; nothing was scaled")

    def factor(self, norm: torch.Tensor) -> torch.Tensor:
        return (self.max_norm / (norm + 1e-6)).clamp(max=1.0)

    @torch.no_grad()
    def scale(self, norm: torch.Tensor) -> None:
        for gradient in self.gradients:
            self.local(gradient).mul_(self.factor(norm))

    def told(self, norm: torch.Tensor) -> Any:
        return norm


def offer(clip: type[PlainClip]) -> dict[str, Any]:
    """The contract's function for a class."""

    def clip_grad_norm_(parameters, max_norm, norm_type=2.0, *, error_if_nonfinite=False):
        return clip(parameters, max_norm, norm_type, error_if_nonfinite).run()

    return {"clip_grad_norm_": clip_grad_norm_}


def card(
    clip: type[PlainClip],
    words: str,
    does: str,
    seen: str,
    unseen: str,
    *clauses: str,
    outcomes: tuple[str, ...] = ("failed",),
) -> Impostor:
    """A near-miss made of a class."""
    return Impostor(
        f"clip.{words}",
        does,
        seen,
        unseen,
        clauses,
        functions=lambda: offer(clip),
        outcomes=outcomes,
    )
