"""The words that calls take, by kind."""

from __future__ import annotations

from spec_tests.programs.scene import MODELS, OPTIMIZER, REPLICAS, SHARDS, TRAINERS, WHOLE

EVERY = MODELS + OPTIMIZER
SAVED = REPLICAS + SHARDS + OPTIMIZER + TRAINERS
BEFORE_A_FINISH = ("evaluate", "evaluate_apart", "infer", "finish")
"""Calls between a backward and its finish of which the contract says what follows."""
WORDS: dict[str, dict[str, tuple[tuple[str, ...], str]]] = {
    # word: the functions that have it, its level
    "how": {
        "none": (REPLICAS + SHARDS + WHOLE + OPTIMIZER, "correct"),
        "zero": (REPLICAS + SHARDS + WHOLE + OPTIMIZER, "correct"),
        "of-the-model": (REPLICAS + SHARDS, "production"),
    },
    "order": dict.fromkeys(("two", "largest"), (REPLICAS + SHARDS, "correct")),
    "which": dict.fromkeys(("first", "second"), (REPLICAS + SHARDS + WHOLE, "correct")),
    "layer": dict.fromkeys(("first", "middle", "last"), (MODELS + TRAINERS, "correct")),
    "flag": dict.fromkeys(("True", "False"), (SHARDS, "correct")),
    "at_once": {"now": (SHARDS, "correct"), "in-flight": (SHARDS, "production")},
    "where": {
        "parameters": (REPLICAS + SHARDS + WHOLE + OPTIMIZER, "correct"),
        "local-tensors": (SHARDS, "correct"),
        "one-parameter": (REPLICAS + SHARDS + WHOLE + OPTIMIZER, "correct"),
        "elsewhere": (OPTIMIZER, "correct"),  # to memory of its own, which it then has
    },
    "number": dict.fromkeys(("0", "1", "2"), (SHARDS + WHOLE + OPTIMIZER + TRAINERS, "correct"))
    | {"3": (TRAINERS, "production")},
    "assigns": {
        "copied": (SAVED, "correct"),
        "assigned": (SHARDS, "correct"),
        "in-parts": (SHARDS, "correct"),
    },
    "whose": dict.fromkeys(("all", "half", "one", "none"), (OPTIMIZER, "correct")),
    "does": dict.fromkeys(("deals", "sets-the-rate", "raises"), (OPTIMIZER, "correct")),
    "factor": dict.fromkeys(("2", "0.5"), (OPTIMIZER + TRAINERS, "correct"))
    | {"0": (TRAINERS, "production")},
    "count": dict.fromkeys(("1", "3"), (TRAINERS, "correct")),
    "rank": dict.fromkeys(("0", "1"), (EVERY + TRAINERS, "correct")),
}
"""The words that a call may take, by kind."""
