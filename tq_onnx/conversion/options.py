"""Hold the options of a conversion besides its preset, and the choice of layers.

Every option combines with every preset that has what it is about. Layers that are left out stay
uncompressed: their caches are ``raw``, uint8 like all other caches.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tq_onnx.codec.kind import NORM_KEPT
from tq_onnx.codec.presets import DEFAULT_SEED, NO_ROTATION, ROTATIONS, Preset
from tq_onnx.codec.spec import Codec
from tq_onnx.codec.window import MAX_ENTRIES
from tq_onnx.errors import UsageError
from tq_onnx.ops.features import Feature

CENTER_FROM: Final = 4
"""The first token that is centered by the mean of all later ones."""


@dataclass(frozen=True)
class Options:
    """Choices of a conversion."""

    rotation: str | None = None  #: ``qr`` or ``hadamard``; None for the preset's
    seed: int = DEFAULT_SEED  #: base seed of the rotations
    #: bits of the keys, in the kind of codec that the preset gives them; None for the preset's
    bits_k: int | None = None
    bits_v: int | None = None  #: likewise for values
    #: that many layers at the beginning, and as many at the end, stay uncompressed
    boundary_layers: int = 0
    #: the layers to compress, as ``4-12`` or ``0,2-5``, counted from 0; None for all
    layers: str | None = None
    equal_rows: bool = False  #: whether keys and values of a layer get rows of one width, the wider
    #: whether queries and keys get scales; None for wherever something tells them
    equalize: bool | None = None
    #: file with statistics of this model, of which offsets and scales are made
    calibration: Path | None = None
    #: the first token that is centered by the mean of all later ones
    center_from: int = CENTER_FROM
    #: how many of the newest tokens caches hold in float16, too; None for the preset's number,
    #: where the model and its target can have exact tokens
    residual_length: int | None = None
    sink_tokens: int | None = None  #: how many of the first tokens, likewise
    #: whether those take rows of a cache that its tokens do not need yet, where they have rows of
    #: their own otherwise. Only caches of fixed capacity have such rows.
    spare_rows: bool = False
    planes: bool = False  #: whether codes and scales of caches lie apart
    #: whether errors of keys are fed back, where a preset searches with a calibration
    feedback: bool = True
    #: whether encoders search where the preset has them do so; if not, they take the nearest codes
    #: and correct the norm
    gains: bool = True


def adapted(preset: Preset, options: Options) -> Preset:
    """Return the preset with the bits and the rotation that were asked for."""
    chosen = replace(
        preset,
        gains=preset.gains if options.gains else 0,
        norm_correction=preset.norm_correction if options.gains or not preset.gains else NORM_KEPT,
        key=_codec(preset.key, options.bits_k, "keys", preset),
        value=_codec(preset.value, options.bits_v, "values", preset),
    )
    if options.rotation is None:
        return chosen
    if options.rotation not in ROTATIONS:
        raise UsageError(f"rotation {options.rotation!r} is not one of {', '.join(ROTATIONS)}")
    if preset.rotation == NO_ROTATION:
        raise UsageError(f"the preset {preset.name} does not rotate", fix="leave the rotation out")
    return replace(chosen, rotation=options.rotation)


def _codec(codec: Codec, bits: int | None, what: str, preset: Preset) -> Codec:
    if bits is None:
        return codec
    letter = what[0]
    if codec.is_raw:
        raise UsageError(
            f"the preset {preset.name} keeps the {what} as they are, in no number of bits",
            fix=f"leave `bits_{letter}` out or choose another preset",
        )
    forms = codec.record.bits
    if bits not in forms:
        known = " or ".join(map(str, forms))
        raise UsageError(
            f"the {what} of the preset {preset.name} are {codec.kind}, which has no form of "
            f"{bits} bits",
            fix=f"give `bits_{letter}` {known}"
            if len(forms) > 1
            else f"leave `bits_{letter}` out, it has {known} bits",
        )
    return Codec(codec.kind, bits)


def exact_tokens(preset: Preset, options: Options) -> tuple[int, int]:
    """Return how many of the newest and of the first tokens are to be exact."""
    newest = preset.window if options.residual_length is None else options.residual_length
    first = preset.sinks if options.sink_tokens is None else options.sink_tokens
    if newest + first > MAX_ENTRIES:
        raise UsageError(
            f"`residual_length={newest}` and `sink_tokens={first}` are more than the {MAX_ENTRIES} "
            "exact tokens that a cache can hold"
        )
    return newest, first


def requests_exact_tokens(options: Options) -> bool:
    """Return whether the options request exact tokens, whatever the preset."""
    return bool(options.residual_length or options.sink_tokens)


def without(options: Options, lacking: Iterable[Feature]) -> Options:
    """Return the options with nothing by default of what is lacking; what is asked for stays."""
    usual = Options()
    off = {
        name: value
        for feature in lacking
        for name, value in feature.options.items()
        if getattr(options, name) == getattr(usual, name)
    }
    return replace(options, **off)


def compressed_layers(options: Options, count: int) -> frozenset[int]:
    """Return the layers to compress, of a model with so many."""
    edge = options.boundary_layers
    if edge and 2 * edge >= count:
        raise UsageError(
            f"{edge} boundary layers at each end leave nothing to compress in a model of {count} "
            "layers",
            fix=f"give at most {(count - 1) // 2}" if count > 2 else "leave them out",
        )
    chosen = frozenset(range(edge, count - edge))
    if options.layers is None:
        return chosen
    named = _parse(options.layers)
    if max(named) >= count:
        raise UsageError(
            f"there is no layer {max(named)} in a model of {count} layers",
            where=f'`layers="{options.layers}"`',
            fix=f"layers are counted from 0 to {count - 1}",
        )
    if not named & chosen:
        raise UsageError(
            f"of the layers {options.layers} none is left to compress between {edge} boundary "
            "layers at each end",
            fix="leave one of the two options out",
        )
    return named & chosen


def _parse(text: str) -> frozenset[int]:
    """Return the layers of ``4-12`` or ``0,2-5``."""
    named: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,5})(?:\s*-\s*([0-9]{1,5}))?\s*", part)
        first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if first > last:
            raise UsageError(
                f"{text!r} names no layers", fix="give them as 4-12, as 7, or as 0,2-5"
            )
        named.update(range(first, last + 1))
    return frozenset(named)
