"""Right but unusual: every clause up to level `correct` must accept these."""

import torch
import torch.distributed as dist

from spec_tests.museum.card import Source, benign
from spec_tests.plain.ddp import PlainDdp

DDP = Source("spec_tests.plain.ddp")

DDP.benign(
    "benign.after-backward",
    "- if not buckets or filled >= self.bucket_bytes or parameter.dtype != dtype:",
    "+ if not buckets or parameter.dtype != dtype:",
    "...",
    "- self.launch_what_is_ready()",
    does="One flat all-reduce after backward.",
)

DDP.benign(
    "benign.reduce-then-divide",
    "- flat = torch.cat(parts) / self.size()",
    "+ flat = torch.cat(parts)",
    "...",
    "- self.write_back(bucket, flat, used)",
    "+ self.write_back(bucket, flat / self.size(), used)",
    does="Sums first, divides afterwards.",
)

DDP.benign(
    "benign.blocking",
    "  handle = dist.all_reduce(flat, group=self.group, async_op=True)",
    "+ handle.wait()",
    does="Waits inside the hook.",
)

DDP.benign(
    "benign.gather-and-sum",
    "- handle = dist.all_reduce(flat, group=self.group, async_op=True)",
    "- self.flying.append((bucket, flat, handle))",
    "+ all_flat = [torch.empty_like(flat) for _ in range(self.size())]",
    "+ handle = dist.all_gather(all_flat, flat, group=self.group, async_op=True)",
    "+ self.flying.append((bucket, all_flat, handle))",
    "...",
    "- self.write_back(bucket, flat, used)",
    "+ self.write_back(bucket, torch.stack(flat).sum(dim=0), used)",
    does="Gathers and sums in rank order.",
)

DDP.benign(
    "benign.reduce-scatter",
    "- handle = dist.all_reduce(flat, group=self.group, async_op=True)",
    "- self.flying.append((bucket, flat, handle))",
    "+ padded = torch.cat([flat, flat.new_zeros(-flat.numel() % self.size())])",
    "+ own = torch.empty_like(padded[: padded.numel() // self.size()])",
    "+ dist.reduce_scatter_tensor(own, padded, group=self.group)",
    "+ handle = dist.all_gather_into_tensor(padded, own, group=self.group, async_op=True)",
    "+ self.flying.append((bucket, padded[: flat.numel()], handle))",
    does="Reduce-scatter and gather.",
)

DDP.benign(
    "benign.padded-buckets",
    "  flat = torch.cat(parts) / self.size()",
    "+ flat = torch.cat([flat, flat.new_zeros(-flat.numel() % 256)])",
    "...",
    "- pieces = flat.split([parameter.numel() for parameter in whole])",
    "+ sizes = [parameter.numel() for parameter in whole]",
    "+ pieces = flat[: sum(sizes)].split(sizes)",
    does="Sends buffers of a fixed size, as fairseq's LegacyDistributedDataParallel does.",
)


class Exchange:
    """A mean that each rank forms of its own part, by messages between two ranks."""

    def __init__(self, flat, group, tag):
        self.flat, self.group, self.tag = flat, group, tag
        self.rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.parts = list(flat.tensor_split(size))
        self.peers = [peer for peer in range(size) if peer != self.rank]
        self.got = [torch.empty_like(self.parts[self.rank]) for _ in self.peers]
        sent = [self.parts[peer].clone() for peer in self.peers]
        self.work = self.post(sent, self.got)

    def post(self, sent, got):
        options = {"group": self.group, "tag": self.tag}
        messages = zip(self.peers, sent, got, strict=True)
        return [
            work
            for peer, out, into in messages
            for work in (
                dist.isend(out, group_dst=peer, **options),
                dist.irecv(into, group_src=peer, **options),
            )
        ]

    def wait(self):
        for work in self.work:
            work.wait()
        own = self.parts[self.rank]
        # In the order of ranks, so that the sum does not depend on whose part it is.
        every = [*self.got[: self.rank], own.clone(), *self.got[self.rank :]]
        own.copy_(torch.stack(every).sum(dim=0))
        others = [self.parts[peer] for peer in self.peers]
        for work in self.post([own] * len(others), others):
            work.wait()


@benign("benign.send-and-receive", also=("ddp.traffic.one-copy*", "ddp.overlap.*"))
class SendsAndReceives(PlainDdp):
    """Reduces by messages between two ranks; only flags travel by all-reduce."""

    def launch(self, bucket):
        self.launched += 1
        flat = torch.cat([self.local(index).reshape(-1) for index in bucket]) / self.size()
        self.flying.append((bucket, flat, Exchange(flat, self.group, self.launched)))


@benign("benign.refuses-unused")
class RefusesUnused(PlainDdp):
    """Raises for parameters without a gradient."""

    def finish(self):
        names = [name for name, p in self.module.named_parameters() if p.requires_grad]
        absent = [name for name, p in zip(names, self.trainable, strict=True) if p.grad is None]
        if self.has_news and absent:
            raise RuntimeError(f"no gradient for {', '.join(absent)}; use them or freeze them")
        super().finish()


DDP.benign(
    "benign.object-broadcast",
    "- for tensor in tensors:",
    "-     whole = tensor.detach().contiguous()",
    "-     dist.broadcast(whole, group=self.group, group_src=0)",
    "-     tensor.copy_(whole)",
    "+ tensors = list(tensors)",
    "+ parcel = [[tensor.detach().clone() for tensor in tensors]]",
    "+ dist.broadcast_object_list(parcel, group=self.group, group_src=0)",
    "+ for tensor, value in zip(tensors, parcel[0], strict=True):",
    "+     tensor.copy_(value)",
    does="Broadcasts a pickled state at construction.",
)

DDP.benign("benign.plain", does="The base of the impostors, with nothing overridden: the null one.")
