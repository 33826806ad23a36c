"""Dialect onnx: what torch and mobius write, every feature of the operator, refusals.

The oracle is the original itself in ONNX Runtime: with ``raw`` caches a converted model must agree
with it but for float noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import onnx.reference
import onnx_ir as ir
import onnxruntime
import pytest

from tests.decoders.running import NUMPY, Array, convert, load, session
from tests.recognise.dialects.edits import (
    Change,
    attentions,
    both,
    with_attribute,
    with_input,
    without_attribute,
    without_input,
)
from tq_onnx.plan import Plan
from tq_onnx.recognise.match import recognise

HEADS, SHARED, SIZE, TOKENS, CAPACITY = 4, 2, 16, 61, 24
CLOSE: Final = 1e-5

RUN_ERRORS: Final = (
    onnxruntime.capi.onnxruntime_pybind11_state.Fail,
    onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument,
    onnxruntime.capi.onnxruntime_pybind11_state.RuntimeException,
)

Feeds = dict[str, Array]


class Caches:
    """Feeds a model its own caches, original or converted.

    Args:
        model: the session.
        plan: names the caches.
        size: B.
        capacity: slots of caches whose shape does not tell them.
    """

    def __init__(
        self, model: onnxruntime.InferenceSession, plan: Plan, size: int, capacity: int = 0
    ) -> None:
        self._model = model
        self._types = {entry.name: NUMPY[entry.type] for entry in model.get_inputs()}
        self._next = {
            pair.present: pair.past
            for layer in plan.layers
            for pair in (layer.key, layer.value)
            if pair.past is not None
        }
        rng = np.random.default_rng(5)
        self.past: Feeds = {}
        for entry in model.get_inputs():
            if entry.name in self._next.values():
                shape = [dim if isinstance(dim, int) else capacity for dim in entry.shape]
                # What stands in slots that hold no token must not matter.
                garbage = rng.integers(0, 200, [size, *shape[1:]])
                self.past[entry.name] = garbage.astype(self._types[entry.name])

    def run(self, calls: Sequence[Feeds]) -> Array:
        """Logits of all calls, ``[B, total, tokens]``."""
        names = [entry.name for entry in self._model.get_outputs()]
        logits = []
        for feeds in calls:
            given = {
                name: np.asarray(value).astype(self._types[name])
                for name, value in feeds.items()
                if name in self._types
            }
            results = dict(zip(names, self._model.run(names, {**given, **self.past}), strict=True))
            self.past = {past: results[name] for name, past in self._next.items()}
            logits.append(np.asarray(results["logits"], np.float64))
        return np.concatenate(logits, axis=1)


def calls(
    size: int, chunks: Sequence[int], *, left_padding: int = 0, seed: int = 0
) -> tuple[list[Feeds], Array]:
    """Inputs of one call after the other, and which tokens count, bool ``[B, total]``."""
    rng = np.random.default_rng(seed)
    total = sum(chunks)
    tokens = rng.integers(3, TOKENS, (size, total))
    kept = np.ones((size, total), np.int64)
    kept[0, :left_padding] = 0
    positions = np.maximum(np.cumsum(kept, axis=1) - 1, 0)
    made: list[Feeds] = []
    start = 0
    for chunk in chunks:
        stop = start + chunk
        made.append(
            {
                "input_ids": tokens[:, start:stop],
                "attention_mask": kept[:, :stop],
                "position_ids": positions[:, start:stop],
                "write_indices": np.full(size, start),
                "nonpad_kv_seqlen": np.full(size, stop),
            }
        )
        start = stop
    return made, kept.astype(bool)


def distance(expected: Array, found: Array, kept: Array | None = None) -> float:
    """The largest difference, relative to the largest logit, of tokens that count."""
    which = np.ones(expected.shape[:2], bool) if kept is None else kept
    assert np.isfinite(expected[which]).all()
    return float(np.abs(found - expected)[which].max() / np.abs(expected[which]).max())


def check(
    model: Callable[[], ir.Model],
    inputs: Sequence[Feeds],
    kept: Array | None = None,
    *,
    library: bool = False,
    capacity: int = 0,
    own_capacity: int = 0,
) -> Plan:
    """Whether a converted model agrees with its original."""
    original, changed = model(), model()
    plan = convert(changed, "raw")
    size = len(inputs[0]["input_ids"])
    expected = Caches(session(original), plan, size, own_capacity).run(inputs)
    converted = session(changed, library=library)
    found = Caches(converted, plan, size, capacity or own_capacity).run(inputs)
    assert distance(expected, found, kept) < CLOSE
    return plan


# Real exports.


def test_static_caches_become_bytes_of_the_same_capacity() -> None:
    model = load("mobius-static")
    plan = convert(model, "int4")

    width = plan.layers[0].key.row_bytes
    for value in (*model.graph.inputs[2:6], *model.graph.outputs[1:]):
        assert value.dtype is ir.DataType.UINT8
        assert list(value.shape)[1:] == [SHARED, CAPACITY, width]
    assert not [node for node in model.graph if node.op_type == "TensorScatter"]


def test_static_sequences_of_different_lengths() -> None:
    """Prompts of 6 and 4 tokens, padded on the right; each goes on where it ended."""
    inputs, kept = calls(2, (6, 1, 2))
    lengths = np.array([6, 4])
    inputs[1] |= {"write_indices": lengths, "nonpad_kv_seqlen": lengths + 1}
    inputs[2] |= {"write_indices": lengths + 1, "nonpad_kv_seqlen": lengths + 3}
    inputs[1]["position_ids"] = lengths[:, None]
    inputs[2]["position_ids"] = lengths[:, None] + [1, 2]

    check(lambda: load("mobius-static"), inputs, kept, library=True)


@pytest.mark.parametrize("valid", [[6, 4], [2, 1], [6, 5]])
def test_static_keys_that_do_not_count(valid: list[int]) -> None:
    """Fewer valid keys than were written: the causal frontier moves with them."""
    inputs, _ = calls(2, (6, 1))
    inputs[0]["nonpad_kv_seqlen"] = np.array(valid)
    inputs[1]["nonpad_kv_seqlen"] = np.array(valid) + 1

    check(lambda: load("mobius-static"), inputs, library=True)


# Features, on what mobius and a text of our own make.


FLOAT, BOOL = ir.DataType.FLOAT, ir.DataType.BOOL

FEATURES: Final[dict[str, Change]] = {
    "softcap": with_attribute("softcap", 0.7),
    "scale": with_attribute("scale", 0.3),
    "default scale": without_attribute("scale"),
    "not causal": with_attribute("is_causal", 0),
    "no mask": without_input(3),
    "neither mask nor causality": both(without_input(3), with_attribute("is_causal", 0)),
    "precision of the softmax": with_attribute("softmax_precision", 1),
    "float mask": with_input(3, FLOAT, ["B", 1, "T", "S"]),
    "float mask and softcap": both(
        with_input(3, FLOAT, ["B", 1, "T", "S"]), with_attribute("softcap", 0.7)
    ),
    "mask of every head": with_input(3, FLOAT, ["B", HEADS, "T", "S"]),
    "mask of rank 3": with_input(3, FLOAT, [HEADS, "T", "S"]),
    "mask of rank 2": with_input(3, BOOL, ["T", "S"]),
}


def extra(inputs: Sequence[Feeds], dtype: ir.DataType, leading: Sequence[int]) -> None:
    """A mask that hides some keys, never the query's own."""
    rng = np.random.default_rng(11)
    for feeds in inputs:
        count, total = feeds["input_ids"].shape[1], feeds["attention_mask"].shape[1]
        keeps = rng.random((*leading, count, total)) < 0.7
        keeps |= np.eye(count, total, total - count, dtype=bool)
        bias = np.where(keeps, rng.normal(size=keeps.shape), -np.inf)
        feeds["extra"] = keeps if dtype is BOOL else bias


@pytest.mark.parametrize("feature", FEATURES)
def test_converted_feature_agrees(feature: str) -> None:
    def model() -> ir.Model:
        made = load("mobius-default")
        FEATURES[feature](made)
        return made

    inputs, kept = calls(2, (5, 1, 3), left_padding=2)
    added = [value for value in model().graph.inputs if value.name == "extra"]
    for value in added:
        sizes = [2 if dim == "B" else dim for dim in value.shape.dims[:-2]]
        extra(inputs, value.dtype, [size if isinstance(size, int) else 2 for size in sizes])

    check(model, inputs, None if added else kept, library=True)


SCATTERED: Final = """
key = TensorScatter<axis={axis}>(past_key, key_rows, write_indices)
value = TensorScatter<axis={axis}>(past_value, value_rows, write_indices)
"""
FLAT_ROWS: Final = "key_rows = Identity(k) value_rows = Identity(v) query = Identity(q)"
HEAD_ROWS: Final = """
by_head = Constant<value_ints = [0, 0, -1, 16]>()
query_rows = Reshape(q, by_head)
query = Transpose<perm=[0, 2, 1, 3]>(query_rows)
key_reshaped = Reshape(k, by_head)
key_rows = Transpose<perm=[0, 2, 1, 3]>(key_reshaped)
value_reshaped = Reshape(v, by_head)
value_rows = Transpose<perm=[0, 2, 1, 3]>(value_reshaped)
"""
FLAT: Final = "q_num_heads=4, kv_num_heads=2"
FLAT_RESULT: Final = "merged = Identity(result)"
HEAD_RESULT: Final = """
result_rows = Transpose<perm=[0, 2, 1, 3]>(result)
side_by_side = Constant<value_ints = [0, 0, -1]>()
merged = Reshape(result_rows, side_by_side)
"""


def text(
    body: str, inputs: str, outputs: str, *, opset: int = 24, dtype: str = "float"
) -> ir.Model:
    """A decoder of one layer: between ``q``, ``k``, ``v`` and ``merged`` comes ``body``."""
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : {opset}]>
        decoder (int64[B, T] input_ids, {inputs}) => ({dtype}[B, T, {TOKENS}] logits, {outputs}) {{
            x = Gather(table, input_ids)
            q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)
            {body}
            logits = MatMul(merged, head)
        }}"""
    )
    rng = np.random.default_rng(2)
    width, narrow = HEADS * SIZE, SHARED * SIZE
    for name, shape in {
        "table": (TOKENS, width),
        "wq": (width, width),
        "wk": (width, narrow),
        "wv": (width, narrow),
        "head": (width, TOKENS),
    }.items():
        array = rng.normal(scale=0.5, size=shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return ir.from_proto(proto)


def static(
    attributes: str = "is_causal=1",
    operands: str = "query, key, value, , , , valid",
    *,
    flat: bool = True,
    capacity: int | str = CAPACITY,
    more: str = "",
    scatter: str = SCATTERED,
) -> ir.Model:
    """A TensorScatter on caches of rank 3 or 4."""
    shape = f"B, {capacity}, {SHARED * SIZE}" if flat else f"B, {SHARED}, {capacity}, {SIZE}"
    caches = [f"float[{shape}] {name}" for name in ("past_key", "past_value")]
    body = "\n".join(
        [
            FLAT_ROWS if flat else HEAD_ROWS,
            scatter.format(axis=1 if flat else 2),
            f"result = Attention<{attributes}{', ' + FLAT if flat else ''}>({operands})",
            FLAT_RESULT if flat else HEAD_RESULT,
        ]
    )
    counts = "int64[B] write_indices, int64[B] valid"
    inputs = ", ".join([counts, *caches, *filter(None, [more])])
    outputs = f"float[{shape}] key, float[{shape}] value"
    return text(body, inputs, outputs)


def static_calls(chunks: Sequence[int], size: int = 2) -> list[Feeds]:
    inputs, _ = calls(size, chunks)
    rng = np.random.default_rng(3)
    for feeds in inputs:
        feeds["valid"] = feeds["nonpad_kv_seqlen"]
        count = feeds["input_ids"].shape[1]
        last = feeds["write_indices"][0] + count
        keeps = rng.random((size, 1, count, CAPACITY)) < 0.7
        keeps[..., 0] = True
        feeds["flags"] = keeps
        feeds["bias"] = np.where(keeps, rng.normal(size=keeps.shape), -np.inf)
        # Without a count of valid keys the mask itself has to hide empty slots.
        feeds["exact"] = keeps & (np.arange(CAPACITY) < last)
    return inputs


FLAGS, BIAS = f"bool[B, 1, T, {CAPACITY}] ", f"float[B, 1, T, {CAPACITY}] "
STATIC: Final[dict[str, dict[str, Any]]] = {
    "causal": {},
    "not causal": {"attributes": "is_causal=0"},
    "softcap": {"attributes": "is_causal=1, softcap=0.5"},
    "Boolean mask": {"operands": "query, key, value, flags, , , valid", "more": f"{FLAGS}flags"},
    "float mask": {"operands": "query, key, value, bias, , , valid", "more": f"{BIAS}bias"},
    "float mask, not causal": {
        "attributes": "is_causal=0",
        "operands": "query, key, value, bias, , , valid",
        "more": f"{BIAS}bias",
    },
    "mask alone": {
        "attributes": "is_causal=0",
        "operands": "query, key, value, exact",
        "more": f"{FLAGS}exact",
    },
}


@pytest.mark.parametrize("capacity", [CAPACITY, "slots"])
@pytest.mark.parametrize("flat", [True, False], ids=["rank 3", "rank 4"])
@pytest.mark.parametrize("case", STATIC)
def test_static_cache_agrees(case: str, flat: bool, capacity: int | str) -> None:
    plan = check(
        lambda: static(flat=flat, capacity=capacity, **STATIC[case]),
        static_calls((5, 1, 3)),
        library=True,
        own_capacity=CAPACITY,
    )
    assert (plan.layers[0].key.past, plan.layers[0].value.present) == ("past_key", "value")


@pytest.mark.parametrize("case", [case for case in STATIC if case != "mask alone"])
def test_static_cache_with_fewer_valid_keys_agrees(case: str) -> None:
    inputs = static_calls((5, 1, 3))
    for feeds in inputs:
        feeds["valid"] = feeds["valid"] - [1, 3]

    check(lambda: static(**STATIC[case]), inputs, library=True)


@pytest.mark.parametrize("case", STATIC)
def test_rows_behind_those_just_written_are_seen_where_they_are_shown(case: str) -> None:
    """Two of eight tokens are verified again, by what is cached behind them too."""
    first, again = static_calls((8, 2))
    again["write_indices"] = np.array([3, 4])
    again["valid"] = np.array([8, 7])
    again["exact"] = again["flags"] & (np.arange(CAPACITY) < 8)
    again["bias"][..., 8:] = -np.inf

    check(lambda: static(**STATIC[case]), [first, again], library=True)


def test_rank_3_caches_are_told_from_embeddings_and_logits() -> None:
    """By what reads and makes them, not by place or name."""
    model = static()
    graph = model.graph
    outputs = list(graph.outputs)
    graph.outputs.clear()
    graph.outputs.extend([*outputs[1:], outputs[0]])
    embedded = graph.node(0)
    embeds = ir.Value(
        name="embeds", type=ir.TensorType(FLOAT), shape=ir.Shape(["B", "T", HEADS * SIZE])
    )
    graph.inputs.append(embeds)
    embedded.outputs[0].replace_all_uses_with(embeds)
    graph.remove(embedded, safe=True)
    graph.inputs.remove(graph.inputs[0])
    outputs[0].name = "scores"

    recognition = recognise(model)

    assert recognition.misses == ()
    assert recognition.interface.tokens == "embeds"
    assert recognition.interface.logits == "scores"


def test_first_write_indices_may_be_missing() -> None:
    """A graph that always writes from the first slot on."""
    scatter = SCATTERED.replace(", write_indices", "")

    check(lambda: static(scatter=scatter), static_calls((5,)))


def prompt(attributes: str, mask: str = "", *, own: bool = False) -> ir.Model:
    """A graph for a first prompt: it takes no caches."""
    shape = f"float[B, {SHARED}, T, {SIZE}] "
    results = "result, present_key, present_value" if own else "result"
    rows = ("key_rows", "value_rows")
    shared = "" if own else "present_key = Identity(key_rows) present_value = Identity(value_rows)"
    body = "\n".join(
        [
            HEAD_ROWS,
            shared,
            f"{results} = Attention<{attributes}>(query, {', '.join(rows)}{mask})",
            HEAD_RESULT,
        ]
    )
    inputs = "bool[B, 1, T, T] flags"
    return text(body, inputs, f"{shape}present_key, {shape}present_value", opset=23)


@pytest.mark.parametrize("own", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("mask", ["", ", flags"])
@pytest.mark.parametrize("causal", [0, 1])
def test_first_prompt_agrees(own: bool, mask: str, causal: int) -> None:
    inputs, _ = calls(2, (6,))
    flags = np.random.default_rng(4).random((2, 1, 6, 6)) < 0.7
    inputs[0]["flags"] = flags | np.eye(6, dtype=bool)

    plan = check(lambda: prompt(f"is_causal={causal}", mask, own=own), inputs, library=True)

    assert plan.layers[0].key.past is None
    assert not plan.fixed_capacity


def grown(
    attributes: str = "is_causal=0",
    operands: str = "query, key, value, flags",
    *,
    more: str = "",
    between: str = "",
) -> ir.Model:
    """A Concat outside; the operator shares heads itself."""
    body = "\n".join(
        [
            HEAD_ROWS,
            "key = Concat<axis=2>(past_key, key_rows)",
            "value = Concat<axis=2>(past_value, value_rows)",
            between,
            f"result = Attention<{attributes}>({operands})",
            HEAD_RESULT,
        ]
    )
    past, present = f"float[B, {SHARED}, P, {SIZE}] ", f"float[B, {SHARED}, S, {SIZE}] "
    inputs = ", ".join(
        ["bool[B, 1, T, S] flags", past + "past_key", past + "past_value"] + [more] * bool(more)
    )
    return text(body, inputs, f"{present}key, {present}value")


def grown_calls() -> list[Feeds]:
    inputs, _ = calls(2, (5, 1, 3))
    extra(inputs, BOOL, (2, 1))
    return [{**feeds, "flags": feeds["extra"]} for feeds in inputs]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"operands": "query, key, value"},
        {"attributes": "is_causal=0, softcap=0.4, scale=0.2"},
        {
            "between": "three = Constant<value_float = 3.0>() stretched = Mul(key, three)",
            "operands": "query, stretched, value, flags",
        },
    ],
    ids=["mask", "no mask", "softcap and scale", "scaled keys"],
)
def test_heads_shared_by_the_operator_agree(options: dict[str, str]) -> None:
    check(lambda: grown(**options), grown_calls(), library=True)


# Refusals.


def mobius(*changes: Change) -> Callable[[], ir.Model]:
    def make() -> ir.Model:
        model = load("mobius-default")
        both(*changes)(model)
        return model

    return make


def with_scores(model: ir.Model) -> None:
    for layer, node in enumerate(attentions(model)):
        node.resize_outputs(4)
        scores = node.outputs[3]
        scores.name, scores.type = f"scores.{layer}", ir.TensorType(FLOAT)
        model.graph.outputs.append(scores)


REFUSALS: Final[dict[str, tuple[Callable[[], ir.Model], str]]] = {
    "scores returned": (mobius(with_scores), "returns the scores (qk_matmul_output)"),
    "an attribute from the future": (mobius(with_attribute("novelty", 1)), "attribute novelty"),
    "a window": (mobius(with_attribute("left_window_size", 4)), "left_window_size"),
    "double softmax": (mobius(with_attribute("softmax_precision", 11)), "double precision"),
    "no scale": (mobius(with_attribute("scale", 0.0)), "the scale is 0"),
    "an input from the future": (mobius(with_input(7, FLOAT, [1])), "8 inputs"),
    "a count besides a past": (
        mobius(with_input(6, ir.DataType.INT64, ["B"])),
        "nonpad_kv_seqlen besides a cache of its own",
    ),
    "half a past": (mobius(without_input(4)), "but not both"),
    "heads that do not share": (mobius(with_attribute("q_num_heads", 3)), "do not share"),
    "widths that do not fit": (mobius(with_attribute("kv_num_heads", 1)), "head size"),
    "no number of heads": (mobius(without_attribute("kv_num_heads")), "do not share"),
    "an integer mask": (
        mobius(with_input(3, ir.DataType.INT32, ["B", 1, "T", "S"])),
        "element type INT32",
    ),
    "a mask of one column": (mobius(with_input(3, BOOL, ["B", 1, "T", 1])), "one column"),
    "a mask of rank 5": (mobius(with_input(3, BOOL, [1, "B", 1, "T", "S"])), "rank 5"),
    "causal over a Concat": (
        lambda: grown("is_causal=1"),
        "has no input for the number of past keys",
    ),
    "a count over a Concat": (
        lambda: grown(operands="query, key, value, , , , valid", more="int64[B] valid"),
        "the cache has no fixed size",
    ),
    "scaled values": (
        lambda: grown(
            between="three = Constant<value_float = 3.0>() stretched = Mul(value, three)",
            operands="query, key, stretched, flags",
        ),
        "values are scaled",
    ),
    "keys and values exchanged for keys": (
        lambda: grown(operands="query, key, key, flags"),
        "no attention reads it",
    ),
    "causal without a count": (
        lambda: static(operands="query, key, value"),
        "has no input for the number of past keys",
    ),
    "empty slots unhidden": (
        lambda: static("is_causal=0", operands="query, key, value"),
        "nothing hides the slots",
    ),
    "written in a circle": (
        lambda: static(scatter=SCATTERED.replace("<axis", '<mode="circular", axis')),
        "mode circular",
    ),
    "written across": (
        lambda: static(scatter=SCATTERED.replace("axis={axis}", "axis=2")),
        "along axis 2",
    ),
    "written to different slots": (
        lambda: static(
            scatter=SCATTERED.replace("value_rows, write_indices", "value_rows, others"),
            more="int64[B] others",
        ),
        "written to different slots",
    ),
    "a past that is computed": (
        lambda: static(
            scatter="negative = Neg(past_key)" + SCATTERED.replace("(past_key,", "(negative,")
        ),
        "does not continue a graph input",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses_with_layer_and_reason(case: str) -> None:
    make, reason = REFUSALS[case]

    misses = recognise(make()).misses

    assert misses and misses[0].layer == 0
    assert reason in misses[0].reason


def test_refuses_a_static_cache_that_is_bytes_already() -> None:
    model = static()
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.name in ("past_key", "key"):
            value.type = ir.TensorType(ir.DataType.INT8)

    assert "quantised already" in recognise(model).misses[0].reason


def test_mask_shorter_than_the_keys_is_an_error() -> None:
    """As in ONNX Runtime's own operator; never a wrong answer."""
    model = grown()
    plan = convert(model, "raw")
    inputs = grown_calls()[:1]
    inputs[0]["flags"] = inputs[0]["flags"][..., :-1]

    with pytest.raises(RUN_ERRORS, match=r"TurboQuantDequantAttention|attention_bias"):
        Caches(session(model, library=True), plan, 2).run(inputs)


def in_precision(model: ir.Model, dtype: ir.DataType) -> ir.Model:
    """All of a float32 model in another type, its weights too."""
    for value in _values(model.graph):
        if value.dtype is not FLOAT:
            continue
        if value.const_value is not None:
            array = value.const_value.numpy().astype(dtype.numpy())
            value.const_value = ir.Tensor(array, dtype=dtype, name=value.name)
        value.type = ir.TensorType(dtype)
    return model


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


@pytest.mark.parametrize("name", ["dynamo-op23-sdpa", "mobius-default", "mobius-static"])
def test_half_precision_agrees_within_its_noise(name: str) -> None:
    def model() -> ir.Model:
        made = in_precision(load(name), ir.DataType.FLOAT16)
        for node in made.graph:
            if node.op_type == "Cast" and node.attributes.get_int("to") == int(FLOAT):
                node.attributes["to"] = ir.AttrInt64("to", int(ir.DataType.FLOAT16))
        return made

    inputs, _ = calls(1, (7, 1, 3, 1))
    changed = model()
    plan = convert(changed, "raw")
    assert {layer.dtype for layer in plan.layers} == {"FLOAT16"}

    expected = Caches(session(model()), plan, 1).run(inputs)
    found = Caches(session(changed, library=True), plan, 1).run(inputs)
    assert distance(expected, found) < 1e-2
