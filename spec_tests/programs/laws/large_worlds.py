"""Large worlds: what one rank of 8 or 64 sends and keeps, counted in a world that is not there.

Two and three ranks do not distinguish a share from a half, or padding from data. Counts and bytes
follow from shapes, so PyTorch's fake process group shows them without such a machine
(`rig.ranks.pretended`): on the first and on the last rank, which gets the remainder of a division.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from spec_tests.rig.ranks.world import World

SIZES = pytest.mark.parametrize("num_ranks", [8, 64])


def first_and_last(
    world: World, num_ranks: int, body: Callable[..., Any], *args: Any
) -> dict[str, Any]:
    """What `body(ctx, *args, rank, num_ranks)` saw, live, as either end of a pretended world."""
    ends = {"first": 0, "last": num_ranks - 1}
    return {name: world.live.run(body, *args, rank, num_ranks)[0] for name, rank in ends.items()}


def both(num_ranks: int) -> str:
    """The situation, for a message about both ends."""
    return f"first and last of {num_ranks} ranks"
