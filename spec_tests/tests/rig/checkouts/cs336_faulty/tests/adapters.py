"""The adapters of 2026, around code that is wrong."""

from cs336_systems.parallel import DDP, FSDP


def get_ddp(module):
    return DDP(module)


def ddp_on_after_backward(ddp_model, optimizer):
    """End of a backward of `get_ddp`'s."""


def get_fsdp(module, compute_dtype=None):
    return FSDP(module)


def fsdp_on_after_backward(fsdp_model, optimizer):
    fsdp_model.finish()


def fsdp_gather_full_params(fsdp_model):
    return dict(fsdp_model.module.named_parameters())


def get_sharded_optimizer(params, optimizer_cls, **kwargs):
    return optimizer_cls(params, **kwargs)
