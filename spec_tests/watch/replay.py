"""Values without a reference run: a rank's gradients, computed again from what went into a step.

In the replayed step a rank keeps, for each micro-batch, the inputs of the model at the top, the
random state, and the gradient that arrived at each of its outputs. From these a plain copy of the
model gives the rank's own gradient, whatever the loss and the loader are. The agent (`replayed`)
holds the mean over the ranks against the gradients that the optimizer was given.
"""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .guard import Current
from .layout import Names, full_weights, is_dtensor, local_of
from .twin import CannotReplayError, Copy, refusing_collectives, refusing_freed_memory


class Recording:
    """What went into one step of one model on this rank: its micro-batches and its weights."""

    def __init__(self, model: nn.Module, names: Names) -> None:
        self._model = weakref.ref(model)
        self._names = names
        self._batches: list[Batch] = []
        self._weights: dict[tuple[int, str], Tensor] = {}
        self._buffers: dict[int, Tensor] = {}

    def begin(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Keep what a training forward begins with."""
        model = self._model()
        assert model is not None
        if not self._batches:  # a forward of another optimizer's turn has changed them
            self._buffers = {id(b): b.clone() for b in model.buffers()}
        device = next((p.device.type for p in model.parameters()), "cpu")
        self._batches.append(Batch(arguments, keywords, device))
        for each in model.modules():
            self.enter(each)

    def enter(self, module: nn.Module) -> None:
        """Keep the full weights that a module computes with, the first time."""
        for owner, name, parameter in full_weights(module):
            if (id(owner), name) not in self._weights:
                self._weights[id(owner), name] = parameter.detach().clone()

    def leave(self, output: Any) -> None:
        """Have the gradient of each output kept when it arrives; an evaluation has none."""
        if self._batches and not self._batches[-1].is_watched:
            self._batches[-1].watch(output)

    @property
    def draws_its_own(self) -> bool:
        """Whether compiled code drew random numbers: not those that the plain copy draws."""
        model = self._model()
        is_compiled = model is not None and any(map(_is_compiled, model.modules()))
        return is_compiled and any(batch.is_random for batch in self._batches)

    def stepped(self) -> None:
        """An optimizer has taken a step with the gradients that have arrived."""
        for batch in self._batches:
            batch.was_used = batch.was_used or bool(batch.arrived)

    def cleared(self) -> None:
        """Gradients were cleared: those that another optimizer used do not go into this step."""
        self._batches = [batch for batch in self._batches if not batch.was_used]
        for batch in self._batches:
            batch.was_cleared = batch.was_cleared or bool(batch.arrived)

    def accumulated(self) -> None:
        """A parameter has got a gradient: from the backward that is running."""
        task = torch._C._current_graph_task_id()
        for batch in self._batches:
            batch.was_accumulated = batch.was_accumulated or batch.task == task

    def _batches_of_step(self, usual: int | None) -> list[Batch]:
        """Return the micro-batches that belong to the step.

        Those that were cleared belong to an update that the script has skipped if the others are as
        many as usual; if not, they are missing.
        """
        model = self._model()
        is_sharded = model is not None and any(map(is_dtensor, model.parameters()))
        # One that no parameter got a gradient from was differentiated for something else.
        batches = [b for b in self._batches if b.was_accumulated or is_sharded]
        kept = [batch for batch in batches if not batch.was_cleared]
        return kept if usual == len(kept) else batches

    def gradients(self, usual: int | None) -> tuple[dict[str, Any], dict[str, Tensor], int]:
        """Compute this rank's gradients.

        Returns:
            name to the gradient and its sum of absolute values; name to the last micro-batch's
            gradient; the number of micro-batches.
        """
        model = self._model()
        if model is None:
            raise CannotReplayError("the model is gone")
        plain = Copy(self._names, self._weights, self._buffers)
        twin = plain.of(model)
        found: dict[str, tuple[Tensor, Tensor]] = {}
        batches = self._batches_of_step(usual)
        last: dict[str, Tensor] = {}
        for batch in batches:
            last = batch.run(twin, plain) or last
            for name, new in last.items() if batch.arrived else ():
                total, size = found.get(name, (torch.zeros_like(new), torch.zeros_like(new)))
                found[name] = (total + new, size + new.abs())
        return found, last, sum(bool(batch.arrived) for batch in batches)


def finish(recordings: Iterable[Recording], watched: Any, path: Path) -> dict[str, Any]:
    """Compute the gradients of an optimizer's models, and write them beside what it was given.

    Returns:
        the file and the number of micro-batches, or the reason why there are none.
    """
    expected: dict[str, tuple[Tensor, Tensor]] = {}
    last: dict[str, Tensor] = {}
    batches, recordings = 0, list(recordings)
    try:
        for recording in recordings:
            found, of_last, count = recording.gradients(watched.usual)
            expected |= found
            last |= of_last
            batches = max(batches, count)
        if not batches:
            raise CannotReplayError("no gradient arrived at an output of the model")
    except CannotReplayError as reason:
        return {"reason": str(reason)}
    except Exception as error:
        return {"reason": f"the copy raised {type(error).__name__}: {str(error)[:300]}"}
    actual, parts, earlier = {}, {}, {}
    for entry, parameter in zip(watched.entries, watched.parameters, strict=True):
        if parameter.grad is not None and entry.name in expected and entry.kind != "flat":
            dense = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            actual[entry.name] = local_of(dense).detach().to("cpu", copy=True)
            parts[entry.name] = (entry.kind, _part(parameter))
            if id(parameter) in watched.earlier:
                earlier[entry.name] = watched.earlier[id(parameter)].to("cpu")
    saved = {"expected": expected, "actual": actual, "parts": parts}
    torch.save({**saved, "last": last, "earlier": earlier}, path)
    is_exact = not any(recording.draws_its_own for recording in recordings)
    return {"path": str(path), "batches": batches, "is_exact": is_exact}


class Batch:
    """One micro-batch: inputs, random state, autocast, and the gradients of the outputs."""

    def __init__(self, arguments: tuple[Any, ...], keywords: dict[str, Any], device: str) -> None:
        def keep(tensor: Tensor) -> Tensor:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)

        with torch.enable_grad():
            self._arguments, self._keywords = tree_map_only(Tensor, keep, (arguments, keywords))
        self._device = device
        self._random = _random_state()
        self._casts = torch.is_autocast_enabled(device)
        self._dtype = torch.get_autocast_dtype(device) if self._casts else None
        self.arrived: dict[int, Tensor] = {}
        self.task = -1  # the backward in which they arrived
        self.is_double = self.is_over = self.was_accumulated = False
        self.is_watched = self.is_random = self.was_used = self.was_cleared = False

    def watch(self, output: Any) -> None:
        """Have the gradient of each output kept when it arrives."""
        self.is_watched = True
        now = _random_state()
        pairs = zip(now[0], self._random[0], strict=True)
        self.is_random = any(not torch.equal(a, b) for a, b in pairs)
        for index, tensor in enumerate(_outputs(output)):
            if tensor.requires_grad and not tensor.is_leaf:

                def keep(gradient: Tensor | None, index: int = index) -> None:
                    if gradient is None or self.is_over:  # autograd hands on that nothing came
                        return
                    self.task = torch._C._current_graph_task_id()
                    self.is_double = self.is_double or gradient.requires_grad
                    before = self.arrived.get(index, 0)  # a second backward through one graph
                    self.arrived[index] = gradient.detach() + before

                tensor.register_hook(keep)

    def run(self, model: nn.Module, plain: Copy) -> dict[str, Tensor]:
        """Run a plain model forward and backward as the script's was run; return its gradients."""
        self.is_over = True  # nothing that arrives from now on is the step's
        if not self.arrived:
            return {}
        if self.is_double:
            raise CannotReplayError("a gradient is differentiated once more")

        def cast(tensor: Tensor) -> Tensor:
            is_cast = plain.dtype is not None and tensor.is_floating_point()
            return tensor.to(plain.dtype) if is_cast else tensor

        before = _random_state()
        _set_random_state(self._random)
        Current.is_replaying = True
        casting = torch.autocast(self._device, dtype=self._dtype) if self._casts else nullcontext()
        try:
            with torch.enable_grad(), casting, refusing_collectives(), refusing_freed_memory():
                arguments, keywords = tree_map_only(Tensor, cast, (self._arguments, self._keywords))
                outputs = _outputs(model(*arguments, **keywords))
                chosen = [outputs[index] for index in self.arrived]
                grads = [g.to(o.dtype) for g, o in zip(self.arrived.values(), chosen, strict=True)]
            trained = {n: p for n, p in plain.parameters.items() if p.requires_grad}
            # Not backward(): whatever the copy still shares with the script gets no gradient.
            found = torch.autograd.grad(
                chosen, list(trained.values()), _from_outside(chosen, grads), allow_unused=True
            )
            pairs = zip(trained, found, strict=True)
            dense = {n: g.to_dense() if g.is_sparse else g for n, g in pairs if g is not None}
            return {n: g.to("cpu", torch.float64) for n, g in dense.items()}
        finally:
            Current.is_replaying = False
            _set_random_state(before)


def _from_outside(outputs: Sequence[Tensor], arrived: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients that came from outside the model.

    What arrives at logits that the model also makes its loss of came through the loss for a part,
    and will come again.
    """
    made_of = [
        {
            j
            for j, other in enumerate(outputs)
            if i != j
            and torch.autograd.grad(output, other, arrived[i], True, allow_unused=True)[0]
            is not None
        }
        for i, output in enumerate(outputs)
    ]
    found: dict[int, Tensor] = {}
    while len(found) < len(outputs):
        # One that no output is made of but those whose outside is known.
        j = next(
            j
            for j in range(len(outputs))
            if j not in found and all(i in found for i, of in enumerate(made_of) if j in of)
        )
        found[j] = arrived[j]
        for i in found:
            if j in made_of[i]:
                found[j] = found[j] - torch.autograd.grad(outputs[i], outputs[j], found[i], True)[0]
    return [found[j] for j in range(len(outputs))]


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


_Random = tuple[list[Tensor], Any, Any]


def _random_state() -> _Random:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    numpy = sys.modules.get("numpy.random")
    theirs = numpy.get_state() if numpy is not None else None
    return [torch.get_rng_state(), *cuda], random.getstate(), theirs


def _set_random_state(state: _Random) -> None:
    (cpu, *cuda), own, theirs = state
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
    random.setstate(own)
    if theirs is not None:
        sys.modules["numpy.random"].set_state(theirs)  # type: ignore[attr-defined]


def _outputs(output: Any) -> list[Tensor]:
    """Return the tensors of an output, also of a dataclass such as a library's `ModelOutput`."""
    if not isinstance(output, Tensor | tuple | list | dict) and hasattr(output, "__dict__"):
        output = vars(output)
    leaves, _ = torch.utils._pytree.tree_flatten(output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _part(parameter: Any) -> tuple[int, int, int] | None:
    """Return the dim that a DTensor is sharded along, the number of parts, and its own."""
    if not is_dtensor(parameter):
        return None
    at = parameter.device_mesh.get_coordinate()
    for mesh_dim, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            return placement.dim, parameter.device_mesh.size(mesh_dim), at[mesh_dim]
    return None
