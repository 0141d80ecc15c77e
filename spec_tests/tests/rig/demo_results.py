"""Results of a demonstration made by hand: what `solution.demo.page` draws, without training."""

from __future__ import annotations

from typing import Any

P, B = 4_353_024, 3_173_376
KINDS = {
    "one rank": ("alone", 1, 0),
    "control": ("alone", 1, 0),
    "ours, ddp": ("ddp", 2, P),
    "ours, bucketed": ("ddp", 2, P),
    "PyTorch's DDP": ("ddp", 2, P),
    "ours, ZeRO-1": ("zero1", 2, 2 * P),
    "ours, FSDP": ("fsdp_full_shard", 2, 2 * (P + B) + P),
    "ours, SHARD_GRAD_OP": ("fsdp_shard_grad_op", 2, 3 * P),
    "ours, NO_SHARD": ("fsdp_no_shard", 2, P),
    "PyTorch's FSDP": ("fsdp_full_shard", 2, 2 * (P + B) + P),
    "killed, resumed": ("ddp", 2, P),
}
STEPS = 30


def results(**more: Any) -> dict[str, Any]:
    """The whole object, as `solution.demo.results` gathers it."""
    return {
        "schema": "trainspec-demo/1",
        "model": "gpt2 tiny",
        "parameters": P // 4,
        "tokens_per_step": 2048,
        "steps": STEPS,
        "device": "cpu",
        "torch": "2.13.0",
        "seconds": 190.0,
        "problems": [],
        "runs": [_run(number, title) for number, title in enumerate(KINDS)],
        **more,
    }


def _run(number: int, title: str) -> dict[str, Any]:
    kind, ranks, sent = KINDS[title]
    share = P // ranks if kind in ("fsdp_full_shard", "fsdp_shard_grad_op") else P
    state = 2 * (P // ranks if share < P or kind == "zero1" else P)
    return {
        "title": title,
        "kind": kind,
        "num_ranks": ranks,
        "losses": [7.6 - 2.1 * (1 - 0.9**step) for step in range(STEPS)],
        "differences": [number % 4 * 1e-7 * (1 + step * number % 5) for step in range(STEPS)],
        "distance": {"loss": number * 2e-7, "grad_norm": number * 3e-6},
        "tokens_per_s": 5400.0 - 150 * number,
        "held": {"parameters": share, "optimizer": state},
        "peak": [446 << 20] * ranks,
        "traffic": {
            "collectives": {"allreduce_": {"count": 4, "bytes": sent}} if sent else {},
            "bytes": sent,
            "theory_bytes": sent,
            "reason": "P: every gradient once",
        },
        "weights": f"{number:02x}" * 32,
    }
