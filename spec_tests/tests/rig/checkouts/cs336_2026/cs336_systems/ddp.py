"""Overlapped data parallel: an asynchronous all-reduce per gradient, from the backward."""

import torch.distributed as dist
from torch import nn


class OverlappedDDP(nn.Module):
    """Replicates `module`; `finish` ends what the backward began."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.in_flight = []
        for tensor in module.state_dict().values():
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, src=0)
            tensor.copy_(whole)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.reduce)

    def reduce(self, parameter):
        parameter.grad = parameter.grad.contiguous()
        self.in_flight.append((dist.all_reduce(parameter.grad, async_op=True), parameter))

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish(self):
        for work, parameter in self.in_flight:
            work.wait()
            parameter.grad /= dist.get_world_size()
        self.in_flight.clear()
