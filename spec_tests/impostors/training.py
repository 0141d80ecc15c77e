"""Near-misses of the training loop."""

from __future__ import annotations

IMPOSTORS = ()
