"""Sizes and types that a graph does not tell: each rule, and where there is nothing to tell."""

from __future__ import annotations

import time

import onnx.parser
import onnx_ir as ir
import pytest

from tests.decoders.running import load
from tests.decoders.synthetic import decoder
from tq_onnx.codec.presets import PRESETS
from tq_onnx.conversion.bake import bake_metadata
from tq_onnx.conversion.check import check, snapshot_interface
from tq_onnx.conversion.planning import make_plan
from tq_onnx.conversion.rewrite import ConvertPass
from tq_onnx.graph.shapes import fill_shapes
from tq_onnx.graph.sizerules import Sizes, sizes
from tq_onnx.recognise.match import recognise

GRAPH = """
<ir_version: 10, opset_import: ["" : 17, "com.microsoft" : 1]>
graph (float[B, T, 32] x, float[B, 4, T, 8] q, float[32] w, float[T] unknown, int64[1] count,
       uint8[32, 32] square, uint8 byte, float[32, 1, 3] kernel)
    => (float[B] y)
<int64[1] rest = {-1}, int64[1] eight = {8}, int64[1] four = {4}, int64 two = {2}, int64 last = {3},
 int64[1] nought = {0}, int64[1] three = {3}, int64[2] halves = {24, 8}, int64[1] end = {1000},
 int64[2] table = {-1, 32}>
{
    BODY
}
"""
HEADS = """l = Shape(x)
    zero = Constant<value_int = 0>()
    one = Constant<value_int = 1>()
    b0 = Gather(l, zero)
    t0 = Gather(l, one)
    b = Unsqueeze(b0, nought)
    t = Unsqueeze(t0, nought)"""

KNOWN: dict[str, tuple[str, tuple[int | str | None, ...] | None]] = {
    "heads of a split projection": (
        f"{HEADS}\n    s = Concat<axis = 0>(b, t, rest, eight)\n    y = Reshape(x, s)",
        ("B", "T", 4, 8),
    ),
    "zeros around": (
        """p = Constant<value_ints = [0, 0, 1, 0, 0, 0, 2, 4]>()
    y = Pad(q, p)""",
        ("B", 4, None, 12),
    ),
    "heads by zeros": (
        "s = Concat<axis = 0>(nought, nought, rest, eight)\n    y = Reshape(x, s)",
        ("B", "T", 4, 8),
    ),
    "a size that is computed": (
        """l = Shape(q)
    one = Constant<value_int = 1>()
    h = Gather(l, one)
    g0 = Div(h, two)
    g1 = Cast<to = 7>(g0)
    g = Unsqueeze(g1, nought)
    s = Concat<axis = 0>(nought, g, four, eight)
    y = Reshape(q, s)""",
        ("B", 2, 4, 8),
    ),
    "positions behind a past": (
        """past = Constant<value_int = 83>()
    e0 = Add(past, last)
    one = Constant<value_int = 1>()
    r = Range(past, e0, one)
    c = Cast<to = 1>(r)
    u = Unsqueeze(c, nought)
    l = Shape(x)
    zero = Constant<value_int = 0>()
    b0 = Gather(l, zero)
    b1 = Unsqueeze(b0, nought)
    s0 = Concat<axis = 0>(three, rest)
    s1 = Reshape(s0, rest)
    n = Shape(s1)
    ones = ConstantOfShape<value = int64[1] {1}>(n)
    none = Constant<value_int = -1>()
    m = Mul(ones, none)
    q0 = Equal(s1, m)
    w0 = Where(q0, ones, s1)
    y = Expand(u, w0)""",
        (3, 3),
    ),
    "positions behind an unknown past": (
        """t = Squeeze(count)
    one = Constant<value_int = 1>()
    r = Range(t, last, one)
    y = Cast<to = 1>(r)""",
        (None,),
    ),
    "half of a rotary embedding": (
        """l = Shape(q)
    d = Gather(l, last)
    h0 = Div(d, two)
    h = Unsqueeze(h0, nought)
    s0 = Slice(q, nought, h, three)
    s1 = Slice(q, h, end, three)
    n = Neg(s1)
    y = Concat<axis = -1>(n, s0)""",
        (None, 4, None, 8),
    ),
    "after an operator that onnx does not know": (
        "n = SimplifiedLayerNormalization(x, w)\n    y = Transpose<perm = [0, 2, 1]>(n)",
        ("B", 32, "T"),
    ),
    "after a quick gelu": ("n = com.microsoft.QuickGelu(x)\n    y = Mul(n, x)", ("B", "T", 32)),
    "a fused product": (
        "n = SimplifiedLayerNormalization(q, w)"
        "\n    y = com.microsoft.FusedMatMul<transB = 1>(n, q)",
        ("B", 4, "T", "T"),
    ),
    "quantised weights": ("y = com.microsoft.MatMulNBits<N = 48, K = 32>(x, w, w)", ("B", "T", 48)),
    "weights of bitsandbytes": (
        "y = com.microsoft.MatMulBnb4<N = 48, K = 32>(x, w, w)",
        ("B", "T", 48),
    ),
    "quantised embeddings": (
        """ids = Shape(x)
    c = Cast<to = 2>(q)
    t = Reshape(c, table)
    y = com.microsoft.GatherBlockQuantized<bits = 4, block_size = 32>(t, ids, w)""",
        (3, 64),
    ),
    "quantised activations": (
        "y = com.microsoft.DynamicQuantizeMatMul(x, square, w)",
        ("B", "T", 32),
    ),
    "quantised at run time": (
        """n = SimplifiedLayerNormalization(x, w)
    a, s, z = DynamicQuantizeLinear(n)
    i = MatMulInteger(a, square, z)
    f = Cast<to = 1>(i)
    y = Mul(f, s)""",
        ("B", "T", 32),
    ),
    "one product of integers": (
        """n = SimplifiedLayerNormalization(x, w)
    a, s, z = DynamicQuantizeLinear(n)
    y = com.microsoft.MatMulIntegerToFloat(a, square, s, w, z)""",
        ("B", "T", 32),
    ),
    "quantised operators": (
        """n = SimplifiedLayerNormalization(x, w)
    a = QuantizeLinear(n, w, byte)
    b = com.microsoft.QLinearAdd(a, w, byte, a, w, byte, w, byte)
    c = QLinearMatMul(b, w, byte, square, w, byte, w, byte)
    d = com.microsoft.QLinearSigmoid(c, w, byte, w, byte)
    e = com.microsoft.QLinearConcat<axis = -1>(w, byte, d, w, byte, d, w, byte)
    y = DequantizeLinear(e, w, byte)""",
        ("B", "T", 64),
    ),
    "a norm behind quantised weights": (
        """p = com.microsoft.MatMulNBits<N = 48, K = 32>(x, w, w)
    s = Pow(p, p)
    m = ReduceMean<axes = [-1]>(s)
    r = Sqrt(m)
    y = Div(p, r)""",
        ("B", "T", 48),
    ),
    "a sum that a norm returns": (
        """p = SimplifiedLayerNormalization(x, w)
    z, mean, deviation, y = com.microsoft.SkipSimplifiedLayerNormalization(p, p, w)""",
        ("B", "T", 32),
    ),
    "a convolution": (
        """n = SimplifiedLayerNormalization(x, w)
    t = Transpose<perm = [0, 2, 1]>(n)
    y = Conv<pads = [2, 0], group = 32>(t, kernel)""",
        ("B", 32, None),
    ),
    "the largest": (
        "p = SimplifiedLayerNormalization(x, w)\n    y, z = TopK(p, three)",
        ("B", "T", 3),
    ),
    "even parts": ("z, y = Split<axis = -1>(x)", ("B", "T", 16)),
    "a sum of squares": (
        "p = SimplifiedLayerNormalization(x, w)\n"
        "    y = ReduceSumSquare<axes = [-1], keepdims = 0>(p)",
        ("B", "T"),
    ),
    "the second part": ("z, y = Split<axis = -1>(x, halves)", ("B", "T", 8)),
    "a slice of other axes": ("y = Slice(q, count, end, nought)", (None, 4, None, 8)),
    "a slice of unknown axes": ("y = Slice(q, nought, end, count)", (None, None, None, None)),
    "a split of unknown width": (
        "z, y = Split<axis = 2>(x, counts)\n    ".replace("counts", "unknown_counts")
        + "unknown_counts = Concat<axis = 0>(count, count)",
        ("B", "T", None),
    ),
}


def told(body: str) -> ir.Value:
    lines = body.split("\n")
    if "unknown_counts" in lines[0]:  # nodes stand in the order in which they compute
        lines = [lines[1], lines[0]]
    text = GRAPH.replace("BODY", "\n".join(lines)).replace("float[B] y)", "float[B] other)")
    text = text.replace("\n}\n", "\n    other = Identity(unknown)\n}\n")
    model = ir.from_proto(onnx.parser.parse_model(text))
    fill_shapes(model)
    return next(v for node in model.graph for v in node.outputs if v.name == "y")


@pytest.mark.parametrize("case", KNOWN)
def test_what_must_be_so_is_told(case: str) -> None:
    body, expected = KNOWN[case]
    value = told(body)
    found = sizes(value)
    assert found is not None
    assert expected is not None
    named = tuple(
        None if isinstance(size, str) and size.startswith("unk") else size for size in found
    )
    assert named == expected
    assert value.dtype == ir.DataType.FLOAT


def test_sizes_of_a_sum_that_have_several_names_are_one_size_each() -> None:
    """Quantisers leave no shapes behind: what is added to the residual may have any length."""
    body = f"""rows = Reshape(x, table)
    one_row = Unsqueeze(rows, nought)
    a = com.microsoft.MatMulNBits<K = 32, N = 32, bits = 8, block_size = 32>(one_row, square, w)
    z = Add(x, a)
    {HEADS.replace("Shape(x)", "Shape(z)")}
    s = Concat<axis = 0>(b, t, rest, eight)
    y = Reshape(z, s)"""

    found = sizes(told(body))
    assert found is not None
    assert found[2:] == (4, 8)


def test_nothing_that_the_model_tells_is_changed() -> None:
    model = load("dynamo-op18-sdpa")
    inputs = {name for value in model.graph.inputs for name in sizes(value) or ()}

    def told() -> dict[str | None, list[int | str | None]]:
        return {
            value.name: [
                size if size in inputs or isinstance(size, int) else None for size in found
            ]
            for node in model.graph
            for value in node.outputs
            if (found := sizes(value)) is not None
        }

    before = told()
    fill_shapes(model)
    after = told()

    for name, found in before.items():
        assert [there or None for here, there in zip(found, after[name], strict=True) if here] == [
            here for here in found if here
        ]


def test_names_that_no_input_has_tell_nothing() -> None:
    """Post-processors leave the names that inference makes up; its twin has no shapes at all."""
    plain, named = decoder(infer=False), decoder(infer=False)
    fill_shapes(plain)
    expected = {value.name: sizes(value) for node in plain.graph for value in node.outputs}
    for node in named.graph:
        for value in node.outputs:
            if not value.is_graph_output():
                count = len(expected[value.name] or ())
                value.shape = ir.Shape([f"unk__{index}" for index in range(count)])
    fill_shapes(named)

    found = {value.name: sizes(value) for node in named.graph for value in node.outputs}
    assert {name: _numbers(shape) for name, shape in found.items()} == {
        name: _numbers(shape) for name, shape in expected.items()
    }
    assert all(_numbers(found[name])[1:4:2] == [4, 16] for name in ("q_0", "q_1"))


def _numbers(shape: Sizes | None) -> list[int | None]:
    return [size if isinstance(size, int) else None for size in shape or ()]


def test_a_shape_that_contradicts_itself_is_left_alone() -> None:
    model = decoder(infer=False)
    value = next(v for node in model.graph for v in node.outputs if v.name == "q1_0")
    value.shape = ir.Shape(["B", "T", 3, 16])
    fill_shapes(model)

    assert sizes(value) == ("B", "T", 3, 16)


ARITHMETIC = """
        za{i} = Shape(q)
        zb{i} = Gather(za{i}, order)
        zc{i} = Cast<to = 7>(zb{i})
        zd{i} = Add(ze{last}, zc{i})
        ze{i} = Sub(zd{i}, zc{i})"""
"""The shape of the query once more, by a detour."""


def test_time_grows_with_layers_where_shapes_are_missing() -> None:
    """A graph like those of torch's older exporter: 10,000 nodes, most of them about shapes."""
    detours = "".join(ARITHMETIC.format(i=index, last=index - 1) for index in range(1, 53))
    query = f"""order = Constant<value_ints = [0, 1, 2, 3]>()
        ze0 = Shape(q){detours}
        qz = Reshape(q, ze52)
        qs = Mul(qz, quarter)"""

    def seconds(layers: int) -> float:
        model = decoder(layers=layers, query=query, infer=False)
        assert len(model.graph) > 275 * layers
        start = time.process_time()
        before = snapshot_interface(model)
        recognition = recognise(model)
        plan = make_plan(recognition, PRESETS["raw"])
        ConvertPass(plan, recognition)(model)
        bake_metadata(model, plan)
        check(before, model, plan)
        took = time.process_time() - start
        assert len(recognition.sites) == layers
        return took

    few, many = seconds(6), seconds(36)
    assert many < 12 * few, f"{many:.2f} s for 36 layers, {few:.2f} s for 6"
