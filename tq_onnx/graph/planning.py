"""Makes the plan of a conversion from what was recognised and what was asked for."""

from __future__ import annotations

from tq_onnx import __version__
from tq_onnx.codec.presets import DEFAULT_SEED, NO_ROTATION, ROTATIONS, Preset
from tq_onnx.codec.rotation import rotation_seed
from tq_onnx.codec.spec import Codec, RowLayout, layout_digest, row_layout
from tq_onnx.errors import UnsupportedModelError, UsageError
from tq_onnx.graph.dialects.site import Site
from tq_onnx.graph.dialects.traces import (
    Cache,
)
from tq_onnx.graph.match import Recognition
from tq_onnx.graph.plan import CachePair, LayerPlan, Plan


def make_plan(
    recognition: Recognition,
    preset: Preset,
    *,
    rotation: str | None = None,
    seed: int = DEFAULT_SEED,
) -> Plan:
    """Plans the conversion of every layer.

    Args:
        recognition: what was found in the model.
        preset: codecs and rotation.
        rotation: a rotation other than the preset's.
        seed: base seed of the rotations.

    Raises:
        UnsupportedModelError: a layer was not recognised, or its head size has no row layout.
        UsageError: the rotation is unknown, does not fit the head size, or is asked of a preset
            that does not rotate.
    """
    interface = recognition.interface
    if recognition.misses or interface is None or not recognition.sites:
        raise UnsupportedModelError(*_refusal(recognition))
    kind = _rotation(preset, rotation)
    # A function body has no optional inputs: either all layers pass a bias, or none; so with sinks,
    # which come after the bias.
    has_sink = any(site.has_sink for site in recognition.sites)
    has_bias = has_sink or any(site.has_bias for site in recognition.sites)
    _check_elements(recognition, preset)
    return Plan(
        tool_version=__version__,
        layout_digest=layout_digest(),
        preset=preset.name,
        rotation=kind,
        seed=seed,
        fixed_capacity=recognition.fixed_capacity,
        interface=interface,
        layers=tuple(
            _layer(site, preset, kind, seed, has_bias=has_bias, has_sink=has_sink)
            for site in recognition.sites
        ),
    )


def _rotation(preset: Preset, wanted: str | None) -> str:
    if wanted is None:
        return preset.rotation
    if wanted not in ROTATIONS:
        raise UsageError(f"rotation {wanted!r} is not one of {', '.join(ROTATIONS)}")
    if preset.rotation == NO_ROTATION:
        raise UsageError(f"the preset {preset.name} does not rotate", fix="leave the rotation out")
    return wanted


def _check_elements(recognition: Recognition, preset: Preset) -> None:
    """One function body writes the raw rows of all layers, and knows one element type."""
    types = sorted({site.dtype.name for site in recognition.sites})
    if preset.rotation == NO_ROTATION and len(types) > 1:
        raise UnsupportedModelError(
            f"its layers compute in several element types ({', '.join(types)})",
            fix="use a preset that quantises",
        )


def _refusal(recognition: Recognition) -> tuple[str]:
    if not recognition.misses:
        return ("no attention layer was found",)
    first, others = recognition.misses[0], len(recognition.misses) - 1
    more = f" (and {others} more such finding{'s' * (others > 1)})" if others else ""
    return (f"{first}{more}",)


def _layer(
    site: Site, preset: Preset, kind: str, seed: int, *, has_bias: bool, has_sink: bool
) -> LayerPlan:
    element_bits = site.dtype.bitwidth
    key = _row_layout(site, preset.key.for_elements(element_bits))
    value = _row_layout(site, preset.value.for_elements(element_bits))
    size = site.head_size
    if kind == "hadamard" and size & (size - 1):
        raise UsageError(
            f"a hadamard rotation needs a head size that is a power of two, not {size}",
            where=f"layer {site.layer}",
            fix="use the qr rotation",
        )
    return LayerPlan(
        layer=site.layer,
        dialect=site.dialect,
        num_heads=site.num_heads,
        kv_num_heads=site.kv_num_heads,
        head_size=size,
        dtype=site.dtype.name,
        scale=site.scale,
        causal=site.causal,
        sliding_window=site.sliding_window,
        softcap=site.softcap,
        has_bias=has_bias,
        key=_pair(site.key),
        value=_pair(site.value),
        key_codec=key.codec.kind,
        key_bits=key.codec.bits,
        value_codec=value.codec.kind,
        value_bits=value.codec.bits,
        key_row_bytes=key.row_bytes,
        value_row_bytes=value.row_bytes,
        rotation_seed=seed if kind == NO_ROTATION else rotation_seed(kind, site.layer, seed),
        has_sink=has_sink,
    )


def _row_layout(site: Site, codec: Codec) -> RowLayout:
    try:
        return row_layout(codec, site.head_size)
    except ValueError as error:
        raise UnsupportedModelError(str(error), where=f"layer {site.layer}") from error


def _pair(cache: Cache) -> CachePair:
    past = None if cache.past is None else cache.past.name
    return CachePair(past=past, present=cache.present.name or "")
