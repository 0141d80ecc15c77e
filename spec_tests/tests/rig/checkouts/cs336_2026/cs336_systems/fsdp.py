"""FSDP in one autograd function: forward gathers a weight, backward scatters its mean gradient."""

import functools

import torch
import torch.distributed as dist
from cs336_basics.model import Embedding, Linear
from torch import nn


class Gather(torch.autograd.Function):
    """Rows of this rank -> all rows, in the dtype to compute with."""

    @staticmethod
    def forward(ctx, shard, dtype):
        ctx.dtype = shard.dtype
        sent = shard.to(dtype).contiguous()
        pieces = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, sent)
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx, grad):
        total = grad.to(ctx.dtype).contiguous()
        dist.all_reduce(total)
        mean = total / dist.get_world_size()
        return mean.chunk(dist.get_world_size())[dist.get_rank()].clone(), None


class FSDP(nn.Module):
    """Linear and Embedding weights are sharded by rows, the rest is replicated."""

    def __init__(self, module: nn.Module, compute_dtype=None):
        super().__init__()
        self.module = module
        self.sharded = set()
        for name, layer in module.named_modules():
            if isinstance(layer, Linear | Embedding):
                rows = layer.weight.detach().chunk(dist.get_world_size())[dist.get_rank()]
                trains = layer.weight.requires_grad
                layer.weight = nn.Parameter(rows.clone(), requires_grad=trains)
                layer.forward = functools.partial(self.compute, layer, compute_dtype)
                self.sharded.add(f"{name}.weight")

    @staticmethod
    def compute(layer, dtype, x):
        weight = Gather.apply(layer.weight, dtype or layer.weight.dtype)
        if isinstance(layer, Embedding):
            return weight[x]
        return x @ weight.T

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish(self):
        for name, parameter in self.module.named_parameters():
            if name not in self.sharded and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    def full(self):
        return {
            name: Gather.apply(p.detach(), p.dtype) if name in self.sharded else p.detach()
            for name, p in self.module.named_parameters()
        }
