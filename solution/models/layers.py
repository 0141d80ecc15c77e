"""Parts of both model families: the check of their ids, the drawing of weights, the layer."""

from typing import Any, Self

import torch
from torch import nn

from solution.config import ModelConfig
from solution.models.checkpointing import Runner


def check_ids(ids_BT: torch.Tensor, *, max_sequence_length: int) -> None:
    """Raise ValueError unless `ids_BT` are integers `[batch, seq]`, and not too long."""
    if ids_BT.ndim != 2 or ids_BT.is_floating_point():
        raise ValueError(
            f"expected integer ids of shape [batch, seq], got {ids_BT.dtype} of shape "
            f"{tuple(ids_BT.shape)}"
        )
    if ids_BT.shape[1] > max_sequence_length:
        raise ValueError(
            f"expected at most max_sequence_length={max_sequence_length} tokens per sequence, got "
            f"{ids_BT.shape[1]}; cut them, or give the model more positions"
        )


class LanguageModel(nn.Module):
    """Base of both families: `blocks`, `final_norm`, `lm_head`, and how weights are drawn."""

    config: ModelConfig

    def reset_parameters(self, generator: torch.Generator | None = None) -> Self:
        """Draw all weights anew, each tensor once, in the order of `named_parameters()`.

        Normal(0, init_std) for matrices and embeddings; the two projections onto the residual
        stream are scaled by 1 / sqrt(2L), where L is the number of layers; biases are 0 and norms
        1. Returns the model.
        """
        std = self.config.init_std
        residual_std = std / (2 * self.config.num_layers) ** 0.5
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim == 1:
                    parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
                elif name.endswith(("attention.out.weight", "mlp.down.weight")):
                    parameter.normal_(0.0, residual_std, generator=generator)
                else:
                    parameter.normal_(0.0, std, generator=generator)
        return self


class Block(nn.Module):
    """One layer: attention and MLP, each on a normalised copy, each added to the stream."""

    def __init__(
        self,
        attention_norm: nn.Module,
        attention: nn.Module,
        mlp_norm: nn.Module,
        mlp: nn.Module,
        run: Runner,
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self._run = run

    def forward(self, x_BTE: torch.Tensor, *positions: Any) -> torch.Tensor:
        """`[B, T, E]` -> `[B, T, E]`; what else it is given goes to the attention."""
        return self._run(self._layer, x_BTE, *positions)

    def _layer(self, x_BTE: torch.Tensor, *positions: Any) -> torch.Tensor:
        x_BTE = x_BTE + self.attention(self.attention_norm(x_BTE), *positions)
        return x_BTE + self.mlp(self.mlp_norm(x_BTE))
