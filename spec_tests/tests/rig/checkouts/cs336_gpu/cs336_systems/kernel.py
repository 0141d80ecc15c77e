"""Attention in one kernel, whose tile of queries is tuned."""

import torch
import triton
import triton.language as tl

from cs336_systems.attention import CompiledAttention


@triton.autotune(
    configs=[triton.Config({"Q_TILE": 16}, num_warps=4), triton.Config({"Q_TILE": 32})],
    key=["seq_q", "seq_k"],
)
@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    seq_q,
    seq_k,
    scale,
    is_causal: tl.constexpr,
    DIM: tl.constexpr,
    SEQ_K: tl.constexpr,
    Q_TILE: tl.constexpr,
):
    batch = tl.program_id(1)
    rows = tl.program_id(0) * Q_TILE + tl.arange(0, Q_TILE)
    keys = tl.arange(0, SEQ_K)
    dims = tl.arange(0, DIM)
    q_at = (batch * seq_q + rows[:, None]) * DIM + dims[None, :]
    k_at = (batch * seq_k + keys[:, None]) * DIM + dims[None, :]
    in_rows, in_keys = rows[:, None] < seq_q, keys[:, None] < seq_k
    q = tl.load(q_ptr + q_at, mask=in_rows, other=0.0)
    k = tl.load(k_ptr + k_at, mask=in_keys, other=0.0)
    v = tl.load(v_ptr + k_at, mask=in_keys, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(keys[None, :] < seq_k, scores, float("-inf"))
    if is_causal:
        scores = tl.where(keys[None, :] <= rows[:, None], scores, float("-inf"))
    highest = tl.max(scores, axis=1)
    weights = tl.exp(scores - highest[:, None])
    total = tl.sum(weights, axis=1)
    out = tl.dot(weights, v, input_precision="ieee") / total[:, None]
    tl.store(out_ptr + q_at, out, mask=in_rows)
    tl.store(lse_ptr + batch * seq_q + rows, highest + tl.log(total), mask=rows < seq_q)


class TritonAttention(CompiledAttention):
    """[batch, seq, dim]; the backward is compiled."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        assert all(t.is_cuda for t in (q, k, v))
        batch, seq_q, dim = q.shape
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = torch.empty((batch, seq_q, dim), device="cuda", dtype=q.dtype)
        lse = torch.empty((batch, seq_q), device=q.device, dtype=torch.float32)
        with torch.cuda.device(q.device):
            attention_kernel[lambda meta: (triton.cdiv(seq_q, meta["Q_TILE"]), batch)](
                q,
                k,
                v,
                out,
                lse,
                seq_q,
                k.shape[1],
                dim**-0.5,
                is_causal=is_causal,
                DIM=dim,
                SEQ_K=triton.next_power_of_2(k.shape[1]),
            )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.is_causal = is_causal
        return out
