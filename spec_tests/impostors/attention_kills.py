"""What the usual tests of attention accept: the chapter's near-misses, held against two of them.

    python -m spec_tests.impostors.attention_kills        a table in Markdown

Both tests are written here after the form of public ones: that of a course (float32, one shape, one
head, full and causal, output, log-sum-exp and gradients to 1e-2) and that of a kernel tutorial
(float16, one batch of two heads, causal, output and gradients to 1e-2). An impostor that raises is
rejected. Beside them stand the clauses that reject it, as `python -m spec_tests impostors` proves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spec_tests.impostors import CATALOGUE
from spec_tests.impostors.card import Impostor

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
    """Those that bring an attention of their own; wrong refusals and costs are no values."""
    return [card for card in CATALOGUE.values() if card.id.startswith("attention.")]


def function_of(card: Impostor) -> Function:
    """The attention that it brings."""
    functions = card.functions() if card.functions else {}
    found: Function = functions["flash_attention"]
    return found


def main() -> int:
    """Print the table."""
    torch.set_num_threads(1)
    accepted = {"course": 0, "tutorial": 0}
    print("| near-miss | what it does | course's test | tutorial's test | rejected by |")
    print("|---|---|---|---|---|")
    cards = [card for card in near_misses() if card.functions]
    for card in cards:
        passed = {
            "course": course_test(function_of(card)),
            "tutorial": tutorial_test(function_of(card)),
        }
        verdicts = ["accepts" if ok else "rejects" for ok in passed.values()]
        accepted = {name: n + passed[name] for name, n in accepted.items()}
        clauses = ", ".join(clause.removeprefix("attention.") for clause in card.rejected_by)
        print(f"| {card.id} | {card.does} | {' | '.join(verdicts)} | {clauses} |", flush=True)
    print()
    print(
        f"Of {len(cards)} near-misses the course's test accepts {accepted['course']}, "
        f"the tutorial's {accepted['tutorial']}, the chapter none."
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
