"""Real bugs of replicas: when a gradient is reduced, and which part of it."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist

from spec_tests.museum.reality import faulty
from spec_tests.plain.ddp import PlainDdp


@faulty("pytorch-187732")
class CountsTheFirstWindow(PlainDdp):
    """All hooks of the first window are counted, and later ones wait for as many in one backward.

    https://github.com/pytorch/pytorch/pull/187732
    """

    def __init__(self, *args):
        self.due: Counter[int] = Counter()
        self.is_first_window = True
        super().__init__(*args)

    def on_gradient(self, index):
        if self.is_first_window and self.is_armed:
            self.due[index] += 1
        super().on_gradient(index)

    def launch(self, bucket):
        if not self.is_first_window and any(self.due[index] > 1 for index in bucket):
            self.launched += 1  # its count is never reached, and it never leaves
            return
        super().launch(bucket)

    def finish(self):
        is_window = self.has_news
        super().finish()
        if is_window:
            self.is_first_window = False


@faulty("deepspeed-7985")
class AddsTheLastLocally(PlainDdp):
    """The reduction runs before the last micro-batch's gradient has been added to what it sends.

    https://github.com/deepspeedai/DeepSpeed/pull/7985
    """

    def __init__(self, *args):
        self.fresh: dict[int, torch.Tensor] = {}
        super().__init__(*args)

    def register(self, index, parameter):
        def keep(gradient):
            self.fresh[index] = gradient.detach().clone()

        parameter.register_hook(keep)
        super().register(index, parameter)

    def local(self, index):
        fresh = self.fresh.get(index)
        return super().local(index) if fresh is None else super().local(index) - fresh

    @torch.no_grad()
    def write_back(self, bucket, flat, used):
        super().write_back(bucket, flat, used)
        for index in bucket:
            if used[index] and index in self.fresh:
                self.trainable[index].grad += self.fresh.pop(index)


@faulty("deepspeed-8224")
class LosesAUse(PlainDdp):
    """Of a module that is called several times, the gradient of one call is not in what is reduced.

    Which call it is depends on the order of hooks; here each call counts as an equal share.
    https://github.com/deepspeedai/DeepSpeed/issues/8224
    """

    def __init__(self, module, *args):
        self.calls: Counter[torch.Tensor] = Counter()
        super().__init__(module, *args)
        for part in module.modules():
            part.register_forward_hook(self.count)

    def count(self, part, *ignored):
        if torch.is_grad_enabled():
            self.calls.update(part.parameters(recurse=False))

    def forward(self, *args, **kwargs):
        if torch.is_grad_enabled():
            self.calls.clear()
        return super().forward(*args, **kwargs)

    def local(self, index):
        calls = self.calls[self.trainable[index]]
        gradient = super().local(index)
        return gradient * (calls - 1) / calls if calls > 1 and self.size() > 1 else gradient


@faulty("megatron-lm-3693")
class ScalesInFlight(PlainDdp):
    """The buffer is handed to the collective, and scaled while that may be reading it.

    https://github.com/NVIDIA/Megatron-LM/pull/3693
    """

    def launch(self, bucket):
        self.launched += 1
        flat = torch.cat([self.local(index).reshape(-1) for index in bucket])
        handle = dist.all_reduce(flat, group=self.group, async_op=True)
        flat /= self.size()
        self.flying.append((bucket, flat, handle))
