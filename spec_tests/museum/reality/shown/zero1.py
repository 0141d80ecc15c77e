"""Real bugs of divided optimizers: weight decay, and the buffer through which weights travel."""

from __future__ import annotations

import torch

from spec_tests.museum.reality import faulty
from spec_tests.plain.zero1 import PlainZero1


@torch.no_grad()
def decay(group, times):
    """Multiply the weights of a group that have gradients by 1 - rate * decay, so many times."""
    factor = 1 - group["lr"] * group.get("weight_decay", 0.0)
    for parameter in group["params"]:
        if parameter.grad is not None:
            parameter.mul_(factor**times)


@faulty("neuron-sp-13")
class DecaysTwice(PlainZero1):
    """Decays its shard, and leaves the inner optimizer's own decay on.

    https://github.com/dylanyunlon/Neuron_SP/issues/13
    """

    def update(self, closure):
        for group in self.inner.param_groups:
            decay(group, 1)
        return super().update(closure)


@faulty("timm-2750")
class DecaysPerDtype(PlainZero1):
    """Goes through a group dtype by dtype, and decays all of its parameters each time.

    https://github.com/huggingface/pytorch-image-models/pull/2750
    """

    def update(self, closure):
        for whole, own in zip(self.param_groups, self.inner.param_groups, strict=True):
            dtypes = {p.dtype for p in whole["params"] if p.grad is not None}
            decay(own, max(0, len(dtypes) - 1))
        return super().update(closure)


@faulty("megatron-lm-4769")
class ClearsTheSharedBuffer(PlainZero1):
    """Each group stages its weights in a buffer, copies all of that to the model, and clears it.

    https://github.com/NVIDIA/Megatron-LM/pull/4769
    """

    def exchange(self):
        new = {p: p.detach().clone() for p in self.owners}
        for group in self.param_groups:
            staged = {p: new[p] for p in group["params"]}
            for parameter, owner in self.owners.items():
                value = staged.get(parameter, torch.zeros_like(parameter))
                with torch.no_grad():
                    parameter.copy_(value)
                self.take(parameter, owner)


@faulty("megatron-lm-4609")
class ReceivesIntoGradients(PlainZero1):
    """Weights are gathered into the memory of the gradients, and nobody clears it after that.

    https://github.com/NVIDIA/Megatron-LM/pull/4609
    """

    @torch.no_grad()
    def take(self, parameter, owner):
        super().take(parameter, owner)
        if parameter.grad is not None:
            parameter.grad.copy_(parameter)
