"""Describe a preset: its codecs, the cost of a token, its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tq_onnx.codec.kind import NOT_CORRECTED
from tq_onnx.codec.presets import DEFAULT_PRESET, Preset
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.codec.window import window_of
from tq_onnx.errors import UsageError

LENGTHS: Final = (1024, 8192, 32768)
"""Tokens of the caches whose bytes are told."""

_HALF_BYTES: Final = 2
_VLLM_HEAD_SIZE: Final = 128
"""Bytes of vLLM's slot for a token of one head of 128, by the presets named after its own."""


@dataclass(frozen=True)
class PresetFacts:
    """A preset at one head size.

    Attributes:
        preset: its name.
        key: codec of the keys; ``raw`` as in a float16 model.
        value: codec of the values, likewise.
        rotation: ``qr``, ``hadamard`` or ``none``.
        norm_correction: what scales make up for: 0 nothing, 1 the norm that quantisation loses, 2
            the product with the vector; 0 where no codec can.
        gains: how many gains the encoder tries.
        window: how many of the newest tokens are exact, unless another number is asked for.
        sinks: how many of the first tokens, likewise.
        bytes_per_token: key and value of one head, metadata included.
        bytes_at: the same with its share of the exact tokens, in caches of 1,024, 8,192 and 32,768
            tokens.
        bits_per_value: the same, in bits of a coordinate.
        ratio: how many times smaller that is than in float16.
        vllm_slot: bytes of vLLM's slot; None where the preset is not vLLM's.
        source: where it comes from.
        experimental: whether other presets of its size are known to do better.
        default: whether it is the one that convert takes.
    """

    preset: str
    key: str
    value: str
    rotation: str
    norm_correction: int
    gains: int
    window: int
    sinks: int
    bytes_per_token: int
    bytes_at: tuple[float, ...]
    bits_per_value: float
    ratio: float
    vllm_slot: int | None
    source: str
    experimental: bool
    default: bool


def preset_facts(preset: Preset, head_size: int) -> PresetFacts:
    """Return what a preset stores at one head size."""
    codecs = [codec.for_elements(8 * _HALF_BYTES) for codec in (preset.key, preset.value)]
    try:
        widths = [row_layout(codec, head_size).row_bytes for codec in codecs]
    except ValueError as error:
        raise UsageError(str(error)) from error
    size = sum(widths)
    planes = [(head_size, width) for width in widths]
    overlay_rows = window_of(preset.window, preset.sinks, planes).overlay_rows
    return PresetFacts(
        preset=preset.name,
        key=_name(codecs[0]),
        value=_name(codecs[1]),
        rotation=preset.rotation,
        norm_correction=preset.norm_correction
        if any(codec.corrects_norm for codec in codecs)
        else NOT_CORRECTED,
        gains=preset.gains,
        window=preset.window,
        sinks=preset.sinks,
        bytes_per_token=size,
        bytes_at=tuple(size * (1 + overlay_rows / tokens) for tokens in LENGTHS),
        bits_per_value=4 * size / head_size,
        ratio=2 * _HALF_BYTES * head_size / size,
        vllm_slot=preset.vllm_slot if head_size == _VLLM_HEAD_SIZE else None,
        source=preset.source,
        experimental=preset.experimental,
        default=preset.name == DEFAULT_PRESET,
    )


def _name(codec: Codec) -> str:
    return "as in the model" if codec.is_raw else str(codec)
