"""What passes the course's own tests and is wrong.

- DDP averages what the hook is given, which is the weight: gradients stay local.
- The optimizer is the plain one: nothing is sharded, and final weights are right all the same.
- FSDP replicates and all-reduces: right numbers, no shard anywhere.
"""

import torch.distributed as dist
from torch import nn


class Wrapper(nn.Module):
    """Computes as the module does."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class DDP(Wrapper):
    """Broadcasts weights, then keeps them together instead of the gradients."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        for parameter in module.parameters():
            whole = parameter.detach().contiguous()
            dist.broadcast(whole, src=0)
            parameter.data.copy_(whole)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.average)

    def average(self, parameter):
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


class FSDP(Wrapper):
    """Fully replicated."""

    def finish(self):
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
