"""Clipping of gradients by their global norm, also where parameters are sharded.

Problem: the norm is that of all gradients together, and a rank may hold only its rows of them.

Idea: sum |x|^p over what this rank holds; add the sums of the ranks that hold other rows; take the
p-th root once.

Steps
    1. Replicated gradients: this rank has all of them, so nothing is sent.
    2. Sharded ones (DTensors with a `Shard` placement): for each process group, all-gather the
       partial sums over the mesh dim that shards, and add them in order of rank, so that all ranks
       get the same bits.
    3. Multiply every gradient by max_norm / (norm + 1e-6) where that is below 1.
    For p = inf sums become maxima. With error_if_nonfinite all ranks raise before any scaling.

Use
    norm = PlainClip(model.parameters(), 1.0, 2.0, False).run()     # before scaling

Cost: one pass over the gradients in float64, one number per rank, one pass to scale.

Source: torch.nn.utils.clip_grad_norm_, and Pascanu et al. 2013.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard


class PlainClip:
    """One call: `run` is the algorithm, line by line."""

    def __init__(self, parameters: Any, max_norm: float, order: float, strict: bool) -> None:
        self.tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self.gradients = [p.grad for p in self.tensors if p.grad is not None]
        self.max_norm, self.order, self.strict = max_norm, float(order), strict

    def run(self) -> Any:
        norm = self.norm()
        self.check(norm)
        self.scale(norm)
        return self.told(norm)

    # ---------------------------------------------------------------------------- the norm

    @torch.no_grad()
    def norm(self) -> torch.Tensor:
        copies = [g for g in self.gradients if not self.is_divided(g)]
        parts = [self.part(copies)]
        for alike in self.by_group().values():
            divided = [p.grad for p in alike if p.grad is not None]
            parts += self.gathered(self.part(divided), alike)
        return self.root(self.combined(parts))

    def by_group(self) -> dict[Any, list[torch.Tensor]]:
        """What is divided, with a gradient on this rank or without: peers wait for its part."""
        found: dict[Any, list[torch.Tensor]] = {}
        for tensor in self.tensors:
            if self.is_divided(tensor if tensor.grad is None else tensor.grad):
                found.setdefault(self.group(tensor), []).append(tensor)
        return found

    def is_divided(self, gradient: torch.Tensor) -> bool:
        return isinstance(gradient, DTensor) and any(
            isinstance(placement, Shard) for placement in gradient.placements
        )

    def local(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient

    def part(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum of |x|^p, or the largest |x|, of what this rank holds."""
        sizes = [self.local(gradient).reshape(-1).abs() for gradient in gradients]
        flat = torch.cat([torch.zeros(1), *sizes]).double()
        return flat.max() if self.order == math.inf else flat.pow(self.order).sum()

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

    @classmethod
    def functions(cls) -> dict[str, Any]:
        """Return the contract's function for this class."""

        def clip_grad_norm_(parameters, max_norm, norm_type=2.0, *, error_if_nonfinite=False):
            return cls(parameters, max_norm, norm_type, error_if_nonfinite).run()

        return {"clip_grad_norm_": clip_grad_norm_}
