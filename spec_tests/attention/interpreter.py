"""Triton's interpreter on CPU tensors: made to run here, and watched.

Private names of `triton.runtime.interpreter`, the same from 3.6 to 3.9, each looked up with care:
where one is gone, the clauses that need it are "not here", never failed. Nothing is imported before
a rank calls a kernel.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any


@functools.cache
def mend() -> None:
    """Let `range(0, tensor)` work under NumPy 2.4 and later.

    Triton 3.6 turns a scalar of its own into an index with `int(array)`, and its scalars are arrays
    of one element, which NumPy no longer takes for a number. What a kernel computes is not touched.
    """
    module: Any = importlib.import_module("triton.runtime.interpreter")
    patch = getattr(module, "_patch_lang_tensor", None)
    if patch is None:
        return

    def patch_and_mend(tensor: Any, *scope: Any) -> Any:
        result = patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())
        return result

    module._patch_lang_tensor = patch_and_mend
