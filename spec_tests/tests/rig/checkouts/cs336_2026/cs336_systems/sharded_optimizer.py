"""ZeRO-1: parameters are dealt to the ranks in turn; the owner updates and broadcasts."""

import torch
import torch.distributed as dist


class ShardedOptimizer(torch.optim.Optimizer):
    """Wraps `optimizer_cls` around what this rank owns."""

    def __init__(self, params, optimizer_cls, **kwargs):
        self.owner = {}
        self.optimizer_cls, self.options = optimizer_cls, kwargs
        self.inner = None
        super().__init__(params, dict(kwargs))

    def add_param_group(self, group):
        super().add_param_group(group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            self.owner[parameter] = len(self.owner) % dist.get_world_size()
        mine = [p for p in group["params"] if self.owner[p] == dist.get_rank()]
        # The same dict but for the parameters: what a scheduler changes is copied before a step.
        own = {**group, "params": mine}
        if self.inner is None:
            self.inner = self.optimizer_cls([own], **self.options)
            self.state = self.inner.state
        else:
            self.inner.add_param_group(own)

    @torch.no_grad()
    def step(self, closure=None, **kwargs):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: value for key, value in group.items() if key != "params"})
        self.inner.step(**kwargs)
        for parameter, owner in self.owner.items():
            whole = parameter.detach().contiguous()
            dist.broadcast(whole, src=owner)
            parameter.copy_(whole)
        return loss
