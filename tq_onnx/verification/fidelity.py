"""The fidelity of a conversion: everything but the codecs is the original's.

An original that is converted with the codec ``raw``, in memory, must compute what it did, to float
noise. The converted file, its codecs taken out (``tq_onnx.measure.rawform``), must be that very
graph; where it was lowered for a target, it must compute the same: what enters the
caches, queries and results of every layer, and the logits. Its codecs must have the tables of its
plan; what they compute is judged elsewhere (``tq_onnx.measure.oracle``), node by node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.codec.window import Window
from tq_onnx.conversion.biases import Biases, find_biases
from tq_onnx.conversion.branches import load_again
from tq_onnx.conversion.calibrationrecord import METADATA_CALIBRATION
from tq_onnx.conversion.original import Original, recognise_original
from tq_onnx.conversion.pipeline import Prepared, prepare
from tq_onnx.errors import UnsupportedModelError, UsageError, VerificationError
from tq_onnx.files.load import LoadedModel
from tq_onnx.graph.copying import copy_graph
from tq_onnx.measure.expose_internals import expose_internals, with_operators
from tq_onnx.measure.probe import Probe
from tq_onnx.measure.rawform import multiply_floats, raw_form
from tq_onnx.measure.readings import Reading, distance, read, values_of, widened
from tq_onnx.plan import CPU, Plan, plan_in
from tq_onnx.targets.registry import target_of
from tq_onnx.verification.adapted import adaptation_problems, bias_problems
from tq_onnx.verification.checks import ROUNDING_BY_CALL, PropertyCheck, failure, tables
from tq_onnx.verification.graph_equality import (
    changed_functions,
    changed_nodes,
    changed_tensors,
    is_same_graph,
    names_in,
)
from tq_onnx.verification.interfaces import failing
from tq_onnx.verification.planned import plan_problems
from tq_onnx.version import __version__

PROMPT_TOKENS: Final = 64
"""Tokens that an original and its conversions read to be compared."""

PLANNED: Final = "layers are what the plan and the original say"
RAW_EQUALS: Final = "the original converted without codecs computes the same"
KEPT: Final = "weights and nodes are the original's"
REST_EQUALS: Final = "all but the codecs computes what the original does"

MAX_REWRITE_ERROR: Final = {"FLOAT": 1e-3, "FLOAT16": 3e-2, "BFLOAT16": 0.15}
"""Relative, of whole arrays: two ways to compute attention, through all layers."""
MAX_LOWERED_ERROR: Final = {"FLOAT": 1e-4, "FLOAT16": 1e-2, "BFLOAT16": 5e-2}
"""Other nodes of a target round otherwise."""
MAX_ROUNDED_ERROR: Final = 5e-2
"""Operands that the graph itself rounds to 8 bits: float noise that flips one is none any more."""

_ROUNDING: Final = frozenset({*ROUNDING_BY_CALL, "QMoE"})


@dataclass(frozen=True, eq=False)
class RawOriginal:
    """An original that was converted without codecs, and what it makes of a prompt."""

    prepared: Prepared  #: the conversion
    model: ir.Model  #: the same with int4 weights that are multiplied as floats
    names: Collection[str]  #: the values that the original has
    prompt: npt.NDArray[np.int64]  #: ids ``[n]``
    probe: Probe  #: the model with its internals exposed
    reading: Reading  #: what it makes of the prompt
    is_rounded: bool  #: True if the graph rounds operands to 8 bits
    check: PropertyCheck  #: whether it computes what the original does
    own: Reading  #: what the original makes of the prompt
    biases: Biases  #: the constant parts of its keys and values


def convert_raw(
    original: Original,
    prompt: npt.NDArray[np.int64],
    original_reading: Reading,
    *,
    window: Window | None = None,
    library: bool = True,
    threads: int | None = None,
) -> RawOriginal | PropertyCheck:
    """Convert an original without codecs, in memory, and compare the two.

    Args:
        original: the original; it is changed.
        prompt: ids ``[n]``.

    Returns:
        The conversion; a check that was not done where the original cannot be converted so.
    """
    path = original.loaded.path
    names = names_in(original.loaded.model)
    biases = find_biases(original.loaded.model, original.recognition)
    try:
        prepared = prepare(path, preset="raw", window=window, original=original)
    except UnsupportedModelError as error:
        return PropertyCheck(RAW_EQUALS, None, error.what)
    model = multiply_floats(prepared.loaded.model)
    is_rounded = any(node.op_type in _ROUNDING for node in model.graph)
    probe = expose_internals(path, loaded=replace(prepared.loaded, model=model))
    reading = read(probe.decoder(library=library, threads=threads), prompt, probe.layers)
    check = _rewritten(original_reading, reading, probe, is_rounded)
    return RawOriginal(
        prepared, model, names, prompt, probe, reading, is_rounded, check, original_reading, biases
    )


def _with_window(
    raw: RawOriginal, plan: Plan, *, library: bool, threads: int | None
) -> RawOriginal | PropertyCheck:
    """Convert the original once more, with the rows of a window in its caches."""
    loaded = raw.prepared.loaded
    window = Window(plan.recent, plan.sinks, plan.overlay_rows)
    original = recognise_original(load_again(loaded), loaded.path)
    return convert_raw(
        original, raw.prompt, raw.own, window=window, library=library, threads=threads
    )


def fidelity(
    raw: RawOriginal | PropertyCheck,
    converted: Path,
    loaded: LoadedModel,
    plan: Plan,
    *,
    library: bool = True,
    threads: int | None = None,
) -> list[PropertyCheck]:
    """Compare all of a converted model but its codecs with its original.

    Args:
        loaded: the converted model; it is not changed.
    """
    if isinstance(raw, RawOriginal) and plan.has_window:
        raw = _with_window(raw, plan, library=library, threads=threads)
    if isinstance(raw, PropertyCheck):
        return [raw]
    expected = raw.model
    if plan.block_size:
        expected = copy_graph(expected)
    raw_plan = _put_in_pages(expected, raw.prepared, plan)
    problems = plan_problems(loaded.model, plan, raw_plan)
    problems += adaptation_problems(loaded.model, plan)
    if METADATA_CALIBRATION not in loaded.model.metadata_props:
        problems += bias_problems(loaded.model, plan, raw.biases)
    form = raw_form(loaded, plan)
    form = replace(form, model=multiply_floats(form.model))
    changed = changed_tensors(form.model, expected)
    is_same = not changed and is_same_graph(form.model, expected)
    if (plan.target == CPU or plan.block_size) and not is_same:
        changed += changed_functions(form.model, expected)
        # This very version would add the same nodes.
        names = names_in(expected) if plan.tool_version == __version__ else raw.names
        changed += changed_nodes(form.model, expected, names)
    results = [
        _verdict(PLANNED, problems, f"{len(plan.layers)} layers, function bodies"),
        raw.check,
        _verdict(KEPT, changed, "all that both graphs have"),
    ]
    if is_same:
        return [*results, PropertyCheck(REST_EQUALS, True, "the same graph, node by node")]
    probe = expose_internals(converted, loaded=form)
    try:
        reading = read(probe.decoder(library=library, threads=threads), raw.prompt, probe.layers)
    except (UnsupportedModelError, UsageError) as error:
        return [*results, PropertyCheck(REST_EQUALS, False, error.what)]
    return [*results, _alike(raw, reading, probe)]


def _put_in_pages(model: ir.Model, raw: Prepared, plan: Plan) -> Plan:
    """Lower an original without codecs as its conversion was, if that has pages; return its plan.

    Of other targets, what all graphs have is compared, and what they compute.
    """
    target = target_of(plan.target, block_size=plan.block_size) if plan.block_size else None
    lowering = None if target is None else target.lowering(raw.plan, raw.loaded.path)
    for step in () if lowering is None else lowering.passes:
        step(model)
    return raw.plan if lowering is None else lowering.plan_behind


def expect_fidelity(
    raw: RawOriginal | PropertyCheck,
    converted: Path,
    loaded: LoadedModel,
    plan: Plan,
    *,
    library: bool = True,
    threads: int | None = None,
) -> None:
    """Refuse a converted model that is not its original but for the codecs of its plan.

    Args:
        loaded: the converted model; it is not changed.
    """
    with failing(converted):
        form = with_operators(loaded)
        plan = plan_in(form.model.metadata_props) or plan
        checks = fidelity(raw, converted, form, plan, library=library, threads=threads)
        checks.append(tables(form.model, plan))
    expect_held(checks, converted)


def expect_held(checks: Sequence[PropertyCheck], converted: Path) -> None:
    """Refuse a converted model of which checks do not hold."""
    lost = [check.detail for check in checks if check.holds is False]
    if lost:
        raise VerificationError(
            f"{failure(checks)} ({'; '.join(lost)})",
            where=str(converted),
            fix="convert the original again",
        )


def _verdict(name: str, problems: Sequence[str], detail: str) -> PropertyCheck:
    some = list(dict.fromkeys(problems))
    suffix = f" (and {len(some) - 4} more)" if len(some) > 4 else ""
    return PropertyCheck(name, not some, "; ".join(some[:4]) + suffix if some else detail)


def _rewritten(
    original_reading: Reading, raw: Reading, probe: Probe, is_rounded: bool
) -> PropertyCheck:
    """Compare an original with its own conversion without codecs."""

    def distances() -> Iterator[tuple[str, float]]:
        for where, expected, found in _both(original_reading, raw):
            for index, layer in enumerate(probe.layers):
                if layer.is_shortened:  # what goes in and what comes out are not as long
                    continue
                for role, names, cache in zip(
                    ("keys", "values"), layer.caches, expected.caches[2 * index :], strict=False
                ):
                    yield (
                        f"layer {layer.plan.layer}, {role}{where}",
                        distance(
                            widened(cache, layer.plan.head_size), found.watched[names.vectors]
                        ),
                    )
            yield f"logits{where}", distance(expected.logits, found.logits)

    return _worst(RAW_EQUALS, distances(), _bound(MAX_REWRITE_ERROR, probe, is_rounded))


def _both(left: Reading, right: Reading) -> Iterator[tuple[str, Reading, Reading]]:
    """Yield two readings, and those of a padded prompt if both graphs take padding."""
    yield "", left, right
    if left.padded is not None and right.padded is not None:
        yield " behind padding", left.padded, right.padded


def _alike(raw: RawOriginal, reading: Reading, probe: Probe) -> PropertyCheck:
    """Compare two conversions without codecs, layer by layer."""

    def distances() -> Iterator[tuple[str, float]]:
        for where, expected, found in _both(raw.reading, reading):
            for raw_layer, layer in zip(raw.probe.layers, probe.layers, strict=True):
                pairs = zip(values_of(raw_layer), values_of(layer), strict=True)
                for (what, mine), (_, converted_name) in pairs:
                    left, right = expected.watched[mine], found.watched[converted_name]
                    yield f"layer {raw_layer.plan.layer}, {what}{where}", distance(left, right)
            yield f"logits{where}", distance(expected.logits, found.logits)

    return _worst(REST_EQUALS, distances(), _bound(MAX_LOWERED_ERROR, raw.probe, raw.is_rounded))


def _bound(bounds: dict[str, float], probe: Probe, is_rounded: bool) -> float:
    least = MAX_ROUNDED_ERROR if is_rounded else 0.0
    return max(least, *(bounds[layer.plan.dtype] for layer in probe.layers))


def _worst(name: str, distances: Iterator[tuple[str, float]], bound: float) -> PropertyCheck:
    """Name the first place that is beyond the bound, or the worst one."""
    largest, where = 0.0, "everywhere"
    for place, measured in distances:
        if not measured <= bound:
            detail = f"{place}: relative distance {measured:.1e}, {bound:.0e} allowed"
            return PropertyCheck(name, False, detail)
        if measured > largest:
            largest, where = measured, place
    detail = f"largest relative distance {largest:.1e} ({where}), {bound:.0e} allowed"
    return PropertyCheck(name, True, detail)
