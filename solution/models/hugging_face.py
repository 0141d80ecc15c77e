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

_GPT2 = {
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "lm_head": "lm_head",
}
_GPT2_BLOCK = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_LLAMA = {
    "token_embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
}
_LLAMA_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # their Conv1D holds [in, out]


def from_hugging_face_state_dict(
    theirs: Mapping[str, torch.Tensor], config: ModelConfig
) -> dict[str, torch.Tensor]:
    """Their state dict as one of `GPT2(config)` or `Llama(config)`.

    Raises:
        ValueError: a key too many or too few (`lm_head.weight` may be absent where it is tied), a
            shape that is not the config's, or an `lm_head.weight` that should be tied and is not.
    """
    with torch.device("meta"):
        model = GPT2(config) if isinstance(config, GPT2Config) else Llama(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    names = {name: _their_name(name, config) for name in shapes}
    if isinstance(config, GPT2Config):
        theirs = _with_tied_head(theirs)
    expected = set(names.values())
    if theirs.keys() != expected:
        kind = "GPT2LMHeadModel" if isinstance(config, GPT2Config) else "LlamaForCausalLM"
        raise ValueError(
            f"expected the {len(expected)} keys of a {config.num_layers}-layer {kind}; "
            f"missing {sorted(expected - theirs.keys())[:3]}, "
            f"unexpected {sorted(theirs.keys() - expected)[:3]}"
        )
    ours = {name: _turned(theirs[key], key) for name, key in names.items()}
    for name, tensor in ours.items():
        if tensor.shape != shapes[name]:
            raise ValueError(
                f"expected {names[name]} to make {name} of shape {tuple(shapes[name])}, "
                f"got {tuple(tensor.shape)}; the config is not that of the weights"
            )
    return ours


def to_hugging_face_state_dict(model: GPT2 | Llama) -> dict[str, torch.Tensor]:
    """The weights of `model` under the names, and in the layout, of Hugging Face's class."""
    keys = {name: _their_name(name, model.config) for name in model.state_dict()}
    return {keys[name]: _turned(tensor, keys[name]) for name, tensor in model.state_dict().items()}


def _with_tied_head(theirs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """GPT-2's weights with the head that a file may leave out, as it is the embedding."""
    wte, head = (f"{_GPT2[module]}.weight" for module in ("token_embedding", "lm_head"))
    if wte not in theirs:
        return theirs
    if not torch.equal(theirs.get(head, theirs[wte]), theirs[wte]):
        raise ValueError(f"expected {head} to be tied to {wte}, got different values")
    return {head: theirs[wte], **theirs}


def _their_name(name: str, config: ModelConfig) -> str:
    """Return their name of a parameter of ours."""
    is_gpt2 = isinstance(config, GPT2Config)
    outer, inner = (_GPT2, _GPT2_BLOCK) if is_gpt2 else (_LLAMA, _LLAMA_BLOCK)
    module, _, kind = name.rpartition(".")
    if module in outer:
        return f"{outer[module]}.{kind}"
    _, layer, part = module.split(".", 2)  # blocks.0.attention.out
    return f"{'transformer.h' if is_gpt2 else 'model.layers'}.{layer}.{inner[part]}.{kind}"


def _turned(tensor: torch.Tensor, theirs: str) -> torch.Tensor:
    return tensor.t().contiguous() if theirs.endswith(_TRANSPOSED) else tensor
