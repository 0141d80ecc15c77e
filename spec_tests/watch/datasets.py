"""Whether two ranks' data sets are the same: a hash of the plain data that one holds.

No sample is read, since that may be slow, draw random numbers or augment. A data set of which two
ranks hold different parts differs in what it holds: a list of files, an array of labels, a path.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils import data as torch_data

_DEPTH, _LOOKED_AT, _OF_EACH, _WORDS = 8, 64, 8, 20_000
_PLAIN = (str, bytes, int, float, bool, Path, type(None))


def identity(data: Any) -> int | None:
    """Return a hash of what a data set holds; None where it has no table of its samples."""
    with suppress(Exception):  # the code of a script: its length, its attributes
        if _has_table(data):
            return zlib.crc32("\n".join(islice(_words(data, _DEPTH), _WORDS)).encode())
    return None


def _has_table(data: Any) -> bool:
    """Return whether it holds something with an entry for each sample, as files or labels."""
    if not isinstance(data, torch_data.Dataset):
        return _tells(data, len(data))
    held, size = [*vars(data).values()], len(data)  # type: ignore[arg-type]
    small = [each for each in held if isinstance(each, list | tuple) and len(each) <= _LOOKED_AT]
    held += [each for values in small for each in values]
    inner = [each for each in held if isinstance(each, torch_data.Dataset)]
    return all(map(_has_table, inner)) if inner else any(_tells(each, size) for each in held)


def _tells(value: Any, size: int) -> bool:
    """Return whether it has `size` entries that are not all alike, and no mere count of them."""
    is_kept_elsewhere = isinstance(getattr(value, "_fingerprint", None), str)  # Hugging Face
    is_table = isinstance(value, list | tuple) or _is_array(value) or is_kept_elsewhere
    if not is_table or len(value) != size or is_kept_elsewhere:
        return is_table and len(value) == size
    some = _some(value)
    if all(isinstance(each, int | float) for each in some):
        return len({b - a for a, b in pairwise(some)}) > 1
    return len({" ".join(_words(each, 3)) for each in some}) > 1  # of an object, its type alone


def _some(value: Any) -> Sequence[Any]:
    """Return some entries of a list, a tensor, an array or a table of pandas."""
    rows = getattr(value, "iloc", value)[:: max(1, len(value) // _LOOKED_AT)]
    if isinstance(rows, list | tuple):
        return rows
    array = rows if isinstance(rows, Tensor) else rows.__array__()
    flat = array.reshape(len(array), -1)  # a view, also of what is mapped from a file
    found: list[Any] = flat[:, :: max(1, flat.shape[1] // _OF_EACH)].reshape(-1).tolist()
    return found


def _is_array(value: Any) -> bool:
    is_array = type(value).__module__.partition(".")[0] in ("numpy", "pandas")
    return (is_array or isinstance(value, Tensor)) and len(getattr(value, "shape", ())) > 0


def _words(value: Any, depth: int) -> Iterator[str]:
    yield type(value).__name__
    if isinstance(value, torch_data.Dataset):
        value = sorted(vars(value).items())
    elif isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, list | tuple):
        yield str(len(value))
        for each in _some(value) if depth else ():
            yield from _words(each, depth - 1)
    elif _is_array(value):
        yield f"{tuple(value.shape)} {_some(value)}"
    elif isinstance(getattr(value, "_fingerprint", None), str):
        yield value._fingerprint
