"""What each simulated rank has for itself, although one process holds all of them.

Random numbers (torch, NumPy, random), the default dtype, the environment and the warning filters
belong to the process, so they are exchanged whenever another rank goes on. Grad mode, autocast and
the stacks of modes belong to threads, and with them to ranks already.
"""

from __future__ import annotations

import os
import random
import warnings
from typing import Any

import numpy as np
import torch


class Private:
    """The private state of one rank while it does not run."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._torch = torch.default_generator.get_state()
        self._random = random.getstate()
        self._numpy: Any = np.random.MT19937()
        self._dtype = torch.get_default_dtype()
        # The mapping behind os.environ: exchanged as a whole, in no time.
        self._environ = dict(os.environ._data)  # type: ignore[attr-defined]  # not in stubs
        for name, value in environment.items():
            self._environ[os.fsencode(name)] = os.fsencode(value)
        self._filters: list[Any] = list(warnings.filters)
        self._show = warnings.showwarning, warnings._showwarnmsg_impl  # type: ignore[attr-defined]  # likewise

    def leave(self) -> None:
        """Put the process's state away: this rank stops running."""
        self._torch = torch.default_generator.get_state()
        self._random = random.getstate()
        self._dtype = torch.get_default_dtype()
        self._filters = warnings.filters  # type: ignore[assignment]  # a list, whatever stubs say
        self._show = warnings.showwarning, warnings._showwarnmsg_impl  # type: ignore[attr-defined]  # not in stubs

    def enter(self) -> None:
        """Make it the process's state: this rank goes on."""
        torch.default_generator.set_state(self._torch)
        random.setstate(self._random)
        np.random.set_bit_generator(self._numpy)  # type: ignore[attr-defined]  # not in stubs
        if self._dtype is not torch.get_default_dtype():
            torch.set_default_dtype(self._dtype)
        os.environ._data = os.environb._data = self._environ  # type: ignore[attr-defined]  # not in stubs
        if warnings.filters is not self._filters:
            warnings.filters = self._filters
            warnings._filters_mutated()  # type: ignore[attr-defined]  # not in stubs
        warnings.showwarning, warnings._showwarnmsg_impl = self._show  # type: ignore[attr-defined]  # likewise
