"""CS336 assignment 2, a checkout of 2024, 2025 or 2026, brought to the contract.

Its `tests/adapters.py` has a function per item, which raises NotImplementedError where the student
left it: that is "not offered". What differs from the contract is when things are called:

    the contract                      tests/adapters.py
    wrapped = ddp(module)             get_ddp (2026), get_ddp_individual_parameters (2025)
    forward                           ddp_bucketed_on_train_batch_start, before the first of a batch
    backward
    finish_gradient_synchronization   *_on_after_backward, the one that belongs to the wrapper
    full_parameters(model)            fsdp_gather_full_params

The exercise's FSDP shards `Linear` and `Embedding` of the package cs336_basics, which lies in the
checkout. The suite's toys are made of torch's, so `fsdp` first puts the course's layers in their
place, around the same Parameter objects. Where the exercise says nothing (process groups, a scale,
grouped heads, causal masks that are not square) the adapter says NotImplementedError, and the suite
"not offered".
"""

from __future__ import annotations

import contextlib
import importlib
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from spec_tests.impls.checkout import give_versions, import_file, offered, refuse_group

Hook = Callable[[nn.Module, Optimizer], object]

# Where the package cs336_basics may lie, seen from the folder that holds tests/, unless its
# pyproject.toml says where.
BASICS = ("cs336-basics", "../cs336-basics", "cs336_basics", "../cs336_basics")


def offer(checkout: Path, device: str) -> SimpleNamespace:
    """The contract's functions that this checkout brings.

    Raises:
        whatever tests/adapters.py raises when it is imported.
    """
    give_versions("cs336-systems", "cs336-basics", "cs336_systems", "cs336_basics")
    folders = (*_named_by(checkout / "pyproject.toml"), *BASICS)
    around = [folder for folder in folders if (checkout / folder / "cs336_basics").is_dir()]
    hooks = import_file(checkout, "tests.adapters", search=around)
    functions: dict[str, Any] = {}
    finishing: WeakKeyDictionary[nn.Module, Hook] = WeakKeyDictionary()
    _offer_ddp(hooks, functions, finishing)
    _offer_fsdp(hooks, functions, finishing)
    _offer_optimizer(hooks, functions)
    for kind in ("pytorch", "triton"):
        if kernel := _kernel(hooks, f"get_flashattention_autograd_function_{kind}"):
            name = "flash_attention" if kind == "pytorch" else "flash_attention_triton"
            functions[name] = _attention(kernel)

    def finish_gradient_synchronization(wrapped: nn.Module) -> None:
        hook = finishing.get(wrapped)
        if hook is not None:
            hook(wrapped, _optimizer_of(wrapped))

    return SimpleNamespace(
        **functions, finish_gradient_synchronization=finish_gradient_synchronization
    )


def _named_by(project: Path) -> list[str]:
    """The folder of `cs336-basics` in a project file: the exercise lets students put theirs there.

    A file that is missing or torn names none.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sources = tomllib.loads(project.read_text()).get("tool", {}).get("uv", {}).get("sources")
        path = (sources or {}).get("cs336-basics", {}).get("path")
        return [path] if isinstance(path, str) else []
    return []


# ------------------------------------------------------------------------------------------- ddp


def _offer_ddp(hooks: ModuleType, functions: dict[str, Any], finishing: Any) -> None:
    get_ddp = offered(hooks, "get_ddp", "get_ddp_individual_parameters")
    get_bucketed = offered(hooks, "get_ddp_bucketed")
    after = _hook(hooks, "ddp_on_after_backward", "ddp_individual_parameters_on_after_backward")
    after_bucketed = _hook(hooks, "ddp_bucketed_on_after_backward")
    start = _hook(hooks, "ddp_bucketed_on_train_batch_start")

    def ddp(module: nn.Module, *, process_group: ProcessGroup | None = None) -> nn.Module:
        refuse_group("get_ddp", process_group)
        assert get_ddp is not None
        wrapped = _callable(get_ddp(module), get_ddp)
        finishing[wrapped] = after
        return wrapped

    def ddp_bucketed(
        module: nn.Module, *, bucket_size_mb: float, process_group: ProcessGroup | None = None
    ) -> nn.Module:
        refuse_group("get_ddp_bucketed", process_group)
        assert get_bucketed is not None
        made = _callable(get_bucketed(module, bucket_size_mb), get_bucketed)
        wrapped: Any = made if isinstance(made, nn.Module) else _Hookable(made)
        parameters = list(module.parameters())
        batch = SimpleNamespace(is_open=False)

        def start_batch(wrapped: nn.Module, inputs: object) -> None:
            if not torch.is_grad_enabled():  # an evaluation is no batch of training
                return
            # Gradients that no finish has followed: this is one more micro-batch of the same batch.
            if batch.is_open and any(p.grad is not None and p.grad.any() for p in parameters):
                return
            batch.is_open = True
            start(wrapped, _optimizer_of(wrapped))

        def end_batch(wrapped: nn.Module, optimizer: Optimizer) -> None:
            batch.is_open = False
            after_bucketed(wrapped, optimizer)

        wrapped.register_forward_pre_hook(start_batch)
        finishing[wrapped] = end_batch
        return wrapped

    functions |= {"ddp": ddp} if get_ddp else {}
    functions |= {"ddp_bucketed": ddp_bucketed} if get_bucketed else {}


def _hook(hooks: ModuleType, *names: str) -> Hook:
    """The hook as it stands, one that is left open too: without it the wrapper is not offered."""
    found = [getattr(hooks, name) for name in names if hasattr(hooks, name)]
    usable = offered(hooks, *names)
    return usable or (found[0] if found else lambda wrapped, optimizer: None)


def _callable(wrapped: Any, getter: Callable[..., Any]) -> Any:
    """A DDP wrapper as the course's tests use it: they call it, and do not ask for an nn.Module."""
    if not callable(wrapped):
        raise TypeError(
            f"expected {getter.__name__} to return what can be called like the module, got "
            f"{wrapped!r:.60}; see tests/adapters.py of the checkout"
        )
    return wrapped


class _Hookable:
    """Gives a wrapper that is no nn.Module the one hook that the adapter needs; all else is its."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    def register_forward_pre_hook(self, hook: Callable[[Any, Any], None]) -> None:
        self.hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.hook(self, args)
        return self.theirs(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.theirs, name)


def _module(wrapped: object, getter: Callable[..., Any]) -> nn.Module:
    if not isinstance(wrapped, nn.Module):
        raise TypeError(
            f"expected {getter.__name__} to return a torch.nn.Module, got {wrapped!r:.60}; see "
            "tests/adapters.py of the checkout"
        )
    return wrapped


def _optimizer_of(wrapped: nn.Module) -> Optimizer:
    """What the hooks get beside the model; the suite's own optimizer is not theirs to see."""
    owner = wrapped if hasattr(wrapped, "parameters") else wrapped.module
    return _Idle(owner.parameters(), lr=0.0)  # type: ignore[union-attr]  # foreign code


class _Idle(torch.optim.SGD):
    """Changes nothing, gradients neither: a hook that clears them means to begin a step."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


# ------------------------------------------------------------------------------------------ fsdp


def _offer_fsdp(hooks: ModuleType, functions: dict[str, Any], finishing: Any) -> None:
    get_fsdp = offered(hooks, "get_fsdp")
    if get_fsdp is None:
        return
    after = _hook(hooks, "fsdp_on_after_backward")
    names: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()

    def fsdp(module: nn.Module, *, compute_dtype: torch.dtype | None = None) -> nn.Module:
        module, renamed = use_course_layers(module)
        wrapped = _module(get_fsdp(module, compute_dtype=compute_dtype), get_fsdp)
        finishing[wrapped] = after
        names[wrapped] = renamed
        return wrapped

    def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
        found = dict(hooks.fsdp_gather_full_params(model))
        for name, parameter in model.named_parameters():
            if not name.endswith(
                "weight"
            ):  # the course's model has no other, so it may be left out
                found.setdefault(name, parameter)
        renamed = names.get(model, {})
        plain = {name.removeprefix("module."): value for name, value in found.items()}
        return {renamed.get(name, name): value for name, value in plain.items()}

    functions |= {"fsdp": fsdp, "full_parameters": full_parameters}


class _Biased(nn.Module):
    """A layer of the course, which has no bias, and a bias."""

    def __init__(self, linear: nn.Module, bias: nn.Parameter) -> None:
        super().__init__()
        self.linear = linear
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        return out + self.bias.to(out.dtype)


def use_course_layers(module: nn.Module) -> tuple[nn.Module, dict[str, str]]:
    """Put the course's Linear and Embedding in the place of torch's, with the same Parameters.

    Returns:
        the module, another one if it is a layer itself; and the names of parameters that have
        another one now, as {new: old}.
    """
    renamed: dict[str, str] = {}
    for prefix, parent in list(module.named_modules()):
        for name, child in list(parent.named_children()):
            path = f"{prefix}.{name}." if prefix else f"{name}."
            setattr(parent, name, _course_layer(child, path, renamed))
    return _course_layer(module, "", renamed), renamed


def _course_layer(module: nn.Module, path: str, renamed: dict[str, str]) -> nn.Module:
    """The course's layer for one of torch's; any other module as it is."""
    linear_class, embedding_class = _course_layers()
    if type(module) is nn.Embedding and embedding_class is not None:
        made = embedding_class(module.num_embeddings, module.embedding_dim)
        return _with_weight(made, module.weight)
    if type(module) is nn.Linear and linear_class is not None:
        made = linear_class(module.in_features, module.out_features)
        layer = _with_weight(made, module.weight)
        if module.bias is None:
            return layer
        renamed[f"{path}linear.weight"] = f"{path}weight"
        return _Biased(layer, module.bias)
    is_theirs = not type(module).__module__.startswith("torch.")
    if isinstance(module, nn.Linear | nn.Embedding) and is_theirs and linear_class is not None:
        kind = type(module).__name__
        raise NotImplementedError(f"{kind}: the course's layers stand for torch's own alone")
    return module


def _course_layers() -> tuple[Any, Any]:
    """Linear and Embedding of cs336_basics; None for what this checkout does not have."""
    try:
        model = importlib.import_module("cs336_basics.model")
    except ModuleNotFoundError:
        return None, None
    return getattr(model, "Linear", None), getattr(model, "Embedding", None)


def _with_weight(layer: nn.Module, weight: torch.Tensor) -> nn.Module:
    own = getattr(layer, "weight", None)
    if not isinstance(own, nn.Parameter) or own.shape != weight.shape:
        raise TypeError(
            f"expected {type(layer).__name__} of cs336_basics to have a parameter `weight` of "
            f"shape {tuple(weight.shape)}, as the course's own, got {getattr(own, 'shape', own)!r}"
        )
    layer.weight = weight  # type: ignore[assignment]  # torch's layers hold a Parameter
    return layer


# ------------------------------------------------------------------------------ zero1, attention


def _offer_optimizer(hooks: ModuleType, functions: dict[str, Any]) -> None:
    get_sharded_optimizer = offered(hooks, "get_sharded_optimizer")
    if get_sharded_optimizer is None:
        return

    def sharded_optimizer(
        params: Iterable[Any],
        optimizer_cls: type[Optimizer],
        *,
        process_group: ProcessGroup | None = None,
        **kwargs: Any,
    ) -> Optimizer:
        refuse_group("get_sharded_optimizer", process_group)
        return get_sharded_optimizer(params, optimizer_cls, **kwargs)  # type: ignore[no-any-return]  # foreign code

    functions["sharded_optimizer"] = sharded_optimizer


def _kernel(hooks: ModuleType, name: str) -> Callable[[], Any] | None:
    """The getter of an autograd function, None where it is left open."""
    getter = offered(hooks, name)
    try:
        if getter is not None:
            getter()
    except NotImplementedError:
        return None
    except Exception:  # its clauses call it again, and say what it raised
        return getter
    return getter


def _attention(getter: Callable[[], Any]) -> Callable[..., Any]:
    def flash_attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool | None = None,
        scale: float | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        # Where the caller leaves the flag out, so does the call: its default is judged, too.
        flag = () if causal is None else (causal,)
        if scale is not None:
            raise NotImplementedError("the exercise's attention takes no scale")
        if causal and q.shape[-2] != k.shape[-2]:
            raise NotImplementedError(
                "the exercise's attention is causal for as many queries as keys; got "
                f"{q.shape[-2]} and {k.shape[-2]}"
            )
        function = getter()
        if q.ndim == 3:
            out = function.apply(q, k, v, *flag)
            return (out, _lse(function, q, k, v, *flag)) if return_lse else out
        if q.ndim != 4 or k.ndim != 4 or q.shape[1] != k.shape[1]:
            raise NotImplementedError(
                f"the exercise's attention takes q, k and v as [batch, seq, dim], so heads of one "
                f"number; got {tuple(q.shape)} and {tuple(k.shape)}"
            )
        # To the exercise a head is one more element of the batch.
        heads = q.shape[:2]
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        out = function.apply(q, k, v, *flag).unflatten(0, heads)
        if not return_lse:
            return out
        return out, _lse(function, q, k, v, *flag).unflatten(0, heads)

    return flash_attention


def _lse(
    function: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *flag: bool
) -> torch.Tensor:
    """[batch, seq_q], the one tensor of that shape that the exercise says to save for backward."""
    with torch.enable_grad():
        out = function.apply(*(t.detach().requires_grad_() for t in (q, k, v)), *flag)
    saved = getattr(out.grad_fn, "saved_tensors", ())
    rows = [t for t in saved if t.shape == q.shape[:2]]
    if len(rows) != 1:
        raise RuntimeError(
            f"expected exactly one saved tensor of shape {tuple(q.shape[:2])}, the log-sum-exp of "
            f"each row, got shapes {[tuple(t.shape) for t in saved]}; see the exercise"
        )
    return rows[0].detach()
