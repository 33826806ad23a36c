"""The two things that the converter does for a user: ``convert`` and ``inspect``.

``convert`` runs load -> recognise -> plan -> rewrite and bake -> check -> save; nothing is written
before everything holds. ``inspect`` stops after recognising, and changes nothing. Both return
the frozen, JSON-able reports of ``tq_onnx.graph.reports``. Bytes per token are those of one more
token of one sequence in all layers, from the graph's own types, scales included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import onnx_ir as ir

from tq_onnx.codec.presets import DEFAULT_PRESET, DEFAULT_SEED, PRESETS
from tq_onnx.errors import ModelFileError, TqOnnxError, UnsupportedModelError, UsageError
from tq_onnx.graph.check import Facts, check, complaint, facts
from tq_onnx.graph.commit import Progress
from tq_onnx.graph.dialects.site import Site
from tq_onnx.graph.dialects.traces import (
    Cache,
    static_dim,
)
from tq_onnx.graph.load import LoadedModel, load
from tq_onnx.graph.match import Recognition, recognise
from tq_onnx.graph.plan import METADATA_PLAN, Plan
from tq_onnx.graph.planning import make_plan
from tq_onnx.graph.reports import (
    ConversionReport,
    InspectionReport,
    LayerFound,
    Miss,
    PresetOffer,
)
from tq_onnx.graph.rewrite import ConvertPass
from tq_onnx.graph.save import ExternalData, SavedFiles, check_output, save

Stage = Literal["load", "recognise", "plan", "rewrite", "check", "save"]
STAGES: Final[tuple[Stage, ...]] = ("load", "recognise", "plan", "rewrite", "check", "save")

_SEE_INSPECT: Final = "`tq-onnx inspect` shows every layer and what stands in the way of each"

OnStage = Callable[[Stage], None]
"""Called with the name of each stage as it begins."""


def convert(
    path: Path,
    output: Path,
    *,
    preset: str = DEFAULT_PRESET,
    seed: int = DEFAULT_SEED,
    rotation: str | None = None,
    overwrite: bool = False,
    external_data: ExternalData | None = None,
    on_stage: OnStage | None = None,
    on_copy: Progress | None = None,
) -> ConversionReport:
    """Converts a model file.

    Args:
        path: the original; it is never changed.
        output: the model to write.
        preset: a name in ``codec.presets.PRESETS``.
        seed: base seed of the rotations.
        rotation: ``qr`` or ``hadamard``; by default the preset's.
        overwrite: whether an output that exists may be replaced.
        external_data: what becomes of external data, see ``tq_onnx.graph.save``.
        on_stage: called as each stage begins.
        on_copy: called with the bytes done and to do while external data is copied.

    Raises:
        UsageError: an option has no such value, or does not fit the model.
        ModelFileError: the model cannot be read or the output cannot be written.
        UnsupportedModelError: the model cannot be converted, or is converted already.
        TqOnnxError: the result did not pass its checks; nothing was written.
    """

    def check_first(loaded: LoadedModel) -> None:
        check_output(loaded, output, overwrite=overwrite, external_data=external_data)

    begin = on_stage or (lambda _: None)
    prepared = prepare(
        path, preset=preset, seed=seed, rotation=rotation, on_stage=begin, on_load=check_first
    )
    begin("save")
    files = save(
        prepared.loaded,
        prepared.loaded.model,
        output,
        overwrite=overwrite,
        external_data=external_data,
        progress=on_copy,
    )
    return prepared.report(files)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A model that is converted in memory and not yet written.

    Attributes:
        loaded: the model, rewritten, and where it came from.
        plan: what was done to each layer.
        bytes_before: cache bytes of one token in the original.
        bytes_after: cache bytes of one token now.
    """

    loaded: LoadedModel
    plan: Plan
    bytes_before: int
    bytes_after: int

    def report(self, files: SavedFiles) -> ConversionReport:
        """The report of the conversion, once it is written."""
        before, after = self.bytes_before, self.bytes_after
        source = self.loaded.path
        return ConversionReport(
            source, self.plan, files.model, files, before, after, before / after
        )


def prepare(
    path: Path,
    *,
    preset: str = DEFAULT_PRESET,
    seed: int = DEFAULT_SEED,
    rotation: str | None = None,
    on_stage: OnStage | None = None,
    on_load: Callable[[LoadedModel], None] | None = None,
) -> Prepared:
    """Everything of ``convert`` but the writing, for callers that write several files together.

    Args:
        path: the original; it is never changed.
        preset: a name in ``codec.presets.PRESETS``.
        seed: base seed of the rotations.
        rotation: ``qr`` or ``hadamard``; by default the preset's.
        on_stage: called as each stage begins.
        on_load: called with the model before any work is done on it; it may refuse.

    Raises:
        TqOnnxError: as for ``convert``.
    """
    if preset not in PRESETS:
        raise UsageError(f"preset {preset!r} is not one of {', '.join(PRESETS)}")
    begin = on_stage or (lambda _: None)
    begin("load")
    loaded = load(path)
    if on_load is not None:
        on_load(loaded)
    begin("recognise")
    before = facts(loaded.model)
    recognition = _recognise(loaded, path)
    begin("plan")
    plan = _plan(recognition, preset, rotation, seed, path)
    bytes_before = _original_bytes(recognition)
    begin("rewrite")
    _rewrite(loaded.model, plan, recognition, before, path)
    begin("check")
    check(before, loaded.model, plan)
    return Prepared(loaded, plan, bytes_before, _converted_bytes(loaded.model, plan))


def inspect(path: Path) -> InspectionReport:
    """Looks into a model file: what ``convert`` would find, or what it did.

    Raises:
        ModelFileError: the file cannot be read.
    """
    loaded = load(path)
    if METADATA_PLAN in loaded.model.metadata_props:
        return _inspect_converted(loaded, path)
    recognition = _recognise(loaded, path, refuse=False)
    found = tuple(_layer(site) for site in recognition.sites)
    convertible = bool(found) and not recognition.misses
    size = _original_bytes(recognition) if found else None
    offers = tuple(_offer(name, recognition, size) for name in PRESETS) if convertible else ()
    return InspectionReport(
        loaded.path,
        loaded.opset,
        loaded.external_files,
        convertible and any(not offer.refusal for offer in offers),
        found,
        tuple(Miss(miss.layer, miss.node, miss.reason) for miss in recognition.misses),
        size,
        offers,
        None,
    )


def _inspect_converted(loaded: LoadedModel, path: Path) -> InspectionReport:
    try:
        plan = Plan.from_json(loaded.model.metadata_props[METADATA_PLAN])
        size = _converted_bytes(loaded.model, plan)
    except (ModelFileError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(
            "its conversion metadata cannot be read",
            where=str(path),
            fix="convert the original model again",
        ) from error
    return InspectionReport(
        loaded.path, loaded.opset, loaded.external_files, False, (), (), size, (), plan
    )


def _recognise(loaded: LoadedModel, path: Path, *, refuse: bool = True) -> Recognition:
    try:
        recognition = recognise(loaded.model)
    except UnsupportedModelError as error:
        raise type(error)(error.what, where=error.where or str(path), fix=error.fix) from error
    except Exception as error:
        text = complaint(loaded.model)
        if not text:
            raise
        raise _invalid(text, path) from error
    if refuse and (recognition.misses or not recognition.sites):
        misses = recognition.misses
        what = str(misses[0]) if misses else "no attention layer was found"
        if len(misses) > 1:
            what += f" (and {len(misses) - 1} more)"
        raise UnsupportedModelError(what, where=str(path), fix=_SEE_INSPECT)
    return recognition


def _plan(
    recognition: Recognition, preset: str, rotation: str | None, seed: int, path: Path
) -> Plan:
    try:
        return make_plan(recognition, PRESETS[preset], rotation=rotation, seed=seed)
    except UnsupportedModelError as error:
        where = f"{path}: {error.where}" if error.where else str(path)
        raise UnsupportedModelError(error.what, where=where, fix=error.fix) from error


def _rewrite(
    model: ir.Model, plan: Plan, recognition: Recognition, before: Facts, path: Path
) -> None:
    try:
        ConvertPass(plan, recognition)(model)
    except Exception as error:
        if before.complaint:
            raise _invalid(before.complaint, path) from error
        if not isinstance(error, ir.passes.InvariantError | ir.passes.PassError):
            raise
        raise TqOnnxError(
            f"the conversion went wrong and nothing was written ({error})",
            where=str(path),
            fix="this is a defect, please report it with the name of the exporter",
        ) from error


def _invalid(text: str, path: Path) -> ModelFileError:
    """For graphs that were broken before: a cycle, nodes out of order, inputs that are missing."""
    return ModelFileError(
        f"it is not a valid model (onnx.checker: {text})", where=str(path), fix="export it again"
    )


def _offer(name: str, recognition: Recognition, size: int | None) -> PresetOffer:
    try:
        after = make_plan(recognition, PRESETS[name]).bytes_per_token
    except TqOnnxError as error:
        return PresetOffer(name, None, None, str(error))
    return PresetOffer(name, after, size / after if size else None, "")


def _original_bytes(recognition: Recognition) -> int:
    """Bytes of one token in the caches of an original, from their own element types."""
    bits = 0
    for site in recognition.sites:
        for cache in (site.key, site.value):
            dtype = (cache.past or cache.present).dtype or site.dtype
            bits += site.kv_num_heads * site.head_size * dtype.bitwidth
    return bits // 8


def _converted_bytes(model: ir.Model, plan: Plan) -> int:
    """Bytes of one token in the caches of a converted model, from the types of its caches.

    Raises:
        KeyError: a cache of the plan is not there, or its row width is not in its type.
    """
    values = {value.name: value for value in (*model.graph.outputs, *model.graph.inputs)}
    bits = 0
    for layer in plan.layers:
        for pair in (layer.key, layer.value):
            name = pair.past or pair.present
            value = values[name]
            width = static_dim(value, -1)
            if width is None or value.dtype is None:
                raise KeyError(name)
            bits += layer.kv_num_heads * width * value.dtype.bitwidth
    return bits // 8


def _layer(site: Site) -> LayerFound:
    mask = [text for text, there in (("causal", site.causal), ("bias", site.has_bias)) if there]
    if site.sliding_window:
        mask.append(f"window {site.sliding_window}")
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
