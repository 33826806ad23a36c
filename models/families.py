"""Save tiny checkpoints of many families of decoders, with random weights.

One table for the two generations of transformers that exporters need: a family that one of them
lacks is told, and left out. Weights are drawn from a fixed seed; all of them get noise, so that
norms, biases and position tables are not what they are by default.

Example::

    python models/families.py checkpoints llama gpt2 whisper
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

#: Tokens that a causal decoder and a sequence-to-sequence model begin and end with.
TOKENS = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
#: Sizes by the names that most families have.
SIZES = {
    **TOKENS,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
HEADS = {**SIZES, "head_dim": 16}
FOUR = {**HEADS, "num_hidden_layers": 4}
ALL_HEADS = {**SIZES, "num_key_value_heads": 4}
#: By the names of GPT-2.
GPT = {**TOKENS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
#: By the names of BART.
PAIR = {
    **TOKENS,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "forced_eos_token_id": None,
}
#: By the names of T5.
TEXT_TO_TEXT = {
    "vocab_size": 61,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "d_model": 64,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8, "mamba_n_groups": 1}
WINDOWS = ["sliding_attention", "full_attention"]
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}


@dataclass(frozen=True)
class Family:
    """A kind of decoder.

    Attributes:
        settings: of its configuration.
        model_type: its name in transformers; None for the name in ``FAMILIES``.
        auto: the class that makes it.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    model_type: str | None = None
    auto: str = "AutoModelForCausalLM"


def _seq2seq(**settings: Any) -> Family:
    return Family(settings, auto="AutoModelForSeq2SeqLM")


FAMILIES = {
    "llama": Family(HEADS),
    "mistral": Family(HEADS),
    "ministral": Family({**HEADS, "sliding_window": 6}),
    "mixtral": Family({**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": Family(SIZES),
    "qwen2_moe": Family({**SIZES, **EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3": Family(HEADS),
    "qwen3_moe": Family({**HEADS, **EXPERTS}),
    "qwen3_next": Family({**FOUR, **EXPERTS, **LINEAR, "shared_expert_intermediate_size": 16}),
    "qwen3_5_text": Family({**FOUR, **LINEAR}),
    "phi": Family(ALL_HEADS),
    "phi3": Family({**SIZES, "original_max_position_embeddings": 64}),
    "phimoe": Family({**SIZES, "num_local_experts": 4, "original_max_position_embeddings": 64}),
    "gemma": Family(HEADS),
    "gemma2": Family({**HEADS, "sliding_window": 6, "query_pre_attn_scalar": 24}),
    "gemma3_text": Family(
        {**HEADS, "sliding_window": 6, "query_pre_attn_scalar": 24, "layer_types": WINDOWS}
    ),
    "gemma3n_text": Family(
        {
            **FOUR,
            "vocab_size_per_layer_input": 61,
            "hidden_size_per_layer_input": 8,
            "sliding_window": 6,
            "num_kv_shared_layers": 2,
            "layer_types": WINDOWS * 2,
            "laurel_rank": 4,
            "activation_sparsity_pattern": None,
        }
    ),
    "gemma4_text": Family(
        {
            **FOUR,
            "vocab_size_per_layer_input": 61,
            "hidden_size_per_layer_input": 8,
            "sliding_window": 6,
            "num_kv_shared_layers": 2,
            "layer_types": WINDOWS * 2,
            "global_head_dim": 32,
        }
    ),
    "gpt2": Family(GPT),
    "gpt_neo": Family(
        {
            **TOKENS,
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 64,
            "window_size": 6,
        }
    ),
    "gptj": Family({**GPT, "rotary_dim": 4}),
    "codegen": Family({**GPT, "rotary_dim": 4, "n_ctx": 64}),
    "gpt_neox": Family(ALL_HEADS),
    "gpt_bigcode": Family(GPT),
    "bloom": Family({**TOKENS, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "opt": Family({**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 64}),
    "falcon": Family({**SIZES, "multi_query": True, "alibi": False}),
    "falcon-alibi": Family({**SIZES, "multi_query": False, "alibi": True}, "falcon"),
    "falcon-grouped": Family(
        {**SIZES, "num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False}, "falcon"
    ),
    "stablelm": Family(SIZES),
    "nemotron": Family(HEADS),
    "mpt": Family({**TOKENS, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    "glm": Family({**HEADS, "attention_bias": True}),
    "glm4": Family({**HEADS, "attention_bias": True}),
    "glm4_moe": Family({**HEADS, "n_routed_experts": 4, "num_experts_per_tok": 2}),
    "cohere": Family(SIZES),
    "cohere2": Family({**SIZES, "sliding_window": 6, "layer_types": WINDOWS}),
    "olmo": Family(SIZES),
    "olmo2": Family(SIZES),
    "olmo3": Family({**SIZES, "sliding_window": 6, "layer_types": WINDOWS}),
    "olmoe": Family({**SIZES, "num_experts": 4, "num_experts_per_tok": 2}),
    "granite": Family(SIZES),
    "granitemoe": Family({**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granitemoehybrid": Family(
        {
            **FOUR,
            **MAMBA,
            "mamba_expand": 2,
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
        }
    ),
    "bamba": Family({**FOUR, **MAMBA, "mamba_expand": 2, "attn_layer_indices": [1, 3]}),
    "jamba": Family(
        {
            **FOUR,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
        }
    ),
    "nemotron_h": Family(
        {
            **HEADS,
            "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
            "num_hidden_layers": 4,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 8,
            "n_groups": 1,
            "use_mamba_kernels": False,
        }
    ),
    "falcon_h1": Family({**HEADS, **MAMBA, "mamba_d_ssm": 128}),
    "lfm2": Family({**FOUR, "layer_types": ["conv", "full_attention"] * 2}),
    "starcoder2": Family(SIZES),
    "smollm3": Family({**FOUR, "no_rope_layers": [1, 1, 1, 0]}),
    "arcee": Family(HEADS),
    "apertus": Family(HEADS),
    "ernie4_5": Family(HEADS),
    "exaone4": Family({**HEADS, "sliding_window": 6, "layer_types": WINDOWS}),
    "helium": Family(HEADS),
    "hunyuan_v1_dense": Family(HEADS),
    "seed_oss": Family({**HEADS, "attention_out_bias": True}),
    "gpt_oss": Family(
        {
            **HEADS,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "layer_types": WINDOWS,
        }
    ),
    "llama4_text": Family(
        {
            **FOUR,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "attention_chunk_size": 6,
            "interleave_moe_layer_step": 2,
        }
    ),
    "deepseek_v2": Family(
        {
            **ALL_HEADS,
            **LATENT,
            "head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 2,
        }
    ),
    "deepseek_v3": Family(
        {
            **ALL_HEADS,
            **LATENT,
            "head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 2,
        }
    ),
    "minicpm3": Family({**ALL_HEADS, **LATENT}),
    "persimmon": Family(ALL_HEADS),
    "diffllama": Family(HEADS),
    "jetmoe": Family({**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8}),
    "xglm": Family({**TOKENS, "d_model": 64, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}),
    "biogpt": Family(ALL_HEADS),
    "doge": Family(HEADS),
    "bitnet": Family(HEADS),
    "dbrx": Family(
        {
            **TOKENS,
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        }
    ),
    "openai-gpt": Family(GPT),
    "ctrl": Family({**GPT, "dff": 48}),
    "bart": _seq2seq(**PAIR),
    "mbart": _seq2seq(**PAIR),
    "marian": _seq2seq(**PAIR, decoder_start_token_id=0),
    "m2m_100": _seq2seq(**PAIR),
    "pegasus": _seq2seq(**PAIR),
    "blenderbot": _seq2seq(**PAIR),
    "blenderbot-small": _seq2seq(**PAIR),
    "t5": _seq2seq(**TEXT_TO_TEXT),
    "mt5": _seq2seq(**TEXT_TO_TEXT),
    "longt5": _seq2seq(**TEXT_TO_TEXT),
    "whisper": Family(
        {
            **PAIR,
            "max_source_positions": 1500,
            "max_target_positions": 448,
            "num_mel_bins": 16,
            "decoder_start_token_id": 1,
            "begin_suppress_tokens": None,
            "suppress_tokens": None,
        },
        auto="AutoModelForSpeechSeq2Seq",
    ),
    "moonshine": Family(
        {
            "vocab_size": 61,
            "hidden_size": 64,
            "intermediate_size": 48,
            "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 2,
            "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4,
            "max_position_embeddings": 64,
            "pad_head_dim_to_multiple_of": 8,
        },
        auto="AutoModelForSpeechSeq2Seq",
    ),
}


def make(name: str, directory: Path) -> None:
    """Save the checkpoint of a family.

    Args:
        name: one of ``FAMILIES``.
        directory: receives ``config.json`` and ``model.safetensors``.
    """
    import torch
    import transformers

    family = FAMILIES[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family.model_type or name, **family.settings)
    model = getattr(transformers, family.auto).from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(directory)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, help="folder for OUTPUT/NAME")
    parser.add_argument("names", nargs="*", choices=[[], *FAMILIES], metavar="NAME")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    for name in options.names or FAMILIES:
        try:
            make(name, options.output / name)
        except Exception as error:  # a generation of transformers without it, or with other names
            print(f"{name}: {type(error).__name__}: {error}".splitlines()[0][:200], flush=True)


if __name__ == "__main__":
    main()
