"""Right but unusual: every clause up to level `correct` must accept these."""

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
