"""An original and its conversion, fed alike by the product's own loop, and how far they part.

Every figure is the largest difference of a logit over the original's largest logit, over tokens
that are no padding. Ways to feed:

- ``prompt``: one prompt in one call;
- ``chunks``: 7, 1, 3 and 1 tokens, caches fed back;
- ``steps``: one token after the other, for graphs that take no more;
- ``padded``: chunks of two sequences, one of them padded on the left; or ``batch``, without
  padding, for graphs that take none;
- ``in place``: chunks in caches of fixed capacity, where the conversion takes them.

With the preset ``raw`` a conversion must agree with its original but for float noise. With the
others it must agree with the raw conversion whose new rows are quantised and decoded before they
are cached: that holds for every form of attention, since ``raw`` proves the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from tests.agreement.roundtrip import roundtrip_rows
from tests.decoders.norms import take_norms_out
from tests.decoders.running import Batch
from tq_onnx.conversion.branches import split
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import prepare
from tq_onnx.errors import TqOnnxError
from tq_onnx.files.load import load
from tq_onnx.ops.domain import DOMAIN, ENCODE
from tq_onnx.plan import Plan
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.opening import open_model, open_original
from tq_onnx.runtime.session import make_session
from tq_onnx.runtime.signature import plan_of, signature_of
from tq_onnx.targets.registry import target_of
from tq_onnx.verification import pages

Array = np.ndarray[Any, Any]

CHUNKS = (7, 1, 3, 1)
AS_THEY_ARE = Options(equalize=False, gains=False, residual_length=0, sink_tokens=0)
"""Keys are compared with those of the original, which no scales have changed; simulated codecs
search for nothing."""
TOTAL = sum(CHUNKS)
PADDING = 3
MIXED_UP = 0.05
TEXTS = 3
TEXT = 64
"""Tokens that packed requests are made of."""


@dataclass(frozen=True)
class Run:
    """A way to feed tokens.

    Attributes:
        chunks: tokens of each call.
        batch: sequences.
        padding: padding of the first one.
        in_place: whether the conversion gets caches of fixed capacity.
    """

    chunks: tuple[int, ...]
    batch: int = 1
    padding: int = 0
    in_place: bool = False

    def data(self, vocabulary: int, seed: int) -> Batch:
        """Random tokens."""
        shape = (self.batch, sum(self.chunks))
        tokens = np.random.default_rng(seed).integers(0, vocabulary, shape)
        mask = np.ones_like(tokens)
        mask[0, : self.padding] = 0
        return Batch(tokens, mask)

    def logits(self, model: OpenModel, seed: int) -> Array:
        """Logits of all tokens that are no padding, ``[n, vocabulary]``."""
        data = self.data(model.vocabulary, seed)
        room = self.in_place and model.plan is not None and model.signature.slots is None
        capacity = sum(self.chunks) + 4 if room else None
        decoder = model.decoder(batch=self.batch, capacity=capacity)
        parts, real = [], []
        for start, stop in edges(self.chunks):
            given = data.mask[:, start:stop]
            part = decoder.prefill(data.tokens[:, start:stop], given if self.padding else None)
            parts.append(part)
            real.append(given[:, stop - start - part.shape[1] :])
        kept = np.concatenate(real, axis=1).astype(bool)
        return np.concatenate(parts, axis=1)[kept].astype(np.float64)

    def alone(self, model: OpenModel, seed: int) -> Array:
        """The same tokens, one sequence after the other, without padding and in one call."""
        data = self.data(model.vocabulary, seed)
        rows = zip(data.tokens, data.mask.astype(bool), strict=True)
        parts = [model.decoder().prefill(tokens[real][None])[0] for tokens, real in rows]
        return np.concatenate(parts).astype(np.float64)


def faithful(original: OpenModel, run: Run, seed: int) -> Array:
    """What an original says; its sequences one by one where it mixes those of a batch up.

    States of recurrent layers take padding in, and a merged decoder is handed other results of an
    encoder in later calls, in both models alike: there it is as it is.

    ONNX Runtime's GroupQueryAttention takes the positions of a first prompt from the first sequence
    of a batch if the cos and sin caches were made for every sequence, as transformers' exporter
    does.
    """
    logits = run.logits(original, seed)
    apart = original.signature.interface.states or original.first is not None
    if run.batch == 1 or original.decoder().last_only or apart:
        return logits
    try:
        alone = run.alone(original, seed)
    except TqOnnxError:  # a graph that takes no prompt of that length
        return logits
    return alone if difference(alone, logits) > MIXED_UP else logits


def edges(chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Beginning and end of each call."""
    start = 0
    for chunk in chunks:
        yield start, start + chunk
        start += chunk


@dataclass
class Agreement:
    """What was found.

    Attributes:
        dialects: forms of attention.
        layers: their number.
        dtype: element type of the model.
        figures: differences by the way of feeding.
        noise: how far the original is from itself, fed in other ways.
        refusal: why there are no figures.
    """

    dialects: str = ""
    layers: int = 0
    dtype: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    noise: float = 0.0
    refusal: str = ""

    @property
    def worst(self) -> float:
        """The largest difference; infinite if nothing was compared."""
        return max(self.figures.values(), default=float("inf"))


@dataclass(frozen=True, eq=False)
class Converted:
    """A conversion in memory.

    Attributes:
        data: the model, serialised; its external data lies beside the original.
        plan: what was done.
    """

    data: bytes
    plan: Plan


def converted(path: Path, preset: str, options: Options = AS_THEY_ARE) -> Converted:
    """The conversion of a file, made once per process; files may not change, new ones may come."""
    return _converted(path, path.stat().st_mtime_ns, preset, options)


@cache
def _converted(path: Path, _: int, preset: str, options: Options) -> Converted:
    prepared = prepare(path, preset=preset, options=options)
    data = ir.to_proto(prepared.loaded.model).SerializeToString()
    return Converted(data, prepared.plan)


def opened(model: ir.Model | bytes, path: Path, *, library: bool) -> OpenModel:
    """A converted model in memory whose external data lies beside ``path``."""
    data = model if isinstance(model, bytes) else ir.to_proto(model).SerializeToString()
    whole = replace(load(path), model=ir.from_proto(onnx.load_model_from_string(data)))
    parts = split(whole)
    if parts is not None:
        first, following = (
            open_model(path, loaded=part, library=library, threads=1)
            for part in (parts.first, parts.following)
        )
        return replace(following, first=first)
    session = make_session(data, library=library, threads=1, external_data=path.parent)
    plan = plan_of(session)
    assert plan is not None  # it was just converted
    return OpenModel(path, session, signature_of(session, plan))


def simulated(path: Path, preset: str, options: Options = AS_THEY_ARE) -> OpenModel:
    """A raw conversion whose new rows go through a preset's codec before they are cached."""
    plan = converted(path, preset, options).plan
    raw = converted(path, "raw")
    model = ir.from_proto(onnx.load_model_from_string(raw.data))
    nodes = {
        node.outputs[0].name: node
        for node in model.graph
        if (node.domain, node.op_type) == (DOMAIN, ENCODE)
    }
    own = {layer.layer: layer for layer in raw.plan.layers}
    for layer in plan.layers:
        assert own[layer.layer].key.present == layer.key.present
        for kept in layer.caches:
            roundtrip_rows(model.graph, nodes[kept.present], plan, layer, kept.codec)
    return opened(model, path, library=False)


def runs(original: OpenModel) -> dict[str, Run]:
    """The ways that a model can be fed in."""
    probe = original.decoder()
    room = original.signature.slots or TOTAL
    chunks = CHUNKS if room >= TOTAL else (room - 3, 1, 1, 1)
    total = sum(chunks)
    batches = probe.rows in (None, 2)
    if original.signature.first_only:
        size = probe.longest_call or min(total, room)
        found = {"prompt": Run((size,))}
        if probe.takes_padding and batches:
            found["padded"] = Run((size,), 2, min(PADDING, size - 1))
        return {name: run for name, run in found.items() if _runs(run, original)}
    found = {"prompt": Run((total,)), "chunks": Run(chunks)}
    if not _runs(found["prompt"], original):
        chunks = (1,) * total
        found = {"steps": Run(chunks)}
    if probe.takes_padding and batches:
        found["padded"] = Run(chunks, 2, min(PADDING, max(chunks[0] - 1, 1)))
    elif batches:
        # ONNX Runtime appends to several sequences only token by token in some operators.
        found["batch"] = Run((total - 3, 1, 1, 1) if max(chunks) > 1 else chunks, 2)
    return {name: run for name, run in found.items() if _runs(run, original)}


def _runs(run: Run, model: OpenModel) -> bool:
    """Whether a graph takes calls of such sizes."""
    try:
        run.logits(model, 0)
    except TqOnnxError:
        return False
    return True


def difference(expected: Array, found: Array, *, typical: bool = False) -> float:
    """The largest difference over the largest expected value; NaN counts as infinite.

    Args:
        expected: logits ``[n, vocabulary]``.
        found: likewise.
        typical: whether the median over tokens counts, not the largest.
    """
    if expected.shape != found.shape or not np.isfinite(expected).all():
        return float("inf")
    errors = np.abs(found - expected).max(axis=-1) / np.abs(expected).max()
    error = np.median(errors) if typical else errors.max()
    return float("inf") if np.isnan(error) else float(error)


def compare(
    reference: Callable[[Run, int], Array],
    made: OpenModel,
    found: dict[str, Run],
    *,
    typical: bool = False,
) -> dict[str, float]:
    """Feeds both models in every way; ``typical``: as for ``difference``, median of some texts."""

    def one(run: Run, seed: int) -> float:
        return difference(reference(run, seed), run.logits(made, seed), typical=typical)

    seeds = range(TEXTS if typical else 1)
    return {
        name: float(np.median([one(run, seed) for seed in seeds])) for name, run in found.items()
    }


def noise(original: OpenModel, found: dict[str, Run]) -> float:
    """How far an original is from itself, fed in one call or token by token."""
    run = found.get("prompt")
    if run is None or original.signature.first_only or original.decoder().last_only:
        return 0.0
    single = Run((1,) * sum(run.chunks))
    if not _runs(single, original):
        return 0.0
    return difference(run.logits(original, 0), single.logits(original, 0))


def _opened(path: Path) -> OpenModel:
    """An original; norms inside GroupQueryAttention, which no CPU has, are taken out of it."""
    try:
        return open_original(path, threads=1)
    except TqOnnxError as error:
        if "q_norm_weight" not in str(error):
            raise
    model = ir.load(path)
    ir.external_data.load_to_model(model)
    take_norms_out(model)
    with TemporaryDirectory() as folder:
        ir.save(model, Path(folder) / path.name)
        return open_original(Path(folder) / path.name, threads=1)


class Original:
    """An original, the ways to feed it, and what it said, which is asked for once."""

    def __init__(self, path: Path) -> None:
        self.model = _opened(path)
        self.runs = runs(self.model)
        if not self.runs:
            Run((self.model.decoder().longest_call or 1,)).logits(self.model, 0)
        self.noise = noise(self.model, self.runs)
        self._said: dict[tuple[Run, int], Array] = {}

    def logits(self, run: Run, seed: int) -> Array:
        """What it says; see ``faithful``."""
        if (run, seed) not in self._said:
            self._said[run, seed] = faithful(self.model, run, seed)
        return self._said[run, seed]


@lru_cache(maxsize=1)
def _original(path: Path, _: int) -> Original:
    return Original(path)


def agreement(
    path: Path, preset: str = "raw", options: Options = AS_THEY_ARE, *, library: bool = False
) -> Agreement:
    """Converts a file and compares; what is refused on the way is told, not raised."""
    try:
        made = converted(path, preset, options)
    except TqOnnxError as error:
        return Agreement(refusal=str(error))
    layers = made.plan.layers
    dialects = ",".join(sorted({layer.dialect for layer in layers}))
    known = Agreement(dialects, len(layers), element_type(path, layers[0].dtype))
    if preset != "raw":
        # Float noise may put a coordinate of a cached row on the other side of a boundary: a
        # difference that is seen, but no error. What is wrong is wrong for most tokens.
        reference = simulated(path, preset, options)
        logits = partial(faithful, reference)
        _compare(known, logits, runs(reference), made, path, library=library, typical=True)
        return known
    try:
        original = _original(path, path.stat().st_mtime_ns)
    except TqOnnxError as error:
        known.refusal = f"original does not run: {error}"
        return known
    known.noise = original.noise
    # Where weights are quantised, activations may be too: the last bit of a float may decide about
    # a step of theirs, likewise.
    typical = _quantises(path)
    _compare(
        known, original.logits, dict(original.runs), made, path, library=library, typical=typical
    )
    return known


def _compare(
    known: Agreement,
    reference: Callable[[Run, int], Array],
    found: dict[str, Run],
    converted: Converted,
    path: Path,
    *,
    library: bool,
    typical: bool,
) -> None:
    try:
        made = opened(converted.data, path, library=library)
        # The graph for first prompts makes caches of its own.
        if made.signature.fixed_capacity and made.first is None:
            chunks = [run.chunks for run in found.values() if run.batch == 1]
            found["in place"] = Run(chunks[-1], in_place=True)
        known.figures = compare(reference, made, found, typical=typical)
    except TqOnnxError as error:
        known.refusal = f"conversion does not run: {error}"


def element_type(path: Path, attention: str) -> str:
    """That of a model whose attention has one: GPT-Neo computes it in float32 in float16 models."""
    graph = ir.load(path).graph
    given = {value.dtype for value in (*graph.inputs, *graph.outputs)}
    return "FLOAT16" if ir.DataType.FLOAT16 in given else attention


def packed(path: Path) -> tuple[float, str]:
    """How far packed requests are from each one alone on the conversion without pages, both raw.

    Returns:
        The difference, infinite where nothing was compared; and why ``target="paged"`` refuses.
    """
    try:
        made = prepare(path, preset="raw", options=AS_THEY_ARE, target=target_of("paged"))
    except TqOnnxError as error:
        return float("inf"), str(error)
    sequences = opened(converted(path, "raw").data, path, library=True)
    text = np.random.default_rng(0).integers(0, sequences.vocabulary, TEXT)
    expected = pages.alone(sequences, text)
    data = ir.to_proto(made.loaded.model).SerializeToString()
    session = make_session(data, threads=1, external_data=path.parent)
    return difference(expected, pages.together(session, made.plan, text)), ""


def _quantises(path: Path) -> bool:
    kinds = (
        *("MatMulNBits", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger"),
        *("MatMulIntegerToFloat", "DynamicQuantizeMatMul"),
    )
    return any(node.op_type in kinds for node in ir.load(path).graph)
