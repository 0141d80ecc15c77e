"""The card of an impostor: what it does wrong, where that was seen, who must reject it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

Functions = dict[str, Any]


@dataclass(frozen=True)
class Impostor:
    """A deliberate near-miss, or (with no `rejected_by`) a benign variant.

    Attributes:
        id: dotted words; `--impl impostor:ID` judges it.
        does: what it does wrong, in one sentence.
        seen: the real bug it comes from, or how one comes to write it.
        unseen: why usual tests miss it.
        rejected_by: ids of the clauses that must each reject it.
        functions: makes the contract functions that replace those of the implementation below.
        patches: source patches of the reference, see `patching`.
        outcomes: how a rejection may show; most are plain failures.
        requires: a module without which there is nothing to judge: "triton".
        alone: whether it only computes, so that clauses for one rank need no process (`alone`).
    """

    id: str
    does: str
    seen: str
    unseen: str
    rejected_by: tuple[str, ...]
    functions: Callable[[], Functions] | None = None
    patches: tuple[tuple[str, str, str], ...] = ()
    outcomes: tuple[str, ...] = ("failed",)
    requires: str = ""
    alone: bool = False

    @property
    def is_here(self) -> bool:
        """True if this machine has what it requires."""
        return not self.requires or find_spec(self.requires) is not None

    @property
    def is_benign(self) -> bool:
        """True for correct but unusual code, which nothing may reject."""
        return not self.rejected_by
