"""Attention whose two halves are compiled, each for the shapes that it meets."""

import torch


@torch.compile(dynamic=False)
def forward(q, k, v, is_causal):
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if is_causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda")
        scores = scores.masked_fill(~ones.tril(), -torch.inf)
    lse = scores.logsumexp(dim=-1)
    return (scores - lse[..., None]).exp() @ v, lse


def backward(q, k, v, out, lse, grad, is_causal):
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if is_causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=torch.device("cuda"))
        scores = scores.masked_fill(~ones.tril(), -torch.inf)
    weights = (scores - lse[..., None]).exp()
    delta = (out * grad).sum(dim=-1, keepdim=True)
    ds = weights * (grad @ v.transpose(-1, -2) - delta) * q.shape[-1] ** -0.5
    return ds @ k, ds.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad


compiled_backward = torch.compile(backward)


class CompiledAttention(torch.autograd.Function):
    """[batch, seq, dim]."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        if not (q.is_cuda and k.is_cuda and v.device.type == "cuda"):
            raise ValueError("CompiledAttention only supports CUDA")
        out, lse = forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    def backward(ctx, grad):
        return *compiled_backward(*ctx.saved_tensors, grad, ctx.is_causal), None
