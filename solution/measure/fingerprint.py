"""A hash of a model's weights: whether two runs ended at the same bits."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from solution.parallel.fsdp.api import full_parameters

__all__ = ["fingerprint"]


def fingerprint(module: nn.Module) -> str:
    """Over all parameters, names and bits: equal exactly when the weights are. All ranks call it.

    Args:
        module: plain, wrapped or sharded; sharded parameters are gathered.
    """
    digest = hashlib.sha256()
    for name, parameter in full_parameters(module).items():
        data = parameter.cpu().contiguous().flatten().view(torch.uint8)
        digest.update(name.encode() + data.numpy().tobytes())
    return digest.hexdigest()
