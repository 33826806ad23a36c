"""Inspect a model file: find what ``convert`` would convert, or report what it did."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tq_onnx.codec.presets import LISTED_PRESETS, Preset
from tq_onnx.codec.unrotated import RAW
from tq_onnx.conversion.biases import find_biases
from tq_onnx.conversion.branches import Parts, split
from tq_onnx.conversion.calibrationrecord import record_in
from tq_onnx.conversion.equalise import INT4, LayerNorms, find_norms, predict
from tq_onnx.conversion.merging import refuse_scales
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.original import Original, recognise_original
from tq_onnx.conversion.pipeline import converted_bytes, prepare
from tq_onnx.conversion.planning import make_plan
from tq_onnx.conversion.reports import (
    InspectionReport,
    LayerFound,
    Miss,
    PresetOffer,
)
from tq_onnx.errors import ModelFileError, TqOnnxError, UnsupportedModelError, located
from tq_onnx.files.load import LoadedModel, load
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.plan import METADATA_PLAN, plan_in
from tq_onnx.recognise.caches import Cache
from tq_onnx.recognise.match import Recognition
from tq_onnx.recognise.site import Site


def inspect(path: Path) -> InspectionReport:
    """Look into a model file."""
    report, original = examine(path)
    return report if original is None else foresee(report, original)


def examine(path: Path) -> tuple[InspectionReport, Original | None]:
    """Look into a model file, and keep what was read.

    Returns:
        The report of ``inspect``, without what scales would do; and the model, unless it was
        converted before.
    """
    loaded = load(path)
    if METADATA_PLAN in loaded.model.metadata_props:
        return _inspect_converted(loaded, path), None
    original = recognise_original(loaded, path)
    recognition = original.recognition
    misses = recognition.misses
    if original.merged is not None:
        misses += original.merged.first.recognition.misses
    interface = recognition.interface
    layers = tuple(_layer(site) for site in recognition.sites)
    convertible = bool(layers) and not misses
    size = original.bytes_per_token if layers else None
    presets = LISTED_PRESETS if convertible else ()
    offers = tuple(_offer(preset, recognition, size) for preset in presets)
    report = InspectionReport(
        loaded.path,
        loaded.opset,
        loaded.external_files,
        any(not offer.refusal for offer in offers),
        layers,
        tuple(Miss(miss.layer, miss.node, miss.reason) for miss in misses),
        size,
        offers,
        None,
        states=tuple(pair.present for pair in interface.states) if interface else (),
    )
    return report, original


def foresee(report: InspectionReport, original: Original) -> InspectionReport:
    """Add what scales from the norm weights would do, as ``convert`` will find it.

    Norms are found in converted models. So the model is converted and checked here, without reading
    a weight, and is good for nothing else afterwards; what ``convert`` refuses is no longer called
    convertible. Scales depend on weights alone, and so do not depend on the preset.
    """
    if not report.convertible:
        return report
    loaded = original.loaded
    biases = find_biases(loaded.model, original.recognition)
    # raw makes no rotations, and no scales read no weights
    usable = [offer.preset for offer in report.presets if not offer.refusal]
    preset = RAW if RAW in usable else usable[0]
    try:
        prepared = prepare(
            loaded.path, preset=preset, options=Options(equalize=False), original=original
        )
        parts = split(prepared.loaded)
        if parts is None:
            norms = find_norms(prepared.loaded.model, prepared.plan)
        else:
            norms = _norms_of_branches(parts)
    except UnsupportedModelError as error:
        reason = f"{error.what}; {error.fix}" if error.fix else error.what
        return replace(report, convertible=False, misses=(Miss(None, "", reason),), presets=())
    pairs = zip(norms, prepared.plan.layers, strict=True)
    equalisation = tuple(predict(*pair, INT4) for pair in pairs)
    return replace(report, equalisation=equalisation, key_bias=biases.norm)


def _norms_of_branches(parts: Parts) -> tuple[LayerNorms | NoMatch, ...]:
    """Return the norms of the branch that takes caches."""
    pair = []
    for loaded in (parts.first, parts.following):
        plan = plan_in(loaded.model.metadata_props)
        assert plan is not None  # it was just converted
        pair.append(find_norms(loaded.model, plan))
    first, following = pair
    for index, norms in enumerate(zip(first, following, strict=True)):
        if len({isinstance(each, NoMatch) for each in norms}) > 1:
            refuse_scales(index)
    return following


def _inspect_converted(loaded: LoadedModel, path: Path) -> InspectionReport:
    try:
        with located(path):
            plan = plan_in(loaded.model.metadata_props)
            assert plan is not None  # by the caller
            record = record_in(loaded.model.metadata_props, plan)
        size = converted_bytes(loaded.model, plan)
    except (ModelFileError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(
            "the conversion metadata cannot be read",
            where=str(path),
            fix="convert the original model again",
        ) from error
    return InspectionReport(
        loaded.path,
        loaded.opset,
        loaded.external_files,
        False,
        (),
        (),
        size,
        (),
        plan,
        calibration=None if record is None else record.facts,
    )


def _offer(preset: Preset, recognition: Recognition, size: int | None) -> PresetOffer:
    try:
        after = make_plan(recognition, preset).bytes_per_token
    except TqOnnxError as error:
        return PresetOffer(preset.name, None, None, str(error))
    ratio = size / after if size else None
    return PresetOffer(preset.name, after, ratio, "")


def _layer(site: Site) -> LayerFound:
    mask = [text for text, has_it in (("causal", site.causal), ("bias", site.has_bias)) if has_it]
    if site.sliding_window:
        mask.append(f"window {site.sliding_window}" + (", ring" if site.ring else ""))
    if site.softcap:
        mask.append(f"softcap {site.softcap:g}")
    if site.has_sink:
        mask.append("sinks")
    return LayerFound(
        layer=site.layer,
        node=site.node.name or "",
        dialect=site.dialect,
        num_heads=site.num_heads,
        kv_num_heads=site.kv_num_heads,
        head_size=site.head_size,
        dtype=site.dtype.name,
        scale=site.scale,
        mask=", ".join(mask) or "none",
        past_key=_past_name(site.key),
        past_value=_past_name(site.value),
    )


def _past_name(cache: Cache) -> str | None:
    return None if cache.past is None else cache.past.name
