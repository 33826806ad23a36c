"""``verify`` of a model whose caches lie in pages: packed requests against the original.

The original reads each request alone. The model reads them packed, prompts, pieces of prompts and
single tokens in one call, with pages in a random order. Without its codecs, which are taken out in
memory, it must compute the same, to float noise; with them, other pages must give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.conversion.calibrationrecord import record_in
from tq_onnx.conversion.check import snapshot_interface
from tq_onnx.conversion.pipeline import prepare
from tq_onnx.files.load import LoadedModel, load
from tq_onnx.measure.rawform import multiply_floats, raw_form
from tq_onnx.measure.readings import distance, with_float_products
from tq_onnx.measure.windows import text_of
from tq_onnx.plan import Plan, plan_in
from tq_onnx.progress import OnProgress, Progress, silent
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.opening import open_original
from tq_onnx.runtime.pages import PagedDecoder
from tq_onnx.runtime.session import make_session, placement
from tq_onnx.targets.paged.checks import violations
from tq_onnx.targets.registry import target_of
from tq_onnx.verification.adapted import BY_NODES, fold_alike
from tq_onnx.verification.calibrated import advice, calibration_checks
from tq_onnx.verification.checks import (
    ROUNDING_BY_CALL,
    PropertyCheck,
    Verdict,
    tables,
)
from tq_onnx.verification.fidelity import KEPT, MAX_REWRITE_ERROR, MAX_ROUNDED_ERROR
from tq_onnx.verification.graph_equality import (
    changed_functions,
    changed_nodes,
    changed_tensors,
    names_in,
)
from tq_onnx.verification.interfaces import not_made_from
from tq_onnx.version import __version__

CALLS: Final[Sequence[Mapping[int, int]]] = (
    {0: 19, 1: 3},
    {0: 1, 2: 24, 1: 1},
    {1: 14, 2: 1, 3: 1},
    {2: 1, 1: 1, 0: 1, 3: 7},
    {3: 1, 0: 1},
)
"""New tokens of requests, call by call."""
_TOKENS: Final = {
    request: sum(call.get(request, 0) for call in CALLS) for call in CALLS for request in call
}
_BLOCKS: Final = 12
Logits = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class PagedReport(Verdict):
    """The result of ``verify`` of a model with pages.

    Attributes:
        kernels: True if the library's kernels were checked, and not only the function bodies.
        logit_distance: of the converted model from the original, relative; of all requests.
        kernel_distance: of kernels from function bodies, likewise; None if no kernels ran.
        cache_bytes_per_token: in pages; the rest of a page that is begun comes on top.
    """

    kernels: bool
    logit_distance: float
    kernel_distance: float | None
    cache_bytes_per_token: int


def verify_pages(
    original: Path,
    converted: LoadedModel,
    plan: Plan,
    tokens: Sequence[int] | npt.NDArray[np.int64] | int,
    *,
    source: str,
    library: bool = True,
    threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> PagedReport:
    """Compare a model whose caches lie in pages with its original.

    Args:
        original: the original model.
        converted: the converted one; it is not changed.
        plan: its plan.
        tokens: ids of a text, or the number of pseudo-random ids to make.
        source: where the tokens come from, for the report.
        library: whether to check the library's kernels, too.
        threads: threads within an operator.
        on_progress: called as each step begins.

    Raises:
        VerificationError: the converted model was not made from this original.
        TqOnnxError: a model or the library is refused.
    """
    tell = on_progress or silent
    graph = load(original)
    snapshot = snapshot_interface(graph.model)
    before = open_original(original, loaded=graph, threads=threads)
    _refuse_stranger(before, converted, plan)
    ids = text_of(before, tokens)
    text = _texts(ids)
    tell(Progress("Reading each request with the original"))
    floats = with_float_products(before, graph, library=False, threads=threads)
    wanted = _alone(floats, text)
    found = [
        _clauses("operators are those of the plan", violations(snapshot, converted.model, plan))
    ]
    found.append(tables(converted.model, plan))
    tell(Progress("Comparing everything but the codecs with the original"))
    made = partial(make_session, threads=threads, external_data=converted.path.parent)
    raw = raw_form(converted, plan).model
    raw_plan = plan_in(raw.metadata_props)
    assert raw_plan is not None  # the raw form is a conversion
    given = _packed(made(_bytes(raw), library=library), raw_plan, text)
    found.append(_same(wanted, given, plan, raw))
    found.append(_clauses(KEPT, _changed(original, converted, raw, plan)))
    record = record_in(converted.model.metadata_props, plan)
    found += calibration_checks(record, plan, before, ids)
    tell(Progress("Reading packed requests"))
    content = _bytes(converted.model)
    bodies = _packed(made(content, library=False), plan, text)
    sessions = [made(content, library=True)] if library else []
    kernels = [_packed(one, plan, text) for one in sessions]
    other = _packed((sessions or [made(content, library=False)])[0], plan, text, seed=1)
    found.append(_same_bits((kernels or [bodies])[0], other))
    for one in sessions:
        placed = placement(one)
        count = placed.encode + placed.attention
        nodes = 2 * len(plan.layers) + sum(layer.readers for layer in plan.layers)
        detail = f"{count} of {nodes} TurboQuant nodes"
        found.append(PropertyCheck("kernels run all operators", count == nodes, detail))
    return PagedReport(
        original=original,
        converted=converted.path,
        source=source,
        tokens=sum(_TOKENS.values()),
        kernels=library,
        checks=tuple(found),
        logit_distance=distance(wanted, (kernels or [bodies])[0]),
        kernel_distance=distance(bodies, kernels[0]) if kernels else None,
        cache_bytes_per_token=plan.bytes_per_token,
        advice=advice(found, record),
    )


def _changed(original: Path, converted: LoadedModel, raw: ir.Model, plan: Plan) -> Iterator[str]:
    """Yield the weights and nodes that are not the original's."""
    sequences = prepare(original, preset="raw")
    wanted = sequences.loaded.model
    fold_alike(wanted, sequences.plan, plan)
    target = target_of(plan.target, block_size=plan.block_size)
    lowering = target.lowering(sequences.plan, original)
    for step in () if lowering is None else lowering.passes:
        step(wanted)
    yield from changed_tensors(converted.model, wanted)
    yield from changed_functions(raw, wanted)
    # This very version would add the same nodes.
    is_same_version = plan.tool_version == __version__
    names = names_in(wanted if is_same_version else load(original).model)
    own = any(layer.equalised == BY_NODES for layer in plan.layers)
    yield from changed_nodes(raw, wanted, names, operators=not own)


def _refuse_stranger(before: OpenModel, converted: LoadedModel, plan: Plan) -> None:
    sizes = [(layer.kv_num_heads, cache.size) for layer in plan.layers for cache in layer.caches]
    if [(cache.kv_num_heads, cache.row) for cache in before.signature.caches] != sizes:
        raise not_made_from(before.path, converted.path, "the caches have other heads")


def _texts(text: npt.NDArray[np.int64]) -> dict[int, npt.NDArray[np.int64]]:
    """Return the tokens of each request, from places all over a text."""
    starts = np.linspace(0, len(text), len(_TOKENS), endpoint=False).astype(int)
    return {
        request: np.resize(text[start:], count)
        for start, (request, count) in zip(starts, _TOKENS.items(), strict=True)
    }


def _pieces(
    text: Mapping[int, npt.NDArray[np.int64]],
) -> Iterator[dict[int, npt.NDArray[np.int64]]]:
    """Yield the new tokens of each call."""
    fed = dict.fromkeys(text, 0)
    for call in CALLS:
        yield {name: text[name][fed[name] : fed[name] + count] for name, count in call.items()}
        fed |= {name: fed[name] + count for name, count in call.items()}


def _alone(before: OpenModel, text: Mapping[int, npt.NDArray[np.int64]]) -> Logits:
    """Return the logits after the tokens of each call, request by request."""
    decoders = {name: before.decoder() for name in text}
    rows = []
    for call in _pieces(text):
        for name, ids in call.items():
            rows.append(np.asarray(decoders[name].prefill(ids[None]), np.float64)[0, -1])
    return np.stack(rows)


def _packed(
    session: Any, plan: Plan, text: Mapping[int, npt.NDArray[np.int64]], *, seed: int = 0
) -> Logits:
    """Return the same of packed requests."""
    blocks = sum(-(-count // plan.block_size) for count in _TOKENS.values()) + _BLOCKS
    decoder = PagedDecoder(session, plan, blocks=blocks, seed=seed)
    rows = [decoder.run(call) for call in _pieces(text)]
    return np.concatenate(rows).astype(np.float64)


def _clauses(name: str, problems: Iterator[str]) -> PropertyCheck:
    some = list(dict.fromkeys(problems))
    return PropertyCheck(name, not some, "; ".join(some[:4]) or "all of them")


def _same(wanted: Logits, given: Logits, plan: Plan, raw: ir.Model) -> PropertyCheck:
    name = "all but the codecs computes what the original does, request by request"
    is_rounded = any(node.op_type in {*ROUNDING_BY_CALL, "QMoE"} for node in raw.graph)
    bound = max(MAX_REWRITE_ERROR[layer.dtype] for layer in plan.layers)
    bound = max(bound, MAX_ROUNDED_ERROR if is_rounded else 0.0)
    worst = max(distance(one, other) for one, other in zip(wanted, given, strict=True))
    detail = f"largest relative distance {worst:.1e} in {len(wanted)} answers, {bound:.0e} allowed"
    return PropertyCheck(name, worst <= bound, detail)


def _same_bits(one: Logits, other: Logits) -> PropertyCheck:
    name = "pages in another order give the same bits"
    differing = int((one != other).any(axis=-1).sum())
    return PropertyCheck(name, not differing, f"{differing} of {len(one)} answers differ")


def _bytes(model: ir.Model) -> bytes:
    content: bytes = ir.to_proto(multiply_floats(model)).SerializeToString()
    return content
