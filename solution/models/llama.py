"""Llama (Touvron et al. 2023; Grattafiori et al. 2024), with attention injected.

    ids [B, T] -> token embedding -> L x (x + attention(norm x); x + mlp(norm x)) -> norm -> logits

Differences from GPT-2, line by line: RMSNorm (no mean, no bias), rotary positions in place of
learned ones, SwiGLU with a third matrix, fewer heads for keys and values than for queries, no
biases, and a separate matrix for the logits.

Rotary positions (Su et al. 2021): at position t the pair (x_i, x_{i + D/2}) of each head turns by
the angle t * theta^(-2i/D), so the product of a query and a key knows only how far they are apart.
Pairs are *halves* apart, as in Hugging Face's weights, which fit by renaming alone. Meta's own
files pair neighbours (x_2i, x_2i+1): the same function, with the rows of the query and key matrices
in another order.

The table of angles is made and kept in float32, whatever dtype the model is moved to: in bfloat16
neighbouring positions share an angle from 256 on. It is no parameter and no state: it is made again
whenever the model moves, so also on the way from `meta` to a device. Blocks are given the table as
an object and not as tensors, which a mixed-precision wrapper would cast.

    with torch.device("meta"):
        model = Llama(LlamaConfig.preset("1b"))             # no memory
    model.to_empty(device="cuda").reset_parameters()         # table made, weights drawn

Legend: B batch, T tokens, V vocabulary, E embedding dim, H heads, G key/value heads, D head dim =
E / H, L layers.
"""

from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import nn

from solution.attention import AttentionFunction, attention
from solution.config import LlamaConfig
from solution.models.checkpointing import runner
from solution.models.layers import Block, LanguageModel, check_ids


class Llama(LanguageModel):
    """A Llama language model; arguments as for `GPT2`, with k and v of `[B, G, T, D]`."""

    def __init__(
        self,
        config: LlamaConfig,
        *,
        attention: AttentionFunction = attention,
        activation_checkpointing: str = "none",
    ) -> None:
        super().__init__()
        self.config = config
        run = runner(activation_checkpointing)
        self.token_embedding = nn.Embedding(config.vocab_size, config.embedding_dim)
        self.rotary = Rotary(config)
        self.blocks = nn.ModuleList(
            Block(_norm(config), SelfAttention(config, attention), _norm(config), MLP(config), run)
            for _ in range(config.num_layers)
        )
        self.final_norm = _norm(config)
        self.lm_head = nn.Linear(config.embedding_dim, config.vocab_size, bias=False)
        self.reset_parameters()

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Logits `[B, T, V]` for integer ids `[B, T]`; ValueError if T is too long or not 2-D."""
        check_ids(ids_BT, max_sequence_length=self.config.max_sequence_length)
        x_BTE = self.token_embedding(ids_BT)
        for block in self.blocks:
            x_BTE = block(x_BTE, self.rotary)
        return self.lm_head(self.final_norm(x_BTE))


class Rotary(nn.Module):
    """Turns the heads of queries and keys by angles that grow with the position."""

    cos_TD: torch.Tensor
    sin_TD: torch.Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self._length = config.max_sequence_length
        self._head_dim, self._theta = config.head_dim, config.rope_theta
        self._make_table(device=None)

    def forward(self, x_BHTD: torch.Tensor) -> torch.Tensor:
        """`[B, H, T, D]` -> the same, turned; computed in float32 or better."""
        length = x_BHTD.shape[2]
        cos_TD, sin_TD = self.cos_TD[:length], self.sin_TD[:length]
        first, second = x_BHTD.chunk(2, dim=-1)
        crossed_BHTD = torch.cat((-second, first), dim=-1)
        return (x_BHTD * cos_TD + crossed_BHTD * sin_TD).to(x_BHTD.dtype)

    def _make_table(self, device: torch.device | None) -> None:
        exponents = torch.arange(0, self._head_dim, 2, dtype=torch.float32, device=device)
        frequencies = 1.0 / self._theta ** (exponents / self._head_dim)
        positions = torch.arange(self._length, dtype=torch.float32, device=device)
        angles_TD = torch.outer(positions, frequencies).repeat(1, 2)  # both halves alike
        self.register_buffer("cos_TD", angles_TD.cos(), persistent=False)
        self.register_buffer("sin_TD", angles_TD.sin(), persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # A cast would round the table for good, and `to_empty` leaves garbage in it.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # unannotated in torch
        self._make_table(self.cos_TD.device)
        return self


class SelfAttention(nn.Module):
    """Causal self-attention; H / G query heads read each head of keys and values."""

    def __init__(self, config: LlamaConfig, attention: AttentionFunction) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.kv_heads * config.head_dim
        self.query = nn.Linear(config.embedding_dim, config.embedding_dim, bias=False)
        self.key = nn.Linear(config.embedding_dim, kv_dim, bias=False)
        self.value = nn.Linear(config.embedding_dim, kv_dim, bias=False)
        self.out = nn.Linear(config.embedding_dim, config.embedding_dim, bias=False)
        self._attention = attention

    def forward(self, x_BTE: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """`[B, T, E]` -> `[B, T, E]`."""
        q_BHTD, k_BGTD, v_BGTD = (
            project(x_BTE).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed_BHTD = self._attention(rotary(q_BHTD), rotary(k_BGTD), v_BGTD, causal=True)
        return self.out(mixed_BHTD.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): one matrix says what passes of the other."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.embedding_dim, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.embedding_dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.embedding_dim, bias=False)

    def forward(self, x_BTE: torch.Tensor) -> torch.Tensor:
        """`[B, T, E]` -> `[B, T, E]`."""
        return self.down(F.silu(self.gate(x_BTE)) * self.up(x_BTE))


def _norm(config: LlamaConfig) -> nn.RMSNorm:
    return nn.RMSNorm(config.embedding_dim, eps=config.norm_epsilon)
