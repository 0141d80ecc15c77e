"""Style of Stanford's CS336, assignment 2: an own DDP that all-reduces asynchronously from hooks
of the parameters, an own AdamW, own clipping, own cross entropy; modules are built from weights.
"""

import frame
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn


class DDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        self.handles = []
        for param in module.parameters():
            dist.broadcast(param.data, src=0)
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self.reduce_gradient)

    def reduce_gradient(self, param):
        param.grad.div_(dist.get_world_size())
        self.handles.append(dist.all_reduce(param.grad, async_op=True))

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self):
        for handle in self.handles:
            handle.wait()
        self.handles.clear()


class AdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def step(self, closure=None):
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                t = state["t"] = state.get("t", 0) + 1
                m = state.setdefault("m", torch.zeros_like(p))
                v = state.setdefault("v", torch.zeros_like(p))
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                lr_t = lr * (1 - beta2**t) ** 0.5 / (1 - beta1**t)
                p.data.addcdiv_(m, v.sqrt().add_(group["eps"]), value=-lr_t)
                p.data.mul_(1 - lr * group["weight_decay"])


def rms_norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


class LM(nn.Module):
    def __init__(self, vocab, d_model=16, d_ff=32, layers=2):
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(vocab, d_model) * 0.1)
        self.up = nn.ParameterList(torch.randn(d_model, d_ff) * 0.2 for _ in range(layers))
        self.down = nn.ParameterList(torch.randn(d_ff, d_model) * 0.2 for _ in range(layers))
        self.norms = nn.ParameterList(torch.ones(d_model) for _ in range(layers + 1))
        self.lm_head = nn.Parameter(torch.randn(d_model, vocab) * 0.1)

    def forward(self, ids):
        x = self.embedding[ids]
        for norm, up, down in zip(self.norms, self.up, self.down, strict=False):
            x = x + nn.functional.silu(rms_norm(x, norm) @ up) @ down
        return rms_norm(x, self.norms[-1]) @ self.lm_head


def cross_entropy(logits, targets):
    logits = logits - logits.max(dim=-1, keepdim=True).values
    chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (logits.exp().sum(-1).log() - chosen).mean()


def gradient_clipping(params, max_norm):
    norm = sum(p.grad.pow(2).sum() for p in params if p.grad is not None) ** 0.5
    if norm > max_norm:
        for p in params:
            p.grad.mul_(max_norm / (norm + 1e-6))


def main():
    args = frame.arguments()
    rank, _ = frame.start()
    torch.manual_seed(args.seed + rank)
    tokens = np.random.default_rng(args.seed).zipf(1.5, 4000) % 64
    batches = np.random.default_rng([args.seed, rank])
    ddp = DDP(LM(64))
    optimizer = AdamW(ddp.parameters(), lr=5e-3)
    for step in range(args.steps):
        starts = batches.integers(0, len(tokens) - 17, size=4)
        batch = torch.from_numpy(np.stack([tokens[i : i + 17] for i in starts]))
        optimizer.zero_grad()
        loss = cross_entropy(ddp(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        ddp.finish_gradient_synchronization()
        gradient_clipping(list(ddp.parameters()), max_norm=0.5)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    frame.end(rank, ddp)


main()
