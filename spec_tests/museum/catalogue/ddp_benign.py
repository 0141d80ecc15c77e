"""Right but unusual: every clause up to level `correct` must accept these."""

import torch
import torch.distributed as dist

from spec_tests.museum.card import benign
from spec_tests.plain.ddp import PlainDdp


@benign("benign.after-backward")
class AfterBackward(PlainDdp):
    """One flat all-reduce after backward."""

    def plan(self):
        self.bucket_bytes = float("inf")
        return super().plan()

    def launch_what_is_ready(self):
        pass


@benign("benign.reduce-then-divide")
class ReduceThenDivide(PlainDdp):
    """Sums first, divides afterwards."""

    def scale(self, flat):
        return flat.clone()

    def write_back(self, bucket, flat, used):
        super().write_back(bucket, flat / self.size(), used)


@benign("benign.blocking")
class Blocking(PlainDdp):
    """Waits inside the hook.

    Waits for every reduction where it is launched.
    """

    def send(self, flat):
        handle = super().send(flat)
        handle.wait()
        return handle


@benign("benign.gather-and-sum")
class GatherAndSum(PlainDdp):
    """Gathers and sums in rank order."""

    def send(self, flat):
        parts = [torch.empty_like(flat) for _ in range(self.size())]
        dist.all_gather(parts, flat, group=self.group)
        flat.copy_(torch.stack(parts).sum(dim=0))
        return _Done()


@benign("benign.reduce-scatter")
class ReduceScatter(PlainDdp):
    """Reduce-scatter and gather."""

    def send(self, flat):
        size = self.size()
        padded = torch.cat([flat, flat.new_zeros(-flat.numel() % size)])
        own = torch.empty_like(padded[: padded.numel() // size])
        dist.reduce_scatter_tensor(own, padded, group=self.group)
        dist.all_gather_into_tensor(padded, own, group=self.group)
        flat.copy_(padded[: flat.numel()])
        return _Done()


@benign("benign.refuses-unused")
class RefusesUnused(PlainDdp):
    """Raises for parameters without a gradient."""

    def finish(self):
        names = [name for name, p in self.module.named_parameters() if p.requires_grad]
        absent = [name for name, p in zip(names, self.trainable, strict=True) if p.grad is None]
        if self.has_news and absent:
            raise RuntimeError(f"no gradient for {', '.join(absent)}; use them or freeze them")
        super().finish()


@benign("benign.object-broadcast")
class ObjectBroadcast(PlainDdp):
    """Broadcasts a pickled state at construction.

    Starts from a pickled state of the first rank.
    """

    @torch.no_grad()
    def start_equal(self):
        tensors = [*self.module.parameters(), *self.module.buffers()]
        parcel = [[t.detach().clone() for t in tensors]]
        dist.broadcast_object_list(parcel, src=self.first_rank(), group=self.group)
        for tensor, value in zip(tensors, parcel[0], strict=True):
            tensor.copy_(value)


class _Done:
    def wait(self):
        pass


@benign("benign.plain")
class Plain(PlainDdp):
    """The base of the impostors, with nothing overridden: the null one."""
