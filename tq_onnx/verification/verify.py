"""``verify``: a conversion against its original.

Hard properties are checks: the model keeps its inputs and outputs, all but its codecs is its
original (``tq_onnx.verification.fidelity``), its baked tables are as its plan says, every backend
computes what the reference computes, caches hold what theory promises, and the way of feeding does
not matter. Quality figures (perplexity, KL divergence, greedy continuation)
are measured and reported; they depend on model and text, so no verdict hangs on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.extremes import warnings_of
from tq_onnx.conversion.original import recognise_original
from tq_onnx.errors import UnsupportedModelError, VerificationError
from tq_onnx.files.load import LoadedModel, load
from tq_onnx.measure import divergence
from tq_onnx.measure.divergence import QualityFigures
from tq_onnx.measure.expose_internals import expose_internals, with_operators
from tq_onnx.measure.feeding_modes import (
    FeedingFigures,
    all_caches,
    call_distances,
    chunk_of,
    compare_feeding_modes,
)
from tq_onnx.measure.greedy import GreedyFigures, compare_greedy
from tq_onnx.measure.oracle import OracleFigures, judge_backends
from tq_onnx.measure.readings import read_original, with_float_products
from tq_onnx.measure.reconstruction import (
    CacheDistance,
    ReconstructionFigures,
    cache_distances,
)
from tq_onnx.measure.windows import MIN_TOKENS, text_of
from tq_onnx.plan import Plan, plan_in
from tq_onnx.progress import OnProgress, Progress, silent
from tq_onnx.recognise.branches import split
from tq_onnx.runtime.generate import generate
from tq_onnx.runtime.model import OpenModel, refuse_pages
from tq_onnx.runtime.opening import open_converted, open_original
from tq_onnx.runtime.placement import PlacementReport, report_placement
from tq_onnx.runtime.providers import CPU, ExecutionProvider
from tq_onnx.targets.registry import target_of_plan
from tq_onnx.verification import checks
from tq_onnx.verification.checks import PropertyCheck, failed
from tq_onnx.verification.devices import (
    ProviderFigures,
    compare_providers,
    on_device,
    providers_agree,
)
from tq_onnx.verification.fidelity import PROMPT_TOKENS, convert_raw, fidelity
from tq_onnx.verification.fixedgraphs import GraphReport, verify_graph
from tq_onnx.verification.interfaces import failing, interface_kept, not_made_from, refuse_stranger
from tq_onnx.verification.pages import PagedReport, verify_pages
from tq_onnx.verification.planned import expect_layers

PROBE_TOKENS: Final = 512
MODE_TOKENS: Final = 8
ANY_ROOM: Final = 1 << 30
BEGINNING: Final = "first prompt"
"""Of checks of the branch that takes no caches."""


@dataclass(frozen=True)
class MemoryFigures:
    """Cache bytes, of the buffers and by the types.

    Attributes:
        tokens: tokens that the measured caches held.
        original_bytes: bytes of the original's buffers.
        converted_bytes: bytes of the converted model's buffers.
        original_bytes_per_token: from the types of the original's caches.
        converted_bytes_per_token: from the types of the converted model's caches.
    """

    tokens: int
    original_bytes: int
    converted_bytes: int
    original_bytes_per_token: int
    converted_bytes_per_token: int

    @property
    def ratio(self) -> float:
        """The factor by which the caches became smaller."""
        return self.original_bytes / self.converted_bytes


@dataclass(frozen=True)
class VerifyReport:
    """The result of ``verify``.

    Attributes:
        original: the original model.
        converted: the converted model.
        source: where the tokens come from.
        tokens: tokens of the text.
        kernels: True if the library's kernels were checked, and not only the function bodies.
        checks: the hard properties.
        quality: original against converted.
        greedy: the continuations of both models.
        memory: cache bytes of both models.
        modes: the feeding modes of the converted model.
        layers: reconstruction of every cache.
        drift: every cache against the original's.
        ladder: errors of each backend (kernels, function bodies, device) on each layer, against
            numpy. It is a key of the JSON document, so the name stays.
        logits_kernel_body: largest relative difference of logits between kernels and bodies.
        placement: where the nodes of the converted model ran when it was compared.
        device: the converted model on its provider against itself on the CPU; None on the CPU.
        warnings: one sentence about the vectors that rows cannot hold, if there are any.
    """

    original: Path
    converted: Path
    source: str
    tokens: int
    kernels: bool
    checks: tuple[PropertyCheck, ...]
    quality: QualityFigures
    greedy: GreedyFigures
    memory: MemoryFigures
    modes: FeedingFigures
    layers: tuple[ReconstructionFigures, ...]
    drift: tuple[CacheDistance, ...]
    ladder: tuple[OracleFigures, ...]
    logits_kernel_body: float | None
    placement: PlacementReport
    device: ProviderFigures | None = None
    warnings: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """The verdict: True if every check holds."""
        return not failed(self.checks)


def verify(
    original: Path,
    converted: Path,
    tokens: Sequence[int] | npt.NDArray[np.int64] | int,
    *,
    source: str,
    new_tokens: int = 32,
    context: int = 512,
    library: bool = True,
    threads: int | None = None,
    ep: ExecutionProvider = CPU,
    on_progress: OnProgress | None = None,
) -> VerifyReport | PagedReport | GraphReport:
    """Compare a converted model with its original.

    Args:
        original: the original model.
        converted: the converted model.
        tokens: ids of a text, or the number of pseudo-random ids to make.
        source: where the tokens come from, for the report.
        new_tokens: greedy tokens to generate with each model.
        context: tokens per perplexity window.
        library: True to check the library's kernels, too; False to run only the function bodies.
        threads: threads within an operator.
        ep: where the converted model runs when it is compared with the original, which always runs
            on the CPU; it is then compared with itself on the CPU too.
        on_progress: called as each step begins, and as windows and layers are done.

    Returns:
        The report; ``holds`` is its verdict. Models whose caches lie in pages, and graphs of
        standard operators, have others.

    Raises:
        VerificationError: the converted model was not made from this original, or cannot read a
            prompt that the original reads.
        TqOnnxError: a model or the library is refused, or the text is too short.
    """
    tell = on_progress or silent
    tell(Progress("Opening both models"))
    loaded = load(converted)
    with failing(converted):
        plan = plan_in(loaded.model.metadata_props)
    if plan is not None and plan.block_size:
        if ep.has_own_memory:
            refuse_pages(plan)
        return verify_pages(
            original,
            loaded,
            plan,
            tokens,
            source=source,
            library=library,
            threads=threads,
            on_progress=on_progress,
        )
    if plan is not None and not (
        target_of_plan(plan).has_operators or target_of_plan(plan).restore
    ):
        return verify_graph(
            original,
            loaded,
            plan,
            tokens,
            source=source,
            new_tokens=new_tokens,
            context=context,
            threads=threads,
            ep=ep,
            on_progress=on_progress,
        )
    whole = _Pair(original, load(original), converted, loaded)
    reports = [
        _verify(
            pair,
            tokens,
            source=source,
            new_tokens=new_tokens,
            context=context,
            library=library,
            threads=threads,
            ep=ep,
            tell=tell,
        )
        for pair in whole.parts() or [whole]
    ]
    *others, report = reports
    found = [
        replace(check, name=f"{BEGINNING}: {check.name}") for r in others for check in r.checks
    ]
    return replace(
        report,
        checks=(*found, *report.checks),
        warnings=tuple(text for one in reports for text in one.warnings),
    )


@dataclass(frozen=True, eq=False)
class _Pair:
    """An original and its conversion, or a part of both."""

    original: Path
    graph: LoadedModel
    converted: Path
    loaded: LoadedModel

    @cached_property
    def form(self) -> LoadedModel:
        """The conversion with operators, which are made again where its target has none."""
        return with_operators(self.loaded)

    @property
    def plan(self) -> Plan:
        """The plan of that."""
        plan = plan_in(self.form.model.metadata_props)
        assert plan is not None  # the conversion was opened
        return plan

    def parts(self) -> list[_Pair]:
        """Return the parts of a merged model, the one that takes caches last; [] for others."""
        theirs, own = split(self.graph), split(self.loaded)
        if theirs is None:
            return []
        if own is None:
            raise not_made_from(self.original, self.converted, "it is not merged of two branches")
        pairs = ((theirs.first, own.first), (theirs.following, own.following))
        return [_Pair(self.original, graph, self.converted, loaded) for graph, loaded in pairs]


def _verify(
    pair: _Pair,
    tokens: Sequence[int] | npt.NDArray[np.int64] | int,
    *,
    source: str,
    new_tokens: int,
    context: int,
    library: bool,
    threads: int | None,
    ep: ExecutionProvider,
    tell: OnProgress,
) -> VerifyReport:
    original, graph, converted, loaded = pair.original, pair.graph, pair.converted, pair.loaded
    before = open_original(original, loaded=graph, threads=threads)
    refuse_stranger(before, converted, loaded)
    with failing(converted, ep):
        library = library and pair.form is loaded  # kernels have nothing to do elsewhere
        after = open_converted(converted, loaded=loaded, library=library, threads=threads, ep=ep)
    text = text_of(before, tokens)
    found = [_kept(before, after, loaded)]
    room = _room(before, after)
    context = min(context, len(text), room)
    prompt = text[: min(PROMPT_TOKENS, len(text), room // 2)]
    memory, own, other = _read(before, after, prompt, ep)
    figures = divergence.compare(
        before.decoder(),
        after.decoder(most=context),
        text,
        vocabulary=before.vocabulary,
        context=context,
        stride=max(1, context // 2),
        on_progress=tell,
    )
    new_tokens = min(new_tokens, 1 if before.signature.first_only else room - len(prompt))
    tell(Progress("Continuing a prompt with both models"))
    greedy = _greedy(before, after, prompt.tolist(), new_tokens, figures.logit_rms_difference)
    nodes = report_placement(after.session, loaded.model)
    found += [
        checks.placed(after, library),
        checks.cache_sizes(after, memory.converted_bytes, memory.tokens),
    ]
    first = recognise_original(graph, original, recognition=before.recognition)
    chunk = chunk_of(after)
    floats = with_float_products(before, graph, library=False, threads=threads)
    calls = call_distances(floats, prompt, chunk)
    theirs = read_original(floats, prompt)
    del before, floats
    tell(Progress("Exposing the layers"))
    probe = expose_internals(converted, loaded=loaded)
    if any(layer.is_shortened for layer in probe.layers):
        raise UnsupportedModelError(
            "the caches keep a window of the tokens, and verify compares all tokens",
            where=str(converted),
            fix="measure its quality with `tq-onnx report`",
        )
    tell(Progress("Feeding caches in every way"))
    with failing(converted, ep):
        if library:
            del after  # before its place is taken
            after = open_converted(converted, loaded=loaded, threads=threads, exact=True)
        after = with_float_products(after, loaded, library=library, threads=threads, exact=True)
        modes, pieces = compare_feeding_modes(
            after, prompt, new_tokens=min(MODE_TOKENS, room - len(prompt)), chunk=chunk
        )
        distances = cache_distances(own, other, probe)
        found += checks.feeding_modes_agree(
            modes,
            loaded.model,
            own=calls,
            drift=distances,
            chunked_drift=cache_distances(own, pieces, probe) if pieces else [],
        )
        del after, pieces
        tell(Progress("Comparing everything but the codecs with the original"))
        raw = convert_raw(first, prompt, theirs, library=library, threads=threads)
        found += [
            *fidelity(raw, converted, pair.form, pair.plan, library=library, threads=threads),
            checks.tables(pair.form.model, pair.plan),
            checks.same_weights(distances, probe),
        ]
        del first, graph, loaded, theirs, raw
        judged = judge_backends(
            probe,
            text[: min(context, PROBE_TOKENS)],
            library=library,
            ep=ep,
            threads=threads,
            on_progress=tell,
        )
        found += [
            *checks.backends_hold(probe, judged.layers),
            *checks.theory_holds(judged.reconstruction),
        ]
    device = None
    if ep.has_own_memory:
        tell(Progress(f"Comparing {ep.provider} with the CPU"))
        device = compare_providers(probe, prompt, new_tokens=new_tokens, ep=ep, threads=threads)
        found.append(on_device(nodes))
        found += providers_agree(device, probe.layers[0].plan.dtype)
    return VerifyReport(
        original=original,
        converted=converted,
        source=source,
        tokens=len(text),
        kernels=library,
        checks=tuple(found),
        quality=figures,
        greedy=greedy,
        memory=memory,
        modes=modes,
        layers=judged.reconstruction,
        drift=tuple(distances),
        ladder=judged.layers,
        logits_kernel_body=judged.logit_gap,
        placement=nodes,
        device=device,
        warnings=warnings_of(one.extremes for one in judged.reconstruction if one.extremes),
    )


def _kept(before: OpenModel, after: OpenModel, loaded: LoadedModel) -> PropertyCheck:
    """Compare what both models take and give; refuse a model that is no conversion of the other."""
    kept = interface_kept(before, after)
    if not kept.holds:
        raise not_made_from(before.path, after.path, kept.detail)
    expect_layers(after.path, loaded.model, after.plan)
    return kept


def _room(before: OpenModel, after: OpenModel) -> int:
    """Return the number of tokens that both models can hold."""
    rooms = [model.longest or ANY_ROOM for model in (before, after)]
    if min(rooms) < MIN_TOKENS:
        raise UnsupportedModelError(
            f"the model takes no more than {min(rooms)} tokens, too few to compare anything",
            where=str(before.path),
            fix=f"export it with room for {MIN_TOKENS} or more",
        )
    return min(rooms)


def _greedy(
    before: OpenModel, after: OpenModel, prompt: list[int], count: int, noise: float
) -> GreedyFigures:
    own, other = (
        generate(model.decoder(most=len(prompt) + count), prompt, max_new_tokens=count).tokens
        for model in (before, after)
    )
    return compare_greedy(before.decoder(), prompt, own, other, noise)


def _read(
    before: OpenModel, after: OpenModel, prompt: npt.NDArray[np.int64], ep: ExecutionProvider
) -> tuple[MemoryFigures, list[npt.NDArray[Any]], list[npt.NDArray[Any]]]:
    """Read a prompt with both models; return the sizes of their caches, and the caches.

    Its last token is a call of its own, as in decoding.
    """
    own, other = before.decoder(), after.decoder(most=len(prompt))
    once = before.signature.first_only
    calls = (prompt,) if once else (prompt[:-1], prompt[-1:])
    for call in calls:
        own.prefill(call[None])
    with failing(after.path, ep):
        for call in calls:
            other.prefill(call[None])
    memory = MemoryFigures(
        tokens=other.slots,
        original_bytes=own.cache_bytes,
        converted_bytes=other.cache_bytes,
        original_bytes_per_token=before.signature.bytes_per_token,
        converted_bytes_per_token=after.signature.bytes_per_token,
    )
    caches = all_caches(own), all_caches(other)
    for spec, wanted, found in zip(after.signature.caches, *caches, strict=True):
        if found.shape[2] != wanted.shape[2]:
            raise VerificationError(
                f"{spec.pair.present} has {found.shape[2]} rows after a prompt of {len(prompt)} "
                f"tokens, and the original's {wanted.shape[2]}",
                where=str(after.path),
                fix="convert the original again",
            )
    return memory, *caches
