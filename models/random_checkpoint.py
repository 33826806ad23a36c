"""Save tiny checkpoints with random weights, for fixtures.

The weights are drawn from fixed seeds and the norm weights are not 1, so that folding them away
wrongly changes the result. No Linear has as many outputs as there are tokens: the genai builder
would take such a layer for the language-model head.

Example::

    python models/random_checkpoint.py qwen3-16 gemma3 checkpoints
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

TOKENIZER = Path(__file__).resolve().parent / "qwen3-tiny"

#: Of every checkpoint: 2 layers, 4 heads, 2 KV heads, own language-model head.
BASE = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
#: Those whose graphs are to be small.
SMALL = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 12,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
#: Those whose heads are as large as real ones.
LARGE = {
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "rope_theta": 1e6,
}


@dataclass(frozen=True)
class Checkpoint:
    """A model type of transformers, its seed, and what differs from ``BASE``."""

    model_type: str
    seed: int
    settings: dict[str, Any] = field(default_factory=dict)


CHECKPOINTS = {
    "qwen3-64": Checkpoint(
        "qwen3", 64, LARGE | {"hidden_size": 16, "intermediate_size": 24, "head_dim": 64}
    ),
    "qwen3-128": Checkpoint(
        "qwen3",
        128,
        LARGE
        | {
            "hidden_size": 32,
            "intermediate_size": 48,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-16": Checkpoint("qwen3", 16, SMALL | {"rope_theta": 1e6}),
    "qwen3-deep": Checkpoint(
        "qwen3",
        28,
        LARGE
        | {
            "num_hidden_layers": 28,
            "vocab_size": 4099,
            "hidden_size": 256,
            "intermediate_size": 768,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "initializer_range": 0.05,
            "tie_word_embeddings": True,
        },
    ),
    "llama": Checkpoint("llama", 1, SMALL),
    "phi3": Checkpoint("phi3", 2, SMALL | {"original_max_position_embeddings": 64}),
    "gemma2": Checkpoint("gemma2", 3, SMALL | {"query_pre_attn_scalar": 24, "sliding_window": 6}),
    "gemma3": Checkpoint(
        "gemma3_text",
        4,
        SMALL
        | {
            "query_pre_attn_scalar": 24,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3-moe": Checkpoint(
        "qwen3_moe",
        5,
        SMALL
        | {
            "moe_intermediate_size": 12,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
}


def make_checkpoint(name: str, directory: Path) -> None:
    """Save the checkpoint of that name into ``directory``, with the tokenizer of qwen3-tiny.

    The tokenizer only satisfies exporters that insist on one; its ids are not the model's.
    """
    checkpoint = CHECKPOINTS[name]
    torch.manual_seed(checkpoint.seed)
    config = AutoConfig.for_model(checkpoint.model_type, **(BASE | checkpoint.settings))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.pad_token_id = config.pad_token_id
    model.save_pretrained(directory)
    for file in TOKENIZER.glob("tokenizer*.json"):
        shutil.copyfile(file, directory / file.name)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="+", choices=CHECKPOINTS, metavar="NAME", help=", ".join(CHECKPOINTS)
    )
    parser.add_argument("output", type=Path, help="folder for OUTPUT/NAME")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.names:
        make_checkpoint(name, options.output / name)


if __name__ == "__main__":
    main()
