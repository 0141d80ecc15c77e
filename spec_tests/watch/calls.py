"""Functions of torch that are wrapped, since no hook shows what they are given."""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.algorithms.join
import torch.utils.checkpoint
from torch import Tensor, nn

from .guard import Current, observe, outwards, quiet, watching
from .layout import fingerprint, is_dtensor, local_of
from .link import script_line, script_path
from .window import KEPT, Window

_LOSS = "trainspec_watch"  # under which a loss is found again in its graph
_OF_CHECKPOINTS = (  # options that are not handed on to the function
    *("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug"),
)
_ALL_REDUCE = ("tensor", "op", "group", "async_op")
_CLOSE = 1e-3  # of a norm: half of it, or twice, is far
_LINEAR = ("Div", "Mul", "ToCopy", "Squeeze", "View", "Unsqueeze")  # nodes: of a factor, or none
_MEANS = (
    *("Mean", "MseLoss", "SmoothL1Loss", "HuberLoss", "NllLoss", "NllLoss2D"),
    *("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"),
)


def start() -> None:
    """Observe these functions in this process."""
    optimizer, module, scaler = torch.optim.Optimizer, nn.Module, torch.amp.GradScaler
    observe("zero_grad", optimizer, after=_cleared)
    observe("zero_grad", module, after=_cleared)
    observe("load_state_dict", optimizer, around=load_state)
    observe("add_param_group", optimizer, after=_built)
    for name in ("clip_grad_norm_", "clip_grads_with_norm_"):
        observe(name, nn.utils, nn.utils.clip_grad, around=clip_grad_norm)
    observe("step", torch.optim.lr_scheduler.LRScheduler, before=_scheduled)
    observe("scale", scaler, before=_scaled)
    observe("unscale_", scaler, before=_unscaled)
    observe("backward", torch.autograd, before=_begun)
    observe("cross_entropy", nn.functional, after=_weighed)
    observe("nll_loss", nn.functional, after=_aimed)
    observe("dropout", nn.functional, before=_dropped)
    observe("checkpoint", torch.utils.checkpoint, around=checkpoint, is_watched=watching)
    if dist.is_available():
        both = (dist, dist.distributed_c10d)  # where `P2POp` compares with what it is given
        for name in ("send", "recv", "isend", "irecv"):  # gloo's flight recorder leaves them out
            observe(name, *both, before=_exchanged)
        observe("all_reduce", *both, around=all_reduce)
        join = torch.distributed.algorithms.join.Join  # uneven inputs are meant
        observe("__enter__", join, before=lambda probe, _: probe.connect().send("join"))


def _dropped(
    probe: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> None:
    # Of what needs no gradient it is an augmentation.
    if probe.window.forwards and training and p > 0 and input.requires_grad:
        probe.window.forwards[-1]["drops"] = True


def _built(probe: Any, result: None, optimizer: Any, *rest: Any, **keywords: Any) -> None:
    probe.built.add(optimizer)


def _exchanged(probe: Any, *arguments: Any, **keywords: Any) -> None:
    probe.connect().has_messages = True


def clip_grad_norm(
    original: Any, parameters: Any, max_norm: float, *rest: Any, **keywords: Any
) -> Any:
    """Clip, and keep each gradient's norm on this rank and what the largest one became."""
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    with_gradient = [p for p in parameters if p.grad is not None]
    is_given = "total_norm" in inspect.signature(original).parameters
    kind = 2.0 if is_given else float(rest[0] if rest else keywords.get("norm_type", 2.0))
    norms: list[float] = []
    quiet(lambda probe: norms.extend(_norms(with_gradient, kind)))()
    result = original(parameters, max_norm, *rest, **keywords)
    if norms:
        quiet(_clipped)(with_gradient, norms, kind, float(max_norm), is_given)
    return result


def _clipped(
    probe: Any,
    parameters: list[Tensor],
    norms: list[float],
    kind: float,
    most: float,
    is_given: bool,
) -> None:
    largest = max(range(len(norms)), key=norms.__getitem__)
    clipped = _norms([parameters[largest]], kind)[0]
    for p in parameters if norms[largest] else ():
        probe.factors[id(p)] = probe.factors.get(id(p), 1.0) * clipped / norms[largest]
    entries = [probe.names.entry(p, "?") for p in parameters]
    del probe.clips[:-8]  # of parameters that no optimizer has
    probe.clips.append(
        {
            "max": most,
            "kind": kind,
            "given": is_given,  # the norm, which may be that of more than these
            "is_scaled": probe.has_scaler,  # whether the script scales its losses
            # Each norm on this rank, and which part of the whole that is.
            "parts": [[n, e.kind, list(e.shard)] for n, e in zip(norms, entries, strict=True)],
            "place": script_line(),
            "largest": parameters[largest],
            "backwards": probe.window.backwards(parameters),
            "norm": norms[largest],
            "clipped": clipped,
        }
    )


def _norms(parameters: list[Any], kind: float) -> list[float]:
    """Return the norm of each gradient's part on this rank."""
    parts = [local_of(p.grad) for p in parameters]
    found = [torch.linalg.vector_norm(g, kind, dtype=torch.float32) for g in parts]
    return [] if not found else torch.stack(found).tolist()


def norm_again(probe: Any, parameters: list[Any]) -> dict[str, Any] | None:
    """Return the clipping of an optimizer's gradients, with the norm that the largest has now."""
    ids = {id(p) for p in parameters}
    found = [clip for clip in probe.clips if id(clip["largest"]) in ids]
    probe.clips = [clip for clip in probe.clips if id(clip["largest"]) not in ids]
    if not found:
        return None
    clip = found[-1]
    largest = clip.pop("largest")
    scaled = {each["backwards"] for each in found if each["clipped"] < 0.97 * each["norm"]}
    return {
        **clip,
        "partial": len([count for count in scaled if 0 < count < clip["backwards"]]),
        "stepped": _norms([largest], clip["kind"])[0] if largest.grad is not None else 0.0,
    }


def _cleared(probe: Any, result: None, owner: Any, *rest: Any, **keywords: Any) -> None:
    """Gradients were cleared: what came before does not go into a step that is computed again."""
    groups = getattr(owner, "param_groups", None)
    parameters = owner.parameters() if groups is None else [p for g in groups for p in g["params"]]
    probe.cleared(parameters)


def load_state(original: Any, optimizer: Any, *rest: Any, **keywords: Any) -> None:
    """Load an optimizer's state, and keep which options of the script it replaces."""
    before = _options(optimizer)
    original(optimizer, *rest, **keywords)
    quiet(_loaded)(optimizer, before)


def _options(optimizer: Any) -> list[dict[str, Any]]:
    """Return the numbers among the options of each group, those that the script has given."""
    usual = inspect.signature(type(optimizer).__init__).parameters
    found = []
    for group in optimizer.param_groups:
        numbers = {n: v for n, v in group.items() if isinstance(v, int | float | tuple)}
        found.append({n: v for n, v in numbers.items() if n in usual and v != usual[n].default})
    return found


def _loaded(probe: Any, optimizer: Any, before: list[dict[str, Any]]) -> None:
    groups = optimizer.param_groups
    pairs = zip(before, groups, strict=False)
    probe.loaded[optimizer] = {
        "place": script_line(),
        "rates": [group["lr"] for group in groups if isinstance(group.get("lr"), float)],
        "replaced": [
            [n, was, new[n]]
            for old, new in pairs
            for n, was in old.items()
            if n != "lr" and isinstance(new.get(n), type(was)) and new[n] != was
        ],
    }


def _scheduled(probe: Any, scheduler: Any, *arguments: Any, **keywords: Any) -> None:
    """Keep after how many forwards a schedule is stepped: steps with none between are one."""
    probe.window.scheduled.setdefault(id(scheduler), {})[len(probe.window.forwards)] = script_line()


def _scaled(probe: Any, scaler: Any, outputs: Any) -> None:
    """A loss is scaled: remember until the step that its gradients are to be unscaled."""
    if scaler.is_enabled():
        probe.scaled.add(id(scaler))
        probe.has_scaler = True


def _unscaled(probe: Any, scaler: Any, *arguments: Any, **keywords: Any) -> None:
    probe.scaled.discard(id(scaler))


def checkpoint(original: Any, function: Any, *arguments: Any, **keywords: Any) -> Any:
    """Checkpoint activations; in a step that is computed again, keep them instead."""
    if not Current.is_replaying:
        return original(function, *arguments, **keywords)
    own = {name: value for name, value in keywords.items() if name not in _OF_CHECKPOINTS}
    return function(*arguments, **own)


def _weighed(
    probe: Any,
    result: Tensor,
    input: Tensor,
    target: Tensor,
    *rest: Any,
    reduction: str = "mean",
    ignore_index: int = -100,
    **keywords: Any,
) -> None:
    """Keep over how many tokens a cross entropy is a mean, and the gradient that it is given."""
    _aimed(probe, result, input, target)
    is_loss = result.requires_grad and not result.dim() and reduction in ("mean", "sum")
    if not is_loss or result.is_meta or target.is_floating_point():
        return
    loss = _keep(probe, (target != ignore_index).sum(), reduction, result)
    node: Any = result.grad_fn
    node.metadata[_LOSS] = loss
    result.register_hook(functools.partial(_weigh, loss))


def _aimed(probe: Any, result: Tensor, input: Tensor, target: Tensor, *_: Any, **__: Any) -> None:
    """Keep a hash of the targets of a loss; of losses by element, the script may leave some out."""
    if result.requires_grad and not result.dim() and not result.is_meta:  # operations are counted
        del probe.window.targets[:-KEPT]
        probe.window.targets.append(fingerprint(target, is_mixed=True))


def _keep(probe: Any, tokens: Tensor | None, of: str, value: Tensor) -> dict[str, Any]:
    """Keep a loss; what it weighs is known when its gradient arrives."""
    loss = {"tokens": tokens, "weight": None, "of": of, "task": 0}
    # A mean by hand may be one of several losses; tokens are of one, on whatever line it is called.
    place = script_line()
    loss |= {"place": place, "path": place if tokens is not None else script_path()}
    loss |= {"is_bad": ~value.detach().isfinite(), "is_cleared": False, "is_whole": False}
    del probe.window.losses[:-KEPT]
    probe.window.losses.append(loss)
    return loss


def _weigh(loss: dict[str, Any], gradient: Tensor) -> None:
    loss |= {"weight": gradient, "task": torch._C._current_graph_task_id()}


def _begun(probe: Any, tensors: Any, *rest: Any, **keywords: Any) -> None:
    """A backward begins: remember of a loss whether it is all that the backward begins with."""
    node = None if getattr(tensors, "is_meta", False) else getattr(tensors, "grad_fn", None)
    is_nested = torch._C._current_graph_task_id() != -1
    if node is not None and tensors.numel() == 1 and not is_nested:
        del probe.window.roots[:-KEPT]
        probe.window.roots.append(tensors.detach())
    is_linear = not is_nested
    for _ in range(8):  # such as a division, and a GradScaler's product
        if node is None:
            return
        if _LOSS in node.metadata:
            node.metadata[_LOSS]["is_whole"] = True
            return
        name = node.name().partition("Backward")[0]
        if is_linear and name in _MEANS:
            _begun_with_mean(probe, tensors, node, name)
            return
        is_linear = is_linear and name in _LINEAR
        node = _before(node)


def _before(node: Any) -> Any:
    """Return the node that a node of a graph is computed from, if it is one."""
    before = [each for each, _ in node.next_functions if each is not None]
    return before[0] if len(before) == 1 else None


def _begun_with_mean(probe: Any, value: Tensor, node: Any, name: str) -> None:
    """A backward begins with a mean, times a factor: keep what arrives at the mean."""
    of, inner = "mean", node
    if name == "Mean":  # by hand: what it is a mean of may be divided already
        of = "mean()"
        while inner is not None and inner.name().startswith(("Mean", "Sum", "View", "Squeeze")):
            inner = _before(inner)
        if inner is None or inner.name().startswith(("Div", "Mul")):
            return
    elif node._saved_reduction != 1:
        return
    loss = _keep(probe, None, of, value)
    loss["is_whole"] = True
    node.register_prehook(lambda gradients: _weigh(loss, gradients[0]))


def loss_scale(frame: Any) -> float:
    """Return the scale of the GradScaler that this step was called by, 1 without one."""
    for owner in (each.f_locals.get("self") for each in outwards(frame)):
        if type(owner).__name__ == "GradScaler" and owner.is_enabled():
            return float(owner.get_scale())
    return 1.0


def is_for_join(frame: Any) -> bool:
    """Return whether a `Join` takes this step, since this rank has ended before the others."""
    code = torch.distributed.algorithms.join.Join.__exit__.__code__
    return any(each.f_code is code for each in outwards(frame))


# ------------------------------------------------------------------------------------ sums by hand
# A step that is given gradients as `all_reduce` has summed them is given as many times the mean as
# there are ranks. Each norm is a pass over the gradients: they are taken for one step alone.


def made(probe: Any, parameter: Tensor) -> None:
    """A backward has added to a gradient: keep its norm, if no wrapper reduces it."""
    is_by_hand = probe.names.of(parameter).ddp is None
    grad = parameter.grad if is_by_hand and _is_due(probe) else None
    if grad is not None and grad.layout is torch.strided:
        probe.window.made[id(parameter)] = (grad.numel(), _norm(grad))


def all_reduce(original: Any, *arguments: Any, **keywords: Any) -> Any:
    """Reduce a tensor, and keep its norms if it is summed at once."""
    given = dict(zip(_ALL_REDUCE, arguments, strict=False)) | keywords
    norms: list[Tensor] = []

    def before(probe: Any) -> None:
        tensor = given.get("tensor")
        if not isinstance(tensor, Tensor) or is_dtensor(tensor) or not tensor.is_floating_point():
            return
        # Neither in a backward, as a hook of DDP's is, nor in a step.
        if torch._C._current_graph_task_id() == -1 and probe.stepping is None:
            del probe.window.by_hand[:-KEPT]
            pointer = tensor.untyped_storage().data_ptr()
            probe.window.by_hand.append((tensor.numel(), pointer))
        is_sum = given.get("op", dist.ReduceOp.SUM) == dist.ReduceOp.SUM
        is_whole = dist.get_world_size(given.get("group")) == dist.get_world_size()
        if is_sum and is_whole and not given.get("async_op") and _is_due(probe):
            norms.append(_norm(tensor))

    def after(probe: Any) -> None:
        tensor = given["tensor"]
        probe.window.summed += [(tensor.numel(), norm, _norm(tensor)) for norm in norms]

    quiet(before)()
    result = original(*arguments, **keywords)
    if norms:
        quiet(after)()
    return result


def others(probe: Any) -> list[int]:
    """Return the sizes of what the script summed beside DDP, such as a codebook's counts.

    What has memory of a gradient, or the size of all, may be the gradients once more. What has the
    size of one may be a weight, as of a moving average.
    """
    known = list(probe.names.known.values())
    if not probe.window.by_hand or not any(each.ddp for each in known):
        return []
    parameters = [p for each in known if (p := each.parameter()) is not None]
    grads = [local_of(p.grad) for p in parameters if p.grad is not None]
    pointers = {g.untyped_storage().data_ptr() for g in grads}
    whole = sum(g.numel() for g in grads)
    found = probe.window.by_hand
    return [size for size, pointer in found if pointer not in pointers and size != whole]


def norm_of_sums(window: Window, parameters: list[Tensor]) -> float | None:
    """Return the norm of the sums, if they are of all gradients as the backwards left them."""
    own = [window.made[id(p)] for p in parameters if id(p) in window.made]
    least = 1 if any(size == 1 for size, _ in own) else 2  # a loss to be shown is no gradient
    summed = [each for each in window.summed if each[0] >= least]
    if not own or sum(size for size, _ in own) != sum(size for size, _, _ in summed):
        return None
    columns = ([n for _, n in own], [n for _, n, _ in summed], [n for _, _, n in summed])
    of_backwards, *both = (math.hypot(*map(float, each)) for each in columns)
    # A hook of a parameter sums before the backward adds to the gradient.
    is_known = any(abs(each - of_backwards) < _CLOSE * of_backwards for each in both)
    return both[1] if is_known else None


def _is_due(probe: Any) -> bool:
    """Return whether an optimizer's next step is the one that is looked at."""
    due = (probe.options["replay"] or 2) - 1
    steps = [each.steps for each in probe.optimizers.values()] or [0]
    return dist.is_initialized() and dist.get_world_size() > 1 and due in steps


def _norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64)
