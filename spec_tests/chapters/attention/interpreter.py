"""Triton's interpreter on CPU tensors: made to run here, and watched.

Private names of `triton.runtime.interpreter`, the same from 3.6 to 3.9, each looked up with care:
where one is gone, the clauses that need it are "not here", never failed. Nothing is imported before
a rank calls a kernel.

The interpreter runs one program after the other, so a race gives right values there. What it can
show is who touches what: every product of tiles, and every address that is loaded and stored.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch


@functools.cache
def mend() -> None:
    """Let `range(0, tensor)` work under NumPy 2.4 and later, and kernels take plain scalars.

    Triton 3.6 turns a scalar of its own into an index with `int(array)`, and its scalars are arrays
    of one element, which NumPy no longer takes for a number. 3.6 and 3.7 hold a bool in four bytes
    and refuse that for their int1. A float argument stays a number of Python's, so that its product
    with a half-precision tile stays narrow; compiled, it is a float32 and the product is wide.
    """
    module: Any = importlib.import_module("triton.runtime.interpreter")
    patch: Any = getattr(module, "_patch_lang_tensor", None)

    def patch_and_mend(tensor: Any, *scope: Any) -> Any:
        result = patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())
        return result

    if patch is not None:
        module._patch_lang_tensor = patch_and_mend
    if hasattr(module, "_implicit_cvt"):
        _mend_scalars(module, module._implicit_cvt)
    builder: Any = getattr(module, "InterpreterBuilder", None)
    executor: Any = getattr(module, "GridExecutor", None)
    if hasattr(builder, "create_masked_store") and callable(executor):
        guard = _Guard()
        executor.__call__ = _hooked(executor.__call__, guard.launch)
        builder.create_masked_store = _hooked(builder.create_masked_store, guard.store)
        builder.create_masked_load = guard.loads(builder.create_masked_load)


class _Guard:
    """Keeps a launch within what was passed to it, so that results do not depend on the heap.

    A store outside raises, for it would overwrite the rank's own memory; atomics are not looked at.
    A load outside returns zeros, so that results are reproducible; `attention.kernels.in-bounds`
    reports it.
    """

    extents: Sequence[tuple[int, int]] = ()

    def launch(self, executor: Any, *arguments: Any, **named: Any) -> None:
        given = (*arguments, *named.values())
        tensors = [*_tensors(given)]
        # Integers may be addresses of further tensors.
        may_point = any(t.dtype in (torch.int64, torch.uint64) for t in tensors)
        may_point |= any(isinstance(each, int) and each >= 2**32 for each in given)
        self.extents = [] if may_point else _extents(tensors)
        self.kernel = executor.fn.__name__

    def loads(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(builder: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
            found = load(builder, pointers, mask, *rest, **named)
            beyond = mask.data & ~_inside(pointers.data, self.extents)
            if self.extents and beyond.any():
                found.data = np.where(beyond, np.zeros_like(found.data), found.data)
            return found

        return guarded

    def store(self, builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> None:
        addresses = _addresses(pointers, mask)
        beyond = int((~_inside(addresses, self.extents)).sum())
        if self.extents and beyond:
            is_all = beyond == addresses.size
            raise IndexError(
                f"kernel {self.kernel}: stores {beyond} elements outside of the tensors that were "
                f"passed to it; {_PAST_ALL if is_all else _PAST_THE_END}?"
            )


_PAST_THE_END = "is a mask or a boundary check missing in the last tile"
_PAST_ALL = "a whole tile: does the grid match the axes of program_id"


def _mend_scalars(module: Any, convert: Callable[[Any], Any]) -> None:
    kinds: dict[type, Any] = {float: (np.float32, module.tl.float32)}
    try:
        convert(True)
    except ValueError:  # 3.8 and later take it
        kinds[bool] = (np.bool_, module.tl.int1)

    def convert_and_mend(arg: Any) -> Any:
        if type(arg) not in kinds:
            return convert(arg)
        in_numpy, in_triton = kinds[type(arg)]
        handle = module.TensorHandle(np.array([arg], dtype=in_numpy), in_triton)
        return module.tl.tensor(handle, in_triton)

    module._implicit_cvt = convert_and_mend


@dataclass
class Launch:
    """What the programs of one launch did; plain data that a body may return.

    Attributes:
        kernel: its name.
        flops: of all products of tiles, padding and hidden tiles among them.
        loaded: elements that were loaded.
        stored: elements that were stored.
        stored_again: stores and atomics to an address that had one before in this launch.
        foreign: loads of an address that another program of this launch stored.
        outside: loads and stores outside of the storages of the kernel's arguments.
    """

    kernel: str
    flops: int = 0
    loaded: int = 0
    stored: int = 0
    stored_again: int = 0
    foreign: int = 0
    outside: int = 0


@dataclass
class _Watch:
    """Of the launch that runs now: extents of its arguments, and who stored where."""

    launches: list[Launch] = field(default_factory=list)
    extents: list[tuple[int, int]] = field(default_factory=list)
    writers: dict[int, int] = field(default_factory=dict)
    loads: list[tuple[int, np.ndarray]] = field(default_factory=list)
    program: int = -1

    def launch(self, executor: Any, *arguments: Any, **named: Any) -> None:
        self.launches.append(Launch(executor.fn.__name__))
        self.extents = _extents(_tensors((*arguments, *named.values())))
        self.writers, self.loads, self.program = {}, [], -1

    def end(self) -> None:
        if not self.writers:
            return
        addresses = np.fromiter(self.writers, dtype=np.uint64)
        order = np.argsort(addresses)
        addresses, writers = addresses[order], np.fromiter(self.writers.values(), int)[order]
        for program, loaded in self.loads:
            at = np.searchsorted(addresses, loaded).clip(max=len(addresses) - 1)
            is_foreign = (addresses[at] == loaded) & (writers[at] != program)
            self.launches[-1].foreign += int(is_foreign.sum())

    def next_program(self, builder: Any, *place: int) -> None:
        self.program += 1

    def dot(self, builder: Any, a: Any, b: Any, *rest: Any, **named: Any) -> None:
        self.launches[-1].flops += 2 * a.data.size * b.data.shape[-1]

    def load(self, builder: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> None:
        addresses = self.touched(pointers, mask)
        self.launches[-1].loaded += addresses.size
        self.loads.append((self.program, addresses))

    def store(self, builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> None:
        now = self.launches[-1]
        for address in self.touched(pointers, mask).tolist():
            now.stored += 1
            now.stored_again += address in self.writers
            self.writers[address] = self.program

    def touched(self, pointers: Any, mask: Any) -> np.ndarray:
        """The addresses that count, noting those outside of all arguments."""
        addresses = _addresses(pointers, mask)
        self.launches[-1].outside += int((~_inside(addresses, self.extents)).sum())
        return addresses


def _tensors(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors of a launch, in tuples, in descriptors and under another dtype, too."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, tuple | list):
            yield from _tensors(argument)
        elif hasattr(argument, "base"):
            yield from _tensors((argument.base,))


def _extents(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages]


def _addresses(pointers: Any, mask: Any) -> np.ndarray:
    every: np.ndarray = np.broadcast_to(pointers.data, mask.data.shape)
    return every[mask.data].astype(np.uint64)


def _inside(addresses: np.ndarray, extents: Iterable[tuple[int, int]]) -> np.ndarray:
    is_inside = np.zeros(addresses.shape, dtype=bool)
    for start, stop in extents:
        is_inside |= (addresses >= start) & (addresses < stop)
    return is_inside


@contextlib.contextmanager
def watched() -> Iterator[list[dict[str, Any]] | None]:
    """Within the block, launches are noted: a list that is filled at its end, or None.

    None: this Triton's interpreter has not the methods that are watched.
    """
    module: Any = importlib.import_module("triton.runtime.interpreter")
    builder = getattr(module, "InterpreterBuilder", None)
    executor = getattr(module, "GridExecutor", None)
    watch = _Watch()
    found: list[dict[str, Any]] = []
    hooks: dict[str, Callable[..., None]] = {
        "set_grid_idx": watch.next_program,
        "create_dot": watch.dot,
        "create_masked_load": watch.load,
        "create_masked_store": watch.store,
        "create_atomic_rmw": lambda builder, kind, *what: watch.store(builder, *what),
    }
    if executor is None or not all(hasattr(builder, name) for name in hooks):
        yield None
        return
    with contextlib.ExitStack() as stack:
        watched_launch = _hooked(executor.__call__, watch.launch, watch.end)
        stack.enter_context(mock.patch.object(executor, "__call__", watched_launch))
        for name, hook in hooks.items():
            watched_method = _hooked(getattr(builder, name), hook)
            stack.enter_context(mock.patch.object(builder, name, watched_method))
        yield found
    found.extend(asdict(launch) for launch in watch.launches)


@contextlib.contextmanager
def tensor_cores() -> Iterator[bool]:
    """Within the block, products of float32 have TF32's bits where the kernel allows it.

    Triton's default for float32 on a device is TF32, which the interpreter only notes. Operands are
    rounded to its eleven bits, to nearest. False: this interpreter has no such products.
    """
    module: Any = importlib.import_module("triton.runtime.interpreter")
    builder: Any = getattr(module, "InterpreterBuilder", None)
    if not hasattr(builder, "create_dot"):
        yield False
        return
    exact = builder.create_dot

    def dot(self: Any, a: Any, b: Any, acc: Any, precision: Any, *rest: Any) -> Any:
        if getattr(precision, "name", "") == "TF32":
            a, b = _in_tf32(a), _in_tf32(b)
        return exact(self, a, b, acc, precision, *rest)

    with mock.patch.object(builder, "create_dot", dot):
        yield True


def _in_tf32(handle: Any) -> Any:
    if handle.data.dtype != np.float32:
        return handle
    rounded = copy.copy(handle)
    bits = np.ascontiguousarray(handle.data).view(np.uint32)
    nearest = ((bits + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32)
    rounded.data = np.where(np.isfinite(handle.data), nearest, handle.data)
    return rounded


def _hooked(
    method: Any, before: Callable[..., None], after: Callable[[], None] = lambda: None
) -> Callable[..., Any]:
    def hooked(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        result = method(*args, **kwargs)
        after()
        return result

    return hooked
