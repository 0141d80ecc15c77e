"""On a GPU: every configuration by value, long sequences, large grids, and float32 that is float32.

A compiler makes another kernel for each head dim, dtype and mask, and has made wrong ones (ptxas
12.8 did, of attention). Gaussian inputs alone never showed it: a gradient was five times off where
a few channels are large. So each configuration is held to the rules of its dtype on three
distributions.
"""

from __future__ import annotations

import pytest
import torch

from spec_tests.chapters.attention import bodies, rules
from spec_tests.chapters.attention.bodies import ATTENTION, observe
from spec_tests.chapters.attention.defined import ALL, OUTPUT_AND_GRADIENTS, as_defined, fitting
from spec_tests.chapters.attention.problem import Problem, inputs
from spec_tests.chapters.attention.test_layout import answer
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

CUDA = ("cuda",)
clause = clauses(judges=ATTENTION, level="correct", worlds=(1,), transports=CUDA)
ELSEWHERE = "seen on a GPU alone; what it judges is judged by value in the interpreter, too"
# One head dim per row of a table of tiles, and some that are padded.
HEAD_DIMS = (16, 64, 80, 128, 256)
DTYPES = ("bfloat16", "float16", "float32")


@clause(
    "attention.device.every-configuration",
    source="contract: values, any-size; "
    "flash-linear-attention issue 1262, TransformerEngine issue 3216: wrong code for a tile",
    no_impostor=ELSEWHERE,
)
@pytest.mark.parametrize("data", ["normal", "outliers", "ones"])
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_configuration_has_the_values(world, subject, head_dim, dtype, mask, data):
    """Every head dim, dtype and mask MUST have the definition's values on three distributions."""
    problem = Problem(
        seq_q=300,
        seq_k=333,
        head_dim=head_dim,
        batch=2,
        heads=4,
        kv_heads=2,
        dtype=dtype,
        causal=mask == "causal",
        data=data,
    )
    problem = fitting(world, subject, problem)
    seen = observe(world, subject, bodies.everything, problem)

    # Where all is one, dQ and dK are zero but for rounding, and norms of zero allow nothing.
    names = ("O", "L", "dV") if data == "ones" else ALL
    rules.close(seen, problem, names=names, tf32=True)


@clause(
    "attention.device.long-sequences",
    source="contract: one-rounding; "
    "accumulators in bfloat16 grow worse with length; the norm of the error shows it",
    no_impostor=ELSEWHERE,
)
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_sequences_are_as_exact_as_short_ones(world, subject, head_dim, mask):
    """Over 4096 keys in bfloat16, O MUST stay within one rounding, its gradients within 1.25."""
    problem = Problem(
        seq_q=4096, head_dim=head_dim, heads=1, dtype="bfloat16", causal=mask == "causal"
    )
    as_defined(world, subject, problem, *ALL)


@clause(
    "attention.device.float32-is-float32",
    level="production",
    source="contract: float32-products; "
    "products of float32 are TF32 on tensor cores unless one says otherwise",
    no_impostor=ELSEWHERE,
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_float32_has_24_bits(world, subject, head_dim):
    """In float32 outputs and gradients MUST have its rounding, not that of TF32's eleven bits."""
    problem = fitting(world, subject, Problem(seq_q=300, head_dim=head_dim, causal=True))
    seen = observe(world, subject, bodies.everything, problem)

    rules.close(seen, problem, names=ALL)


@clause(
    "attention.device.many-sequences",
    source="contract: any-size; "
    "CUDA: 65 535 blocks on the second and third axis; PyTorch issue 142228",
    no_impostor=ELSEWHERE,
)
def test_more_sequences_than_a_grid_axis_holds(world, subject):
    """More than 65 535 pairs of sequence and head MUST work like few."""
    problem = Problem(seq_q=5, head_dim=16, batch=33_000, heads=2, dtype="float16", causal=True)
    as_defined(world, subject, problem, *OUTPUT_AND_GRADIENTS)


def on_side_stream(ctx, subject, problem):
    """The answer on the current stream, and on another one that made the inputs just before."""
    x = inputs(problem)
    first = answer(ctx, subject, problem, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = [torch.full_like(t, torch.nan, device=ctx.device) for t in (x.q, x.k, x.v, x.do)]
        torch.cuda._sleep(50_000_000)  # a kernel on the wrong stream finds NaN
        for made, tensor in zip(late, (x.q, x.k, x.v, x.do), strict=True):
            made.copy_(tensor)
        x.q, x.k, x.v, x.do = late
        again = answer(ctx, subject, problem, x)
    stream.synchronize()
    return first, again


@clause(
    "attention.device.side-stream",
    source="xformers, test_cuda_streams; a launch on the default stream",
    no_impostor=ELSEWHERE,
)
def test_it_runs_on_the_current_stream(world, subject):
    """On a side stream the answer MUST have the same bits as on the default stream."""
    problem = Problem(seq_q=300, head_dim=64, dtype="bfloat16", causal=True)
    problem = fitting(world, subject, problem)
    first, again = observe(world, subject, on_side_stream, problem)

    judge.tensors([again], first, quantity="answer on the default stream", given=repr(problem))
