"""Forms of collectives that torch documents and NCCL takes, and that gloo refuses.

The list is in spec_tests/README.md, below "CUDA on a CPU". An implementation that uses one of them
is right, so `advice` recognises gloo's refusal: the clause is "not here". Where CUDA is stood in
for, `install` has each of them done by a form that gloo takes, with the same values and kinds of
collectives.

Gloo's words alone do not tell a form that it lacks from sizes that are wrong. So `advice` looks at
what was passed: sizes or dtypes that NCCL refuses as well stay a failure.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_GATHERS = ("all_gather_single", "all_gather_into_tensor", "_all_gather_base")
_SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor", "_reduce_scatter_base")
_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", *_SCATTERS)
_COPIES = ("broadcast", "all_gather", "all_to_all", "all_to_all_single", *_GATHERS)
_PREMUL = "_make_nccl_premul_sum"

_SAID = (
    (rf"Cannot use ReduceOp\.PREMUL_SUM with Gloo|{_PREMUL}", "ReduceOp.PREMUL_SUM"),
    (r"Work::getFuture not implemented", "get_future() of this collective"),
    (r"Failed to create StreamBlock", "block_current_stream()"),
    (r"Backend gloo does not support (\w+)", "this collective"),
)
"""Words of errors that leave no doubt, each with what is refused."""


# -------------------------------------------------------------------------- what gloo refused


def advice(error: BaseException) -> str:
    """Return why a clause is "not here" if gloo refused what NCCL takes; empty for other errors."""
    words = str(error) if isinstance(error, RuntimeError | AttributeError | ImportError) else ""
    form = next((form for said, form in _SAID if re.search(said, words[:2000])), "")
    if isinstance(error, RuntimeError) and re.search("ProcessGroupGloo|scalar type", words[:2000]):
        with contextlib.suppress(Exception):  # foreign values: what cannot be looked at is no form
            form = form or _form_of_call(error)
    if not form:
        return ""
    is_pretended = "spec_tests.rig.ranks.pretended_cuda" in sys.modules
    where = "run it on a machine with a CUDA device (--transport cuda)"
    return f"gloo refuses {form}, which torch documents and NCCL takes; " + (
        where if is_pretended else "--pretend-cuda stands in for NCCL"
    )


def _form_of_call(error: BaseException) -> str:
    """The form of the call of torch.distributed that raised, if NCCL takes it."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name, given = frame.f_code.co_name, frame.f_locals
        if frame.f_code.co_filename != c10d.__file__:
            continue
        if name in (*_COPIES, *_REDUCTIONS) and any(_is_float8(value) for value in given.values()):
            return f"{name} of float8"
        if name in _GATHERS:
            return _stacked(name, given["output_tensor"], given["input_tensor"], given["group"])
        if name in _SCATTERS:
            return _stacked(name, given["input"], given["output"], given["group"])
        if name == "all_gather":
            return _listed(given["tensor_list"], given["tensor"], given["group"])
        if name == "all_to_all" and _is_uneven(given):
            return "all_to_all of tensors of unequal sizes"
    return ""


def _is_float8(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and "float8" in str(value.dtype)


def _stacked(name: str, whole: torch.Tensor, part: torch.Tensor, group: Any) -> str:
    is_form = _fits(whole, part, group)
    return f"{name} between tensors of unlike shapes, such as [n] and [ranks, n]" if is_form else ""


def _fits(whole: torch.Tensor, part: torch.Tensor, group: Any) -> bool:
    """Whether NCCL takes the two: as many elements as all ranks' parts have, whatever the shape."""
    if not isinstance(whole, torch.Tensor) or not isinstance(part, torch.Tensor):
        return False
    is_dense = whole.is_contiguous() and part.is_contiguous()
    numel = part.numel() * dist.get_world_size(group)
    return is_dense and whole.dtype == part.dtype and whole.numel() == numel


def _listed(outputs: Sequence[torch.Tensor], own: torch.Tensor, group: Any) -> str:
    rank = dist.get_rank(group)
    if len(outputs) != dist.get_world_size(group) or outputs[rank].numel() != own.numel():
        return ""
    if any(t.dtype != own.dtype or not t.is_contiguous() for t in outputs):
        return ""
    is_even = len({t.numel() for t in outputs}) == 1
    return f"all_gather into tensors of {'another shape' if is_even else 'unequal sizes'}"


def _is_uneven(given: dict[str, Any]) -> bool:
    both = [*given["output_tensor_list"], *given["input_tensor_list"]]
    return len({t.dtype for t in both}) == 1 and len({t.shape for t in both}) > 1


# ----------------------------------------------------------------------- by forms that it takes


class PremulSum:
    """What `_make_nccl_premul_sum` returns: a sum of tensors that are multiplied first."""

    def __init__(self, factor: Any) -> None:
        self.factor = factor


class Together:
    """The handle of several operations, and of what is left to do after them."""

    def __init__(self, works: Sequence[Any], then: Callable[[], None] | None = None) -> None:
        self.works, self.then = works, then

    def wait(self, *ignored: object) -> bool:
        """Wait for all of them."""
        for work in self.works:
            work.wait()
        then, self.then = self.then, None
        if then is not None:
            then()
        return True

    synchronize = block_current_stream = wait

    def is_completed(self) -> bool:
        """Whether nothing is left to wait for."""
        return all(work.is_completed() for work in self.works) and self.wait()

    is_success = is_completed

    def get_future(self) -> Any:
        """A future that is over."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result([])
        return future


def install() -> None:
    """Let this process use all of these forms, before foreign code is imported; for good."""
    for names, change in (
        (_COPIES, _as_bytes),
        (_GATHERS, functools.partial(_flatten, "output_tensor", "input_tensor")),
        (_SCATTERS, functools.partial(_flatten, "input", "output")),
        (_REDUCTIONS, _multiply_first),
    ):
        for name in (name for name in names if hasattr(c10d, name)):
            _replace(name, _with_arguments(getattr(c10d, name), change))
    _replace("all_gather", _gathered_in_lists(c10d.all_gather))
    _replace("all_to_all", _exchanged_flat(c10d.all_to_all))
    _replace(_PREMUL, PremulSum)
    work: Any = dist.Work
    work.get_future = _with_a_future(work.get_future)
    work.block_current_stream = lambda self: self.wait() and None


def _replace(name: str, value: Any) -> None:
    for home in (dist, c10d):
        setattr(home, name, value)


def _with_arguments(
    function: Callable[..., Any], change: Callable[[dict[str, Any]], None]
) -> Callable[..., Any]:
    """`function`, whose arguments by name are changed first."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        with torch.no_grad():
            change(bound.arguments)
        return function(*bound.args, **bound.kwargs)

    return called


def _as_bytes(given: dict[str, Any]) -> None:
    def plain(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        return value.detach().view(torch.uint8) if _is_float8(value) else value

    given.update({name: plain(value) for name, value in given.items()})


def _flatten(of_all: str, of_one: str, given: dict[str, Any]) -> None:
    """Make both flat, if NCCL takes them as they are and gloo does not."""
    whole, part, group = given[of_all], given[of_one], given.get("group")
    if not _fits(whole, part, group):
        return
    rows = (dist.get_world_size(group) * part.shape[0], *part.shape[1:]) if part.dim() else None
    if whole.shape != rows:
        given[of_all], given[of_one] = whole.detach().view(-1), part.detach().view(-1)


def _multiply_first(given: dict[str, Any]) -> None:
    if not isinstance(operator := given.get("op"), PremulSum):
        return
    given["op"] = dist.ReduceOp.SUM
    if "tensor" in given:
        given["tensor"].mul_(operator.factor)
    elif "input" in given:
        given["input"] = given["input"] * operator.factor
    else:
        given["input_list"] = [each * operator.factor for each in given["input_list"]]


def _with_a_future(get_future: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def found(work: Any) -> Any:
        try:
            return get_future(work)
        except RuntimeError as error:
            if "getFuture not implemented" not in str(error):
                raise
            return Together([work]).get_future()

    return found


def _gathered_in_lists(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if all(each.shape == tensor.shape for each in tensor_list) or not _listed(
            tensor_list, tensor, group
        ):
            return function(tensor_list, tensor, group, async_op)
        if all(each.numel() == tensor.numel() for each in tensor_list):
            alike = [each.detach().view(tensor.shape) for each in tensor_list]
            return function(alike, tensor, group, async_op)
        tensor_list[dist.get_rank(group)].copy_(tensor)
        sent = Together(
            [
                dist.broadcast(each, group=group, group_src=rank, async_op=True)
                for rank, each in enumerate(tensor_list)
            ]
        )
        return sent if async_op else sent.wait() and None

    return gather


def _exchanged_flat(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def exchange(
        output_tensor_list: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False
    ) -> Any:
        if not _is_uneven(
            {"output_tensor_list": output_tensor_list, "input_tensor_list": input_tensor_list}
        ):
            return function(output_tensor_list, input_tensor_list, group, async_op)
        sent = torch.cat([each.detach().reshape(-1) for each in input_tensor_list])
        sizes = [each.numel() for each in output_tensor_list]
        received = sent.new_empty(sum(sizes))
        lengths = [each.numel() for each in input_tensor_list]
        work = dist.all_to_all_single(received, sent, sizes, lengths, group, async_op=True)

        def copy() -> None:
            for each, part in zip(output_tensor_list, received.split(sizes), strict=True):
                each.detach().copy_(part.view(each.shape))

        later = Together([work], copy)
        return later if async_op else later.wait() and None

    return exchange
