"""Impostors: deliberate near-misses that the clauses must reject, and variants they must not.

A clause that nothing fails proves nothing. For every clause at least one impostor differs from
right code by a line or a method, is made of a bug that somebody really had, and must be rejected by
the clauses that its card names. Benign variants are right but unusual and must be accepted. Two
controls run each time: the null impostor (nothing is changed, nothing may be rejected) and the
forced failure (everything raises, everything must be rejected).

    python -m spec_tests --impl impostor:ddp.sum-for-mean
    python -m spec_tests impostors                  every impostor against the clauses it names
    python -m spec_tests impostors --accepted       benign variants, and a sample of other chapters
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from spec_tests.impostors import (
    attention_benign,
    attention_calls,
    attention_gradients,
    attention_kernels,
    attention_masks,
    attention_operator,
    attention_shapes,
    attention_values,
    checkpoint_benign,
    checkpoint_content,
    checkpoint_disk,
    clip_benign,
    clip_norm,
    clip_scaling,
    data_benign,
    data_files,
    data_order,
    data_state,
    ddp_benign,
    ddp_construction,
    ddp_corners,
    ddp_costs,
    ddp_gradients,
    ddp_groups,
    ddp_reductions,
    ddp_schedules,
    ddp_windows,
    fsdp_benign,
    fsdp_corners,
    fsdp_costs,
    fsdp_entrances,
    fsdp_order,
    fsdp_rows,
    fsdp_schedules,
    fsdp_settings,
    fsdp_values,
    fsdp_windows,
    measure_memory,
    measure_sweep,
    measure_throughput,
    models,
    programs,
    trace_content,
    trace_times,
    training,
    training_benign,
    training_gradient,
    training_records,
    zero1_benign,
    zero1_groups,
    zero1_schedules,
    zero1_state,
    zero1_updates,
)
from spec_tests.impostors.card import Functions, Impostor
from spec_tests.impostors.patching import forget, patched
from spec_tests.impostors.plain_ddp import overlay
from spec_tests.target import Target, import_target


def _raises_always() -> Functions:
    from spec_tests.contract import FUNCTIONS

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("forced failure")

    return dict.fromkeys(FUNCTIONS, fail)


FORCED_FAILURE = Impostor(
    "control.forced-failure",
    "Every function raises.",
    "A control: machinery that rejects nothing would accept it.",
    "",
    ("ddp.gradients.mean",),
    functions=_raises_always,
)

REFERENCE = Impostor(
    "control.reference",
    "Nothing is changed.",
    "A control: the implementation below, as it is.",
    "",
    (),
)

CATALOGUE: dict[str, Impostor] = {
    impostor.id: impostor
    for chapter in (
        data_order,
        data_files,
        data_state,
        attention_values,
        attention_masks,
        attention_shapes,
        attention_gradients,
        attention_calls,
        attention_operator,
        attention_kernels,
        ddp_construction,
        ddp_gradients,
        ddp_reductions,
        ddp_groups,
        ddp_windows,
        ddp_corners,
        ddp_costs,
        ddp_schedules,
        zero1_updates,
        zero1_groups,
        zero1_schedules,
        zero1_state,
        clip_norm,
        clip_scaling,
        checkpoint_content,
        checkpoint_disk,
        training_gradient,
        training_records,
        training,
        models,
        measure_memory,
        trace_times,
        trace_content,
        measure_throughput,
        measure_sweep,
        fsdp_corners,
        fsdp_costs,
        fsdp_entrances,
        fsdp_order,
        fsdp_rows,
        fsdp_schedules,
        fsdp_settings,
        fsdp_values,
        fsdp_windows,
        programs,
        attention_benign,
        ddp_benign,
        fsdp_benign,
        zero1_benign,
        clip_benign,
        checkpoint_benign,
        data_benign,
        training_benign,
    )
    for impostor in chapter.IMPOSTORS
} | {FORCED_FAILURE.id: FORCED_FAILURE}


def find(words: str) -> Impostor:
    """The impostor of that id.

    Raises:
        ValueError: naming those that are near.
    """
    if words == REFERENCE.id:
        return REFERENCE
    if words not in CATALOGUE:
        from difflib import get_close_matches

        near = get_close_matches(words, CATALOGUE, n=3, cutoff=0.3)
        raise ValueError(f"no impostor {words!r}; close to it: {', '.join(near) or 'none'}")
    return CATALOGUE[words]


def rejected_by() -> dict[str, Sequence[str]]:
    """Clause id to the ids of the impostors that name it."""
    table: dict[str, list[str]] = {}
    for impostor in CATALOGUE.values():
        if impostor is not FORCED_FAILURE:
            for clause in impostor.rejected_by:
                table.setdefault(clause, []).append(impostor.id)
    return {clause: tuple(ids) for clause, ids in table.items()}


def stories() -> dict[str, list[dict[str, str]]]:
    """Clause id to the cards of the impostors that it rejects, as a report tells them."""
    table: dict[str, list[dict[str, str]]] = {}
    for clause, ids in rejected_by().items():
        cards = (CATALOGUE[id] for id in ids)
        table[clause] = [
            {"impostor": c.id, "does": c.does, "seen": c.seen, "unseen": c.unseen} for c in cards
        ]
    return table


def counts() -> tuple[int, int]:
    """How many near-misses there are, and how many benign variants; controls are neither."""
    benign = sum(impostor.is_benign for impostor in CATALOGUE.values())
    return len(CATALOGUE) - benign - 1, benign


def build(words: str, target: Target) -> Any:
    """The implementation below with the impostor's functions or patches. Called in ranks only."""
    impostor = find(words)
    patches = impostor.patches if impostor.is_here else ()
    if patches:
        forget(target.module)
    with patched(patches):
        base = import_target(target)
        for module, _, _ in patches:
            importlib.import_module(module)  # some are imported on first use
    return overlay(base, impostor.functions() if impostor.functions else {})
