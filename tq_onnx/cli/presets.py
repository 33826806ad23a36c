"""``tq-onnx presets``: what each preset stores, what a token costs, and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import click

from tq_onnx.cli import flags, terminal
from tq_onnx.codec.presets import DEFAULT_PRESET, PRESETS, Preset
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.errors import UsageError
from tq_onnx.measure.tables import TextTable

_HALF_BYTES: Final = 2
_VLLM_HEAD_SIZE: Final = 128
_VLLM_SLOTS: Final = {"k8v4": 196, "4bit_nc": 134, "k3v4_nc": 118, "3bit_nc": 102}
"""Bytes of vLLM's slot for a token of one head of 128, by the presets named after its own."""


@dataclass(frozen=True)
class PresetFacts:
    """A preset at one head size.

    Attributes:
        preset: its name.
        key: codec of the keys; ``raw`` as in a float16 model.
        value: codec of the values, likewise.
        rotation: ``qr``, ``hadamard`` or ``none``.
        norm_correction: whether scales make up for the norm that quantisation loses.
        bytes_per_token: key and value of one head, metadata included.
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
    norm_correction: bool
    bytes_per_token: int
    bits_per_value: float
    ratio: float
    vllm_slot: int | None
    source: str
    experimental: bool
    default: bool


@click.command()
@click.option(
    "--head-size",
    type=click.IntRange(min=8, max=512),
    default=128,
    show_default=True,
    help="Head size that the bytes are told for.",
)
@flags.as_json
def presets(head_size: int, as_json: bool) -> None:
    """List every preset: codecs, bytes of a token, and where it comes from.

    Bytes are those of the key and the value of one KV head, metadata included; `tq-onnx inspect`
    tells those of a whole model.

    \b
    Example:
      tq-onnx presets
      tq-onnx presets --head-size 64 --json
    """
    try:
        found = [facts(preset, head_size) for preset in PRESETS.values()]
    except ValueError as error:
        raise UsageError(str(error)) from error
    if as_json:
        terminal.print_json(found)
        return
    rows = []
    for entry in found:
        slot = "" if entry.vllm_slot is None else f" (its slot: {entry.vllm_slot} bytes)"
        rows.append(
            (
                entry.preset + (" (default)" if entry.default else ""),
                entry.key,
                entry.value,
                entry.rotation,
                entry.bytes_per_token,
                f"{entry.bits_per_value:.2f}",
                f"{entry.ratio:.2f}",
                f"{entry.source}{slot}{'; experimental' if entry.experimental else ''}",
            )
        )
    columns = ("preset", "keys", "values", "rotation", ">bytes", ">bits", ">smaller", "from")
    terminal.print_table(TextTable.of(columns, rows))
    terminal.print_line(
        f"bytes: key and value of one token and KV head of size {head_size}; bits: of one value; "
        "smaller: than float16, times"
    )


def facts(preset: Preset, head_size: int) -> PresetFacts:
    """A preset at one head size.

    Raises:
        ValueError: there are no rows of this head size.
    """
    codecs = [codec.for_elements(8 * _HALF_BYTES) for codec in (preset.key, preset.value)]
    size = sum(row_layout(codec, head_size).row_bytes for codec in codecs)
    return PresetFacts(
        preset=preset.name,
        key=_name(codecs[0]),
        value=_name(codecs[1]),
        rotation=preset.rotation,
        norm_correction=preset.norm_correction and any(codec.corrects_norm for codec in codecs),
        bytes_per_token=size,
        bits_per_value=4 * size / head_size,
        ratio=2 * _HALF_BYTES * head_size / size,
        vllm_slot=_VLLM_SLOTS.get(preset.name) if head_size == _VLLM_HEAD_SIZE else None,
        source=preset.source,
        experimental=preset.experimental,
        default=preset.name == DEFAULT_PRESET,
    )


def _name(codec: Codec) -> str:
    return "as in the model" if codec.is_raw else str(codec)
