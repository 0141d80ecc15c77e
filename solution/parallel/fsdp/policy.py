"""Which dtype is used where.

    shard, gradient, optimizer   the parameter's own dtype, always
    gather, forward, backward    param_dtype       inputs are cast, unless cast_forward_inputs=False
    pending gradient, reduction  reduce_dtype, else the dtype of the backward
    outputs                      output_dtype, else as they come

PyTorch counterpart: the classes of the same names and meaning.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of one `fully_shard`; None leaves what is there.

    The innermost policy counts: a layer sharded with its own policy ignores that of the model
    around it. Buffers are never cast.

    Attributes:
        param_dtype: in which weights are gathered and computed with.
        reduce_dtype: in which gradients are reduced, and accumulated between reductions.
        output_dtype: to which the module's floating-point outputs are cast.
        cast_forward_inputs: whether floating-point inputs are cast to `param_dtype`.

    Raises:
        ValueError: a dtype that is no floating-point `torch.dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            value = getattr(self, name)
            is_dtype = isinstance(value, torch.dtype) and value.is_floating_point
            if value is not None and not is_dtype:
                raise ValueError(
                    f"expected {name} to be a floating-point torch.dtype or None, got {value!r}"
                )

    @property
    def input_dtype(self) -> torch.dtype | None:
        """To which inputs are cast."""
        return self.param_dtype if self.cast_forward_inputs else None


@dataclass(frozen=True)
class OffloadPolicy:
    """Where shards are kept: on the device that computes. There is no other policy."""
