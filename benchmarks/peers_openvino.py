"""OpenVINO's stateful attention on the processor, its cache in any of the types that it has.

A state of u4 or of a TurboQuant mode cannot be set, only filled by attending to a prompt, which
takes a time that grows with the square of the context; so there is one copy of it, and long
contexts are refused. Every step appends, so the context grows by one for each step of a copy.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
import openvino.opset13 as op
from contender import Array, Step, normal
from openvino.op.util import Variable, VariableInfo

BYTES_OF_128 = {"f16": 256, "u8": 136, "u4": 72, "tbq4": 68, "tbq3": 52}
"""Of a row of head size 128, with its scales and zero points (float32) or its norm."""

LONGEST_FILLED = 4096
CHUNK = 1024
NAMES = ("query", "key", "value", "beam")


class OpenVino:
    """Compiled for latency, everything but the cache in float32."""

    def __init__(self, cache: str) -> None:
        """Chooses the cache: f16, u8, u4, tbq4 or tbq3."""
        self._cache = cache
        self._filled = cache not in ("f16", "u8")
        self.most_copies = 1 if self._filled else None

    def version(self) -> str:
        """Of openvino."""
        return str(ov.__version__)

    def cache_bytes(self, step: Step) -> int:
        """As the plugin lays rows out."""
        return step.vectors * BYTES_OF_128[self._cache] * step.head_size // 128

    def prepare(self, step: Step, threads: int, copies: int) -> _Prepared:
        """Requests with a state each; decode only."""
        if step.new != 1:
            raise RuntimeError("only its decode is measured here")
        if self._filled and step.context > LONGEST_FILLED:
            raise RuntimeError(f"filling this cache beyond {LONGEST_FILLED} tokens takes too long")
        settings = {
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
            **self._precisions(),
        }
        compiled = ov.Core().compile_model(_model(step), "CPU", settings)
        kinds = {_kind(node) for node in compiled.get_runtime_model().get_ordered_ops()}
        if "ScaledDotProductAttention" not in kinds or "Concatenation" in kinds:
            raise RuntimeError("openvino did not make one operator of the cache and its attention")
        return _Prepared(compiled, step, copies, filled=self._filled)

    def _precisions(self) -> dict[str, str]:
        if not self._filled:
            return {"KV_CACHE_PRECISION": self._cache}
        width = f"u{self._cache[-1]}"
        settings = {"KEY_CACHE_PRECISION": width, "VALUE_CACHE_PRECISION": width}
        if self._cache.startswith("tbq"):
            settings |= {"KEY_CACHE_QUANT_ALG": "TURBO", "VALUE_CACHE_QUANT_ALG": "TURBO"}
        return settings


class _Prepared:
    caches = ()

    def __init__(
        self, compiled: ov.CompiledModel, step: Step, copies: int, *, filled: bool
    ) -> None:
        shape = (step.batch, step.kv_heads, step.past, step.head_size)
        past = {"key": normal(shape, seed=1), "value": normal(shape, seed=2)}
        self._requests = []
        for _ in range(copies):
            request = compiled.create_infer_request()
            if filled:
                _fill(request, step, past)
            else:
                _feed(request, step, past, slice(0, 1))
                request.infer()
                for state in request.query_state():
                    state.state = ov.Tensor(past["key" if "key" in state.name else "value"])
            _feed(request, step, past, slice(0, 1))
            request.infer()  # the state's buffer grows now, not in a timed step
            self._requests.append(request)

    def run(self, at: int) -> None:
        """Appends and attends."""
        self._requests[at % len(self._requests)].infer()


def _fill(request: ov.InferRequest, step: Step, past: dict[str, Array]) -> None:
    for start in range(0, step.past, CHUNK):
        _feed(request, step, past, slice(start, min(start + CHUNK, step.past)))
        request.infer()


def _feed(request: ov.InferRequest, step: Step, past: dict[str, Array], rows: slice) -> None:
    count = rows.stop - rows.start
    query = normal((step.batch, step.query_heads, count, step.head_size))
    new = [np.ascontiguousarray(past[role][:, :, rows]) for role in ("key", "value")]
    beams = np.arange(step.batch, dtype=np.int32)
    for name, array in zip(NAMES, [query, *new, beams], strict=True):
        request.set_tensor(name, ov.Tensor(array))


def _kind(node: ov.Node) -> str:
    return str(node.get_rt_info()["layerType"].astype(str))


def _model(step: Step) -> ov.Model:
    """What an exported decoder's attention looks like: state, Gather, Concat, repeated heads."""
    size, heads = step.head_size, step.kv_heads
    query = op.parameter([-1, step.query_heads, -1, size], np.float32)
    new = {role: op.parameter([-1, heads, -1, size], np.float32) for role in ("key", "value")}
    beam = op.parameter([-1], np.int32)
    parameters = [query, new["key"], new["value"], beam]
    for name, parameter in zip(NAMES, parameters, strict=True):
        parameter.output(0).get_tensor().set_names({name})
    zero = op.constant(np.int64(0))
    sinks, caches = [], []
    for role, rows in new.items():
        about = VariableInfo()
        about.data_shape = ov.PartialShape([-1, heads, -1, size])
        about.data_type = ov.Type.f32
        about.variable_id = f"past_{role}"
        variable = Variable(about)
        empty = op.constant(np.array([step.batch, heads, 0, size], np.int64))
        read = op.read_value(op.broadcast(op.constant(np.float32(0)), empty), variable)
        cache = op.concat([op.gather(read, beam, zero), rows], 2)
        sinks.append(op.assign(cache, variable))
        caches.append(_repeat(cache, step))
    attention = op.scaled_dot_product_attention(query, *caches, causal=False)
    return ov.Model([op.result(attention)], sinks, parameters, "attention_layer")


def _repeat(cache: ov.Node, step: Step) -> ov.Node:
    zero = op.constant(np.int64(0))
    sizes = op.shape_of(cache, "i64")
    parts = [op.gather(sizes, op.constant(np.array([axis], np.int64)), zero) for axis in range(4)]
    group = op.constant(np.array([step.query_heads // step.kv_heads], np.int64))
    target = op.concat([*parts[:2], group, *parts[2:]], 0)
    wide = op.unsqueeze(cache, op.constant(np.int64(2)))
    repeated = op.broadcast(wide, target, broadcast_spec="BIDIRECTIONAL")
    shape = op.constant(np.array([0, step.query_heads, -1, step.head_size], np.int64))
    return op.reshape(repeated, shape, True)
