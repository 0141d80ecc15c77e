"""Accelerator.clip_grad_norm_ of one tensor clips nothing and returns 0.

Expected: a gradient of ones of 4 elements has the norm 2, and after clipping to 1 the norm 1
Got: norm 0, and the gradient is as before
Versions: accelerate 1.15.0, torch 2.13.0, checked 2026-11-23
Clause: clip.norm.any-iterable
Issue: introduced by https://github.com/huggingface/accelerate/pull/4219; no report found (searched: accelerate clip_grad_norm_ single tensor list(parameters))
"""

import torch
from accelerate import Accelerator
from torch import nn

RANKS = 2


def observe(rank: int) -> tuple[object, object]:
    """Return the norm, and the norm after clipping: of torch.nn.utils, and of Accelerate."""
    found = []
    for clip in (nn.utils.clip_grad_norm_, Accelerator(cpu=True).clip_grad_norm_):
        parameter = nn.Parameter(torch.ones(4))
        parameter.grad = torch.ones(4)
        norm = clip(parameter, 1.0)  # "an iterable of Tensors or a single Tensor"
        found.append((round(norm.item(), 3), round(parameter.grad.norm().item(), 3)))
    return found[0], found[1]
