"""Weights from and to Hugging Face's models: the same bits under other names.

    model.load_state_dict(from_hugging_face_state_dict(theirs.state_dict(), model.config))
    theirs.load_state_dict(to_hugging_face_state_dict(model))

`GPT2LMHeadModel` and `LlamaForCausalLM`, chosen by the config. Names are a list and not a rule:
GPT-2's output projection of attention is square, and a missing transpose there raises no error.
Strict in both directions: a key too many is as wrong as one too few.

What does not show in the weights is the caller's to compare: their Llama config must have the
default kind of rope, our `rope_theta`, and our `norm_epsilon` as `rms_norm_eps`.
"""

from collections.abc import Mapping

import torch

from solution.config import GPT2Config, ModelConfig
from solution.models.gpt2 import GPT2
from solution.models.llama import Llama

Name = tuple[str, bool]
"""Theirs, and whether the matrix is transposed: their Conv1D holds [in, out]."""

_GPT2 = {
    "token_embedding.weight": ("transformer.wte.weight", False),
    "position_embedding.weight": ("transformer.wpe.weight", False),
    "final_norm.weight": ("transformer.ln_f.weight", False),
    "final_norm.bias": ("transformer.ln_f.bias", False),
    "lm_head.weight": ("lm_head.weight", False),
}
_GPT2_BLOCK = {
    "attention_norm.weight": ("ln_1.weight", False),
    "attention_norm.bias": ("ln_1.bias", False),
    "attention.qkv.weight": ("attn.c_attn.weight", True),
    "attention.qkv.bias": ("attn.c_attn.bias", False),
    "attention.out.weight": ("attn.c_proj.weight", True),
    "attention.out.bias": ("attn.c_proj.bias", False),
    "mlp_norm.weight": ("ln_2.weight", False),
    "mlp_norm.bias": ("ln_2.bias", False),
    "mlp.up.weight": ("mlp.c_fc.weight", True),
    "mlp.up.bias": ("mlp.c_fc.bias", False),
    "mlp.down.weight": ("mlp.c_proj.weight", True),
    "mlp.down.bias": ("mlp.c_proj.bias", False),
}
_LLAMA = {
    "token_embedding.weight": ("model.embed_tokens.weight", False),
    "final_norm.weight": ("model.norm.weight", False),
    "lm_head.weight": ("lm_head.weight", False),
}
_LLAMA_BLOCK = {
    "attention_norm.weight": ("input_layernorm.weight", False),
    "attention.query.weight": ("self_attn.q_proj.weight", False),
    "attention.key.weight": ("self_attn.k_proj.weight", False),
    "attention.value.weight": ("self_attn.v_proj.weight", False),
    "attention.out.weight": ("self_attn.o_proj.weight", False),
    "mlp_norm.weight": ("post_attention_layernorm.weight", False),
    "mlp.gate.weight": ("mlp.gate_proj.weight", False),
    "mlp.up.weight": ("mlp.up_proj.weight", False),
    "mlp.down.weight": ("mlp.down_proj.weight", False),
}


def from_hugging_face_state_dict(
    theirs: Mapping[str, torch.Tensor], config: ModelConfig
) -> dict[str, torch.Tensor]:
    """Their state dict as one of `GPT2(config)` or `Llama(config)`.

    Raises:
        ValueError: a key too many or too few (`lm_head.weight` may be absent where it is tied), a
            shape that is not the config's, or an `lm_head.weight` that should be tied and is not.
    """
    names = _names(config)
    if isinstance(config, GPT2Config):
        theirs = _with_tied_head(theirs)
    expected = {key for key, _ in names.values()}
    if theirs.keys() != expected:
        kind = "GPT2LMHeadModel" if isinstance(config, GPT2Config) else "LlamaForCausalLM"
        raise ValueError(
            f"expected the {len(expected)} keys of a {config.num_layers}-layer {kind}; "
            f"missing {sorted(expected - theirs.keys())[:3]}, "
            f"unexpected {sorted(theirs.keys() - expected)[:3]}"
        )
    with torch.device("meta"):
        model = GPT2(config) if isinstance(config, GPT2Config) else Llama(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    ours = {name: _transpose(theirs[key], flip) for name, (key, flip) in names.items()}
    for name, tensor in ours.items():
        if tensor.shape != shapes[name]:
            raise ValueError(
                f"expected {names[name][0]} to make {name} of shape {tuple(shapes[name])}, "
                f"got {tuple(tensor.shape)}; the config is not that of the weights"
            )
    return ours


def to_hugging_face_state_dict(model: GPT2 | Llama) -> dict[str, torch.Tensor]:
    """The weights of `model` under the names, and in the layout, of Hugging Face's class."""
    ours = model.state_dict()
    return {key: _transpose(ours[name], flip) for name, (key, flip) in _names(model.config).items()}


def _with_tied_head(theirs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """GPT-2's weights with the head that a file may leave out, as it is the embedding."""
    wte, head = _GPT2["token_embedding.weight"][0], _GPT2["lm_head.weight"][0]
    if wte not in theirs:
        return theirs
    if not torch.equal(theirs.get(head, theirs[wte]), theirs[wte]):
        raise ValueError(f"expected {head} to be tied to {wte}, got different values")
    return {head: theirs[wte], **theirs}


def _names(config: ModelConfig) -> dict[str, Name]:
    """Every name of ours, with theirs."""
    if isinstance(config, GPT2Config):
        outer, inner, prefix = _GPT2, _GPT2_BLOCK, "transformer.h"
    else:
        outer, inner, prefix = _LLAMA, _LLAMA_BLOCK, "model.layers"
    return outer | {
        f"blocks.{layer}.{ours}": (f"{prefix}.{layer}.{theirs}", flip)
        for layer in range(config.num_layers)
        for ours, (theirs, flip) in inner.items()
    }


def _transpose(tensor: torch.Tensor, flip: bool) -> torch.Tensor:
    return tensor.t().contiguous() if flip else tensor
