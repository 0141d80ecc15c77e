"""The DDP/FSDP course: a checkout with `data/`, `model/` and `train/`, brought to the contract.

    the contract          the course
    token_loader          the class of data/distributed_data_loader.py that takes (file_paths,
                          local_batch_size, sequence_length, device, rank, world_size)
    language_model        MyGPT2LMHeadModel(config) of model/my_gpt2.py
    accumulation_steps    DistributedTrainer of train/distributed_trainer.py, as it counts itself
    train                 its training_step(inputs, targets, should_sync), once per micro-batch,
                          and its _aggregate_loss, within the plainest loop

A part that the checkout does not have is not offered. The course wraps its model in PyTorch's own
DistributedDataParallel: that is lent to `train` and not judged. It does not clip, and records no
norm: the adapter counts norm and tokens for it.
"""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from spec_tests.impls.checkout import import_file

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
_COUNTS = ("grad_accumulation_steps", "gradient_accumulation_steps", "grad_acc_steps")
_IGNORED = -100


def offer(root: Path, device: str) -> SimpleNamespace:
    """The contract's functions that this checkout brings.

    Raises:
        whatever its files raise when they are imported.
    """
    functions: dict[str, Any] = {
        "BORROWED": ("ddp", "ddp_bucketed"),
        "ddp": DistributedDataParallel,
    }
    functions["ddp_bucketed"] = lambda module, *, bucket_size_mb: DistributedDataParallel(
        module, bucket_cap_mb=bucket_size_mb
    )
    for name, make in {
        "data.distributed_data_loader": _loader,
        "model.my_gpt2": _model,
        "train.distributed_trainer": _trainer,
    }.items():
        if root.joinpath(*name.split(".")).with_suffix(".py").is_file():
            functions |= make(import_file(root, name), device)
    return SimpleNamespace(**functions)


# ------------------------------------------------------------------------------------------ data


class _Loader:
    """What the course's loader yields, however it is asked for it."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    def __iter__(self) -> Batches:
        if hasattr(self.theirs, "__iter__"):
            return iter(self.theirs)
        return iter(self.theirs.next_batch, None)

    def state_dict(self) -> dict[str, Any]:
        return self._own("state_dict")()  # type: ignore[no-any-return]  # foreign code

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._own("load_state_dict")(state)

    def _own(self, name: str) -> Callable[..., Any]:
        if not hasattr(self.theirs, name):
            raise NotImplementedError(f"the course asks for no {name}() of a loader")
        return getattr(self.theirs, name)  # type: ignore[no-any-return]  # foreign code


def _loader(module: ModuleType, device: str) -> dict[str, Any]:
    wanted = {"file_paths", "local_batch_size", "sequence_length"}
    classes = [
        kind
        for kind in dict.fromkeys(v for v in vars(module).values() if isinstance(v, type))
        if kind.__module__ == module.__name__
    ]
    kinds = [kind for kind in classes if wanted <= inspect.signature(kind).parameters.keys()]
    if len(kinds) != 1:
        raise ValueError(
            f"data/distributed_data_loader.py: expected one class that takes {sorted(wanted)}, "
            f"got {[kind.__name__ for kind in kinds]}"
        )

    def token_loader(
        paths: Sequence[Any],
        *,
        batch_size: int,
        sequence_length: int,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> _Loader:
        given = {"rank": rank, "world_size": world_size}
        return _Loader(
            kinds[0](
                file_paths=[str(path) for path in paths],
                local_batch_size=batch_size,
                sequence_length=sequence_length,
                device=device,
                **{name: value for name, value in given.items() if value is not None},
            )
        )

    return {"token_loader": token_loader}


# ----------------------------------------------------------------------------------------- model


def _model(module: ModuleType, device: str) -> dict[str, Any]:
    class Logits(nn.Module):
        """The course's model, whose output may be an object around the logits."""

        def __init__(self, theirs: nn.Module) -> None:
            super().__init__()
            self.theirs = theirs

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            out = self.theirs(ids)
            return getattr(out, "logits", out)

    def language_model(
        *,
        vocab_size: int,
        num_layers: int,
        num_heads: int,
        embedding_dim: int,
        max_sequence_length: int,
    ) -> nn.Module:
        sizes = {
            "vocab_size": vocab_size,
            "n_layer": num_layers,
            "n_head": num_heads,
            "n_embd": embedding_dim,
            "n_positions": max_sequence_length,
            "n_ctx": max_sequence_length,
        }
        return Logits(module.MyGPT2LMHeadModel(_config(module, sizes)))

    return {"language_model": language_model}


def _config(module: ModuleType, sizes: dict[str, Any]) -> Any:
    """A GPT2Config where the file uses something of transformers; else an object with its names."""
    if any(_is_of_transformers(value) for value in vars(module).values()):
        from transformers import GPT2Config

        return GPT2Config(**sizes)
    return SimpleNamespace(
        **sizes,
        n_inner=None,
        activation_function="gelu_new",
        layer_norm_epsilon=1e-5,
        initializer_range=0.02,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
    )


def _is_of_transformers(value: object) -> bool:
    home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    return str(home).partition(".")[0] == "transformers"


# --------------------------------------------------------------------------------------- trainer


def _trainer(module: ModuleType, device: str) -> dict[str, Any]:
    @contextmanager
    def trainer(
        model: nn.Module, optimizer: Optimizer, is_wrapped: bool, **sizes: int
    ) -> Iterator[Any]:
        still = SimpleNamespace(step=lambda: None, get_last_lr=lambda: [0.0], state_dict=dict)
        with tempfile.TemporaryDirectory() as folder:
            yield module.DistributedTrainer(
                model=model,
                optimizer=optimizer,
                lr_scheduler=still,
                log_every_n_steps=1,
                save_every_n_steps=10**9,
                checkpoint_dir=folder,
                ddp_enabled=is_wrapped,
                **sizes,
            )

    def accumulation_steps(
        *, global_batch_size: int, micro_batch_size: int, world_size: int
    ) -> int:
        model = nn.Linear(1, 1)
        object.__setattr__(model, "no_sync", nullcontext)  # their __init__ asks for a wrapped one
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sizes = {"global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size}
        with (
            mock.patch.dict(os.environ, WORLD_SIZE=str(world_size)),
            mock.patch.object(dist, "get_world_size", return_value=world_size),
            trainer(model, optimizer, True, max_steps=1, **sizes) as made,
        ):
            return _count(made)

    def train(
        model: nn.Module,
        optimizer: Optimizer,
        batches: Batches,
        *,
        steps: int,
        global_batch_size: int,
        micro_batch_size: int,
        max_norm: float | None = None,
        lr: Callable[[int], float] | None = None,
    ) -> list[dict[str, float]]:
        if max_norm is not None:
            raise NotImplementedError("the course's trainer does not clip")
        sizes = {"global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size}
        is_wrapped = hasattr(model, "no_sync")
        with trainer(model, optimizer, is_wrapped, max_steps=steps, **sizes) as made:
            model.train()
            return [_step(made, optimizer, batches, is_wrapped, k, lr) for k in range(steps)]

    return {"accumulation_steps": accumulation_steps, "train": train}


def _count(trainer: Any) -> int:
    found = [getattr(trainer, name) for name in _COUNTS if hasattr(trainer, name)]
    if not found:
        raise NotImplementedError(f"DistributedTrainer has none of {', '.join(_COUNTS)}")
    return found[0]  # type: ignore[no-any-return]  # foreign code


def _step(
    trainer: Any,
    optimizer: Optimizer,
    batches: Batches,
    is_wrapped: bool,
    number: int,
    lr: Callable[[int], float] | None,
) -> dict[str, float]:
    optimizer.zero_grad()
    losses, tokens = [], torch.zeros((), dtype=torch.int64)
    count = _count(trainer)
    if not count:
        raise ValueError(
            "train/distributed_trainer.py counts 0 micro-batches per step: nothing is trained"
        )
    for micro in range(count):
        inputs, targets = next(batches)
        losses.append(trainer.training_step(inputs, targets, micro == count - 1).detach())
        tokens += (targets != _IGNORED).sum().cpu()
    loss = torch.stack(losses).mean()
    if is_wrapped:
        aggregated = trainer._aggregate_loss(loss, loss.device)
        loss = loss if aggregated is None else torch.as_tensor(aggregated)
        dist.all_reduce(tokens)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] if lr is None else lr(number)
    held = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    norm = nn.utils.get_total_norm(held)
    record = {"loss": float(loss), "grad_norm": float(norm), "tokens": float(tokens)}
    record["lr"] = float(optimizer.param_groups[0]["lr"])
    optimizer.step()
    return record
