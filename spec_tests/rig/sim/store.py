"""The key-value store of a simulated world: waiting for a key gives the baton away."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from spec_tests.rig.sim.baton import Baton


class SimStore(dist.Store):
    """Shared by all ranks. torch calls it through C++, with bytes."""

    def __init__(self, baton: Baton) -> None:
        super().__init__()
        self._baton = baton
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Write, whatever was there."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """Read; waits for the key."""
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a number that begins at 0; the sum."""
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Write `desired` if `expected` is there, or if nothing is; what is there then."""
        wanted = expected.encode() if isinstance(expected, str) else bytes(expected)
        if self._values.get(key, wanted) == wanted:
            self.set(key, desired)
        return self._values.get(key, wanted)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are there."""
        self._baton.wait_until(lambda: self.check(keys), lambda: f"keys {list(keys)} of the store")

    def delete_key(self, key: str) -> bool:
        """Remove; whether it was there."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """How many keys there are."""
        return len(self._values)

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing times out here."""
