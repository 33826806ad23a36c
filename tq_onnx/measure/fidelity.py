"""The fidelity of a conversion: everything but the codecs is the original's.

An original that is converted with the codec ``raw``, in memory, must compute what it did, to float
noise. The converted file, its codecs taken out (``tq_onnx.measure.rawform``), must be that very
graph; where it holds scales or was lowered for a target, it must compute the same: what enters the
caches, queries and results of every layer, and the logits. The codecs themselves are judged
elsewhere (``tq_onnx.measure.oracle``), node by node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.conversion.original import recognise_original
from tq_onnx.conversion.pipeline import prepare
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.files.load import LoadedModel
from tq_onnx.measure.adapted import adaptation_problems, fold_alike
from tq_onnx.measure.checks import PropertyCheck
from tq_onnx.measure.expose_internals import expose_internals
from tq_onnx.measure.planned import plan_problems
from tq_onnx.measure.probe import LayerNames, Probe
from tq_onnx.measure.rawform import multiply_floats, raw_form
from tq_onnx.measure.samegraph import changed_nodes, changed_tensors, is_same_graph
from tq_onnx.plan import CPU, Plan
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.model import OpenModel, made_up_embeddings
from tq_onnx.runtime.session import make_session

PLANNED: Final = "layers are what the plan and the original say"
RAW_EQUALS: Final = "the original converted without codecs computes the same"
WEIGHTS: Final = "weights are the original's"
REST_EQUALS: Final = "all but the codecs computes what the original does"

MAX_REWRITE_ERROR: Final = {"FLOAT": 1e-3, "FLOAT16": 3e-2, "BFLOAT16": 0.15}
"""Relative, of whole arrays: two ways to compute attention, through all layers."""
MAX_SCALED_ERROR: Final = {"FLOAT": 1e-4, "FLOAT16": 1e-2, "BFLOAT16": 5e-2}
"""Scales in the channels of queries and keys, or other nodes of a target, round otherwise."""
MAX_ROUNDED_ERROR: Final = 5e-2
"""Operands that the graph itself rounds to 8 bits: float noise that flips one is none any more."""

_ROUNDING: Final = frozenset({"DynamicQuantizeLinear", "DynamicQuantizeMatMul", "QMoE"})
_STEPS: Final = 2

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Reading:
    """The results of a model that has read a prompt, in two calls and a few steps.

    Attributes:
        logits: of all calls, ``[1, T, V]``.
        caches: all tokens that are in the caches ``[1, N, S, W]``, in signature order.
        watched: inner values of all calls, by name.
    """

    logits: Floats
    caches: list[Array]
    watched: dict[str, Array]


def read_original(
    before: OpenModel,
    loaded: LoadedModel,
    prompt: npt.NDArray[np.int64],
    *,
    threads: int | None = None,
) -> Reading:
    """Read a prompt with an original; int4 weights are multiplied as floats, in ``loaded`` too."""
    if not multiply_floats(loaded.model):
        return _read(before.decoder(), prompt)
    session = make_session(
        ir.to_proto(loaded.model).SerializeToString(),
        library=False,
        threads=threads,
        external_data=loaded.path.parent,
    )
    embeddings = made_up_embeddings(session, before.signature.interface)
    return _read(Decoder(session, before.signature, embeddings=embeddings), prompt)


def fidelity(
    original: Path,
    converted: Path,
    prompt: npt.NDArray[np.int64],
    own: Reading,
    *,
    graph: LoadedModel,
    loaded: LoadedModel,
    plan: Plan,
    library: bool = True,
    threads: int | None = None,
) -> list[PropertyCheck]:
    """Compare all of a converted model but its codecs with its original.

    Args:
        original: the original model.
        converted: the converted model; errors name it.
        prompt: ids ``[n]``.
        own: what the original makes of them.
        graph: the original; it is changed.
        loaded: the converted model; it is not changed.
        plan: its plan.
        library: whether the library's kernels run; if not, function bodies.
        threads: threads within an operator.
    """
    try:
        raw = prepare(original, preset="raw", original=recognise_original(graph, original))
    except UnsupportedModelError as error:
        return [PropertyCheck(RAW_EQUALS, None, error.what)]
    multiply_floats(raw.loaded.model)
    rounded = _is_rounded(raw.loaded.model)
    probe = expose_internals(original, loaded=raw.loaded)
    wanted = _read(probe.decoder(library=library, threads=threads), prompt, probe.layers)
    # From here on it is there to be compared with, and has the same scales.
    folded = fold_alike(raw.loaded.model, raw.plan, plan)
    rest = raw_form(loaded, plan)
    multiply_floats(rest.model)
    problems = plan_problems(loaded.model, plan, raw.plan)
    problems += adaptation_problems(loaded.model, plan, folded)
    changed = changed_tensors(rest.model, raw.loaded.model)
    same = is_same_graph(rest.model, raw.loaded.model) and not changed
    if plan.target == CPU and not same:
        changed += changed_nodes(rest.model, raw.loaded.model)
    found = [
        _verdict(PLANNED, problems, f"{len(plan.layers)} layers, function bodies"),
        _rewritten(own, wanted, probe, rounded),
        _verdict(WEIGHTS, changed, "all tensors that both graphs have"),
    ]
    if same:
        return [*found, PropertyCheck(REST_EQUALS, True, "the same graph, node by node")]
    del raw
    other = expose_internals(converted, loaded=rest)
    given = _read(other.decoder(library=library, threads=threads), prompt, other.layers)
    return [*found, _alike(wanted, given, probe, other, rounded)]


def _verdict(name: str, problems: Sequence[str], detail: str) -> PropertyCheck:
    some = list(dict.fromkeys(problems))
    more = f" (and {len(some) - 4} more)" if len(some) > 4 else ""
    return PropertyCheck(name, not some, "; ".join(some[:4]) + more if some else detail)


def _is_rounded(model: ir.Model) -> bool:
    return any(node.op_type in _ROUNDING for node in model.graph)


def _read(
    decoder: Decoder, prompt: npt.NDArray[np.int64], layers: Sequence[LayerNames] = ()
) -> Reading:
    """Feed a prompt in two calls and steps; a graph for first prompts takes it at once."""
    count = len(prompt)
    ends = [count]
    if not decoder.signature.first_only:
        ends = [(count - _STEPS) * 3 // 4, *range(count - _STEPS, count + 1)]
    logits: list[Array] = []
    names = [name for layer in layers for _, name in _values(layer)]
    watched: dict[str, list[Array]] = {name: [] for name in names}
    start = 0
    for end in ends:
        for piece in decoder.calls(end - start):
            tokens = prompt[start:end][piece]
            logits.append(decoder.prefill(tokens[None]).astype(np.float64))
            for name, parts in watched.items():
                parts.append(decoder.watched[name])
        start = end
    caches = [decoder.cache(index) for index in range(len(decoder.signature.caches))]
    joined = {name: np.concatenate(parts, axis=2) for name, parts in watched.items()}
    return Reading(np.concatenate(logits, axis=1), caches, joined)


def _rewritten(own: Reading, raw: Reading, probe: Probe, rounded: bool) -> PropertyCheck:
    """Compare an original with its own conversion without codecs."""

    def distances() -> Iterator[tuple[str, float]]:
        for index, layer in enumerate(probe.layers):
            for role, names, cache in zip(
                ("keys", "values"), layer.caches, own.caches[2 * index :], strict=False
            ):
                yield (
                    f"layer {layer.plan.layer}, {role}",
                    _distance(cache, raw.watched[names.vectors]),
                )
        yield "logits", _distance(own.logits, raw.logits)

    return _worst(RAW_EQUALS, distances(), _bound(MAX_REWRITE_ERROR, probe, rounded))


def _alike(
    wanted: Reading, given: Reading, probe: Probe, other: Probe, rounded: bool
) -> PropertyCheck:
    """Compare two conversions without codecs, layer by layer."""

    def distances() -> Iterator[tuple[str, float]]:
        for one, its in zip(probe.layers, other.layers, strict=True):
            pairs = zip(_values(one), _values(its), strict=True)
            for (what, mine), (_, theirs) in pairs:
                left, right = wanted.watched[mine], given.watched[theirs]
                if its.plan.equalised and what in ("queries", "keys"):
                    right = _fitted(right, left)
                yield f"layer {one.plan.layer}, {what}", _distance(left, right)
        yield "logits", _distance(wanted.logits, given.logits)

    return _worst(REST_EQUALS, distances(), _bound(MAX_SCALED_ERROR, probe, rounded))


def _values(layer: LayerNames) -> Iterator[tuple[str, str]]:
    """Yield what is compared of a layer, with its names, in the order of computation."""
    yield "queries", layer.query
    yield "keys", layer.key.vectors
    yield "values", layer.value.vectors
    yield "results of attention", layer.output


def _bound(bounds: dict[str, float], probe: Probe, rounded: bool) -> float:
    least = MAX_ROUNDED_ERROR if rounded else 0.0
    return max(least, *(bounds[layer.plan.dtype] for layer in probe.layers))


def _worst(name: str, distances: Iterator[tuple[str, float]], bound: float) -> PropertyCheck:
    """Name the first place that is beyond the bound, or the worst one."""
    largest, where = 0.0, "everywhere"
    for place, distance in distances:
        if not distance <= bound:
            detail = f"{place}: relative distance {distance:.1e}, {bound:.0e} allowed"
            return PropertyCheck(name, False, detail)
        if distance > largest:
            largest, where = distance, place
    detail = f"largest relative distance {largest:.1e} ({where}), {bound:.0e} allowed"
    return PropertyCheck(name, True, detail)


def _distance(wanted: Array, given: Array) -> float:
    """Return the relative distance of arrays that mean the same; infinite if they cannot."""
    if wanted.shape != given.shape:
        return float("inf")
    left, right = (np.asarray(array, np.float64) for array in (wanted, given))
    equal = np.array_equal(left, right, equal_nan=True)
    with np.errstate(all="ignore"):
        energy = max(float((left**2).sum()), 1e-300)
        return 0.0 if equal else float(np.sqrt(((left - right) ** 2).sum() / energy))


def _fitted(given: Array, wanted: Array) -> Floats:
    """Scale the channels of queries or keys back, by what fits best."""
    left, right = (np.asarray(array, np.float64) for array in (wanted, given))
    products = (left * right).sum(axis=(0, 2), keepdims=True)
    energies = (right * right).sum(axis=(0, 2), keepdims=True)
    fitted: Floats = right * (products / np.where(energies > 0, energies, 1))
    return fitted
