"""What the reference's attention promises beyond the contract: its class, operators and seam."""

import json
from importlib.util import find_spec

import pytest
import torch

from spec_tests.reference_tests.launch import run

PROGRAM = """
import json
import sys

import torch
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import solution
from solution.attention import BACKENDS, attention

NAME = sys.argv[1]
CLASS = {"tiled": "FlashAttentionTorch", "triton": "FlashAttentionTriton"}[NAME]
FUNCTION = {"tiled": "flash_attention", "triton": "flash_attention_triton"}[NAME]
function, Class = getattr(solution, FUNCTION), getattr(solution, CLASS)
forward = getattr(torch.ops.trainspec, f"flash_attention_{NAME}").default


def inputs(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    drawn = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return [tensor.requires_grad_() for tensor in drawn]


def gradients(out, tensors):
    return torch.autograd.grad(out, tensors, torch.ones_like(out).cumsum(-1))


def saved():
    q, k, v = inputs((2, 20, 16), (2, 24, 16), (2, 24, 16))
    out = Class.apply(q, k, v, True)
    shapes = [tuple(tensor.shape) for tensor in out.grad_fn.saved_tensors]
    same = function(q, k, v, causal=True)
    only = torch.autograd.grad(Class.apply(q.detach(), k, v.detach()).sum(), k)[0]
    return {
        "lse": shapes.count((2, 20)),
        "equal": torch.equal(out, same),
        "gradients": all(map(torch.equal, gradients(out, (q, k, v)), gradients(same, (q, k, v)))),
        "only": torch.equal(only, torch.autograd.grad(Class.apply(q, k, v).sum(), k)[0]),
    }


def second():
    q, k, v = inputs((1, 2, 8, 16), (1, 2, 8, 16), (1, 2, 8, 16))
    said = []
    for out in (function(q, k, v), Class.apply(q[0], k[0], v[0], False)):
        first = torch.autograd.grad(out.square().sum(), q, create_graph=True)[0]
        for derive in (
            lambda first=first: first.sum().backward(retain_graph=True),
            lambda first=first: torch.autograd.grad(first.sum(), k, retain_graph=True),
        ):
            try:
                derive()
                said.append("a number")
            except NotImplementedError as error:
                said.append(str(error))
    return said


def operators():
    tensors = inputs((1, 2, 20, 16), (1, 1, 24, 16), (1, 1, 24, 16))
    transposed = [t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    empty = [t.detach()[:0] for t in tensors]
    checks = [
        opcheck(forward, (*(t.requires_grad_() for t in given), True, 0.3), raise_exception=False)
        for given in (tensors, transposed, empty)
    ]
    return sorted({str(result) for check in checks for result in check.values()})


def compiled():
    tensors = inputs((1, 2, 20, 16), (1, 1, 24, 16), (1, 1, 24, 16))

    def twice(q, k, v):
        return 2 * function(q, k, v, causal=True)

    whole = torch.compile(twice, fullgraph=True, backend="aot_eager")(*tensors)
    eager = twice(*tensors)
    return [
        torch.equal(eager, whole),
        all(map(torch.equal, gradients(eager, tensors), gradients(whole, tensors))),
    ]


def counted():
    shape = (2, 4, 16, 16)
    found = []
    for causal in (False, True):
        with FlopCounterMode(display=False) as counter:
            function(*inputs(shape, shape, shape), causal=causal).sum().backward()
        found.append(counter.get_total_flops())
    return found


def under_autocast():
    q, k, v = inputs((1, 2, 20, 16), (1, 1, 24, 16), (1, 1, 24, 16))
    with torch.autocast("cpu", dtype=torch.float16):
        out = function(q, k.half(), v)
    halves = (tensor.half() for tensor in (q, k, v))
    return [str(out.dtype), torch.equal(out, function(*halves)), str(gradients(out, q)[0].dtype)]


def seam():
    tensors = inputs((2, 4, 33, 16), (2, 2, 40, 16), (2, 2, 40, 16))
    found = {}
    for causal in (False, True):
        for scale in (None, -0.3):
            exact = attention(*(t.double() for t in tensors), causal=causal, scale=scale,
                              backend="plain")
            for name in {"plain", "sdpa", NAME}:
                out = attention(*tensors, causal=causal, scale=scale, backend=name)
                distance = float((out - exact).norm() / exact.norm())
                found[name] = max(found.get(name, 0.0), distance)
    return found


print(json.dumps({
    "saved": saved(), "second": second(), "operators": operators(), "compiled": compiled(),
    "counted": counted(), "autocast": under_autocast(), "seam": seam(),
}))
"""


@pytest.fixture(scope="session", params=["tiled", "triton"])
def found(request, tmp_path_factory):
    if request.param == "triton" and find_spec("triton") is None:
        pytest.skip("needs Triton, which is not installed")
    folder = tmp_path_factory.mktemp("attention")
    ended = run(PROGRAM, request.param, folder=folder, environment={"TRITON_INTERPRET": "1"})
    assert ended.status == 0, ended.err
    return json.loads(ended.out.splitlines()[-1])


def test_the_class_keeps_one_lse_and_computes_what_the_function_computes(found):
    assert found["saved"] == {"lse": 1, "equal": True, "gradients": True, "only": True}


def test_a_second_derivative_is_refused_in_words(found):
    assert len(found["second"]) == 4
    for said in found["second"]:
        assert "first derivatives only" in said


def test_the_operators_are_what_pytorch_expects_of_operators(found):
    assert found["operators"] == ["SUCCESS"]


def test_compiling_the_whole_changes_no_bit(found):
    assert found["compiled"] == [True, True]


def test_operations_are_counted_as_the_papers_count(found):
    whole = 7 * 2 * (2 * 4) * 16 * 16 * 16
    assert found["counted"] == [whole, whole // 2]


def test_autocast_makes_all_three_one_dtype_and_gradients_stay_the_callers(found):
    assert found["autocast"] == ["torch.float16", True, "torch.float32"]


def test_every_backend_of_the_seam_computes_the_same(found):
    assert max(found["seam"].values()) < 1e-5, found["seam"]
    assert len(found["seam"]) == 3


def test_tuning_without_a_gpu_says_what_it_needs(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, and it would be used for a while")
    ended = run("spec_tests.benchmarks.tune", folder=tmp_path)

    assert ended.status == 2
    assert "there is no CUDA device" in ended.err
