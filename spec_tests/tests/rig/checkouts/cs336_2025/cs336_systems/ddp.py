"""Data parallel, one gradient at a time and in buckets."""

import torch
import torch.distributed as dist
from torch import nn


class NaiveDDP(nn.Module):
    """All-reduces every gradient after the backward."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        for tensor in module.state_dict().values():
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, src=0)
            tensor.copy_(whole)

    def forward(self, *args, **kwargs):
        """As the module does."""
        return self.module(*args, **kwargs)

    def average(self, parameters):
        """Means of these gradients, sent as one flat tensor."""
        gradients = [p.grad for p in parameters]
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for grad, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            grad.copy_(mean.view_as(grad))

    def finish(self):
        """Average what has a gradient."""
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                self.average([parameter])


class BucketedDDP(NaiveDDP):
    """Counts gradients down per bucket; `start` must come before each batch."""

    def __init__(self, module: nn.Module, bucket_size_mb: float):
        super().__init__(module)
        self.buckets, filled = [[]], 0
        for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
            is_other = bool(self.buckets[-1]) and self.buckets[-1][0].dtype != parameter.dtype
            if is_other or filled >= bucket_size_mb * 2**20:
                self.buckets.append([])
                filled = 0
            self.buckets[-1].append(parameter)
            filled += parameter.numel() * parameter.element_size()
        self.missing = None
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(self.counter(number))

    def counter(self, number):
        """The hook of a parameter in this bucket."""

        def count(parameter):
            self.missing[number] -= 1

        return count

    def start(self):
        """A new batch: every gradient is still to come."""
        self.missing = [len(bucket) for bucket in self.buckets]

    def finish(self):
        """Average the buckets in their order; nobody may have started a batch and not ended it."""
        if self.missing is None:
            return
        if any(self.missing):
            raise RuntimeError(f"gradients are missing: {self.missing}")
        for bucket in self.buckets:
            self.average(bucket)
        self.missing = None
