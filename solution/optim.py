"""Settings of the optimizer: which parameters decay, and the learning rate of each step.

`decay_groups` puts every trainable parameter into exactly one of two groups: matrices and
embeddings decay, biases and norm weights do not (decaying a norm's weight towards zero shrinks its
layer's output, not its complexity).

`cosine_schedule` is a pure function of the number of finished steps, so it resumes, and counts the
same at any world size and accumulation, by construction:

    lr
    peak |    /^^^\\__
         |   /       \\___
    10 % |  /            \\________   stays there; a bare cosine would climb again
         +--+---+--------+--------> step
            0   warmup   num_steps - 1
"""

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from solution.config import require_positive


def decay_groups(module: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for a `torch.optim` optimizer: what has two dims or more decays.

    Frozen parameters are left out; a tied one appears once; an empty group is not made.

    Raises:
        ValueError: nothing in `module` is trainable.
    """
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trainable:
        raise ValueError("expected a module with trainable parameters, got none")
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def cosine_schedule(
    peak: float, *, num_steps: int, warmup_steps: int = 0
) -> Callable[[int], float]:
    """The learning rate as a function of the number of steps already finished.

    Step k < warmup_steps uses peak * (k + 1) / warmup_steps, so the first step moves and the last
    of the warm-up uses the peak. From there a half cosine falls to a tenth of the peak at step
    num_steps - 1, and stays.

    Raises:
        ValueError: num_steps is not positive, or warmup_steps not in [0, num_steps].

    >>> lr = cosine_schedule(1.0, num_steps=5, warmup_steps=2)
    >>> [round(lr(step), 3) for step in range(7)]
    [0.5, 1.0, 0.775, 0.325, 0.1, 0.1, 0.1]
    """
    require_positive("num_steps", num_steps)
    if not 0 <= warmup_steps <= num_steps:
        raise ValueError(f"expected 0 <= warmup_steps <= {num_steps} steps, got {warmup_steps}")
    first = max(0, warmup_steps - 1)  # the step that uses the peak
    span = max(1, num_steps - 1 - first)

    def lr(step: int) -> float:
        if step < warmup_steps:
            return peak * (step + 1) / warmup_steps
        progress = min(1.0, (step - first) / span)
        return peak * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)

    return lr
