"""The kernels of torch's collectives in a simulated world: what each of them means.

Each takes the arguments of the `c10d` operator of its name, says what is sent, what will be
overwritten and what must be alike on all ranks, and how results follow from what everybody brought.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from spec_tests.rig.sim.collectives import Collectives
from spec_tests.rig.sim.faults import NotSimulated, SimError
from spec_tests.rig.sim.meeting import Combine, Post, Tensors

Cut = Callable[[Post, int, int], Tensors]
"""What a post holds for a rank of so many."""

OPERATORS = (
    *("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_"),
    *("_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
    *("gather_", "scatter_", "alltoall_", "alltoall_base_", "barrier", "monitored_barrier_"),
    *("send", "recv_", "recv_any_source_"),
)


class Kernels:
    """One method per operator of OPERATORS; `now` is the world in which they are called."""

    def __init__(self, now: Callable[[], Collectives]) -> None:
        self._now = now

    def _post(
        self, name: str, outputs: Any, inputs: Any, group: Any, combine: Combine, **more: Any
    ) -> Any:
        """Launch a collective; what a rank brings must be alike unless `unit` says otherwise."""
        return self._now().post(group, name, inputs, outputs, combine, **{"unit": inputs, **more})

    # ---------------------------------------------------------------------------- reductions

    def allreduce_(self, tensors: Any, group: Any, operator: Any, *rest: Any) -> Any:
        """Everybody gets the sum."""
        if tensors[0].is_sparse:
            raise NotSimulated("the simulated world does not reduce sparse tensors; use gloo")
        return tensors, self._all_reduce("all_reduce", tensors, group, operator)

    def allreduce_coalesced_(self, tensors: Any, group: Any, operator: Any, *rest: Any) -> Any:
        """Likewise, several tensors."""
        return self._all_reduce("all_reduce_coalesced", tensors, group, operator)

    def _all_reduce(self, name: str, tensors: Tensors, group: Any, operator: Any) -> Any:
        word = NAMES[operator.op()]

        def combine(posts: list[Post]) -> list[Tensors]:
            parts = zip(*(post.inputs for post in posts), strict=True)
            return [[reduce(part, word) for part in parts]] * len(posts)

        return self._post(name, tensors, tensors, group, combine, reduce=word)

    def reduce_(self, tensors: Any, group: Any, operator: Any, root: int, *rest: Any) -> Any:
        """The root gets the sum."""
        word = NAMES[operator.op()]

        def combine(posts: list[Post]) -> list[Tensors]:
            total = reduce(_first_inputs(posts), word)
            return [[total] if post.rank == root else () for post in posts]

        mine = tensors if _rank_in(group) == root else ()
        return self._post("reduce", mine, tensors, group, combine, reduce=word, root=root)

    def reduce_scatter_(
        self, outputs: Any, inputs: Any, group: Any, operator: Any, *rest: Any
    ) -> Any:
        """Rank i gets the sum of the i-th tensors."""

        def cut(post: Post, rank: int, size: int) -> Tensors:
            return [post.inputs[rank]]

        name = "reduce_scatter"
        return outputs, self._scatter_sums(name, outputs, inputs[0], group, operator, cut)

    def _reduce_scatter_base_(
        self, output: Any, input: Any, group: Any, operator: Any, *rest: Any
    ) -> Any:
        """Rank i gets the sum of the i-th parts."""
        _require_parts(input, output, group)
        name = "reduce_scatter_single"
        return output, self._scatter_sums(name, [output], [input], group, operator, _rows)

    def reduce_scatter_tensor_coalesced_(
        self, outputs: Any, inputs: Any, group: Any, operator: Any, *rest: Any
    ) -> Any:
        """Likewise, several tensors."""
        name = "reduce_scatter_single_coalesced"
        return self._scatter_sums(name, outputs, inputs, group, operator, _rows)

    def _scatter_sums(
        self, name: str, outputs: Tensors, inputs: Tensors, group: Any, operator: Any, cut: Cut
    ) -> Any:
        word = NAMES[operator.op()]

        def combine(posts: list[Post]) -> list[Tensors]:
            found: list[Tensors] = []
            for own in posts:
                parts = (cut(post, own.rank, len(posts)) for post in posts)
                found.append([reduce(part, word) for part in zip(*parts, strict=True)])
            return found

        return self._post(name, outputs, inputs, group, combine, reduce=word)

    # ------------------------------------------------------------------------------- copies

    def broadcast_(self, tensors: Any, group: Any, root: int, *rest: Any) -> Any:
        """Everybody gets what the root has."""

        def combine(posts: list[Post]) -> list[Tensors]:
            return [() if p.rank == root else posts[root].inputs for p in posts]

        is_root = _rank_in(group) == root
        sent, received = (tensors, ()) if is_root else ((), tensors)
        work = self._post("broadcast", received, sent, group, combine, unit=tensors, root=root)
        return tensors, work

    def allgather_(self, outputs: Any, inputs: Any, group: Any, *rest: Any) -> Any:
        """Everybody gets what each has, one tensor per rank."""
        return outputs, self._post("all_gather", outputs[0], inputs, group, _every_input)

    def _allgather_base_(self, output: Any, input: Any, group: Any, *rest: Any) -> Any:
        """Likewise, into one tensor."""
        _require_parts(output, input, group)
        return output, self._post("all_gather_single", [output], [input], group, _joined)

    def allgather_into_tensor_coalesced_(
        self, outputs: Any, inputs: Any, group: Any, *rest: Any
    ) -> Any:
        """Likewise, several tensors."""
        return self._post("all_gather_single_coalesced", outputs, inputs, group, _joined)

    def allgather_coalesced_(self, outputs: Any, inputs: Any, group: Any, *rest: Any) -> Any:
        """Several tensors, each into one per rank; outputs are listed by rank."""
        flat = [tensor for tensors in outputs for tensor in tensors]
        return self._post("all_gather_coalesced", flat, inputs, group, _every_input)

    def gather_(self, outputs: Any, inputs: Any, group: Any, root: int, *rest: Any) -> Any:
        """The root gets what each has."""

        def combine(posts: list[Post]) -> list[Tensors]:
            return [_first_inputs(posts) if p.rank == root else () for p in posts]

        mine = outputs[0] if _rank_in(group) == root else ()
        return self._post("gather", mine, inputs, group, combine, root=root)

    def scatter_(self, outputs: Any, inputs: Any, group: Any, root: int, *rest: Any) -> Any:
        """Rank i gets the root's i-th tensor."""

        def combine(posts: list[Post]) -> list[Tensors]:
            return [[posts[root].inputs[p.rank]] for p in posts]

        sent = inputs[0] if _rank_in(group) == root else ()
        work = self._post("scatter", outputs, sent, group, combine, unit=outputs, root=root)
        return outputs, work

    def alltoall_(self, outputs: Any, inputs: Any, group: Any, *rest: Any) -> Any:
        """Rank i gets the i-th tensor of each."""

        def combine(posts: list[Post]) -> list[Tensors]:
            return [[post.inputs[p.rank] for post in posts] for p in posts]

        return outputs, self._post("all_to_all", outputs, inputs, group, combine, unit=())

    def alltoall_base_(
        self, output: Any, input: Any, group: Any, received: Any, sent: Any, *rest: Any
    ) -> Any:
        """Rank i gets the i-th part of each; parts are rows, as many as the sizes say."""
        more: dict[str, Any] = {"unit": (), "sizes": (list(received), list(sent))}
        return self._post("all_to_all_single", [output], [input], group, _exchanged, **more)

    # ------------------------------------------------------------------- barriers and letters

    def barrier(self, tensor: Any, group: Any, *rest: Any) -> Any:
        """Everybody has come."""
        return self._post("barrier", (), (), group, lambda posts: [()] * len(posts))

    def monitored_barrier_(self, tensor: Any, group: Any, *rest: Any) -> None:
        """Likewise; blocks."""
        dist.Work.unbox(self.barrier(tensor, group)).wait()  # type: ignore[attr-defined]  # not in stubs

    def send(self, tensors: Any, group: Any, peer: int, tag: int) -> Any:
        """A tensor to a rank."""
        return self._now().send(group, tensors, peer, tag)

    def recv_(self, tensors: Any, group: Any, peer: int, tag: int) -> Any:
        """A tensor from a rank."""
        return self._now().receive(group, tensors, peer, tag)

    def recv_any_source_(self, tensors: Any, group: Any, tag: int) -> Any:
        """A tensor from any rank."""
        return self._now().receive(group, tensors, None, tag)


def _rank_in(group: Any) -> int:
    return int(dist.ProcessGroup.unbox(group).rank())  # type: ignore[attr-defined]  # not in stubs


def _require_parts(whole: torch.Tensor, part: torch.Tensor, group: Any) -> None:
    """Live backends refuse this on the rank itself, before anything is compared with its peers."""
    size = dist.ProcessGroup.unbox(group).size()  # type: ignore[attr-defined]  # not in stubs
    if whole.numel() != size * part.numel():
        raise RuntimeError(
            f"expected a tensor of {size} parts, one of {part.numel()} elements for each rank, "
            f"got one of {whole.numel()} elements"
        )


def _first_inputs(posts: list[Post]) -> Tensors:
    return [post.inputs[0] for post in posts]


def _every_input(posts: list[Post]) -> list[Tensors]:
    return [[tensor for post in posts for tensor in post.inputs]] * len(posts)


def _joined(posts: list[Post]) -> list[Tensors]:
    parts = zip(*(post.inputs for post in posts), strict=True)
    return [[torch.cat([tensor.reshape(-1) for tensor in part]) for part in parts]] * len(posts)


def _rows(post: Post, rank: int, size: int) -> Tensors:
    return [tensor.reshape(-1).chunk(size)[rank] for tensor in post.inputs]


def _exchanged(posts: list[Post]) -> list[Tensors]:
    sent = ((post.inputs[0], post.sizes[1]) for post in posts)
    pieces = [tensor.split(sizes or len(tensor) // len(posts)) for tensor, sizes in sent]
    return [[torch.cat([row[post.rank] for row in pieces])] for post in posts]


# ------------------------------------------------------------ arithmetic, in order of the ranks

_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    # As C++ compares: a NaN that comes second gets lost, one that comes first stays.
    "MIN": lambda a, b: torch.where(b < a, b, a),
    "MAX": lambda a, b: torch.where(a < b, b, a),
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}

_OF_BITS = ("BAND", "BOR", "BXOR")

# As torch numbers them; what an operator's kernel gets is the number.
NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")


def reduce(contributions: Sequence[torch.Tensor], operator: str) -> torch.Tensor:
    """Combine one tensor per rank, in order of rank; a single one is returned as it is.

    Raises:
        SimError: gloo has no such operator, or not for this dtype.
    """
    if operator == "AVG":
        return reduce(contributions, "SUM") / len(contributions)
    combine, dtype = _COMBINE.get(operator), contributions[0].dtype
    if combine is None:
        raise SimError(f"gloo does not reduce with {operator}; known: {', '.join(_COMBINE)}")
    if operator in _OF_BITS and (dtype.is_floating_point or dtype.is_complex):
        raise SimError(f"gloo does not reduce {dtype} with {operator}")
    return functools.reduce(combine, contributions)
