"""Say what a conversion of a known kind of model may cost, in sentences for warnings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tq_onnx.files.configuration import configured_type
from tq_onnx.plan import Plan
from tq_onnx.recognise.site import Site

_FRAGILE_KEYS: Final = {"gpt_oss": "gpt-oss", "gptoss": "gpt-oss"}
"""Names of models by their types in config.json and in genai_config.json."""
_ENOUGH_BITS: Final = 5
"""Of a key element, also in models with fragile keys."""


def cautions(path: Path, plan: Plan, sites: Sequence[Site], bytes_after: int) -> tuple[str, ...]:
    """Return sentences about a conversion; none for most.

    Args:
        path: the original.
        plan: of the conversion.
        sites: the layers of the original.
        bytes_after: of a token in all converted caches.
    """
    sentences = (_of_keys(path, plan), _of_rings(sites, bytes_after))
    return tuple(sentence for sentence in sentences if sentence)


def _of_keys(path: Path, plan: Plan) -> str:
    name = _FRAGILE_KEYS.get(configured_type(path) or "")
    if name is None or all(layer.key.codec.bits >= _ENOUGH_BITS for layer in plan.layers):
        return ""
    return (
        f"the keys of {name} are known to lose more by quantization than those of other models: "
        'use `preset="k8v4"`, or `preset="int5"` with `calibrate=True`, and measure the loss by '
        "tq-onnx report"
    )


def _of_rings(sites: Sequence[Site], bytes_after: int) -> str:
    """Compare caches of all tokens with those of an original that holds only the newest ones."""
    windows = {site.sliding_window for site in sites if site.ring}
    if not windows:
        return ""
    growing = sum(site.bytes_per_token for site in sites if not site.ring)
    fixed = sum(site.bytes_per_token * site.sliding_window for site in sites if site.ring)
    if bytes_after > growing:
        cost = f"from {fixed // (bytes_after - growing):,} tokens on, the caches are larger than"
    else:
        cost = f"in long texts the caches are {growing / bytes_after:.1f} times smaller than"
    return (
        f"{sum(site.ring for site in sites)} of {len(sites)} layers of the original keep only the "
        f"newest {' or '.join(f'{size:,}' for size in sorted(windows))} tokens, and all converted "
        f"layers keep all tokens: {cost} the original's"
    )
