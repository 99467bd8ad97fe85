"""What a model's config.json counts: heads, layers, experts. Where attention may be cut, and cost.

The names of the counts differ by architecture; the first that is there is taken.
Source: the configuration files of transformers 5.24.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mxfp4prep.errors import InvalidCheckpoint

_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "kv_n_heads")
_HEAD_DIM = ("head_dim", "kv_channels")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
)
_MOE_WIDTH = ("moe_intermediate_size",)
_SHARED_EXPERTS = (
    "n_shared_experts",
    "num_shared_experts",
    "moe_num_shared_experts",
    "num_shared_expert",
)
_PARTS_OF_CONFIG = ("attn_config", "ffn_config")
"""Where DBRX keeps some of its counts."""


class Topology(NamedTuple):
    """The counts of a text model; 0 where config.json is silent.

    heads, kv_heads, head_dim   attention; kv_heads as many as heads where not said
    linear_*                    heads of linear attention, and the rows of one
    layers, hidden              transformer layers, and the width of the residual stream
    experts, experts_per_token  routed experts of a MoE layer, and how many of them a token visits
    moe_width                   intermediate size of a routed expert
    shared_experts              experts that every token visits
    output_groups               groups of heads that share an output projection (DeepSeek-V4)
    """

    model_type: str = ""
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    linear_value_dim: int = 0
    layers: int = 0
    hidden: int = 0
    experts: int = 0
    experts_per_token: int = 0
    moe_width: int = 0
    shared_experts: int = 0
    output_groups: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Topology:
        """The counts of a Hugging Face config.json (nested text_config too).

        Raises InvalidCheckpoint for a count that is none.
        """
        nested = config.get("text_config")
        text = nested if isinstance(nested, Mapping) else config
        places = [text, *(text[key] for key in _PARTS_OF_CONFIG if key in text)]
        places = [place for place in places if isinstance(place, Mapping)]

        def count(*names: str, by_layer: bool = False) -> int:
            for name in names:
                for place in places:
                    value = place.get(name)
                    if value is not None:
                        return _by_layer(name, value) if by_layer else _count(name, value)
            return 0

        heads = count(*_HEADS)
        hidden = count(*_HIDDEN)
        kv_heads = count(*_KV_HEADS) or heads
        if text.get("multi_query") is True and text.get("new_decoder_architecture") is not True:
            kv_heads = min(heads, 1)  # Falcon-7B, GPT-BigCode
        model_type = text.get("model_type", config.get("model_type"))
        return cls(
            model_type=model_type if isinstance(model_type, str) else "",
            heads=heads,
            kv_heads=kv_heads,
            head_dim=count(*_HEAD_DIM) or (hidden // heads if heads else 0),
            linear_key_heads=count("linear_num_key_heads"),
            linear_value_heads=count("linear_num_value_heads"),
            linear_key_dim=count("linear_key_head_dim"),
            linear_value_dim=count("linear_value_head_dim"),
            layers=count(*_LAYERS),
            hidden=hidden,
            experts=count(*_EXPERTS, by_layer=True),
            experts_per_token=count(*_EXPERTS_PER_TOKEN, by_layer=True),
            moe_width=count(*_MOE_WIDTH, by_layer=True),
            shared_experts=count(*_SHARED_EXPERTS, by_layer=True),
            output_groups=count("o_groups"),
        )


def _by_layer(name: str, value: object) -> int:
    """A count that may be given layer by layer (Hunyuan); 0 where the layers differ."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        counts = {_count(name, item) for item in value}
        return counts.pop() if len(counts) == 1 else 0
    return _count(name, value)


def _count(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidCheckpoint(
            f"config.json: {name}", "not a count", found=repr(value), expected="a number"
        )
    return value
