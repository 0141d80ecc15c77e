"""FlashAttention-2 in PyTorch operations: attention whose memory does not grow with its scores.

Scores exist for one tile of queries and keys at a time. The forward keeps, per query, the largest
score m so far, the sum l of exp(score - m) and the unnormalised output; a tile that raises m
shrinks what was summed before by exp(m_old - m_new). In the end out = acc / l, and one number per
query is kept for the backward, the LSE: m + log l, the logarithm of the softmax's denominator.

The backward makes each tile of P = softmax(S) again, as exp(S - LSE), and never needs m or l:

    dV = P^T dO                      since O = P V
    dP = dO V^T
    dS = P (dP - delta)              delta_i = sum_j P_ij dP_ij = dO_i . O_i: the softmax's own part
    dQ = scale dS K,  dK = scale dS^T Q

The LSE may have a gradient, too: dLSE_i / dS_ij is P_ij, so it is subtracted from delta and costs
nothing.

Heads that share a key head stand below one another as rows of one matrix, so keys are never
repeated, and dK and dV sum over these heads inside one product. Causal tiles that no query sees are
never computed. Sums and statistics are float32 (float64 for float64), whatever the inputs are.

Cost: 4 Q K D operations per head forward and 10 Q K D backward, half with `causal`; memory
O(tile^2) for scores and O(Q + K) for the rest. Equal inputs give equal bits: one loop, one order.

Paper: Dao 2023, algorithms 1 and 2. Left out: parallelism over tiles, which is what
`solution.attention.triton_kernels` adds.

Legend: B batch, G key/value heads, R query heads per key head, Q queries, K keys, D head dim;
Z = B G is what all products are batched over, rows are R queries.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["tiled_backward", "tiled_forward"]

TILE = 256  # queries and keys of one tile: its scores stay in a core's cache


def tiled_forward(
    q_BHQD: torch.Tensor,
    k_BGKD: torch.Tensor,
    v_BGKD: torch.Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output `[B, H, Q, D]` in q's dtype, and the LSE `[B, H, Q]`, natural, float32 or 64."""
    q_ZRQD, k_ZKD, v_ZKD = _grouped(q_BHQD, k_BGKD, v_BGKD)
    out_ZRQD = torch.zeros_like(q_ZRQD, dtype=q_BHQD.dtype, memory_format=torch.contiguous_format)
    lse_ZRQ = q_ZRQD.new_full(q_ZRQD.shape[:3], -torch.inf)
    num_keys, num_hidden = k_ZKD.shape[1], k_ZKD.shape[1] - q_ZRQD.shape[2]
    for rows in _tiles(0, q_ZRQD.shape[2]):
        q = _rows(q_ZRQD, rows)
        acc, row_sum = torch.zeros_like(q), q.new_zeros(q.shape[:2])
        row_max = torch.full_like(row_sum, -torch.inf)
        for keys in _tiles(0, min(num_keys, rows.stop + num_hidden) if causal else num_keys):
            scores = _scores(q, k_ZKD, rows, keys, scale, num_hidden if causal else None)
            new_max = torch.maximum(row_max, scores.amax(dim=-1))
            # Nothing but -inf so far: -inf - -inf is NaN, and any finite number in its place right.
            shift = new_max.masked_fill(new_max == -torch.inf, 0.0)
            weights = scores.sub_(shift.unsqueeze(-1)).exp_()
            shrink = row_max.sub_(shift).exp_()
            row_sum.mul_(shrink).add_(weights.sum(dim=-1))
            acc.mul_(shrink.unsqueeze(-1)).baddbmm_(weights, v_ZKD[:, keys])
            row_max = new_max
        # A row that saw nothing has 0/0; it stays zero, and its LSE -inf + log 0 = -inf.
        acc.div_(row_sum.masked_fill(row_sum == 0, 1.0).unsqueeze(-1))
        out_ZRQD[:, :, rows] = acc.unflatten(1, (q_ZRQD.shape[1], -1))
        lse_ZRQ[:, :, rows] = row_max.add_(row_sum.log_()).unflatten(1, (q_ZRQD.shape[1], -1))
    return out_ZRQD.view(q_BHQD.shape), lse_ZRQ.view(q_BHQD.shape[:3])


def tiled_backward(
    dout_BHQD: torch.Tensor,
    dlse_BHQ: torch.Tensor | None,
    q_BHQD: torch.Tensor,
    k_BGKD: torch.Tensor,
    v_BGKD: torch.Tensor,
    out_BHQD: torch.Tensor,
    lse_BHQ: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    wants_q: bool = True,
    wants_kv: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dQ, dK and dV, in the shapes and the dtype of q, k and v; empty where not wanted."""
    q_ZRQD, k_ZKD, v_ZKD = _grouped(q_BHQD, k_BGKD, v_BGKD)
    dout_ZRQD = dout_BHQD.to(q_ZRQD.dtype).reshape(q_ZRQD.shape)
    delta_ZRQ = torch.einsum("zrqd,zrqd->zrq", dout_ZRQD, out_BHQD.to(q_ZRQD).reshape(q_ZRQD.shape))
    if dlse_BHQ is not None:
        delta_ZRQ = delta_ZRQ - dlse_BHQ.reshape(delta_ZRQ.shape)
    # exp(S - inf) is 0: a row that saw nothing gives and gets nothing.
    minus_lse_ZRQ = -lse_BHQ.masked_fill(lse_BHQ == -torch.inf, torch.inf).reshape(delta_ZRQ.shape)
    dq_ZRQD = q_ZRQD.new_zeros(q_ZRQD.shape)
    dk_ZKD, dv_ZKD = k_BGKD.new_empty(k_ZKD.shape), v_BGKD.new_empty(v_ZKD.shape)
    num_hidden = k_ZKD.shape[1] - q_ZRQD.shape[2]
    for keys in _tiles(0, k_ZKD.shape[1]):
        k, v = k_ZKD[:, keys], v_ZKD[:, keys]
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        first = max(0, keys.start - num_hidden) if causal else 0
        for rows in _tiles(first, q_ZRQD.shape[2]):
            q, dout = _rows(q_ZRQD, rows), _rows(dout_ZRQD, rows)
            minus_lse = _rows(minus_lse_ZRQ, rows).unsqueeze(-1)
            hidden = num_hidden if causal else None
            weights = _scores(q, k_ZKD, rows, keys, scale, hidden, plus=minus_lse).exp_()
            delta = _rows(delta_ZRQ, rows).unsqueeze(-1)
            dscores = torch.baddbmm(delta, dout, v.mT, beta=-1).mul_(weights)
            if wants_kv:
                dv.baddbmm_(weights.mT, dout)
                dk.baddbmm_(dscores.mT, q, alpha=scale)
            if wants_q:
                dq = torch.bmm(dscores, k).unflatten(1, (q_ZRQD.shape[1], -1))
                dq_ZRQD[:, :, rows].add_(dq, alpha=scale)
        dk_ZKD[:, keys], dv_ZKD[:, keys] = dk, dv
    if not wants_kv:
        return dq_ZRQD.view(q_BHQD.shape).to(q_BHQD.dtype), q_BHQD.new_empty(0), q_BHQD.new_empty(0)
    dq_BHQD = dq_ZRQD.view(q_BHQD.shape).to(q_BHQD.dtype) if wants_q else q_BHQD.new_empty(0)
    return dq_BHQD, dk_ZKD.view(k_BGKD.shape), dv_ZKD.view(v_BGKD.shape)


def _grouped(
    q_BHQD: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q `[Z, R, Q, D]`, k and v `[Z, K, D]`, in the dtype of sums; views where they can be."""
    sums = torch.float64 if q_BHQD.dtype == torch.float64 else torch.float32
    (batch, heads, queries, head_dim), (key_heads, keys) = q_BHQD.shape, k_BGKD.shape[1:3]
    groups = (batch * key_heads, max(1, heads // max(1, key_heads)), queries, head_dim)
    flat = (batch * key_heads, keys, head_dim)
    return (
        q_BHQD.to(sums).reshape(groups),
        k_BGKD.to(sums).reshape(flat),
        v_BGKD.to(sums).reshape(flat),
    )


def _tiles(start: int, stop: int) -> Iterator[slice]:
    """[start, stop) in slices of at most `TILE`."""
    for first in range(start, stop, TILE):
        yield slice(first, min(first + TILE, stop))


def _rows(tensor_ZRQ: torch.Tensor, rows: slice) -> torch.Tensor:
    """Those queries of all R heads below one another: `[Z, R * len(rows), ...]`."""
    return tensor_ZRQ[:, :, rows].flatten(1, 2)


def _scores(
    q: torch.Tensor,
    k_ZKD: torch.Tensor,
    rows: slice,
    keys: slice,
    scale: float,
    num_hidden: int | None,
    plus: torch.Tensor | None = None,
) -> torch.Tensor:
    """`scale * q k^T` of one tile, and `plus` for each row, which costs no pass of its own.

    With `num_hidden` query i sees the keys up to i + num_hidden.
    """
    start = q.new_zeros(()) if plus is None else plus
    scores = torch.baddbmm(start, q, k_ZKD[:, keys].mT, beta=plus is not None, alpha=scale)
    if num_hidden is None or keys.stop <= rows.start + num_hidden + 1:
        return scores
    row = torch.arange(rows.start, rows.stop, device=q.device).unsqueeze(-1)
    column = torch.arange(keys.start, keys.stop, device=q.device)
    of_heads = scores.unflatten(1, (-1, rows.stop - rows.start))  # a view
    of_heads.masked_fill_(column > row + num_hidden, -torch.inf)
    return scores
