"""Real bugs of clipping: over which ranks a norm is summed, and how often an element counts."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from spec_tests.museum.reality import faulty
from spec_tests.plain.clip import PlainClip


@faulty("veomni-862")
class SumsOverReplicas(PlainClip):
    """Adds the parts of all ranks, of which replicas hold the same.

    https://github.com/ByteDance-Seed/VeOmni/pull/862
    """

    def group(self, gradient):
        return None if gradient.device_mesh.ndim > 1 else super().group(gradient)


@faulty("miles-diffusion-35")
class ReturnsOwnNorm(PlainClip):
    """Scales by the whole norm, and returns that of its own shards.

    https://github.com/radixark/miles_diffusion/pull/35
    """

    @torch.no_grad()
    def norm(self):
        self.own = self.root(self.part(self.gradients))
        return super().norm()

    def told(self, norm):
        return self.own


@faulty("loongforge-152")
class ClipsByOwnNorm(PlainClip):
    """Takes the norm of its own shards for that of the gradient.

    https://github.com/baidu-baige/LoongForge/pull/152
    """

    def gathered(self, part, gradients):
        return [part]


@faulty("transformerengine-715")
class CountsReplicasPerRank(PlainClip):
    """Replicated gradients enter the sum over ranks as divided ones do.

    https://github.com/ROCm/TransformerEngine/pull/715
    """

    def part(self, gradients):
        found = super().part(gradients)
        is_replicated = gradients and not self.is_divided(gradients[0])
        return found * dist.get_world_size() if is_replicated and self.order != math.inf else found
