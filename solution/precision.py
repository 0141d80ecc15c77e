"""The number format of a forward, and the loss scale that float16's short range needs.

    fp32   as it is
    bf16   matrix products in bfloat16 (`torch.autocast`); its range is float32's, nothing to add
    fp16   matrix products in float16, with a loss scale

Weights, gradients and optimizer state stay float32 in all of them.

Loss scaling (Micikevicius et al. 2018, section 3.2): the loss is multiplied by a power of two
before the backward, so that small gradients do not become zero in float16, and gradients are
divided by it after they were reduced and before anyone reads their norm. Both are exact. Where the
scaled gradients overflow on any rank, no rank updates: the scale is halved, down to 1. After 2000
updates in a row it doubles. The sequence of scales is that of `torch.amp.GradScaler`.

Where this differs: GradScaler goes on with the next data, so an overflow costs a step of data and
the schedule's place in it. Here the step is taken again on the same micro-batches (see
`solution.trainer`), and a run uses the same tokens at the same steps in every format. A gradient
that is not finite at scale 1 either is no overflow but an error, and raises as in the other
formats.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from solution.config import require_positive

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """The format of a run's forward passes, and the loss scale where there is one.

    Args:
        name: "fp32", "bf16" or "fp16".
        initial_scale: of the loss, fp16 only; a power of two.
        growth_interval: updates without overflow after which the scale doubles.

    Attributes:
        scale: what the loss is multiplied by; 1.0 for all but fp16.

    Raises:
        ValueError: another name, or a scale or interval that is not positive.
    """

    def __init__(
        self, name: str = "fp32", *, initial_scale: float = 2.0**16, growth_interval: int = 2000
    ) -> None:
        if name not in PRECISIONS:
            raise ValueError(f"expected precision among {list(PRECISIONS)}, got {name!r}")
        if not 1.0 <= initial_scale < float("inf"):
            raise ValueError(f"expected initial_scale >= 1, got {initial_scale!r}")
        self.name = name
        self.scale = initial_scale if name == "fp16" else 1.0
        self._growth_interval = require_positive("growth_interval", growth_interval)
        self._num_good_steps = 0

    @classmethod
    def of(cls, precision: str | Precision) -> Precision:
        """`precision` itself, or a new one of that name."""
        return precision if isinstance(precision, cls) else cls(str(precision))

    def forward(self, device: torch.device) -> AbstractContextManager[object]:
        """A context for a forward and its loss; the backward runs outside of it."""
        dtype = PRECISIONS[self.name]
        if dtype is None:  # not a disabled autocast, which would end one of the caller's
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=dtype)

    @property
    def can_back_off(self) -> bool:
        """Whether a smaller scale may make a gradient finite."""
        return self.scale > 1.0

    def back_off(self) -> None:
        """After an overflow: half the scale, and the count of good steps begins anew."""
        self.scale = max(1.0, self.scale / 2)
        self._num_good_steps = 0

    def updated(self) -> None:
        """After an update: twice the scale, if there were enough of them in a row."""
        if self.name != "fp16":
            return
        self._num_good_steps += 1
        if self._num_good_steps == self._growth_interval:
            self.scale, self._num_good_steps = self.scale * 2, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its count, for a checkpoint; equal on all ranks."""
        return {"name": self.name, "scale": self.scale, "num_good_steps": self._num_good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the scale that `state` was saved with.

        Raises:
            ValueError: not such a state. One of another format is none of this one's business: its
                scale is dropped.
        """
        expected = {"name", "scale", "num_good_steps"}
        if set(state) != expected:
            raise ValueError(f"expected a state with {sorted(expected)}, got {sorted(state)}")
        if state["name"] == self.name:
            self.scale = float(state["scale"])
            self._num_good_steps = int(state["num_good_steps"])
