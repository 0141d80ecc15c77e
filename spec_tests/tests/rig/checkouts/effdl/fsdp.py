"""FSDP in one file: DTensors sharded on dim 0, two streams, an all-gather and a reduce-scatter."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes to compute and to reduce in; None keeps the parameter's."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


class FSDPCommContext:
    """The streams that all units of a model share."""

    def __init__(self, device_type):
        self.device_handle = _get_device_handle(device_type)
        self.all_gather_stream = self.device_handle.Stream(priority=-1)
        self.reduce_scatter_stream = self.device_handle.Stream(priority=-1)


class ShardedParameter:
    """A parameter in its two forms: this rank's rows, and all of them."""

    def __init__(self, module, name, parameter, mesh, policy):
        self.module, self.name, self.mesh = module, name, mesh
        self.dtype = parameter.dtype
        self.reduce_dtype = policy.reduce_dtype or policy.param_dtype or self.dtype
        rows = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
        trains = parameter.requires_grad
        self.sharded = nn.Parameter(DTensor.from_local(rows, mesh, [Shard(0)]), trains)
        whole = torch.empty_like(parameter, dtype=policy.param_dtype or self.dtype)
        self.full = nn.Parameter(whole.detach(), trains)
        self.num_bytes = self.full.untyped_storage().size()
        self.free()

    def gather(self):
        mine = self.sharded.to_local().detach().to(self.full.dtype)
        gathered = torch.empty(self.full.shape, dtype=mine.dtype, device=mine.device)
        dist.all_gather_into_tensor(gathered, mine, group=self.mesh.get_group())
        return gathered

    def fill(self, gathered):
        self.full.untyped_storage().resize_(self.num_bytes)
        self.full.data.copy_(gathered)
        self.module._parameters[self.name] = self.full

    def free(self):
        self.full.untyped_storage().resize_(0)
        self.module._parameters[self.name] = self.sharded

    def reduce(self, stream):
        if self.full.grad is None:
            return
        grad, self.full.grad = self.full.grad.to(self.reduce_dtype), None
        grad.record_stream(stream)
        mine = grad.new_empty(self.sharded.to_local().shape)
        group = self.mesh.get_group()
        dist.reduce_scatter_tensor(mine, grad.contiguous(), op=dist.ReduceOp.AVG, group=group)
        mean = DTensor.from_local(mine.to(self.dtype), self.mesh, [Shard(0)])
        self.sharded.grad = mean if self.sharded.grad is None else self.sharded.grad + mean


class FSDPModule:
    """What a sharded module can do besides."""

    def unshard(self):
        if self.is_full:
            return
        handle, stream = self.comm_ctx.device_handle, self.comm_ctx.all_gather_stream
        with handle.stream(stream):
            gathered = [p.gather() for p in self.fsdp_params]
        handle.current_stream().wait_event(stream.record_event())
        for parameter, rows in zip(self.fsdp_params, gathered, strict=True):
            parameter.fill(rows)
        self.is_full = True

    def reshard(self):
        for parameter in self.fsdp_params:
            parameter.free()
        self.is_full = False

    def before_forward(self, module, args):
        self.unshard()

    def after_forward(self, module, args, output):
        if self.reshard_after_forward or not torch.is_grad_enabled():
            self.reshard()
        if torch.is_tensor(output) and output.requires_grad:
            output.register_hook(self.before_backward)

    def before_backward(self, grad):
        self.unshard()
        if not self.is_in_backward:
            self.is_in_backward = True
            Variable._execution_engine.queue_callback(self.after_backward)
        return grad

    def after_backward(self):
        self.is_in_backward = False
        if self.reshard_after_backward:
            self.reshard()
        if not self.reduce_grads:
            return
        handle, stream = self.comm_ctx.device_handle, self.comm_ctx.reduce_scatter_stream
        stream.wait_event(handle.current_stream().record_event())
        with handle.stream(stream):
            for parameter in self.fsdp_params:
                parameter.reduce(stream)
        handle.current_stream().wait_event(stream.record_event())


def fully_shard(module, *, module_fqn, comm_ctx, mesh, reshard_after_forward=True, mp_policy=None):
    policy = mp_policy or MixedPrecisionPolicy()
    module.fsdp_params = [
        ShardedParameter(owner, name, parameter, mesh, policy)
        for owner in module.modules()
        for name, parameter in list(owner.named_parameters(recurse=False))
    ]
    module.comm_ctx, module.module_fqn = comm_ctx, module_fqn
    module.reshard_after_forward = reshard_after_forward
    module.reshard_after_backward = module.reduce_grads = True
    module.is_full = module.is_in_backward = False
    kind = type(module)
    module.__class__ = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})
    module.register_forward_pre_hook(module.before_forward)
    module.register_forward_hook(module.after_forward)
    return module
