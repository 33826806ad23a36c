"""The conversion of a model file, from end to end.

``convert`` runs load -> recognise -> plan -> rewrite, bake, adapt and lower -> check -> save;
nothing is written before everything holds. It returns a frozen, JSON-able report
(``tq_onnx.conversion.reports``). Bytes per token count one more token of one sequence in all
layers, from the graph's own types, scales included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import onnx_ir as ir

from tq_onnx.codec.calibration import Calibration
from tq_onnx.codec.presets import DEFAULT_PRESET, Preset, find_preset
from tq_onnx.codec.window import Window
from tq_onnx.conversion.bake import bake_metadata
from tq_onnx.conversion.biases import NO_BIASES, Biases, expect_centered, find_biases
from tq_onnx.conversion.calibrationfile import read_calibration
from tq_onnx.conversion.calibrationrecord import (
    METADATA_CALIBRATION,
    CalibrationFacts,
    record_of,
)
from tq_onnx.conversion.cautions import Rings, cautions
from tq_onnx.conversion.check import check, check_merged
from tq_onnx.conversion.equalise import LayerEqualisation
from tq_onnx.conversion.merging import expect_continued, merge
from tq_onnx.conversion.naming import name_sizes
from tq_onnx.conversion.options import (
    Options,
    compressed_layers,
    without,
)
from tq_onnx.conversion.original import Original, blaming, recognise_original
from tq_onnx.conversion.planning import DEFAULT_OPTIONS, make_plan
from tq_onnx.conversion.reports import ConversionReport
from tq_onnx.conversion.rewrite import ConvertPass
from tq_onnx.conversion.scales import adapt, turning_layers
from tq_onnx.conversion.target import CPU, Target
from tq_onnx.errors import TqOnnxError, UnsupportedModelError, located
from tq_onnx.files.load import LoadedModel, load
from tq_onnx.files.save import ExternalData, SavedFiles, check_output, save
from tq_onnx.graph.values import label, static_dim
from tq_onnx.ops.features import OFFSETS, ROTARY_OFFSETS
from tq_onnx.plan import Plan
from tq_onnx.progress import OnProgress, Progress, silent
from tq_onnx.recognise.site import Site

_LOAD: Final = "Reading the graph"
_RECOGNISE: Final = "Looking for attention"
_PLAN: Final = "Planning"
_REWRITE: Final = "Rewriting"
_CHECK: Final = "Checking the result"
_SAVE: Final = "Writing"
STEPS: Final = (_LOAD, _RECOGNISE, _PLAN, _REWRITE, _CHECK, _SAVE)
"""Steps of a conversion, as progress names them."""

OnCalibration = Callable[[Path, Calibration], tuple[str, ...]]
"""Takes an original and the calibration that it is to be converted with; refuses one of another
model, and returns what it could not tell, in sentences. It runs the model, which conversions do
not."""


def convert(
    path: Path,
    output: Path,
    *,
    preset: str = DEFAULT_PRESET,
    options: Options = DEFAULT_OPTIONS,
    target: Target = CPU,
    overwrite: bool = False,
    external_data: ExternalData | None = None,
    on_progress: OnProgress | None = None,
    on_calibration: OnCalibration | None = None,
) -> ConversionReport:
    """Convert a model file."""

    target.expect_file()

    def check_first(loaded: LoadedModel) -> None:
        check_output(loaded, output, overwrite=overwrite, external_data=external_data)

    prepared = prepare(
        path,
        preset=preset,
        options=options,
        target=target,
        on_progress=on_progress,
        on_load=check_first,
        on_calibration=on_calibration,
    )
    _tell(on_progress, _SAVE)
    files = save(
        prepared.loaded,
        prepared.loaded.model,
        output,
        overwrite=overwrite,
        external_data=external_data,
        on_progress=on_progress,
    )
    return prepared.report(files)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A model that is converted in memory and not yet written."""

    loaded: LoadedModel  #: the model, rewritten, and where it came from
    plan: Plan  #: what was done to each layer
    bytes_before: int  #: cache bytes of one token in the original
    ring_bytes: int  #: cache bytes of the original besides, which texts do not add to
    bytes_after: int  #: cache bytes of one token now
    #: what scales from norm weights do; see ``ConversionReport``
    equalisation: tuple[LayerEqualisation, ...] = ()
    calibration: CalibrationFacts | None = None  #: see ``ConversionReport``
    warnings: tuple[str, ...] = ()  #: see ``ConversionReport``
    key_bias: float = 0.0  #: see ``ConversionReport``

    def report(self, files: SavedFiles) -> ConversionReport:
        """Return the report of the conversion, once it is written."""
        before, after = self.bytes_before, self.bytes_after
        source = self.loaded.path
        return ConversionReport(
            source,
            self.plan,
            files.model,
            files,
            before,
            after,
            before / after,
            self.equalisation,
            self.calibration,
            self.warnings,
            self.ring_bytes,
            self.key_bias,
        )


def prepare(
    path: Path,
    *,
    preset: str = DEFAULT_PRESET,
    options: Options = DEFAULT_OPTIONS,
    target: Target = CPU,
    on_progress: OnProgress | None = None,
    on_load: Callable[[LoadedModel], None] | None = None,
    on_calibration: OnCalibration | None = None,
    original: Original | None = None,
    window: Window | None = None,
) -> Prepared:
    """Do all of ``convert`` except the writing, for callers that write several files together.

    Args:
        on_load: called with the model before any work is done on it; it may refuse.
        original: the model, if it was read already; it is converted in place.
        window: of all caches, raw ones included; None for what the options ask for.
    """
    find_preset(preset)
    if original is None:
        _tell(on_progress, _LOAD)
        loaded = load(path)
        if on_load is not None:
            on_load(loaded)
        _tell(on_progress, _RECOGNISE)
        original = recognise_original(loaded, path)
    original.expect_complete(path)

    convert_graph = partial(
        _prepare,
        path=path,
        preset=preset,
        options=options,
        target=target,
        on_progress=on_progress,
        window=window,
    )
    merged = original.merged
    if merged is None:
        return convert_graph(original, on_calibration=on_calibration)
    if target.name != CPU.name:
        raise UnsupportedModelError(
            f"the target {target.name} takes no decoder in the branches of an If",
            where=str(path),
            fix="convert decoder_with_past_model.onnx, which it was merged from",
        )
    sites = merged.first.recognition.sites
    first = convert_graph(merged.first, beside=original.recognition.sites)
    following = convert_graph(original, beside=sites, on_calibration=on_calibration)
    with blaming(merged.interface, path), located(path):
        expect_continued(first.plan, following.plan)
        parts = {part.loaded.branch: part.loaded.model for part in (first, following)}
        model = merge(merged.loaded.model, parts, following.loaded.branch)
        check_merged(merged.interface, model, first.plan, following.plan)
    return replace(following, loaded=replace(merged.loaded, model=model))


def _prepare(
    original: Original,
    path: Path,
    *,
    preset: str,
    options: Options,
    target: Target,
    on_progress: OnProgress | None,
    window: Window | None,
    beside: Sequence[Site] = (),
    on_calibration: OnCalibration | None = None,
) -> Prepared:
    """Convert a model that is no merged one, or a part of one that stands beside ``beside``."""
    chosen = find_preset(preset)
    calibration = None if options.calibration is None else read_calibration(options.calibration)
    loaded, before, recognition = original.loaded, original.interface, original.recognition
    _tell(on_progress, _PLAN)
    options = without(options, target.capabilities.lacking)
    if target.in_pages:
        options = replace(options, spare_rows=True)
    if {chosen.key, chosen.value} <= {*target.capabilities.in_planes}:
        options = replace(options, planes=True)
    feeds_back = calibration is not None and options.feedback
    with blaming(before, path):
        with located(path):
            biases = _biases(original, chosen, options, target)
            plan = make_plan(
                recognition,
                chosen,
                options,
                window,
                feeds_back=feeds_back,
                centered=biases.layers,
                turning=turning_layers(calibration) or biases.turning,
                beside=beside,
                in_pages=target.in_pages,
            )
            target.capabilities.expect(target.name, plan, _node_names(recognition.sites))
        warnings = _calibration_warnings(calibration, plan, options, path, on_calibration)
        rings = Rings.of(recognition.sites)
        _tell(on_progress, _REWRITE)
        model = _run((ConvertPass(plan, recognition),), loaded.model, path)
        plan, equalisation = adapt(model, plan, options, calibration, biases)
        with located(path):
            lowering = target.lowering(plan, path)
            if lowering is not None:
                # A clone shares the tensors, and a refusal leaves nothing half done.
                model = _run(lowering.passes, model.clone(), path)
                plan = lowering.plan_behind
        name_sizes(model)
        bake_metadata(model, plan)
        facts = _write_record(model, calibration, options)
        _tell(on_progress, _CHECK)
        check(before, model, plan, target)
        size = converted_bytes(model, plan)
        warnings += cautions(path, plan, rings, size)
    loaded = replace(loaded, model=model)
    sizes = rings.growing, rings.fixed, size
    return Prepared(loaded, plan, *sizes, equalisation, facts, warnings, biases.norm)


def _biases(original: Original, preset: Preset, options: Options, target: Target) -> Biases:
    """Return what keys and values are less by default; none where a calibration tells more."""
    if options.calibration is not None or preset.key.is_raw or not original.recognition.sites:
        return NO_BIASES
    biases = find_biases(original.loaded.model, original.recognition)
    lacking = {OFFSETS, ROTARY_OFFSETS} & {*target.capabilities.lacking}
    why = f'models for `target="{target.name}"` take no offset of keys' if lacking else ""
    expect_centered(
        biases, compressed_layers(options, len(original.recognition.sites)), takes_no_offsets=why
    )
    return NO_BIASES if lacking else biases


def _node_names(sites: Sequence[Site]) -> dict[int, str]:
    return {site.layer: label(site.node) for site in sites}


def _calibration_warnings(
    calibration: Calibration | None,
    plan: Plan,
    options: Options,
    path: Path,
    on_calibration: OnCalibration | None,
) -> tuple[str, ...]:
    """Refuse a calibration of another model; return what may be wrong with it, in sentences."""
    if calibration is None:
        return ()
    calibration.check_matches(plan.layers)
    calibration.check_center_from(options.center_from)
    with located(path):
        calibration.check_lengths(
            [
                layer.layer
                for layer in plan.layers
                if not all(codec.is_raw for codec in layer.codecs)
            ]
        )
    unknown = () if on_calibration is None else on_calibration(path, calibration)
    doubts = calibration.shortage, calibration.turns_unknown
    return (*unknown, *(doubt for doubt in doubts if doubt))


def _write_record(
    model: ir.Model, calibration: Calibration | None, options: Options
) -> CalibrationFacts | None:
    """Write what a model keeps of its calibration into the metadata; return it in a few words."""
    if calibration is None:
        return None
    record = record_of(calibration, options.center_from)
    model.metadata_props[METADATA_CALIBRATION] = record.to_json()
    return record.facts


def _run(
    passes: Sequence[ir.passes.InPlacePass],
    model: ir.Model,
    path: Path,
) -> ir.Model:
    """Run passes on a model in place, and tell their refusals from defects."""
    try:
        return ir.passes.Sequential(*passes)(model).model
    except (ir.passes.InvariantError, ir.passes.PassError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause, TqOnnxError):
            cause = cause.__cause__
        if isinstance(cause, TqOnnxError):
            raise cause from cause.__cause__
        raise TqOnnxError(
            f"the conversion went wrong and nothing was written ({cause or type(cause).__name__})",
            where=str(path),
            fix="this is a defect, please report it with the name of the exporter",
        ) from error


def _tell(on_progress: OnProgress | None, step: str) -> None:
    (on_progress or silent)(Progress(step, STEPS.index(step), len(STEPS)))


def converted_bytes(model: ir.Model, plan: Plan) -> int:
    """Return the bytes of one token in a converted model, from the types of its caches.

    Raises:
        KeyError: a cache of the plan is not there, or its row width is not in its type.
    """
    values = {value.name: value for value in (*model.graph.outputs, *model.graph.inputs)}
    bits = 0
    for layer in plan.layers:
        for pair in layer.caches:
            name = pair.past or pair.present
            value = values[name]
            width = static_dim(value, -1)
            if width is None or value.dtype is None:
                raise KeyError(name)
            bits += layer.kv_num_heads * width * value.dtype.bitwidth
    return bits // 8
