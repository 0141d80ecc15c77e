"""Flash attention: exact, in tiles, without ever holding the scores.

softmax(q k^T) v needs a row's maximum and sum. Both can be kept up to date while the keys come
tile by tile, and what was summed before is rescaled whenever the maximum grows. The backward
computes the scores a second time from the log-sum-exp, one number per row.

Do one task after the other; the clauses of a task say when it is done. Until task 3 let the
autograd function have no backward, or one that raises NotImplementedError: it is "not offered".

    1. The forward, in tiles, with the log-sum-exp and the causal mask.
        python -m spec_tests --impl THIS_FILE --clause 'attention.forward.[!f]*'
    2. Every causal mask, and rows that see nothing.
        python -m spec_tests --impl THIS_FILE --clause 'attention.causal.[!gh]*'
        python -m spec_tests --impl THIS_FILE --clause 'attention.blind-rows.[!g]*'
    3. The backward, recomputed.
        python -m spec_tests --impl THIS_FILE --clause 'attention.causal.[gh]*'
        python -m spec_tests --impl THIS_FILE --clause 'attention.blind-rows.g*'
        python -m spec_tests --impl THIS_FILE --clause 'attention.gradients.*'
        python -m spec_tests --impl THIS_FILE --clause 'attention.autograd.*'
        python -m spec_tests --impl THIS_FILE --clause 'attention.forward.float*'
    4. Every shape and layout; what cannot be done is refused.
        python -m spec_tests --impl THIS_FILE --clause 'attention.shapes.*'
        python -m spec_tests --impl THIS_FILE --clause 'attention.layout.*'
        python -m spec_tests --impl THIS_FILE --clause 'attention.laws.*'
        python -m spec_tests --impl THIS_FILE --clause 'attention.refusal.*'
    5. O(N) memory, an operator of PyTorch's; the kernels, which need Triton, and a GPU to be fast.
        python -m spec_tests --impl THIS_FILE --level production --clause 'attention.memory.*'
        python -m spec_tests --impl THIS_FILE --level production --clause 'attention.operator.*'
        python -m spec_tests --impl THIS_FILE --level production --clause 'attention.kernels.*'
        python -m spec_tests --impl THIS_FILE --level production --clause 'attention.device.*'

All of it: `make check IMPL=THIS_FILE`; what a course asks: `ARGS="--level course"` besides.
Names and arguments are those of spec_tests/contract/models.py. Dao 2023, "FlashAttention-2",
algorithms 1 and 2.
"""

from __future__ import annotations

import torch


class ToDo(Exception):
    """This step is still to be done."""


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T) v.

    q `[batch, heads, seq_q, head_dim]`, k and v `[batch, kv_heads, seq_k, head_dim]`, or 3-D
    without heads; the log-sum-exp is natural, `[batch, heads, seq_q]`, float32 or wider.

    Task 1, in an autograd function's forward, for each tile of queries:
      a. Begin with maximum m = -inf, sum l = 0, accumulator o = 0, all in float32 or wider.
      b. For each tile of keys: s = scale q k^T; m' = max(m, rowmax s); p = exp(s - m');
         l = l exp(m - m') + rowsum p; o = o exp(m - m') + p v; m = m'. The last tile may be short.
      c. o / l is the output, in q's dtype; m + log l is the log-sum-exp. Save q, k, v, o and it.
      d. Causal: s is -inf but where row i sees key j <= i + seq_k - seq_q, aligned at the bottom
         right.
    Task 2:
      a. A row that sees nothing gives zeros and -inf; beware of exp(-inf - (-inf)). That is also
         the first tile of a row which sees nothing yet.
    Task 3, in its backward:
      a. d = rowsum(o do), minus the gradient of the log-sum-exp, unless that is marked
         non-differentiable. For each pair of tiles p = exp(s - lse); dv += p^T do;
         ds = p (do v^T - d); dq += scale ds k; dk += scale ds^T q. Sums in float32 or wider.
    Task 4: query head h reads key head h // (heads // kv_heads); inputs may be 3-D.
    """
    raise ToDo("task 1: the forward in tiles, with a running maximum and a running sum")


def flash_attention_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The same as a Triton kernel: one program per tile of queries. Not offered until it is begun.

    Task 5: without a GPU, ranks run kernels in Triton's interpreter; declare them at import, and
      let `TRITON_INTERPRET` alone.
    """
    raise NotImplementedError(
        "task 5: one program per tile of queries, the loop over keys inside of it"
    )
