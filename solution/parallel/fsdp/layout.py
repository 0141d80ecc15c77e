"""Where the rows of parameters lie in a message. Pure arithmetic, no communication.

Problem. A parameter `[n, ...]` is cut along dim 0 into W pieces as `torch.chunk` cuts it: each of
`ceil(n / W)` rows, the last ones shorter or empty. Many parameters travel together, and a gather or
a reduce-scatter wants each rank's share in one stretch of memory. So a message is a matrix
`[W, m]`: row r holds rank r's pieces, one parameter after another, each in a place of its own of
`ceil(n / W)` rows.

    message    |  weight     |  bias |      a weight of 5 rows and a bias of 3 over W = 2 ranks;
    rank 0     | row 0 1 2   |  0 1  |      x: padding, sent and never read
    rank 1     | row 3 4 x   |  2 x  |

All whole pieces of a parameter are one strided view of the matrix, and what is left is a second, so
copying in or out costs one or two copies per parameter, whatever W is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def rows_of(num_rows: int, rank: int, num_ranks: int) -> slice:
    """The rows that rank `rank` of `num_ranks` keeps: piece `rank` of `torch.chunk`, or none.

    >>> [rows_of(4, rank, 3) for rank in range(3)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 4, None)]
    """
    length = -(-num_rows // num_ranks)
    return slice(min(rank * length, num_rows), min((rank + 1) * length, num_rows))


class Layout:
    """A message `[W, m]` that carries tensors of these shapes.

    Attributes:
        shapes: of the full tensors.
        num_ranks: W.
        width: m, elements per rank, padding included.

    >>> Layout([torch.Size([5, 2]), torch.Size([3])], num_ranks=2).width
    8
    """

    def __init__(self, shapes: Sequence[torch.Size], num_ranks: int) -> None:
        self.shapes = tuple(shapes)
        self.num_ranks = num_ranks
        self._sizes = [-(-shape[0] // num_ranks) * shape[1:].numel() for shape in shapes]
        self.width = sum(self._sizes)

    def pieces(self, row: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Views of one rank's `row` `[m]`: its piece of each tensor, in the piece's shape.

        >>> layout = Layout([torch.Size([5, 2]), torch.Size([3])], num_ranks=2)
        >>> [piece.tolist() for piece in layout.pieces(torch.arange(8), rank=1)]
        [[[0, 1], [2, 3]], [6]]
        """
        found = []
        shapes = _shapes_of_pieces(self.shapes, rank, self.num_ranks)
        for place, shape in zip(row.split(self._sizes), shapes, strict=True):
            is_short = shape.numel() < place.numel()
            found.append((place[: shape.numel()] if is_short else place).view(shape))
        return found

    def places(self, matrix: torch.Tensor) -> Sequence[torch.Tensor]:
        """Views of all ranks' pieces of each tensor, `[W, ...]`."""
        return matrix.split(self._sizes, dim=1)

    def pairs(self, fulls: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> Pairs:
        """Views of the (contiguous) full tensors beside those of `places` with the same elements.

        >>> full, matrix = torch.arange(5), torch.zeros(2, 3, dtype=torch.int64)
        >>> layout = Layout([full.shape], num_ranks=2)
        >>> for rows, row_places in layout.pairs([full], layout.places(matrix)):
        ...     _ = row_places.copy_(rows)
        >>> matrix.tolist()
        [[0, 1, 2], [3, 4, 0]]
        """
        found: Pairs = []
        for full, place, size in zip(fulls, places, self._sizes, strict=True):
            if full.numel() == place.numel():  # its rows divide: most do, and one view will do
                found.append((full.view(place.shape), place))
                continue
            flat = full.view(-1)
            whole = flat.numel() // size
            found.append((flat[: whole * size].view(whole, size), place[:whole]))
            rest = flat[whole * size :]
            if rest.numel():
                found.append((rest, place[whole, : rest.numel()]))
        return found


@lru_cache(maxsize=1024)
def _shapes_of_pieces(
    shapes: tuple[torch.Size, ...], rank: int, num_ranks: int
) -> list[torch.Size]:
    rows = (rows_of(shape[0], rank, num_ranks) for shape in shapes)
    return [
        torch.Size([own.stop - own.start, *shape[1:]])
        for own, shape in zip(rows, shapes, strict=True)
    ]


@lru_cache(maxsize=1024)
def layout_of(shapes: tuple[torch.Size, ...], num_ranks: int) -> Layout:
    """The layout of these shapes; the same every step, so worked out once."""
    return Layout(shapes, num_ranks)
