"""Whether a step changed parameters, or this rank's shards of them, by the optimizer's own update.

A few parameters of the second step are kept, with their gradients and states. After the step the
same class of optimizer, on plain copies, says what they should be: a shard that lies in memory of
another one, or that is written over in the step, is something else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as optim

from .layout import local_of

# Their updates are by element: that of a shard is the shard of the update.
_BY_ELEMENT = frozenset(
    ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD")
)
_NOT_PLAIN = ("params", "fused", "foreach", "capturable", "differentiable")
_MOST = 2**18  # elements of a sampled parameter
_MANY = 8  # parameters that are sampled
_SHARE = 1e-2  # of the largest update: what kernels that fuse operations are apart


class Sample:
    """Some parameters of one optimizer as they are before a step, each with an optimizer of it."""

    def __init__(self, optimizer: Any, names: dict[int, str]) -> None:
        self._copies: list[tuple[str, Tensor, Tensor, Tensor, Any]] = []
        found = [
            (group, p)
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and p.grad.layout is torch.strided and not p.is_complex()
            if 0 < local_of(p).numel() <= _MOST
        ]
        for group, p in found[:: max(1, len(found) // _MANY)] if _is_known(optimizer) else ():
            copy = local_of(p).clone().requires_grad_()
            copy.grad = local_of(p.grad).clone()
            plain = {n: v for n, v in group.items() if n not in _NOT_PLAIN}
            own = type(optimizer)([{**plain, "params": [copy], "foreach": False}])
            state = optimizer.state.get(p, {})
            own.state[copy] = {n: _clone(value) for n, value in state.items()}
            name = names.get(id(p), "a parameter of the optimizer")
            self._copies.append((name, p, copy, copy.detach().clone(), own))

    def compare(self) -> list[Any] | None:
        """Return name, elements that are something else, and all, of the first that is."""
        for name, p, copy, before, own in self._copies:
            step = type(own).step
            getattr(step, "__wrapped__", step)(own)  # without the script's hooks of all optimizers
            after = local_of(p)
            allowed = _SHARE * (copy.detach() - before).abs().max()
            allowed = allowed + 8 * torch.finfo(copy.dtype).eps * before.abs()
            off = int(((after - copy.detach()).abs() > allowed).sum())
            if off:
                return [name, off, after.numel()]
        return None


def _is_known(optimizer: Any) -> bool:
    kind = type(optimizer)
    is_torch = kind.__module__.startswith("torch.optim.") and kind.__name__ in _BY_ELEMENT
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    others = len(optim._global_optimizer_pre_hooks) > 1  # beside the watcher's
    return is_torch and not own and not others  # which may change gradients, or weights


def _clone(value: Any) -> Any:
    return local_of(value).clone() if isinstance(value, Tensor) else value
