"""Make the plan of a conversion from the recognised layers and the options."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from tq_onnx.codec.planes import field_bytes
from tq_onnx.codec.presets import HADAMARD, Preset
from tq_onnx.codec.rotation import rotation_seed
from tq_onnx.codec.spec import Codec, RowLayout, layout_digest, row_layout
from tq_onnx.codec.unrotated import RAW
from tq_onnx.codec.window import Window, window_of
from tq_onnx.conversion.options import (
    Options,
    adapted,
    compressed_layers,
    exact_tokens,
    requests_exact_tokens,
)
from tq_onnx.errors import UnsupportedModelError, UsageError
from tq_onnx.graph.values import static_dim
from tq_onnx.plan import CachePlan, LayerPlan, Plan, planes_of
from tq_onnx.recognise.caches import Cache
from tq_onnx.recognise.match import Recognition
from tq_onnx.recognise.site import Site
from tq_onnx.version import __version__

DEFAULT_OPTIONS: Final = Options()

_RAW: Final = Codec(RAW, 32)


def make_plan(
    recognition: Recognition,
    preset: Preset,
    options: Options = DEFAULT_OPTIONS,
    window: Window | None = None,
    *,
    feeds_back: bool = False,
    centered: Collection[int] = (),
    turning: Collection[int] = (),
    beside: Sequence[Site] = (),
    in_pages: bool = False,
) -> Plan:
    """Plan the conversion of every layer.

    Args:
        options: what else was asked for; scales and offsets are of the graph, not of the plan, but
            for whether there will be offsets.
        turning: layers whose keys are less a mean that turns with their slots, if they are
            quantised and keep their slots.
        beside: layers of another graph of the same file, which shares the function bodies.
    """
    interface = recognition.interface
    if recognition.misses or interface is None or not recognition.sites:
        raise UnsupportedModelError(*_refusal(recognition))
    sites = recognition.sites
    chosen = adapted(preset, options)
    feeds_back = feeds_back and chosen.gains > 0
    compressed = compressed_layers(options, len(sites))
    # A function body has no optional inputs: either all layers pass a bias, or none; so with sinks,
    # which come after the bias.
    has_sink = any(site.has_sink for site in (*sites, *beside))
    has_bias = has_sink or any(
        reader.has_bias for site in (*sites, *beside) for reader in site.attentions
    )
    layers = tuple(
        replace(
            _layer(
                site,
                chosen if site.layer in compressed else _uncompressed(chosen),
                options,
                feeds_back=feeds_back,
                centered=options.calibration is not None or site.layer in centered,
                turns=site.layer in turning,
            ),
            has_bias=has_bias,
            has_sink=has_sink,
        )
        for site in sites
    )
    takes_padding = interface.attention_mask and interface.padding and not interface.right_padding
    if takes_padding and not in_pages and any(layer.key.rotary for layer in layers):
        # Offsets turn with the place of a token in its own sequence.
        layers = tuple(replace(layer, has_padding=True) for layer in layers)
    codecs = {codec for layer in layers for codec in layer.codecs}
    _check_elements(layers)
    if options.planes:
        _check_planes(layers)
    if window is None:
        window = _window(recognition, layers, chosen, options, in_pages=in_pages)
    # A target of pages refuses planes itself.
    if options.planes and options.spare_rows and window.entries and not in_pages:
        raise UsageError(
            "exact tokens in spare rows take whole rows, and planes have none there",
            fix="convert with `residual_length=0` and `sink_tokens=0`, or convert for another "
            "target",
        )
    return Plan(
        tool_version=__version__,
        layout_digest=layout_digest(
            codecs, has_window=window.entries > 0, has_planes=options.planes
        ),
        preset=preset.name,
        rotation=chosen.rotation,
        seed=options.seed,
        norm_correction=chosen.norm_correction,
        fixed_capacity=recognition.fixed_capacity,
        interface=interface,
        layers=layers,
        recent=window.recent,
        sinks=window.sinks,
        overlay_rows=window.overlay_rows,
        gains=chosen.gains if any(codec.searches for codec in codecs) else 0,
        planes=options.planes,
    )


def _uncompressed(preset: Preset) -> Preset:
    return replace(preset, key=_RAW, value=_RAW)


def _window(
    recognition: Recognition,
    layers: Sequence[LayerPlan],
    preset: Preset,
    options: Options,
    *,
    in_pages: bool,
) -> Window:
    """Return the window of a model: all caches have as many rows, whatever their width."""
    planes = planes_of(layers)
    window = window_of(*exact_tokens(preset, options), planes)
    if not window.overlay_rows:
        return Window()
    if options.spare_rows:
        window = replace(window, overlay_rows=0)
    alike = len({size for size, _ in planes}) == 1
    for site in recognition.sites:
        if in_pages:
            reason = "" if alike else "the layers have several head sizes"
        else:
            reason = _lacks_place(site, recognition, window)
        if not reason:
            continue
        if not requests_exact_tokens(options):
            return Window()
        raise UnsupportedModelError(
            f"{reason}, which leaves no place for exact tokens",
            where=f"layer {site.layer}",
            fix="convert with `residual_length=0` and `sink_tokens=0`",
        )
    return window


def _lacks_place(site: Site, recognition: Recognition, window: Window) -> str:
    """Return why the caches of a layer have no place for exact tokens; empty if they have one."""
    caches = (site.key, site.value)
    if any(cache.cut is not None for cache in caches):
        return "a cache is shortened before it is returned"
    if not window.takes_spare_rows:
        return ""
    if not recognition.fixed_capacity:
        return "the caches must grow"
    slots = [None if cache.past is None else static_dim(cache.past, 2) for cache in caches]
    if site.key.past is None or any(isinstance(count, int) for count in slots):
        return "the graph fixes the number of rows"
    return ""


def _check_elements(layers: Sequence[LayerPlan]) -> None:
    """Refuse raw rows of several element types: one function body writes the rows of all layers."""
    types = sorted({layer.dtype for layer in layers})
    if len(types) > 1 and any(codec.is_raw for layer in layers for codec in layer.codecs):
        raise UnsupportedModelError(
            f"the layers compute in several element types ({', '.join(types)})",
            fix="use a preset that quantises, in all layers",
        )


def _check_planes(layers: Sequence[LayerPlan]) -> None:
    """Refuse rows that cannot lie in planes."""
    fix = "convert all layers with one preset that rotates, such as `int4`"
    sizes = set()
    for layer in layers:
        try:
            fields = [field_bytes(codec, layer.head_size) for codec in layer.codecs]
        except ValueError as error:
            raise UsageError(str(error), where=f"layer {layer.layer}", fix=fix) from error
        sizes.update(fields)
        needed = [row_layout(codec, layer.head_size).row_bytes for codec in layer.codecs]
        if [cache.row_bytes for cache in layer.caches] != needed:
            raise UsageError(
                "planes have no padded rows",
                where=f"layer {layer.layer}",
                fix="leave `equal_rows` or `planes` out",
            )
    if len(sizes) > 1:
        raise UsageError(f"rows with {' and '.join(map(str, sizes))} bytes of scales", fix=fix)


def _refusal(recognition: Recognition) -> tuple[str]:
    if not recognition.misses:
        return ("no attention layer was found",)
    first, count = recognition.misses[0], len(recognition.misses) - 1
    suffix = f" (and {count} more such finding{'s' * (count > 1)})" if count else ""
    return (f"{first}{suffix}",)


def _layer(
    site: Site,
    preset: Preset,
    options: Options,
    *,
    feeds_back: bool,
    centered: bool,
    turns: bool,
) -> LayerPlan:
    element_bits = site.dtype.bitwidth
    rows = [
        _row_layout(site, codec.for_elements(element_bits)) for codec in (preset.key, preset.value)
    ]
    key, value = (row.codec for row in rows)
    size = site.head_size
    rotated = key.is_rotated or value.is_rotated
    if preset.rotation == HADAMARD and rotated and size & (size - 1):
        raise UsageError(
            f"a hadamard rotation needs a head size that is a power of two, not {size}",
            where=f"layer {site.layer}",
            fix='choose the qr rotation, with `rotation="qr"`',
        )
    widths = [row.row_bytes for row in rows]
    if options.equal_rows:
        widths = [max(widths)] * 2
    seed = options.seed
    quantised = not (key.is_raw and value.is_raw)
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
        has_bias=site.has_bias,
        key=replace(
            _cache(site.key, key, widths[0], size),
            feedback=feeds_back and key.searches,
            rotary=turns and not key.is_raw and site.key.cut is None,
        ),
        value=_cache(site.value, value, widths[1], site.result_size),
        rotation_seed=rotation_seed(preset.rotation, site.layer, seed) if rotated else seed,
        has_sink=site.has_sink,
        centered=centered and quantised,
        readers=len(site.attentions),
    )


def _row_layout(site: Site, codec: Codec) -> RowLayout:
    try:
        return row_layout(codec, site.head_size)
    except ValueError as error:
        raise UnsupportedModelError(str(error), where=f"layer {site.layer}") from error


def _cache(cache: Cache, codec: Codec, row_bytes: int, size: int) -> CachePlan:
    past = None if cache.past is None else cache.past.name
    return CachePlan(past, cache.present.name or "", codec, row_bytes, size)
