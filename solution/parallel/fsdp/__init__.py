"""Fully sharded data parallelism, with the names of `torch.distributed.fsdp`: read `api.py`.

What is not PyTorch's, `fsdp` for a whole model and `full_parameters`, is imported from there.
"""

from solution.parallel.fsdp.api import fully_shard
from solution.parallel.fsdp.module import FSDPModule, UnshardHandle, register_fsdp_forward_method
from solution.parallel.fsdp.options import MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
]
