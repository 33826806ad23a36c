"""Runs small decoders, original or converted, with their caches fed back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from tq_onnx.codec.presets import PRESETS
from tq_onnx.conversion.bake import bake_metadata
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.planning import make_plan
from tq_onnx.conversion.rewrite import ConvertPass
from tq_onnx.conversion.target import Lowering
from tq_onnx.plan import Plan
from tq_onnx.recognise.match import recognise
from tq_onnx.runtime.session import make_session

Array = np.ndarray[Any, Any]

FIXTURES = Path(__file__).parents[1] / "fixtures"
VOCABULARY = 61
"""Of the smallest fixture."""
DECOMPOSED = sorted(
    path.stem
    for path in FIXTURES.glob("*.onnx")
    if path.stem.startswith(("dynamo-op18", "dynamo-op20", "legacy", "optimum"))
)
"""Real exports whose attention is spelled out, with Hugging Face's names and growing caches."""
GROWING = [
    *DECOMPOSED,
    *("genai-cpu-fp32", "genai-cpu-int4", "genai-cpu-int4-hd128"),
    *("genai-cuda-fp16", "genai-cuda-int4"),
]
"""Real exports of every kind with those names and caches."""
CHUNKS = (7, 1, 3, 1)
SCALE_ROOT = 128**-0.25
EXACT = 1e-5
"""float32 noise relative to the largest logit; a code on the other side of a boundary shows as
1e-4 or more."""
NUMPY = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(uint8)": np.uint8,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}


def load(name: str) -> ir.Model:
    return ir.load(FIXTURES / f"{name}.onnx")


def convert(model: ir.Model, preset: str = "int4") -> Plan:
    """Converts in place, with encoders that every target has."""
    recognition = recognise(model)
    plan = make_plan(
        recognition, PRESETS[preset], Options(gains=False, residual_length=0, sink_tokens=0)
    )
    ConvertPass(plan, recognition)(model)
    bake_metadata(model, plan)
    return plan


def lower(model: ir.Model, lowering: Lowering) -> Plan:
    """Lowers a converted model in place."""
    for step in lowering.passes:
        step(model)
    bake_metadata(model, lowering.plan_behind)
    return lowering.plan_behind


def session(model: ir.Model, *, library: bool = False) -> onnxruntime.InferenceSession:
    return make_session(ir.to_proto(model).SerializeToString(), library=library, threads=1)


def caches_of(model: onnxruntime.InferenceSession, size: int, slots: int = 0) -> dict[str, Array]:
    """Caches before the first call; what stands in slots that hold no token must not matter."""
    rng = np.random.default_rng(5)
    return {
        entry.name: rng.integers(0, 200, (size, entry.shape[1], slots, entry.shape[3])).astype(
            NUMPY[entry.type]
        )
        for entry in model.get_inputs()
        if entry.name.startswith("past")
    }


def fed_back(
    model: onnxruntime.InferenceSession, calls: Iterable[dict[str, Array]], caches: dict[str, Array]
) -> Array:
    """Logits of calls, each with the caches that the one before returned."""
    types = {entry.name: NUMPY[entry.type] for entry in model.get_inputs()}
    outputs = [entry.name for entry in model.get_outputs()]
    logits = []
    for feeds in calls:
        given = {
            name: np.asarray(array).astype(types[name])
            for name, array in feeds.items()
            if name in types
        }
        results = dict(zip(outputs, model.run(outputs, given | caches), strict=True))
        caches = {name: results[name.replace("past", "present")] for name in caches}
        logits.append(np.asarray(results["logits"], np.float64))
    return np.concatenate(logits, axis=1)


@dataclass
class Batch:
    """Token ids and mask of a batch: ``[B, total]``, positions count what the mask keeps."""

    tokens: Array
    mask: Array

    @property
    def positions(self) -> Array:
        return np.maximum(np.cumsum(self.mask, axis=1) - 1, 0)

    @property
    def real(self) -> Array:
        return self.mask.astype(bool)

    def feeds(self, chunks: Sequence[int] = CHUNKS) -> Iterator[dict[str, Array]]:
        """Inputs of one call after the other; ``bias`` is for models that take one."""
        start = 0
        for chunk in chunks:
            stop = start + chunk
            distance = np.arange(start, stop)[:, None] - np.arange(stop)
            yield {
                "input_ids": self.tokens[:, start:stop],
                "attention_mask": self.mask[:, :stop],
                "position_ids": self.positions[:, start:stop],
                "bias": (-0.1 * np.abs(distance)[None, None]).astype(np.float32),
            }
            start = stop


def batch(total: int, size: int = 1, *, left_padding: int = 0, seed: int = 0) -> Batch:
    """Random tokens; the first sequence is padded on the left."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(3, VOCABULARY, (size, total))
    mask = np.ones((size, total), np.int64)
    mask[0, :left_padding] = 0
    tokens[0, :left_padding] = 0
    return Batch(tokens, mask)


@dataclass
class Decoder:
    """Feeds a session its own presents as pasts.

    Args:
        session: a model with inputs named as Hugging Face names them.
        size: B.
        capacity: slots of every cache from the beginning; 0 lets the caches grow.
    """

    session: onnxruntime.InferenceSession
    size: int = 1
    capacity: int = 0
    head_size: int = 64
    caches: dict[str, Array] = field(default_factory=dict)
    results: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(7)
        for entry in self.session.get_inputs():
            if entry.name.startswith("past_key_values"):
                # genai leaves the head size of float caches symbolic; the callers know it.
                width = entry.shape[3] if isinstance(entry.shape[3], int) else self.head_size
                shape = (self.size, entry.shape[1], self.capacity, width)
                # What stands in slots that hold no token must not matter.
                garbage = rng.integers(0, 256, shape).astype(NUMPY[entry.type])
                self.caches[entry.name] = garbage

    def feed(self, feeds: dict[str, Array]) -> Array:
        names = {entry.name: entry.type for entry in self.session.get_inputs()}
        inputs = {
            name: np.asarray(value).astype(NUMPY[names[name]])
            for name, value in feeds.items()
            if name in names
        }
        outputs = [entry.name for entry in self.session.get_outputs()]
        results = dict(
            zip(outputs, self.session.run(outputs, {**inputs, **self.caches}), strict=True)
        )
        self.results = results
        for name, value in results.items():
            if name.startswith("present"):
                self.caches[name.replace("present", "past_key_values")] = value
        return np.asarray(results["logits"], np.float64)

    def run(self, data: Batch, chunks: Sequence[int] = CHUNKS) -> Array:
        """Logits ``[B, total, vocabulary]``."""
        return np.concatenate([self.feed(feeds) for feeds in data.feeds(chunks)], axis=1)

    @classmethod
    def runner(
        cls, session: onnxruntime.InferenceSession, size: int = 1, **options: int
    ) -> Callable[[Batch], Array]:
        """Runs every batch with empty caches."""
        return lambda data: cls(session, size, **options).run(data)

    def same_bytes(self, other: Decoder, tokens: int) -> bool:
        """Whether both hold the same rows for the first tokens."""
        return all(
            np.array_equal(mine[:, :, :tokens], other.caches[name][:, :, :tokens])
            for name, mine in self.caches.items()
        )


def to_float32(model: ir.Model) -> None:
    """Makes a float16 model a float32 one, in place, so that it can be compared exactly.

    Float16 has rounded the root of the scale; the converter takes the scale for what it was.
    """
    half, single = ir.DataType.FLOAT16, ir.DataType.FLOAT
    graph = model.graph
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype == half:
            array = tensor.numpy().astype(np.float32)
            if np.allclose(array, SCALE_ROOT, rtol=1e-3):
                array = np.full_like(array, SCALE_ROOT)
            value.const_value = ir.tensor(array, name=value.name)
    for value in (*graph.inputs, *graph.initializers.values(), *_outputs(graph)):
        if value.dtype == half:
            value.type = ir.TensorType(single)
    for node in graph:
        if node.op_type == "Cast" and node.attributes.get_int("to") == int(half):
            node.attributes["to"] = ir.AttrInt64("to", int(single))


def _outputs(graph: ir.Graph) -> Iterator[ir.Value]:
    for node in graph:
        yield from node.outputs


def agree(
    expected: Callable[[Batch], Array],
    found: Callable[[Batch], Array],
    batches: Sequence[Batch],
    tolerance: float = EXACT,
) -> bool:
    """Whether logits of real tokens agree in most batches.

    In the others float32 noise may have put a coordinate on the other side of a boundary: a
    difference that is seen, but no error. A wrong graph is wrong in all of them.
    """
    errors = []
    for data in batches:
        wanted = expected(data)[data.real]
        difference = np.abs(found(data)[data.real] - wanted)
        errors.append(float(difference.max() / np.abs(wanted).max()))
    return float(np.median(errors)) < tolerance


def batches(total: int, size: int = 1, *, left_padding: int = 0) -> list[Batch]:
    return [batch(total, size, left_padding=left_padding, seed=seed) for seed in range(3)]
