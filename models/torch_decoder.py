"""What both exporters of torch are given: a decoder, one example step, and its tensors' names.

The names are those that Hugging Face decoders have:

* inputs ``input_ids`` ``[batch_size, sequence_length]``, ``attention_mask``
  ``[batch_size, total_sequence_length]``, ``position_ids`` ``[batch_size, sequence_length]``, all
  int64, and ``past_key_values.N.key`` / ``past_key_values.N.value``
  ``[batch_size, num_key_value_heads, past_sequence_length, head_dim]``;
* outputs ``logits`` and ``present.N.key`` / ``present.N.value``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedModel

ATTENTION_FORMS = ("sdpa", "eager")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

# Sizes of the example step; all different, so that no two dimensions are taken for one.
BATCH, PAST, NEW = 2, 5, 3

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]

TOKENS_AXES = {0: "batch_size", 1: "sequence_length"}
MASK_AXES = {0: "batch_size", 1: "total_sequence_length"}
PAST_AXES = {0: "batch_size", 2: "past_sequence_length"}
PRESENT_AXES = {0: "batch_size", 2: "total_sequence_length"}


class CachesAsPairs(torch.nn.Module):
    """A decoder that takes and returns its caches as ``(key, value)`` pairs, one per layer."""

    def __init__(self, decoder: PreTrainedModel) -> None:
        """Wrap ``decoder``."""
        super().__init__()
        self.decoder = decoder

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_values: Pairs,
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return the logits and the caches after this step."""
        cache = DynamicCache()
        for layer, (key, value) in enumerate(past_key_values):
            cache.update(key, value, layer)
        result = self.decoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        return result.logits, [(layer.keys, layer.values) for layer in cache.layers]


@dataclass(frozen=True)
class Step:
    """The example step that is traced: three int64 tensors and the caches before it."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    past_key_values: list[tuple[torch.Tensor, torch.Tensor]]


def load_decoder(model_dir: Path, *, attention: str, dtype: str) -> PreTrainedModel:
    """Load a checkpoint for export.

    Args:
        model_dir: folder with ``config.json`` and ``model.safetensors``.
        attention: one of ``ATTENTION_FORMS``, the implementation inside transformers.
        dtype: one of ``DTYPES``, of weights, caches and logits.
    """
    decoder = AutoModelForCausalLM.from_pretrained(
        model_dir, attn_implementation=attention, dtype=DTYPES[dtype]
    ).eval()
    if getattr(decoder.config, "num_experts", None):
        # Neither exporter of torch knows the operators of the default, grouped_mm.
        decoder.set_experts_implementation("batched_mm")
    return decoder


def example_step(config: PretrainedConfig, *, dtype: str, tokens: int = NEW) -> Step:
    """Return a step of ``tokens`` random tokens on top of random caches."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (BATCH, config.num_key_value_heads, PAST, head_dim)
    generator = torch.Generator().manual_seed(0)

    def random_cache() -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DTYPES[dtype])

    return Step(
        torch.randint(3, config.vocab_size, (BATCH, tokens), generator=generator),
        torch.ones(BATCH, PAST + tokens, dtype=torch.long),
        torch.arange(PAST, PAST + tokens)[None].expand(BATCH, tokens).contiguous(),
        [(random_cache(), random_cache()) for _ in range(config.num_hidden_layers)],
    )


def past_names(config: PretrainedConfig) -> list[str]:
    """Return the caches' input names, in order."""
    return [f"past_key_values.{name}" for name in _cache_names(config)]


def present_names(config: PretrainedConfig) -> list[str]:
    """Return the caches' output names, in order."""
    return [f"present.{name}" for name in _cache_names(config)]


def _cache_names(config: PretrainedConfig) -> list[str]:
    return [f"{n}.{part}" for n in range(config.num_hidden_layers) for part in ("key", "value")]
