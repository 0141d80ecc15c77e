"""Near-misses of the gradient norm: an element counts too often, or not, or as it should not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from spec_tests.impostors.plain_clip import PlainClip, card


class LocalNorm(PlainClip):
    def gathered(self, part: torch.Tensor, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [part]


class CountsCopies(PlainClip):
    """Sums over the ranks whatever it is given."""

    def is_divided(self, gradient: torch.Tensor) -> bool:
        return True

    def group(self, gradient: Any) -> Any:
        return None


class WholeMesh(PlainClip):
    def group(self, gradient: Any) -> Any:
        return None


class AddsMaxima(PlainClip):
    def combined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(parts).sum()


class AlwaysTwo(PlainClip):
    def norm(self) -> torch.Tensor:
        self.order = 2.0
        return super().norm()


class LargestOfNothing(PlainClip):
    def part(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        if gradients:
            torch.cat([self.local(g).reshape(-1) for g in gradients]).abs().max()
        return super().part(gradients)


class AveragesParts(PlainClip):
    def combined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return super().combined(parts) / max(1, len(parts) - 1)


class FillsNone(PlainClip):
    def present(self) -> list[torch.Tensor]:
        for tensor in self.tensors:
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
        return super().present()


class OwnPartFirst(PlainClip):
    """Adds its own part first, and the others' as they come, in float32."""

    def part(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return super().part(gradients).float()

    def gathered(self, part: torch.Tensor, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        parts = super().gathered(part, gradients)
        rank = dist.get_rank()
        return parts[rank:] + parts[:rank]

    def combined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


class TellsNumbers(PlainClip):
    def told(self, norm: torch.Tensor) -> Any:
        return norm.item()


class ReadsTwice(PlainClip):
    """Walks the parameters for the norm, and once more to scale: a generator is at its end."""

    def listed(self, parameters: Any) -> Any:
        return [parameters] if isinstance(parameters, torch.Tensor) else parameters

    def present(self) -> list[torch.Tensor]:
        self.first = [p.grad for p in self.tensors if p.grad is not None]
        return [p.grad for p in self.tensors if p.grad is not None]


class OneMessageEach(PlainClip):
    def gathered(self, part: torch.Tensor, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = []
        for gradient in gradients:
            found += super().gathered(self.part([gradient]), gradients)
        return found


class GathersGradients(PlainClip):
    def norm(self) -> torch.Tensor:
        whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in self.gradients]
        return self.root(self.part(whole))


class AddsUpInFloat32(PlainClip):
    def part(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.order != 2.0 or not gradients:
            return super().part(gradients)
        norms = [torch.linalg.vector_norm(self.local(g)) for g in gradients]
        return torch.stack(norms).double().square().sum()


IMPOSTORS = (
    card(
        LocalNorm,
        "local-norm",
        "Takes the norm of what the rank holds.",
        "torchtitan issue 19: clip_grad_norm_ on local shards.",
        "One rank's losses look as usual; each part of a tensor is scaled by another factor.",
        "clip.norm.global",
        "clip.scaling.factor",
    ),
    card(
        CountsCopies,
        "counts-copies",
        "Sums over ranks also what all ranks hold.",
        "VeOmni issue 184, pytorch issue 88955.",
        "Too large a norm clips more, and training is only slower.",
        "clip.norm.replicated-once",
        "clip.norm.mixed",
        "clip.traffic.replicated-sends-nothing",
    ),
    card(
        WholeMesh,
        "whole-mesh",
        "Sums over all ranks of a mesh, replicas too.",
        "hyper-parallel issue 526: hybrid sharding.",
        "Tests have one axis.",
        "clip.norm.replicated-axes-once",
    ),
    card(
        AddsMaxima,
        "adds-maxima",
        "Adds up the ranks' largest elements.",
        "torchrec issue 3199: one reduction for all orders.",
        "Everyone clips by the 2-norm.",
        "clip.norm.orders",
    ),
    card(
        AlwaysTwo,
        "always-two",
        "Ignores norm_type.",
        "The argument is accepted for compatibility.",
        "Everyone clips by the 2-norm.",
        "clip.norm.orders",
    ),
    card(
        LargestOfNothing,
        "largest-of-nothing",
        "Asks an empty shard for its largest element.",
        "torchrec issues 3809 and 3891; FSDP2 for p = infinity.",
        "Models have more rows than tests have ranks.",
        "clip.norm.empty-shards",
        outcomes=("failed", "hang"),
    ),
    card(
        AveragesParts,
        "averages-parts",
        "Averages the ranks' parts of the sum.",
        "ReduceOp.AVG, as for gradients.",
        "Of copies the average is right.",
        "clip.norm.global",
    ),
    card(
        FillsNone,
        "fills-none",
        "Puts zeros where a gradient is None.",
        "A foreach over all parameters wants tensors.",
        "The norm is the same; the optimizer decays what it should skip.",
        "clip.norm.absent-gradients",
    ),
    card(
        OwnPartFirst,
        "own-part-first",
        "Adds its own part first, then the others'.",
        "A loop over peers.",
        "Equal to all digits but the last.",
        "clip.norm.plain-and-equal",
    ),
    card(
        TellsNumbers,
        "tells-numbers",
        "Returns a float.",
        "`.item()` for the log.",
        "It prints the same.",
        "clip.norm.plain-and-equal",
    ),
    card(
        ReadsTwice,
        "reads-twice",
        "Walks the parameters twice.",
        "`for p in parameters` in two loops.",
        "Tests pass a list.",
        "clip.norm.any-iterable",
    ),
    card(
        OneMessageEach,
        "one-message-each",
        "Sends one number for each parameter.",
        "A loop over DTensors' own norms.",
        "A millisecond each, hundreds of them.",
        "clip.traffic.one-number",
    ),
    card(
        GathersGradients,
        "gathers-gradients",
        "Gathers whole gradients to take their norm.",
        "`grad.full_tensor()`.",
        "The number is right, once there is memory for it.",
        "clip.traffic.one-number",
    ),
    card(
        AddsUpInFloat32,
        "adds-up-in-float32",
        "Takes the norm of each whole tensor in float32.",
        "torch.nn.utils.clip_grad_norm_ on a CPU.",
        "Tests have small tensors; a plain run and a data-parallel one are off by the same.",
        "clip.norm.of-many-elements",
    ),
)
