"""How much memory a training step will take, by term and phase, before anything is allocated.

1. The model is copied with fake tensors in place of parameters and buffers: shapes and dtypes, no
   memory. Nothing of the original is touched.
2. AdamW gets its state from one step on fake gradients.
3. One more step runs under a `Ledger`: forward and loss, backward, update.

The peak is a moment, not a sum: at the end of the loss activations are complete and there are no
gradients yet; at the end of the backward it is the other way round; in the update there may be a
copy of all parameters. Which of them is the highest depends on model and batch.

Works for any module that maps ids to logits. `solution.measure.activations` has the closed form
for the two models of this folder. Device memory beyond it: the allocator's rounding, workspaces of
libraries (some 50 MiB on CUDA), scratch space inside kernels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from solution.config import require_positive
from solution.measure.ledger import Ledger, Peak

__all__ = ["Prediction", "fake_twin", "memory_estimate", "predict", "training_step"]

PHASES = ("forward", "backward", "update")
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Prediction:
    """Bytes of one training step.

    Attributes:
        terms: `parameters`, `buffers`, `gradients`, `optimizer`, `activations`: what each comes to
            when it is complete.
        peaks: by phase (`forward`, `backward`, `update`), what is alive at its highest moment.
        after_step: what stays between steps.
    """

    terms: dict[str, int]
    peaks: dict[str, Peak]
    after_step: int

    @property
    def peak_phase(self) -> str:
        """The phase with the highest moment."""
        return max(PHASES, key=lambda phase: self.peaks[phase].total)

    @property
    def peak_bytes(self) -> int:
        """The highest moment of the step."""
        return self.peaks[self.peak_phase].total


def memory_estimate(model: nn.Module, *, batch_size: int, sequence_length: int) -> dict[str, int]:
    """Bytes of one training step with cross-entropy and AdamW, whose state exists already.

    Args:
        model: ids `[batch_size, sequence_length]` -> logits `[..., vocab]`, on any device, `meta`
            too. It is left as it was.
        batch_size, sequence_length: of the step.

    Returns:
        `parameter_bytes`, `gradient_bytes`, `optimizer_bytes`, `activation_bytes` (what forward and
        loss leave for the backward) and `peak_bytes`.

    Raises:
        ValueError: a size that is not a positive integer, or nothing to train.
    """
    found = predict(model, batch_size=batch_size, sequence_length=sequence_length)
    terms = {f"{name.removesuffix('s')}_bytes": size for name, size in found.terms.items()}
    del terms["buffer_bytes"]
    return {**terms, "peak_bytes": found.peak_bytes}


def predict(
    model: nn.Module,
    *,
    batch_size: int,
    sequence_length: int,
    make_optimizer: MakeOptimizer = torch.optim.AdamW,
    keeps_logits: bool = False,
    autocast: torch.dtype | None = None,
) -> Prediction:
    """As `memory_estimate`, by term and phase.

    Args:
        model, batch_size, sequence_length: as there.
        make_optimizer: from the list of trainable parameters.
        keeps_logits: whether the caller holds them during the backward, as `out = model(ids)` does.
        autocast: dtype of products in the forward, where it is not that of the weights.
    """
    require_positive("batch_size", batch_size)
    require_positive("sequence_length", sequence_length)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("expected a model with trainable parameters, got none")
    # Randomness of a fake operator is none, but a generator may advance.
    with torch.random.fork_rng(), FakeTensorMode(allow_non_fake_inputs=True):
        twin = fake_twin(model)
        device = next(twin.parameters()).device
        ids = torch.zeros(batch_size, sequence_length, dtype=torch.int64, device=device)
        return _booked_step(twin, ids, make_optimizer, keeps_logits, autocast)


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    ledger: Ledger,
    *,
    keeps_logits: bool = False,
    autocast: torch.dtype | None = None,
) -> None:
    """Forward and loss, backward, update, each a phase of `ledger`; gradients are None after it."""
    with ledger.phase("forward", newborn="activations"):
        with torch.autocast(ids.device.type, dtype=autocast, enabled=autocast is not None):
            loss, logits = _loss(model, ids)
        if not keeps_logits:
            del logits
    with ledger.phase("backward", newborn="temporaries"):
        loss.backward()
    with ledger.phase("update", newborn="temporaries"):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _loss(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(ids)
    return F.cross_entropy(logits.flatten(0, -2), ids.flatten()), logits


def fake_twin(model: nn.Module, *, device: str | None = None) -> nn.Module:
    """A copy with fake parameters and buffers; those on `meta` are taken to the CPU.

    To be called, and used, under a FakeTensorMode.
    """
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        place = device or ("cpu" if tensor.is_meta else tensor.device)
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = fake  # one for all modules that share it
    return copy.deepcopy(model, memo)


def _booked_step(
    model: nn.Module,
    ids: torch.Tensor,
    make_optimizer: MakeOptimizer,
    keeps_logits: bool,
    autocast: torch.dtype | None,
) -> Prediction:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(trainable)
    for parameter in trainable:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()  # makes the state
    optimizer.zero_grad(set_to_none=True)
    ledger = Ledger()
    ledger.own("parameters", model.parameters())
    ledger.own("buffers", model.buffers())
    ledger.own("optimizer", _state(optimizer))
    ledger.own("inputs", [ids])
    for parameter in trainable:
        parameter.register_post_accumulate_grad_hook(
            lambda taken: ledger.own("gradients", [cast(torch.Tensor, taken.grad)])
        )
    with ledger:
        training_step(model, optimizer, ids, ledger, keeps_logits=keeps_logits, autocast=autocast)
    terms = {
        "parameters": ledger.live["parameters"],
        "buffers": ledger.live["buffers"],
        "gradients": ledger.ends["backward"].get("gradients", 0),
        "optimizer": ledger.live["optimizer"],
        "activations": ledger.ends["forward"].get("activations", 0),
    }
    return Prediction(terms, dict(ledger.peaks), sum(ledger.live.values()))


def _state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, torch.Tensor)]
