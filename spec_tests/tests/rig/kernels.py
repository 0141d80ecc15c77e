"""Kernels in Triton that are wrong, or right and beyond the interpreter; imported by ranks only."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_pointers(x, out, is_doubled, N: tl.constexpr):
    """The idiom of CS336: block pointers, their element type, a plain bool."""
    source = tl.make_block_ptr(x, (N, N), (N, 1), (0, 0), (N, N), (1, 0))
    target = tl.make_block_ptr(out, (N, N), (N, 1), (0, 0), (N, N), (1, 0))
    values = tl.load(source, boundary_check=(0, 1), padding_option="zero")
    if is_doubled:
        values = values * 2
    tl.store(target, values.to(target.type.element_ty), boundary_check=(0, 1))


@triton.jit
def descriptors(x, out, is_doubled, N: tl.constexpr):
    """The idiom of Triton's tutorials: both tensors come in descriptors."""
    out.store([0, 0], x.load([0, 0]))


@triton.jit
def beyond(x, out, is_doubled, N: tl.constexpr):
    """Wrong: the last row of the tile lies beyond the end of the tensor."""
    at = N + tl.arange(0, N * N)
    tl.store(out + at, tl.load(x + tl.arange(0, N * N)))


@triton.jit
def reads_beyond(x, out, is_doubled, N: tl.constexpr):
    """Wrong: the last row is read beyond the end of the tensor."""
    at = tl.arange(0, N * N)
    tl.store(out + at, tl.load(x + N + at))


@triton.jit
def device_function(x, out, is_doubled, N: tl.constexpr):
    """A function that only a device has."""
    at = tl.arange(0, N)
    tl.store(out + at, tl.extra.cuda.libdevice.exp(tl.load(x + at)))


@triton.jit
def assembly(x, out, is_doubled, N: tl.constexpr):
    """Instructions of a device."""
    at = tl.arange(0, N)
    moved = tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [tl.load(x + at)], tl.float32, True, 1
    )
    tl.store(out + at, moved)


@triton.autotune([triton.Config({"M": m}) for m in (1, 2, 4)], key=["is_doubled"])
@triton.jit
def tuned(x, out, is_doubled, N: tl.constexpr, M: tl.constexpr):
    """Several configurations, to be timed on a device; the first one does not compile."""
    tl.static_assert(M > 1)
    tl.store(out, tl.load(x))


@triton.jit
def unknown_name(x, out, is_doubled, N: tl.constexpr):
    """Wrong: a misspelt name."""
    tl.store(out, no_such_name)  # type: ignore[name-defined]  # noqa: F821 - the fault


@triton.jit
def unknown_function(x, out, is_doubled, N: tl.constexpr):
    """Wrong: a misspelt function."""
    tl.no_such_function(x)


@triton.jit
def asserting(x, out, is_doubled, N: tl.constexpr):
    """Wrong, in words that Triton uses elsewhere."""
    assert N > 100, "Block pointers have been removed; 0 active drivers; not supported"
