"""Values without a reference run: a rank's gradients, computed again from what went into a step.

In the replayed step a rank keeps, for each micro-batch, the inputs of the model at the top, the
random state, and the gradient that arrived at each of its outputs. From these a plain copy of the
model gives the rank's own gradient, whatever the loss and the loader are. The agent (`replayed`)
holds the mean over the ranks against the gradients that the optimizer was given.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from .guard import Current
from .layout import Names, full_weights, is_dtensor, local_of, part_of
from .window import tensors_of

_WRAPPERS = {
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}
_INTERNAL = set(nn.Module().__dict__)  # what every module has, and is copied by itself
_MAKE_WEIGHTS = ("torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


class CannotReplayError(Exception):
    """Why a step cannot be computed again."""


class Recording:
    """What went into one step of one model on this rank: its micro-batches and its weights."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._batches: list[Batch] = []
        self._weights: dict[tuple[int, str], Tensor] = {}
        self._buffers: dict[int, Tensor] = {}
        self._found: list[dict[str, Tensor]] | None = None
        self._is_random = self._has_moved = False

    def begin(self, model: nn.Module, arguments: tuple[Any, ...], keywords: Any) -> None:
        """Keep what a training forward begins with."""
        self._found = None  # what was found is of a step that is over
        if not self._batches:  # a forward of another optimizer's turn has changed them
            self._buffers = {id(b): b.clone() for b in model.buffers()}
            self._weights, self._has_moved = {}, False
        device = next((p.device.type for p in model.parameters()), "cpu")
        self._batches.append(Batch(arguments, keywords, device))
        for each in model.modules():
            self.enter(each)

    def enter(self, module: nn.Module) -> None:
        """Keep the full weights that a module computes with, the first time."""
        is_training = bool(self._batches) and not self._batches[-1].is_watched
        for owner, name, parameter in full_weights(module):
            kept = self._weights.get((id(owner), name))
            if kept is None:
                self._weights[id(owner), name] = parameter.detach().clone()
            elif is_training and not torch.equal(kept, parameter):
                is_alike = kept.shape == parameter.shape  # and NaN equals not even itself
                is_alike = is_alike and not ((kept != parameter) & ~kept.isnan()).any()
                self._has_moved = self._has_moved or not is_alike

    def leave(self, output: Any) -> None:
        """Have the gradient of each output kept when it arrives; an evaluation has none."""
        if self._batches and not self._batches[-1].is_watched:
            self._batches[-1].watch(output)

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

    def _batches_of_step(self, model: nn.Module, usual: int | None) -> list[Batch]:
        """Return the micro-batches that belong to the step.

        Those that were cleared belong to an update that the script has skipped if the others are as
        many as usual; if not, they are missing.
        """
        is_sharded = any(map(is_dtensor, model.parameters()))
        # One that no parameter got a gradient from was differentiated for something else.
        batches = [b for b in self._batches if b.was_accumulated or is_sharded]
        kept = [batch for batch in batches if not batch.was_cleared]
        # What an attack is made of is differentiated by its inputs, and its gradients are dropped.
        is_attack = kept and all(b.is_of_inputs == b.was_cleared for b in batches)
        return kept if is_attack or usual == len(kept) else batches

    def gradients(self, model: nn.Module, usual: int | None) -> list[dict[str, Tensor]]:
        """Compute this rank's gradients by name, of each micro-batch that has some.

        Once: a second optimizer of the model asks when the first one has changed its weights.
        """
        if self._found is None:
            plain = Copy(self._names, self._weights, self._buffers)
            twin = plain.of(model)
            if self._has_moved:
                raise CannotReplayError("the weights change between the forwards of the step")
            batches = self._batches_of_step(model, usual)
            penalties = [batch for batch in self._batches if not batch.was_accumulated]
            if any(batch.is_double for batch in batches + penalties):
                raise CannotReplayError("gradients were computed with create_graph=True")
            self._found = [batch.run(twin, plain) for batch in batches if batch.arrived]
            self._is_random = any(batch.is_random for batch in self._batches)
            self._batches, self._weights, self._buffers = [], {}, {}
        return self._found

    def draws_its_own(self, model: nn.Module) -> bool:
        """Return whether compiled code drew random numbers: not those that the plain copy draws."""
        return self._is_random and any(
            type(each).__name__ == "OptimizedModule" or each._compiled_call_impl is not None
            for each in model.modules()
        )


def finish(recordings: dict[nn.Module, Recording], watched: Any, path: Path) -> dict[str, Any]:
    """Compute the gradients of an optimizer's models, and write them beside what it was given.

    Returns:
        the file and the number of micro-batches, or the reason why there are none.
    """
    expected: dict[str, tuple[Any, Any]] = {}  # the gradient, and its sum of absolute values
    last: dict[str, Tensor] = {}  # of the last micro-batch
    batches = 0
    try:
        for model, recording in recordings.items():
            found = recording.gradients(model, watched.usual)
            for name, new in (pair for each in found for pair in each.items()):
                total, size = expected.get(name, (0.0, 0.0))
                expected[name] = (total + new, size + new.abs())
            last |= found[-1] if found else {}
            batches = max(batches, len(found))
        if not batches:
            raise CannotReplayError("no gradient arrived at an output of the model")
    except CannotReplayError as reason:
        return {"reason": str(reason)}
    except Exception as error:
        return {"reason": f"the copy raised {type(error).__name__}: {str(error)[:300]}"}
    is_exact = not any(recording.draws_its_own(model) for model, recording in recordings.items())
    actual, parts, factors, earlier = {}, {}, {}, {}
    triples = zip(watched.entries, watched.parameters, watched.factors, strict=True)
    for entry, parameter, factor in triples:
        if (
            parameter.grad is not None
            and entry.name in expected
            and entry.kind not in ("flat", "local")
        ):
            dense = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            actual[entry.name] = local_of(dense).detach().to("cpu", copy=True)
            parts[entry.name] = (entry.kind, part_of(parameter))
            factors[entry.name] = factor
            if id(parameter) in watched.earlier:
                earlier[entry.name] = watched.earlier[id(parameter)].to("cpu")
    if not actual:
        return {"reason": "no gradient that a wrapper reduces was given to the optimizer"}
    saved = {"expected": expected, "actual": actual, "parts": parts, "factors": factors}
    torch.save({**saved, "last": last, "earlier": earlier}, path)
    return {"path": str(path), "batches": batches, "is_exact": is_exact}


class Batch:
    """One micro-batch: inputs, random state, autocast, and the gradients of the outputs."""

    def __init__(self, arguments: tuple[Any, ...], keywords: dict[str, Any], device: str) -> None:
        def keep(tensor: Tensor) -> Tensor:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)

        with torch.enable_grad():
            self._arguments, self._keywords = tree_map_only(Tensor, keep, (arguments, keywords))
        self.is_of_inputs = any(t.requires_grad for t in tensors_of((arguments, keywords)))
        self._device = device
        self._random = _random_state()
        self._casts = torch.is_autocast_enabled(device)
        self._dtype = torch.get_autocast_dtype(device) if self._casts else None
        self.arrived: dict[int, Tensor] = {}
        self.task = -1  # the backward in which they arrived
        self.is_double = self.was_accumulated = False
        self.is_watched = self.is_random = self.was_used = self.was_cleared = False

    def watch(self, output: Any) -> None:
        """Have the gradient of each output kept when it arrives."""
        self.is_watched = True
        now = _random_state()
        pairs = zip(now[0], self._random[0], strict=True)
        self.is_random = any(not torch.equal(a, b) for a, b in pairs)
        for index, tensor in enumerate(tensors_of(output)):
            if tensor.requires_grad and not tensor.is_leaf:

                def keep(gradient: Tensor | None, index: int = index) -> None:
                    if gradient is None:  # autograd hands on that nothing came
                        return
                    self.task = torch._C._current_graph_task_id()
                    self.is_double = self.is_double or torch.is_grad_enabled()
                    before = self.arrived.get(index, 0)  # a second backward through one graph
                    self.arrived[index] = gradient.detach() + before

                tensor.register_hook(keep)

    def run(self, model: nn.Module, plain: Copy) -> dict[str, Tensor]:
        """Run a plain model forward and backward as the script's was run; return its gradients."""

        def cast(tensor: Tensor) -> Tensor:
            is_cast = plain.dtype is not None and tensor.is_floating_point()
            return tensor.to(plain.dtype) if is_cast else tensor

        before = _random_state()
        _set_random_state(self._random)
        Current.is_replaying = True
        casting = torch.autocast(self._device, dtype=self._dtype) if self._casts else nullcontext()
        refusing: Any = Refusing()  # type: ignore[no-untyped-call]
        try:
            with torch.enable_grad(), casting, refusing:
                arguments, keywords = tree_map_only(Tensor, cast, (self._arguments, self._keywords))
                outputs = tensors_of(model(*arguments, **keywords))
                chosen = [outputs[index] for index in self.arrived]
                grads = [g.to(o.dtype) for g, o in zip(self.arrived.values(), chosen, strict=True)]
                # What arrives at logits that the model also makes its loss of came through the loss
                # for a part: that part is not to come again.
                for output, gradient in zip(chosen, grads, strict=True):
                    output.register_hook(lambda _, arrived=gradient: arrived)
            trained = {n: p for n, p in plain.parameters.items() if p.requires_grad}
            # Not backward(): whatever the copy still shares with the script gets no gradient.
            found = torch.autograd.grad(chosen, [*trained.values()], grads, allow_unused=True)
            pairs = zip(trained, found, strict=True)
            dense = {n: g.to_dense() if g.is_sparse else g for n, g in pairs if g is not None}
            return {n: g.to("cpu", torch.float64) for n, g in dense.items()}
        finally:
            Current.is_replaying = False
            _set_random_state(before)


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


# ---------------------------------------------------------------------------------- the plain copy


class Copy:
    """Builds a plain copy of a model: full weights, and neither wrappers nor hooks."""

    def __init__(
        self, names: Names, weights: dict[tuple[int, str], Tensor], buffers: dict[int, Tensor]
    ) -> None:
        self._names, self._weights, self._buffers = names, weights, buffers
        self._memo: dict[Any, Any] = {}
        self._alive: list[Any] = []
        self._twins: list[nn.Module] = []
        self.parameters: dict[str, nn.Parameter] = {}
        self.dtype: torch.dtype | None = None

    def of(self, module: nn.Module) -> nn.Module:
        """Return the copy of a module and all that is in it."""
        copied = self._twin(module)
        with Refusing():  # type: ignore[no-untyped-call]  # torch leaves it bare
            for twin in self._twins:  # when each is known: an attribute may hold a sibling
                self._own_attributes(twin)
        return copied

    def _twin(self, module: nn.Module) -> nn.Module:
        """Return the copy of a module; one that occurs twice is copied once."""
        kind = type(module)
        if any(base.__name__ == "FSDPModule" for base in kind.__bases__[:-1]):
            kind = kind.__bases__[-1]  # fully_shard made a class of both
        inner = _WRAPPERS.get(kind.__name__)
        if inner:
            return self._twin(getattr(module, inner))
        if id(module) in self._memo:
            return self._memo[id(module)]
        if isinstance(module, torch.jit.ScriptModule):
            raise CannotReplayError("a ScriptModule cannot be copied")
        if "SyncBatchNorm" in kind.__name__ or kind.__name__ == "FullyShardedDataParallel":
            raise CannotReplayError(f"{kind.__name__} communicates in its forward")
        _refuse_hooks(module)
        twin = self._memo[id(module)] = kind.__new__(kind)
        self._twins.append(twin)
        state = module.__dict__
        # A tensor that the last forward left behind is missing: a forward that reads it says so.
        left = [n for n, v in state.items() if isinstance(v, Tensor) and v.grad_fn is not None]
        twin.__dict__.update(
            {n: type(v)() if n.endswith("_hooks") else v for n, v in state.items() if n not in left}
        )
        for key, hook in module._forward_pre_hooks.items():
            if type(hook).__module__ in _MAKE_WEIGHTS:  # of other parameters; it holds no tensor
                twin._forward_pre_hooks[key] = hook
        twin.__dict__["_compiled_call_impl"] = None
        parts = state["_modules"].items()  # `bool` of a compiled DDP raises
        twin.__dict__["_modules"] = {n: None if m is None else self._twin(m) for n, m in parts}
        twin.__dict__["_parameters"] = {
            n: self._parameter(module, n, p) for n, p in state["_parameters"].items()
        }
        twin.__dict__["_buffers"] = {
            n: b if b is None else self._buffers.get(id(b), b).clone()
            for n, b in state["_buffers"].items()
        }
        return twin

    def _parameter(self, module: nn.Module, name: str, parameter: Any) -> nn.Parameter | None:
        if parameter is None:
            return None
        if id(parameter) not in self._memo:
            weight = self._weights.get((id(module), name))
            if weight is None:
                full = self._names.of(parameter).name or name
                raise CannotReplayError(f"full weights of {full!r} were not seen")
            shard = self._names.shards.get((id(module), name))
            known = shard[1]() if shard else parameter
            full = name if known is None else self._names.of(known).name or name
            if shard and weight.dtype != local_of(parameter).dtype:
                self.dtype = weight.dtype
            if getattr(parameter, "_backward_hooks", None):
                raise CannotReplayError(f"{full!r} has a hook that may change its gradient")
            twin = nn.Parameter(weight.clone(), requires_grad=parameter.requires_grad)
            self._memo[id(parameter)] = self.parameters[full] = twin
        return self._memo[id(parameter)]

    def _own_attributes(self, twin: nn.Module) -> None:
        """Let attributes that hold modules or parameters hold the copies."""
        for name in twin.__dict__.keys() - _INTERNAL:
            value = twin.__dict__[name]
            if value is None or isinstance(value, bool | int | float | str):
                continue
            # Its own: what a copy that fails has begun, nothing else may be made of.
            memo = {**self._memo, "torch": dict(self._memo.get("torch", {}))}
            try:
                twin.__dict__[name] = copy.deepcopy(value, memo)
            except Exception:  # a process group, a lock, freed weights: the copy shares it
                continue
            self._alive.append(memo.pop(id(memo), None))  # whose ids the memo has
            self._memo = memo


def _refuse_hooks(module: nn.Module) -> None:
    wrapper = next((k for k in type(module).__mro__ if k.__name__ == "FSDPModule"), None)
    package = wrapper.__module__.rpartition(".")[0] if wrapper is not None else ""
    for kind in _HOOKS:
        for hook in getattr(module, kind).values():
            while isinstance(hook, functools.partial):
                hook = hook.func
            place = getattr(hook, "__module__", None) or ""
            if type(hook).__module__ in _MAKE_WEIGHTS:
                continue
            if not place.startswith(("torch.distributed.", package or "torch.distributed.")):
                raise CannotReplayError(
                    f"a {type(module).__name__} has a hook of {place or 'its own'}"
                )


class Refusing(TorchDispatchMode):
    """Refuses to communicate, in the script's groups, and to read weights that a wrapper freed."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise CannotReplayError("the model communicates in its forward")
        if any(map(_is_freed, torch.utils._pytree.tree_leaves((args, kwargs)))):
            raise CannotReplayError("it reads weights whose memory is freed")  # kernels do not look
        return func(*args, **(kwargs or {}))


def _is_freed(value: object) -> bool:
    local: Any = getattr(value, "_local_tensor", value)
    try:
        is_tensor = isinstance(local, Tensor) and local.numel() > 0
        return bool(is_tensor and not local.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError):  # sparse, or of a class that has no storage
        return False
