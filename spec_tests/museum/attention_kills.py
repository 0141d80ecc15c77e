"""What the usual tests of attention accept: the chapter's near-misses, held against two of them.

    python -m spec_tests.museum.attention_kills        a table in Markdown
    python -m spec_tests.museum.attention_kills ID     one of them: "accepts" or "rejects", twice

Both tests are written here after the form of public ones: that of a course (float32, one shape, one
head, full and causal, output, log-sum-exp and gradients to 1e-2) and that of a kernel tutorial
(float16, one batch of two heads, causal, output and gradients to 1e-2). An impostor that raises is
rejected. Beside them stand the clauses that reject it, as `python -m spec_tests impostors` proves.
Near-misses of the kernels run in Triton's interpreter, where it is installed, in processes of their
own: a module is patched as it is imported. `results/attention_kills.md` holds the last table.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spec_tests.impls import parse
from spec_tests.museum import CATALOGUE
from spec_tests.museum.card import Impostor
from spec_tests.rig.target import load

Function = Callable[..., Any]
TOLERANCE = 1e-2


def course_test(attention: Function) -> bool:
    """Whether a course's test accepts it: batch 4, 128 queries and keys, head dim 64, float32."""
    return all(_agrees(attention, (4, 128, 64), torch.float32, causal) for causal in (False, True))


def tutorial_test(attention: Function) -> bool:
    """Whether a kernel tutorial's test accepts it: batch 1, two heads, 128, 64, float16, causal."""
    return _agrees(attention, (1, 2, 128, 64), torch.float16, causal=True)


def _agrees(attention: Function, shape: tuple[int, ...], dtype: torch.dtype, causal: bool) -> bool:
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=generator).to(dtype) for _ in range(4)]
    try:
        seen = _answer(attention, given, causal)
    except Exception:
        return False
    wanted = _answer(_definition, [t.double() for t in given], causal)
    return all(
        torch.allclose(a.double(), b, rtol=TOLERANCE, atol=TOLERANCE)
        for a, b in zip(seen, wanted, strict=True)
    )


def _answer(attention: Function, given: list[Any], causal: bool) -> list[Any]:
    *leaves, do = [tensor.clone().requires_grad_() for tensor in given]
    out, lse = attention(*leaves, causal=causal, return_lse=True)
    statistics = [lse] if do.ndim == 3 else []  # the tutorial looks at no log-sum-exp
    return [out, *statistics, *torch.autograd.grad(out, leaves, do)]


def _definition(q: Any, k: Any, v: Any, *, causal: bool, return_lse: bool) -> Any:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def near_misses() -> list[Impostor]:
    """Those of the attention chapter that this machine can judge."""
    return [c for c in CATALOGUE.values() if c.id.startswith("attention.") and c.is_here]


def function_of(card: Impostor) -> Function:
    """The attention that it brings, or the kernels that it patches."""
    if card.functions is not None:
        found: Function
        (found,) = card.functions().values()
    else:
        found = load(parse(f"impostor:{card.id}")).flash_attention_triton
    return found


def verdicts(card: Impostor) -> tuple[str, str]:
    """What the course's test and the tutorial's say: "accepts" or "rejects"."""
    if card.functions is None:
        command = [sys.executable, "-m", __spec__.name, card.id]
        ended = subprocess.run(command, capture_output=True, text=True)
        # Nothing was said where the process died of what it read or wrote.
        course, tutorial = ended.stdout.split() or ("rejects", "rejects")
        return course, tutorial
    function = function_of(card)
    said = ["accepts" if test(function) else "rejects" for test in (course_test, tutorial_test)]
    return said[0], said[1]


HEADER = "| near-miss | what it does | course's test | tutorial's test | rejected by |"


def row(card: Impostor, said: tuple[str, str]) -> str:
    """Its line of the table."""
    clauses = ", ".join(clause.removeprefix("attention.") for clause in card.rejected_by)
    return f"| {card.id} | {card.does} | {' | '.join(said)} | {clauses} |"


def main(arguments: Sequence[str]) -> int:
    """Print the table, or what is said of one."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__spec__.name}", description=__doc__.partition("\n")[0]
    )
    names = [card.id for card in near_misses()]
    parser.add_argument("id", nargs="?", metavar="ID", choices=names, help="of one near-miss")
    asked = parser.parse_args(arguments).id
    os.environ["TRITON_INTERPRET"] = "1"  # read as Triton is imported, which is later
    torch.set_num_threads(1)
    if asked:
        function = function_of(CATALOGUE[asked])
        for test in (course_test, tutorial_test):
            print("accepts" if test(function) else "rejects")
        return 0
    accepted = [0, 0]
    print(f"{HEADER}\n|---|---|---|---|---|")
    for card in near_misses():
        said = verdicts(card)
        accepted = [n + (word == "accepts") for n, word in zip(accepted, said, strict=True)]
        print(row(card, said), flush=True)
    print(
        f"\nOf {len(near_misses())} near-misses the course's test accepts {accepted[0]}, the "
        f"tutorial's {accepted[1]}, the chapter none."
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
