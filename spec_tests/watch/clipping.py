"""The norm of clipping: by the norm of the whole gradient, before it or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from spec_tests.watch.norm import Finding, step_norm
from spec_tests.watch.run import Step, unequal

_CLIP = "docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html"


@step_norm("watch.clip.norm", source=_CLIP)
def clip_norm(step: Step) -> Iterator[Finding]:
    """Clipping MUST use the norm of the whole gradient that the optimizer steps with."""
    clips = {rank: event["clip"] for rank, event in step.events.items() if event["clip"]}
    if len(clips) < len(step.events):
        yield from _clipped_on_some(step, clips)
        return
    whole = _whole_norm(clips)
    for rank, clip in clips.items():
        if clip["partial"]:
            yield _clipped_in_parts(step, rank, clip)
            return
        if whole is None:
            yield from _clipped_before_the_mean(step, rank, clip)
            return
        if not clip["norm"] or not clip["clipped"]:
            continue
        used, right = clip["clipped"] / clip["norm"], min(1.0, clip["max"] / (whole + 1e-6))
        own = _norm([part[0] for part in clip["parts"]], clip["kind"])
        if abs(used / right - 1) > 0.03:
            is_own = abs(used / min(1.0, clip["max"] / (own + 1e-6)) - 1) < 0.01 and own != whole
            yield step.finding(
                rank,
                f"expected gradients scaled by {right:.4g} (norm {whole:.4g} over all ranks), got "
                f"{used:.4g}",
                place=clip["place"],
                likely="the norm of this rank's shards alone was used" if is_own else "",
            )
            return
        ratio = clip["clipped"] / clip["stepped"] if clip["stepped"] else 1.0
        if ratio > 1.9 or ratio < 0.55:
            yield step.finding(
                rank,
                f"expected the clipped gradients in the step, got ones {ratio:.4g} times smaller",
                place=clip["place"],
                likely="scaled gradients were clipped: scaler.unscale_(optimizer) comes first",
            )
            return


def _clipped_in_parts(step: Step, rank: int, clip: dict[str, Any]) -> Finding:
    """Gradients that were clipped, and added to, before they were clipped for the step."""
    return step.finding(
        rank,
        f"expected the gradient of {clip['backwards']} micro-batches to be clipped once, got it "
        f"scaled down {clip['partial']} times before it was whole",
        place=clip["place"],
        likely="clip_grad_norm_ is called after each backward: earlier micro-batches weigh less",
        is_advice=True,
    )


def _clipped_on_some(step: Step, clips: dict[int, Any]) -> Iterator[Finding]:
    if clips:
        rank = next(rank for rank in step.events if rank not in clips)
        yield step.finding(
            rank,
            f"expected clipped gradients as on rank {min(clips)}, got others",
            place=clips[min(clips)]["place"],
            likely="only some ranks clip: the others keep the whole gradient",
            needs_replicas=True,
        )


def _clipped_before_the_mean(step: Step, rank: int, clip: Any) -> Iterator[Finding]:
    """Replicated gradients that differed when they were clipped and are equal in the step."""
    is_replica = all(part[1] in ("ddp", "plain") for part in clip["parts"])
    if is_replica and not list(unequal(step, "grads", every=True)):
        yield step.finding(
            rank,
            "expected the norm of the reduced gradients, got one of gradients that differ between "
            "the ranks",
            place=clip["place"],
            likely="gradients are clipped before they are reduced",
        )


def _whole_norm(clips: dict[int, Any]) -> float | None:
    """Return the norm over all ranks; None where replicated parts differ between the ranks."""
    kind = next(iter(clips.values()))["kind"]
    if any(part[1] == "tensor" for clip in clips.values() for part in clip["parts"]):
        return None  # tensor parallelism: which parts are the same is not known
    alike = [[p[0] for p in c["parts"] if p[1] in ("ddp", "plain")] for c in clips.values()]
    first = alike[0]
    if any(
        len(a) != len(first)
        or any(abs(x - y) > 1e-3 * abs(y) for x, y in zip(a, first, strict=True))
        for a in alike
    ):
        return None
    parts = {}
    for rank, clip in clips.items():
        for index, (value, of, shard) in enumerate(clip["parts"]):
            if of not in ("ddp", "plain"):
                parts[index, tuple(shard) if of == "sharded" else rank] = value
    return _norm([*first, *parts.values()], kind)


def _norm(parts: Sequence[float], kind: float) -> float:
    is_largest = kind == float("inf")
    return max(parts) if is_largest else float(sum(part**kind for part in parts) ** (1 / kind))
