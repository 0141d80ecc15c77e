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

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F

TILE = 256  # keys of one tile, and queries with `causal`: no key further beyond a query is read
TILE_FULL = 512  # queries otherwise: fewer tiles, and both of their matrices fit the cache


def tiled_forward(
    q_BHQD: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output `[B, H, Q, D]` in q's dtype, and the LSE `[B, H, Q]`, natural, float32 or 64."""
    q_ZRQD, k_ZKD, v_ZKD = _grouped(q_BHQD, k_BGKD, v_BGKD)
    out_ZRQD = torch.zeros_like(q_ZRQD, dtype=q_BHQD.dtype, memory_format=torch.contiguous_format)
    lse_ZRQ = q_ZRQD.new_full(q_ZRQD.shape[:3], -torch.inf)
    num_keys, num_hidden = k_ZKD.shape[1], k_ZKD.shape[1] - q_ZRQD.shape[2]
    tile_q = TILE if causal else TILE_FULL
    scratch = _scratch(q_ZRQD, k_ZKD, tile_q)
    for rows in _tiles(0, q_ZRQD.shape[2], tile_q):
        q = _rows(q_ZRQD, rows) * scale
        acc, row_sum = torch.zeros_like(q), q.new_zeros(q.shape[:2])
        row_max = torch.full_like(row_sum, -torch.inf)
        num_seen = min(num_keys, rows.stop + num_hidden) if causal else num_keys
        for keys in _tiles(0, num_seen, TILE):
            scores = _product(q, k_ZKD[:, keys], scratch)
            if causal:
                _hide(scores, rows, keys, num_hidden)
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
    # For each query, a column each: -delta and -LSE.
    out_ZRQD = out_BHQD.to(q_ZRQD.dtype).reshape(q_ZRQD.shape)
    minus_delta_ZRQ1 = -torch.einsum("zrqd,zrqd->zrq", dout_ZRQD, out_ZRQD).unsqueeze(-1)
    if dlse_BHQ is not None:
        minus_delta_ZRQ1.add_(dlse_BHQ.reshape(minus_delta_ZRQ1.shape))
    # exp(S - inf) is 0: a row that saw nothing gives and gets nothing.
    minus_lse_ZRQ1 = -lse_BHQ.masked_fill(lse_BHQ == -torch.inf, torch.inf)
    minus_lse_ZRQ1 = minus_lse_ZRQ1.reshape(minus_delta_ZRQ1.shape)
    tile_q = TILE if causal else TILE_FULL
    scratch, other_scratch = (_scratch(q_ZRQD, k_ZKD, tile_q) for _ in range(2))
    dq_ZRQD = q_ZRQD.new_zeros(q_ZRQD.shape)
    dk_ZKD, dv_ZKD = k_BGKD.new_empty(k_ZKD.shape), v_BGKD.new_empty(v_ZKD.shape)
    num_hidden = k_ZKD.shape[1] - q_ZRQD.shape[2]
    for keys in _tiles(0, k_ZKD.shape[1], TILE):
        # One more column each, and the products below are S - LSE and dP - delta with no pass of
        # their own: (scale q, -LSE) (k, 1) = scale q k - LSE.
        k, v = F.pad(k_ZKD[:, keys], (0, 1), value=1.0), F.pad(v_ZKD[:, keys], (0, 1), value=1.0)
        dk, dv = torch.zeros_like(k_ZKD[:, keys]), torch.zeros_like(v_ZKD[:, keys])
        first = max(0, keys.start - num_hidden) if causal else 0
        for rows in _tiles(first, q_ZRQD.shape[2], tile_q):
            q = torch.cat([_rows(q_ZRQD, rows) * scale, _rows(minus_lse_ZRQ1, rows)], dim=-1)
            dout = torch.cat([_rows(dout_ZRQD, rows), _rows(minus_delta_ZRQ1, rows)], dim=-1)
            scores = _product(q, k, scratch)
            if causal:
                _hide(scores, rows, keys, num_hidden)
            weights = scores.exp_()
            dscores = _product(dout, v, other_scratch).mul_(weights)
            if wants_kv:
                dv.baddbmm_(weights.mT, dout[..., :-1])
                dk.baddbmm_(dscores.mT, q[..., :-1])
            if wants_q:
                dq = torch.bmm(dscores, k[..., :-1]).unflatten(1, (q_ZRQD.shape[1], -1))
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


def _tiles(start: int, stop: int, size: int) -> Iterator[slice]:
    """[start, stop) in slices of at most `size`."""
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def _rows(tensor_ZRQ: torch.Tensor, rows: slice) -> torch.Tensor:
    """Those queries of all R heads below one another: `[Z, R * len(rows), ...]`."""
    return tensor_ZRQ[:, :, rows].flatten(1, 2)


def _scratch(q_ZRQD: torch.Tensor, k_ZKD: torch.Tensor, tile_q: int) -> torch.Tensor:
    """Memory for the largest tile."""
    num_rows = q_ZRQD.shape[1] * min(tile_q, q_ZRQD.shape[2])
    return q_ZRQD.new_empty(k_ZKD.shape[0] * num_rows * min(TILE, k_ZKD.shape[1]))


def _product(rows: torch.Tensor, keys: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """`rows keys^T`, over what was in `scratch` before.

    Memory that was used a moment ago is still in the cache; new memory is not, and may have to be
    fetched from the kernel page by page.
    """
    shape = rows.shape[0], rows.shape[1], keys.shape[1]
    return torch.bmm(rows, keys.mT, out=scratch[: math.prod(shape)].view(shape))


def _hide(scores: torch.Tensor, rows: slice, keys: slice, num_hidden: int) -> None:
    """-inf where query i would see a key after i + `num_hidden`."""
    if keys.stop <= rows.start + num_hidden + 1:
        return
    row = torch.arange(rows.start, rows.stop, device=scores.device).unsqueeze(-1)
    column = torch.arange(keys.start, keys.stop, device=scores.device)
    of_heads = scores.unflatten(1, (-1, rows.stop - rows.start))  # a view
    of_heads.masked_fill_(column > row + num_hidden, -torch.inf)
