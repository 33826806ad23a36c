"""What recognition says of real exports; tests/agreement runs them and their conversions."""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.decoders.running import load
from tq_onnx.recognise.match import recognise

ADDS: Final = {"causal": False, "has_bias": True}
"""A mask is added, which hides the future, too."""
COUNTS: Final = {"causal": True, "has_bias": False}
EXPORTS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "dynamo-op18-sdpa": ("decomposed", {**ADDS, "head_size": 64}),
    "dynamo-op18-eager": ("decomposed", {**ADDS, "head_size": 64}),
    "dynamo-op20-sdpa": ("decomposed", {**ADDS, "head_size": 64}),
    "dynamo-op20-eager": ("decomposed", {**ADDS, "head_size": 64}),
    "dynamo-op18-sdpa-hd128-fp16": ("decomposed", {**ADDS, "head_size": 128}),
    "legacy-op14-eager": ("decomposed", ADDS),
    "legacy-op17-sdpa": ("decomposed", ADDS),
    "legacy-op17-sdpa-fp16": ("decomposed", ADDS),
    "optimum": ("decomposed", ADDS),
    "hf-static-prefill": ("decomposed", {**ADDS, "counts_tokens": True}),
    "hf-static-decode": ("decomposed", {**ADDS, "counts_tokens": True}),
    "genai-cpu-fp32": ("gqa", {**COUNTS, "head_size": 64}),
    "genai-cpu-int4": ("gqa", {**COUNTS, "head_size": 64}),
    "genai-cpu-int4-hd128": ("gqa", {**COUNTS, "head_size": 128}),
    "genai-cuda-fp16": ("gqa", {**COUNTS, "head_size": 64}),
    "genai-cuda-int4": ("gqa", {**COUNTS, "head_size": 64}),
    "hf-ortcuda-decode": ("mha", ADDS),
    "hf-ortcuda-prefill": ("mha", ADDS),
    "genai-cpu-fp16": ("mha", ADDS),
    "dynamo-op23-sdpa": ("onnx", {**ADDS, "counts_tokens": False}),
    "dynamo-op24-sdpa": ("onnx", {**ADDS, "counts_tokens": False}),
    "mobius-default": ("onnx", {"causal": True, "has_bias": True}),
    "mobius-static": ("onnx", {"causal": True, "has_bias": True, "counts_tokens": True}),
}
HALF: Final = {"fp16", "genai-cuda-int4"}


@pytest.mark.parametrize("name", EXPORTS)
def test_recognises_every_layer_of_an_export(name: str) -> None:
    recognition = recognise(load(name))
    dialect, facts = EXPORTS[name]
    facts = {"head_size": 16, "softcap": 0, "sliding_window": 0, **facts}

    assert recognition.misses == ()
    assert [site.layer for site in recognition.sites] == [0, 1]
    begins = name.endswith("prefill")
    for site in recognition.sites:
        assert (site.dialect, site.num_heads, site.kv_num_heads) == (dialect, 4, 2)
        assert {fact: getattr(site, fact) for fact in facts} == facts
        assert site.scale == pytest.approx(site.head_size**-0.5, rel=1e-6)
        assert (site.key.past is None) == begins
        assert site.dtype.name == ("FLOAT16" if any(end in name for end in HALF) else "FLOAT")
    assert recognition.fixed_capacity != begins
    first = recognition.sites[0]
    if name.startswith(("dynamo", "genai", "mobius-default")):
        names = first.key.past.name, first.value.present.name
        assert names == ("past_key_values.0.key", "present.0.value")
    if name == "mobius-static":
        names = first.key.past.name, first.value.present.name
        assert names == ("key_cache.0", "updated_value_cache.0")
    if name.startswith("hf-static"):
        assert first.key.update.slots == (24 if begins else 0)
        (source,) = first.key.update.sources
        assert source.name == "input.past_key_values.layers.0.cumulative_length"
    assert recognition.interface.logits == "logits"
