"""Overlapped data parallel over NCCL, with ranges for the profiler and a clock."""

import torch
import torch.cuda.nvtx as nvtx
import torch.distributed as dist
from torch import nn


class TimedDDP(nn.Module):
    """Replicates `module` on this rank's GPU."""

    def __init__(self, module: nn.Module):
        super().__init__()
        assert torch.cuda.device_count() >= dist.get_world_size()
        self.device = torch.device(f"cuda:{dist.get_rank()}")
        torch.cuda.set_device(self.device)
        self.module = module.to(self.device)
        self.group = dist.new_group(backend="nccl")
        self.stream = torch.cuda.Stream()
        self.in_flight = []
        self.communication_ms = torch.zeros((), device="cuda")
        for parameter in module.parameters():
            assert parameter.device == self.device
            dist.broadcast(parameter.data, src=0, group=self.group)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.reduce)

    def reduce(self, parameter):
        assert parameter.grad.is_cuda
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.stream.wait_stream(torch.cuda.current_stream())
        with nvtx.range(f"all_reduce {tuple(parameter.shape)}"), torch.cuda.stream(self.stream):
            begun.record()
            work = dist.all_reduce(
                parameter.grad, op=dist.ReduceOp.AVG, group=self.group, async_op=True
            )
            parameter.grad.record_stream(self.stream)
        self.in_flight.append((work, begun, ended))

    def forward(self, *args, **kwargs):
        nvtx.range_push("forward")
        args = [arg.to(self.device, non_blocking=True) for arg in args]
        out = self.module(*args, **kwargs)
        nvtx.range_pop()
        return out

    def finish(self):
        for work, begun, ended in self.in_flight:
            work.wait()
            ended.record()
            torch.cuda.synchronize()
            self.communication_ms += torch.tensor(begun.elapsed_time(ended), device="cuda")
        self.in_flight.clear()
        assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated(self.device)
