"""TorchTNT, behind the contract: `prepare_ddp` with a DDPStrategy.

Its dataclass hands the options of DistributedDataParallel on; `no_sync` is that of the wrapper, as
in its AutoUnit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchtnt.utils.prepare_module import DDPStrategy, prepare_ddp

from spec_tests.impls.shared import no_sync, replicas


def _wrapped(module: nn.Module, **options: Any) -> nn.Module:
    return prepare_ddp(module, torch.device("cpu"), DDPStrategy(**options))


ddp, ddp_bucketed = replicas(_wrapped)
__all__ = ["ddp", "ddp_bucketed", "no_sync"]
