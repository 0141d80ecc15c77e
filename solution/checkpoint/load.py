"""Loading: the newest complete checkpoint, all of it, on all ranks, or nothing.

1. choose    rank 0 lists the complete folders, newest first
2. verify    ranks share the check sums; a damaged folder is skipped with a warning
3. compare   names, shapes, dtypes and options with the live model and optimizer
4. read      into fresh tensors
5. apply     optimizer, model, loader, generators; what any rank refuses is undone on all

Up to the last step nothing live has been touched. What it changes in tensors is exchanged with the
fresh ones, so that undoing needs no further memory.

At another world size model and optimizer are the same; the loader's state is used if all ranks had
the same one (as a global position is); a rank that took part in the save takes up its own random
numbers, any further one goes on with those it was started with.
"""

import copy
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from solution import comm
from solution.checkpoint import folder, save, storage
from solution.checkpoint.folder import CheckpointError, together
from solution.checkpoint.named import ModelTensors, OptimizerTensors, same


def load_checkpoint(
    directory: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: save.Stateful | None = None,
    process_group: comm.Group = None,
) -> int:
    """Load the newest complete checkpoint below `directory`. All ranks call it.

    Args:
        directory: what was given to `save_checkpoint`.
        model, optimizer: filled in place; plain or wrapped, at any world size.
        loader: its `load_state_dict` is called; leave it out if that is not wanted.

    Returns:
        Its step.

    Raises:
        CheckpointError: on all ranks: there is none, or it does not fit. Nothing was changed.
    """
    group, root = process_group, Path(directory).absolute()
    listing = f"list the checkpoints in {root}"
    found, complaints = together(
        listing, lambda: folder.complete_folders(root), group, by_first=True
    )
    _warn(f"{root}: ignored what is not complete: {'; '.join(complaints)}", complaints, group)
    for candidate in found:
        reports = comm.gather_objects(_damage(candidate.path, group), group)
        damages = [text for text in reports if text]
        if not damages:
            _Loading(candidate.path, model, optimizer, loader, group).run()
            return candidate.step
        _warn(f"{candidate.path}: skipped this checkpoint: {damages[0]}", damages, group)
    raise CheckpointError(
        f"rank {comm.rank(group)}: expected a complete checkpoint in {root}, got none (damaged: of "
        f"steps {[each.step for each in found]}, incomplete: {complaints or 'none'}); check the "
        "path, or start without loading"
    )


def _damage(path: Path, group: comm.Group) -> str:
    """Return why a folder cannot be used, from this rank's part of the check; "" if it can."""
    try:
        if comm.rank(group) == 0:
            storage.decode((path / save.PLAIN).read_bytes())
        return storage.damage(path, part=comm.rank(group), of=comm.size(group))
    except Exception as error:  # bytes that make no sense raise whatever they happen to meet
        return f"{type(error).__name__}: {error}"


def _warn(text: str, reasons: list[str], group: comm.Group) -> None:
    if reasons and comm.rank(group) == 0:
        warnings.warn(text, stacklevel=3)


@dataclass(frozen=True)
class _Loading:
    """One verified folder on its way into the live objects."""

    path: Path
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: save.Stateful | None
    group: comm.Group

    def run(self) -> None:
        """Steps 3 to 5 of the module's docstring."""
        compared = together(f"load {self.path}", self._compare, self.group)
        plain, own, named, moments, targets = compared
        together(
            f"read {self.path}",
            lambda: storage.read_tensors(targets, self.path, self.group) if targets else None,
            self.group,
        )
        undo: list[Callable[[], object]] = []

        @torch.no_grad()
        def apply() -> None:
            undo.append(partial(save.restore_random_state, save.random_state()))
            undo.extend(  # a load replaces dicts of the optimizer, and of an optimizer inside of it
                partial(vars(each).update, {**vars(each)})
                for each in (self.optimizer, *vars(self.optimizer).values())
                if isinstance(each, torch.optim.Optimizer)
            )
            moments.load(targets.get("optimizer", {}).get("state", {}), plain["optimizer"])
            undo.append(partial(named.load, named.tensors, copy.deepcopy(named.objects)))
            for name, live in named.tensors.items():
                fresh, before = targets["model"][name], live.clone()
                live.copy_(fresh)
                undo.append(partial(live.copy_, fresh.copy_(before)))
            named.load(named.tensors, plain["objects"])
            if self.loader is not None:
                undo.append(partial(self.loader.load_state_dict, self.loader.state_dict()))
                self.loader.load_state_dict(own["loader"])
            if own["random"] is not None:
                save.restore_random_state(own["random"])

        try:
            together(f"take over what it read from {self.path}", apply, self.group)
        except BaseException as error:
            for put_back in reversed(undo):
                try:
                    with torch.no_grad():
                        put_back()
                except Exception as other:
                    error.add_note(f"what refused may be changed: undoing it raised {other!r}")
            raise

    def _compare(self) -> tuple[Any, dict[str, Any], ModelTensors, OptimizerTensors, Any]:
        plain = storage.decode((self.path / save.PLAIN).read_bytes())
        # By flat names: "model.encoder.weight".
        sizes = dict(storage.read_metadata(self.path).state_dict_metadata)
        named = ModelTensors.of(self.model)
        moments = OptimizerTensors.of(self.optimizer, named)
        problem = _model_mismatch(named, sizes, plain["objects"])
        problem = problem or moments.mismatch(plain["optimizer"])
        if problem:
            raise ValueError(f"{problem}. Build model and optimizer as they were when it was saved")
        own = self._own(plain["ranks"])
        model = {n: torch.empty_like(t, requires_grad=False) for n, t in named.tensors.items()}
        targets = {"model": model, "optimizer": {"state": moments.empty(plain["optimizer"], sizes)}}
        return plain, own, named, moments, save.with_tensors(targets)

    def _own(self, encoded: list[bytes]) -> dict[str, Any]:
        """Return this rank's part of the states that each rank saved for itself."""
        ranks = [storage.decode(each) for each in encoded]
        rank, is_same_size = comm.rank(self.group), len(ranks) == comm.size(self.group)
        own = dict(ranks[rank] if is_same_size else ranks[0])
        own["random"] = ranks[rank]["random"] if rank < len(ranks) else None
        if self.loader is not None:
            if own["loader"] is None:
                raise ValueError("expected state of a loader, got none: it was saved without one")
            if not is_same_size and any(not same(r["loader"], own["loader"]) for r in ranks):
                raise ValueError(
                    f"expected one state of the loader for all ranks, got {len(ranks)} different "
                    f"ones; with them only {len(ranks)} ranks can go on"
                )
        return own


def _model_mismatch(named: ModelTensors, sizes: dict[str, Any], objects: dict[str, Any]) -> str:
    """Return why the saved tensors do not fit this model; "" if they do."""
    saved = {name.removeprefix("model."): s for name, s in sizes.items() if name[:6] == "model."}
    own = named.tensors
    if own.keys() != saved.keys() or objects.keys() != named.objects.keys():
        missing = sorted(own.keys() - saved.keys()) + sorted(named.objects.keys() - objects.keys())
        extra = sorted(saved.keys() - own.keys()) + sorted(objects.keys() - named.objects.keys())
        return (
            f"model: expected its {len(own)} tensors, got other ones: missing {missing[:5]}, "
            f"unexpected {extra[:5]}"
        )
    for name, tensor in own.items():
        theirs = saved[name]
        if tensor.shape != theirs.size or tensor.dtype != theirs.properties.dtype:
            return (
                f"model: expected {name!r} as {tensor.dtype} of shape {tuple(tensor.shape)}, got "
                f"{theirs.properties.dtype} of shape {tuple(theirs.size)}"
            )
    return ""
