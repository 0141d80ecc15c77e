"""GPT-2 (Radford et al. 2019), with attention injected.

    ids [B, T] -> token + position embedding -> L x (x + attention(norm x); x + mlp(norm x))
               -> norm -> logits [B, T, V] through the token embedding itself (tied)

With the weights of Hugging Face's GPT2LMHeadModel the logits are the same. The form differs: no
dropout (equal runs on other layouts must be comparable), no mask or position buffers (nothing to
fill with garbage when a model goes from `meta` to a device), Linear layers of `[out, in]` where
GPT-2 has `[in, out]`.

    with torch.device("meta"):
        model = GPT2(GPT2Config.preset("xl"))          # no memory
    model.to_empty(device="cuda").reset_parameters()    # tied again, initialised

Legend: B batch, T tokens, V vocabulary, E embedding dim, H heads, D head dim = E / H, L layers.
"""

from collections.abc import Callable
from typing import Self, cast

import torch
import torch.nn.functional as F
from torch import nn

from solution.attention import AttentionFunction, attention
from solution.config import GPT2Config
from solution.models.checkpointing import runner
from solution.models.layers import Block, LanguageModel, check_ids


class GPT2(LanguageModel):
    """A GPT-2 language model.

    Args:
        attention: `(q, k, v, *, causal) -> out` on `[B, H, T, D]`; see `solution.attention`.
        activation_checkpointing: a mode of `solution.models.checkpointing`.
    """

    def __init__(
        self,
        config: GPT2Config,
        *,
        attention: AttentionFunction = attention,
        activation_checkpointing: str = "none",
    ) -> None:
        super().__init__()
        self.config = config
        run = runner(activation_checkpointing)
        self.token_embedding = nn.Embedding(config.vocab_size, config.embedding_dim)
        self.position_embedding = nn.Embedding(config.max_sequence_length, config.embedding_dim)
        self.blocks = nn.ModuleList(
            Block(_norm(config), SelfAttention(config, attention), _norm(config), MLP(config), run)
            for _ in range(config.num_layers)
        )
        self.final_norm = _norm(config)
        self.lm_head = nn.Linear(config.embedding_dim, config.vocab_size, bias=False)
        self._tie()
        # `load_state_dict(assign=True)`, the way from `meta` to weights, sets the two separately.
        self.register_load_state_dict_post_hook(_tie_again)  # type: ignore[no-untyped-call]  # torch's
        self.reset_parameters()

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Logits `[B, T, V]` for integer ids `[B, T]`; ValueError if T is too long or not 2-D."""
        check_ids(ids_BT, max_sequence_length=self.config.max_sequence_length)
        positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        x_BTE = self.token_embedding(ids_BT) + self.position_embedding(positions_T)
        for block in self.blocks:
            x_BTE = block(x_BTE)
        return self.lm_head(self.final_norm(x_BTE))

    def _tie(self) -> None:
        self.lm_head.weight = self.token_embedding.weight

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # `to_empty` and moves off `meta` make a new Parameter per *module*, which unties the two.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # unannotated in torch
        self._tie()
        return self


def _tie_again(module: nn.Module, incompatible_keys: object) -> None:
    cast(GPT2, module)._tie()


class SelfAttention(nn.Module):
    """Causal multi-head self-attention; one matrix makes queries, keys and values."""

    def __init__(self, config: GPT2Config, attention: AttentionFunction) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.embedding_dim, 3 * config.embedding_dim)
        self.out = nn.Linear(config.embedding_dim, config.embedding_dim)
        self._attention = attention

    def forward(self, x_BTE: torch.Tensor) -> torch.Tensor:
        """`[B, T, E]` -> `[B, T, E]`."""
        q_BHTD, k_BHTD, v_BHTD = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(x_BTE).chunk(3, dim=-1)
        )
        mixed_BHTD = self._attention(q_BHTD, k_BHTD, v_BHTD, causal=True)
        return self.out(mixed_BHTD.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """E -> 4E -> E with GPT-2's GELU, the tanh form."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.embedding_dim, 4 * config.embedding_dim)
        self.down = nn.Linear(4 * config.embedding_dim, config.embedding_dim)

    def forward(self, x_BTE: torch.Tensor) -> torch.Tensor:
        """`[B, T, E]` -> `[B, T, E]`."""
        return self.down(F.gelu(self.up(x_BTE), approximate="tanh"))


def _norm(config: GPT2Config) -> nn.LayerNorm:
    return nn.LayerNorm(config.embedding_dim, eps=config.layer_norm_epsilon)


def language_model(
    *,
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    embedding_dim: int,
    max_sequence_length: int,
) -> GPT2:
    """A GPT-2 of that shape: ids `[batch, seq]` -> logits `[batch, seq, vocab]`.

    Raises:
        ValueError: a size is not a positive integer, or the heads do not divide the embedding.
    """
    config = GPT2Config(
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_heads=num_heads,
        embedding_dim=embedding_dim,
        max_sequence_length=max_sequence_length,
    )
    return GPT2(config)
