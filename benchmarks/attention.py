"""Decode attention of one layer: the TurboQuant operators against ONNX Runtime's own cache ops.

Run it from the repository with tq-onnx installed:

    python benchmarks/attention.py
    python benchmarks/attention.py --contexts 4096 --threads 1 --json

Each contender does what one layer does in one decode step: append one token to a cache of fixed
capacity, in place, and attend to all of it. The method is in README.md of this folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort

from tq_onnx.codec.codebook import lloyd_max
from tq_onnx.codec.rotation import make_rotation
from tq_onnx.codec.spec import LLOYD_MAX, Codec, row_layout
from tq_onnx.ops.domain import ATTENTION, DOMAIN, ENCODE, VERSION
from tq_onnx.runtime.library import get_library_path, library_info

HEAD_SIZE = 128
SCALE = HEAD_SIZE**-0.5
MICROSOFT = "com.microsoft"
Array = npt.NDArray[np.generic]
F32, F16, U8, I8 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.UINT8, ir.DataType.INT8
I32, I64 = ir.DataType.INT32, ir.DataType.INT64


@dataclass(frozen=True)
class Shape:
    """One decode step: ``context`` tokens are attended to, the new one included."""

    query_heads: int
    kv_heads: int
    context: int


@dataclass(frozen=True)
class Contender:
    """A model, the inputs that stay, and the caches of which there are many copies."""

    name: str
    model: bytes
    constants: dict[str, Array]
    caches: dict[str, tuple[str, Array]]
    """Input name to (output name, content); bound in place."""
    custom_ops: bool = False


@dataclass
class Result:
    """Timing of one contender at one shape."""

    name: str
    query_heads: int
    kv_heads: int
    context: int
    threads: int
    cache_bytes: int = 0
    milliseconds: float | None = None
    fastest_ms: float | None = None
    times_float32_gqa: float | None = None
    reason: str = ""
    samples: list[float] = field(default_factory=list, repr=False)


def _model(
    inputs: Sequence[ir.Value],
    nodes: Sequence[ir.Node],
    outputs: Sequence[tuple[ir.Value, str, ir.DataType]],
    initializers: Sequence[ir.Value] = (),
) -> bytes:
    for value, name, dtype in outputs:
        value.name, value.type = name, ir.TensorType(dtype)
    graph = ir.Graph(
        inputs,
        [value for value, _, _ in outputs],
        nodes=nodes,
        initializers=initializers,
        opset_imports={"": 18, MICROSOFT: 1, DOMAIN: VERSION},
        name="decode_step",
    )
    return ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()


def _value(name: str, dtype: ir.DataType, rank: int) -> ir.Value:
    shape = ir.Shape([None] * rank)
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=shape)


def _constant(name: str, array: Array) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    return ir.Value(
        name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor
    )


def turboquant(shape: Shape, key_bits: int, value_bits: int) -> Contender:
    """Two encodes and one attention, caches in place."""
    rng = np.random.default_rng(0)
    heads, context = shape.kv_heads, shape.context
    constants = [_constant("rotation", make_rotation("qr", HEAD_SIZE, 0))]
    books = {}
    for role, bits in (("key", key_bits), ("value", value_bits)):
        book = lloyd_max(bits, HEAD_SIZE)
        books[role] = (
            _constant(f"{role}_centroids", book.centroids),
            _constant(f"{role}_boundaries", book.boundaries),
        )
        constants += books[role]
    inputs = {
        name: _value(name, dtype, rank)
        for name, dtype, rank in (
            ("query", F32, 4),
            ("key", F32, 4),
            ("value", F32, 4),
            ("past_key", U8, 4),
            ("past_value", U8, 4),
            ("past_length", I64, 1),
        )
    }
    nodes = []
    for role, bits in (("key", key_bits), ("value", value_bits)):
        operands = [inputs[role], inputs[f"past_{role}"], inputs["past_length"], constants[0]]
        attributes = {"codec": LLOYD_MAX, "bits": bits, "norm_correction": 1}
        nodes.append(
            ir.node(ENCODE, [*operands, *books[role]], attributes, domain=DOMAIN, version=VERSION)
        )
    present_key, present_value = (node.outputs[0] for node in nodes)
    nodes.append(
        ir.node(
            ATTENTION,
            [
                inputs["query"],
                present_key,
                present_value,
                inputs["past_length"],
                constants[0],
                books["key"][0],
                constants[0],
                books["value"][0],
            ],
            {
                "scale": SCALE,
                "causal": 1,
                "sliding_window": 0,
                "softcap": 0.0,
                "key_codec": LLOYD_MAX,
                "key_bits": key_bits,
                "value_codec": LLOYD_MAX,
                "value_bits": value_bits,
            },
            domain=DOMAIN,
            version=VERSION,
        )
    )
    caches = {}
    for role, bits in (("key", key_bits), ("value", value_bits)):
        layout = row_layout(Codec(LLOYD_MAX, bits), HEAD_SIZE)
        rows = rng.integers(0, 256, (1, heads, context, layout.row_bytes), dtype=np.uint8)
        rows[..., layout.scale_offset :] = np.full(1, 11, "<f2").view(np.uint8)
        caches[f"past_{role}"] = (f"present_{role}", rows)
    return Contender(
        f"turboquant k{key_bits}v{value_bits}",
        _model(
            list(inputs.values()),
            nodes,
            [
                (nodes[2].outputs[0], "output", F32),
                (present_key, "present_key", U8),
                (present_value, "present_value", U8),
            ],
            constants,
        ),
        {
            "query": _normal(rng, (1, shape.query_heads, 1, HEAD_SIZE)),
            "key": _normal(rng, (1, heads, 1, HEAD_SIZE)),
            "value": _normal(rng, (1, heads, 1, HEAD_SIZE)),
            "past_length": np.array([context - 1], np.int64),
        },
        caches,
        custom_ops=True,
    )


def group_query_attention(shape: Shape, cache: str) -> Contender:
    """ONNX Runtime's GroupQueryAttention with its shared buffer; cache float32 ... int4."""
    rng = np.random.default_rng(0)
    heads, context = shape.kv_heads, shape.context
    float_type, dtype = (F16, np.float16) if cache == "float16" else (F32, np.float32)
    cache_type = {"int8": I8, "int4": U8}.get(cache, float_type)
    inputs = [
        _value("query", float_type, 3),
        _value("key", float_type, 3),
        _value("value", float_type, 3),
        _value("past_key", cache_type, 4),
        _value("past_value", cache_type, 4),
        _value("seqlens_k", I32, 1),
        _value("total_sequence_length", I32, 0),
    ]
    attributes: dict[str, object] = {
        "num_heads": shape.query_heads,
        "kv_num_heads": heads,
        "scale": SCALE,
    }
    operands: list[ir.Value | None] = list(inputs)
    scales = []
    if cache in ("int8", "int4"):
        bits = int(cache[3:])
        attributes |= {
            "k_quant_type": "PER_TENSOR",
            "v_quant_type": "PER_TENSOR",
            "kv_cache_bit_width": bits,
        }
        step = np.full(1, 4 / (2 ** (bits - 1) - 1), np.float32)
        scales = [_constant("k_scale", step), _constant("v_scale", step)]
        operands += [None] * 5 + scales
    node = ir.node(
        "GroupQueryAttention", operands, attributes, domain=MICROSOFT, version=1, num_outputs=3
    )
    content = _cache_content(rng, (1, heads, context, HEAD_SIZE), cache, dtype)
    return Contender(
        f"GroupQueryAttention {cache}",
        _model(
            inputs,
            [node],
            [
                (node.outputs[0], "output", float_type),
                (node.outputs[1], "present_key", cache_type),
                (node.outputs[2], "present_value", cache_type),
            ],
            scales,
        ),
        {
            "query": _normal(rng, (1, 1, shape.query_heads * HEAD_SIZE), dtype),
            "key": _normal(rng, (1, 1, heads * HEAD_SIZE), dtype),
            "value": _normal(rng, (1, 1, heads * HEAD_SIZE), dtype),
            "seqlens_k": np.array([context - 1], np.int32),
            "total_sequence_length": np.array(context, np.int32),
        },
        {"past_key": ("present_key", content), "past_value": ("present_value", content)},
    )


def _normal(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32
) -> Array:
    return rng.standard_normal(shape, np.float32).astype(dtype)


def _cache_content(
    rng: np.random.Generator, shape: tuple[int, ...], cache: str, dtype: npt.DTypeLike
) -> Array:
    if cache == "int8":
        return rng.integers(-127, 128, shape, dtype=np.int8)
    if cache == "int4":
        return rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8)
    return _normal(rng, shape, dtype)


CONTENDERS: dict[str, Callable[[Shape], Contender]] = {
    "turboquant k4v4": lambda shape: turboquant(shape, 4, 4),
    "turboquant k3v3": lambda shape: turboquant(shape, 3, 3),
    "turboquant k2v2": lambda shape: turboquant(shape, 2, 2),
    "GroupQueryAttention float32": lambda shape: group_query_attention(shape, "float32"),
    "GroupQueryAttention float16": lambda shape: group_query_attention(shape, "float16"),
    "GroupQueryAttention int8": lambda shape: group_query_attention(shape, "int8"),
    "GroupQueryAttention int4": lambda shape: group_query_attention(shape, "int4"),
}
YARDSTICK = "GroupQueryAttention float32"


class Runner:
    """A session with as many copies of the caches as do not fit into the processor's cache."""

    def __init__(self, contender: Contender, threads: int, cold_bytes: int) -> None:
        """Binds copies of the caches, ``cold_bytes`` together."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        if contender.custom_ops:
            options.register_custom_ops_library(str(get_library_path()))
        self.session = ort.InferenceSession(
            contender.model, options, providers=["CPUExecutionProvider"]
        )
        self.cache_bytes = sum(content.nbytes for _, content in contender.caches.values())
        self.bindings = []
        self.alive: list[object] = []
        for _ in range(max(2, -(-cold_bytes // self.cache_bytes))):
            binding = self.session.io_binding()
            for name, array in contender.constants.items():
                binding.bind_ortvalue_input(name, self._keep(array))
            for name, (output, content) in contender.caches.items():
                value = self._keep(content.copy())
                binding.bind_ortvalue_input(name, value)
                binding.bind_ortvalue_output(output, value)
            binding.bind_output("output")
            self.bindings.append(binding)
        self.at = 0

    def _keep(self, array: Array) -> ort.OrtValue:
        value = ort.OrtValue.ortvalue_from_numpy(array)
        self.alive += [array, value]
        return value

    def step(self) -> float:
        """Milliseconds of one decode step on the next copy of the caches."""
        binding = self.bindings[self.at % len(self.bindings)]
        self.at += 1
        begin = time.perf_counter()
        self.session.run_with_iobinding(binding)
        return (time.perf_counter() - begin) * 1e3


def measure(
    shape: Shape, threads: int, names: Sequence[str], *, cold_mb: int, seconds: float
) -> list[Result]:
    """Times all contenders at one shape, taking turns; a contender that fails says why."""
    results = {
        name: Result(name, shape.query_heads, shape.kv_heads, shape.context, threads)
        for name in names
    }
    runners = {}
    for name, result in results.items():
        try:
            runner = Runner(CONTENDERS[name](shape), threads, cold_mb << 20)
            runner.step()
        except Exception as error:  # whatever a peer's session raises is the reason it is missing
            result.reason = str(error).splitlines()[0]
            continue
        runners[name] = runner
        result.cache_bytes = runner.cache_bytes
    end = time.perf_counter() + seconds * max(1, len(runners))
    rounds = 0
    while rounds < 5 or time.perf_counter() < end:
        for name, runner in runners.items():
            runner.step()  # wakes the threads
            results[name].samples += [runner.step() for _ in range(3)]
        rounds += 1
    for result in results.values():
        if result.samples:
            result.milliseconds = statistics.median(result.samples)
            result.fastest_ms = min(result.samples)
    yardstick = results[YARDSTICK].milliseconds if YARDSTICK in results else None
    for result in results.values():
        if result.milliseconds and yardstick:
            result.times_float32_gqa = yardstick / result.milliseconds
    return list(results.values())


def _shapes(text: str) -> list[tuple[int, int]]:
    pairs = []
    for item in text.split(","):
        query_heads, kv_heads = (int(part) for part in item.split("/"))
        pairs.append((query_heads, kv_heads))
    return pairs


def _integers(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


def main() -> None:
    """Prints a table, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=_shapes, default=[(16, 8), (40, 8)], metavar="H/N,...")
    parser.add_argument("--contexts", type=_integers, default=[1024, 4096, 16384])
    parser.add_argument("--threads", type=_integers, default=[1, 2])
    parser.add_argument("--only", default="", help="contenders whose name contains this")
    parser.add_argument("--cold-mb", type=int, default=128, help="caches of a contender in all")
    parser.add_argument("--seconds", type=float, default=1.0, help="per contender and shape")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    names = [name for name in CONTENDERS if arguments.only in name or name == YARDSTICK]
    info = library_info()
    if not arguments.json:
        print(f"onnxruntime {ort.__version__}, tq-onnx {info.version} ({info.isa})")
        print(
            f"{'heads':>7} {'context':>8} {'threads':>7}  {'contender':<28} {'ms':>8} {'x f32':>6}"
        )
    results = []
    for query_heads, kv_heads in arguments.heads:
        for context in arguments.contexts:
            for threads in arguments.threads:
                some = measure(
                    Shape(query_heads, kv_heads, context),
                    threads,
                    names,
                    cold_mb=arguments.cold_mb,
                    seconds=arguments.seconds,
                )
                results += some
                if not arguments.json:
                    for result in some:
                        _print(result)
    if arguments.json:
        rows = [{k: v for k, v in asdict(r).items() if k != "samples"} for r in results]
        document = {"onnxruntime": ort.__version__, "tq_onnx": info.version, "isa": info.isa,
                    "head_size": HEAD_SIZE, "results": rows}  # fmt: skip
        json.dump(document, sys.stdout, indent=2)
        print()


def _print(result: Result) -> None:
    where = f"{result.query_heads}/{result.kv_heads}"
    left = f"{where:>7} {result.context:>8} {result.threads:>7}  {result.name:<28}"
    if result.milliseconds is None:
        print(f"{left} missing: {result.reason}", flush=True)
        return
    ratio = f"{result.times_float32_gqa:6.2f}" if result.times_float32_gqa else "     -"
    print(f"{left} {result.milliseconds:8.3f} {result.fastest_ms:8.3f} {ratio}", flush=True)


if __name__ == "__main__":
    main()
