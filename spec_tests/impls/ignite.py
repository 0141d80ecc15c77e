"""PyTorch-Ignite, behind the contract: `auto_model`, which wraps in DistributedDataParallel.

Ignite finds the process group that there is; options of DistributedDataParallel are handed on. It
has no name for `no_sync`: that of the wrapper is what its documentation uses for accumulation.
"""

from __future__ import annotations

from typing import Any

import ignite.distributed as idist
from torch import nn

from spec_tests.impls.shared import no_sync, replicas


def _wrapped(module: nn.Module, **options: Any) -> nn.Module:
    idist.sync()
    return idist.auto_model(module, sync_bn=False, **options)


ddp, ddp_bucketed = replicas(_wrapped)
__all__ = ["ddp", "ddp_bucketed", "no_sync"]
