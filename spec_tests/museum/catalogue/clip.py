"""Near-misses of clipping by the global norm, and right but unusual ways to do it."""

import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from spec_tests.museum.card import benign, near_miss
from spec_tests.plain.clip import PlainClip


@near_miss("clip.local-norm", rejected_by=("clip.norm.global", "clip.scaling.factor"))
class LocalNorm(PlainClip):
    """Takes the norm of what the rank holds.

    From: torchtitan issue 19: clip_grad_norm_ on local shards.
    Unseen: One rank's losses look as usual; each part of a tensor is scaled by another factor.
    """

    def gathered(self, part, gradients):
        return [part]


@near_miss(
    "clip.counts-copies",
    rejected_by=(
        "clip.norm.replicated-once",
        "clip.norm.mixed",
        "clip.traffic.replicated-sends-nothing",
    ),
)
class CountsCopies(PlainClip):
    """Sums over ranks also what all ranks hold.

    From: VeOmni issue 184, pytorch issue 88955.
    Unseen: Too large a norm clips more, and training is only slower.
    """

    def is_divided(self, gradient):
        return True

    def group(self, gradient):
        return None


@near_miss("clip.whole-mesh", rejected_by="clip.norm.replicated-axes-once")
class WholeMesh(PlainClip):
    """Sums over all ranks of a mesh, replicas too.

    From: hyper-parallel issue 526: hybrid sharding.
    Unseen: Tests have one axis.
    """

    def group(self, gradient):
        return None


@near_miss("clip.adds-maxima", rejected_by="clip.norm.orders")
class AddsMaxima(PlainClip):
    """Adds up the ranks' largest elements.

    From: torchrec issue 3199: one reduction for all orders.
    Unseen: Everyone clips by the 2-norm.
    """

    def combined(self, parts):
        return torch.stack(parts).sum()


@near_miss("clip.adds-norms", rejected_by=("clip.norm.global", "clip.norm.orders"))
class AddsNorms(PlainClip):
    """Adds up the ranks' norms.

    From: An all-reduce of what `get_total_norm` gave for the shards.
    Unseen: For p = 1 it is right; and a norm that is too large clips a little more.
    """

    def gathered(self, part, gradients):
        norms = [self.root(each) for each in super().gathered(part, gradients)]
        return [torch.stack(norms).sum().pow(self.order)] if math.isfinite(self.order) else norms


@near_miss(
    "clip.largest-of-nothing", rejected_by="clip.norm.empty-shards", outcomes=("failed", "hang")
)
class LargestOfNothing(PlainClip):
    """Asks an empty shard for its largest element.

    From: torchrec issues 3809 and 3891; FSDP2 for p = infinity.
    Unseen: Models have more rows than tests have ranks.
    """

    def part(self, gradients):
        if gradients:
            torch.cat([self.local(g).reshape(-1) for g in gradients]).abs().max()
        return super().part(gradients)


@near_miss("clip.fills-none", rejected_by="clip.norm.absent-gradients")
class FillsNone(PlainClip):
    """Puts zeros where a gradient is None.

    From: A foreach over all parameters wants tensors.
    Unseen: The norm is the same; the optimizer decays what it should skip.
    """

    def present(self):
        for tensor in self.tensors:
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
        return super().present()


@near_miss("clip.own-part-first", rejected_by="clip.norm.plain-and-equal")
class OwnPartFirst(PlainClip):
    """Adds its own part first, then the others'.

    From: A loop over peers.
    Unseen: Equal to all digits but the last.
    """

    def part(self, gradients):
        return super().part(gradients).float()

    def gathered(self, part, gradients):
        parts = super().gathered(part, gradients)
        rank = dist.get_rank()
        return parts[rank:] + parts[:rank]

    def combined(self, parts):
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


@near_miss("clip.reads-twice", rejected_by="clip.norm.any-iterable")
class ReadsTwice(PlainClip):
    """Walks the parameters twice.

    From: `for p in parameters` in two loops.
    Unseen: Tests pass a list.

    Walks the parameters for the norm, and once more to scale: a generator is at its end.
    """

    def listed(self, parameters):
        return [parameters] if isinstance(parameters, torch.Tensor) else parameters

    def present(self):
        self.first = [p.grad for p in self.tensors if p.grad is not None]
        return [p.grad for p in self.tensors if p.grad is not None]


@near_miss("clip.gathers-gradients", rejected_by="clip.traffic.one-number")
class GathersGradients(PlainClip):
    """Gathers whole gradients to take their norm.

    From: `grad.full_tensor()`.
    Unseen: The number is right, once there is memory for it.
    """

    def norm(self):
        whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in self.gradients]
        return self.root(self.part(whole))


@near_miss("clip.adds-up-in-float32", rejected_by="clip.norm.of-many-elements")
class AddsUpInFloat32(PlainClip):
    """Takes the norm of each whole tensor in float32.

    From: torch.nn.utils.clip_grad_norm_ on a CPU.
    Unseen: Tests have small tensors; a plain run and a data-parallel one are off by the same.
    """

    def part(self, gradients):
        if self.order != 2.0 or not gradients:
            return super().part(gradients)
        norms = [torch.linalg.vector_norm(self.local(g)) for g in gradients]
        return torch.stack(norms).double().square().sum()


@near_miss("clip.scales-by-own-norm", rejected_by="clip.scaling.factor")
class ScalesByOwnNorm(PlainClip):
    """Returns the global norm and scales by the rank's own.

    From: miles_diffusion issue 35: a local partial value is used as if it were global.
    Unseen: The norm in the log is right.
    """

    def factor(self, norm):
        return super().factor(self.root(self.part(self.gradients)))


@near_miss("clip.clips-each-by-itself", rejected_by="clip.scaling.factor")
class ClipsEachByItself(PlainClip):
    """Clips every gradient to max_norm by itself.

    From: A loop over parameters around clip_grad_norm_.
    Unseen: Every single norm is as asked.
    """

    @torch.no_grad()
    def scale(self, norm):
        for gradient in self.gradients:
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            own = torch.linalg.vector_norm(whole.double(), self.order)
            self.local(gradient).mul_(self.factor(own))


@near_miss("clip.normalises", rejected_by="clip.scaling.untouched-below")
class Normalises(PlainClip):
    """Scales small gradients up to max_norm.

    From: The clamp at one is forgotten.
    Unseen: Early in training norms are large.
    """

    def factor(self, norm):
        return self.max_norm / (norm + 1e-6)


@near_miss(
    "clip.skips-nan", rejected_by=("clip.nonfinite.agreed", "clip.nonfinite.error-on-all-ranks")
)
class SkipsNan(PlainClip):
    """Leaves NaN out of the norm.

    From: nan_to_num, to keep the log readable.
    Unseen: Norms are finite.

    A comparison with NaN is false, so the largest is looked for among the rest.
    """

    def combined(self, parts):
        return super().combined([part.nan_to_num(nan=0.0, posinf=math.inf) for part in parts])


@near_miss("clip.skips-nan-in-maxima", rejected_by="clip.nonfinite.largest-of-nan")
class SkipsNanInMaxima(SkipsNan):
    """Combines the largest elements by comparison.

    From: An all-reduce with MAX: PyTorch's own, for DTensors.
    Unseen: The 2-norm is right.
    """

    def combined(self, parts):
        if self.order == math.inf:
            return super().combined(parts)
        return PlainClip.combined(self, parts)


@near_miss("clip.scales-then-raises", rejected_by="clip.nonfinite.error-scales-nothing")
class ScalesThenRaises(PlainClip):
    """Scales by NaN, then raises.

    From: The check stands at the end.
    Unseen: It raises.
    """

    def check(self, norm):
        if self.strict:
            self.scale(norm)
        super().check(norm)


@near_miss("clip.raises-when-asked", rejected_by="clip.nonfinite.finite-is-no-error")
class RaisesWhenAsked(PlainClip):
    """Raises whenever error_if_nonfinite is set.

    From: The condition has lost its `not`, or its second half.
    Unseen: Tests of the flag use NaN.

    Takes the flag for a reason.
    """

    def check(self, norm):
        if self.strict:
            raise RuntimeError(f"the gradient norm is {norm.item()}")


@benign("benign.clip-asks-everyone")
class AsksEveryone(PlainClip):
    """Agrees on the norm of replicated gradients too.

    Sends its norm even where all ranks have the whole gradient, and takes the largest.
    """

    def norm(self):
        norm = super().norm()
        if not any(map(self.is_divided, self.gradients)):
            dist.all_reduce(norm, op=dist.ReduceOp.MAX)
        return norm


@benign("benign.clip-refuses-mixtures")
class RefusesMixtures(PlainClip):
    """Refuses plain tensors beside DTensors."""

    def norm(self):
        if len({isinstance(gradient, DTensor) for gradient in self.gradients}) > 1:
            raise ValueError("expected parameters to be all plain or all DTensors, got both")
        return super().norm()


@benign("benign.clip-plain")
class ClipPlain(PlainClip):
    """The base of the near-misses: gathers parts, adds in rank order."""


@benign("benign.clip-gathers-gradients")
class ClipGathersGradients(GathersGradients):
    """Takes the norm of gathered gradients."""


@near_miss(
    "clip.asks-gradients-alone", rejected_by="clip.norm.absent-on-one-rank", outcomes=("hang",)
)
class AsksGradientsAlone(PlainClip):
    """Takes no part in the sum where the rank has no sharded gradient.

    From: A list of gradients that are not None, PyTorch's own among them.
    Unseen: Ranks that run the same layers have gradients of the same parameters.
    """

    def takers(self):
        return [p for p in self.tensors if p.grad is not None and self.is_divided(p.grad)]
