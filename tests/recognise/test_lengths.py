"""Past lengths and numbers of tokens that must be shown: right numbers, or a refusal.

Each graph was once converted in silence to something else than it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import onnx_ir as ir
import pytest

from tests.decoders.onelayer import CACHES, TOKENS, decoder
from tests.decoders.running import Array, convert, fed_back, session
from tests.recognise.test_soundness import EXACT, MASK, MERGED, changed, model_of, reason
from tq_onnx.recognise.match import recognise

Feeds = dict[str, Array]
PREFIX = 2


def run(
    model: ir.Model, feed: Callable[[int, int], Feeds], *, start: int = 0, ids: int = 1
) -> Array:
    """Logits of some calls with growing caches, which begin with some slots.

    Args:
        model: original or converted with raw caches.
        feed: inputs besides ids and caches, by the tokens before a call and after it.
        start: slots of the first caches.
        ids: for each token.
    """
    running, rng = session(model), np.random.default_rng(0)
    rows = rng.standard_normal((2, 2, 2, start, 16)).astype(np.float32)
    caches = dict(zip(("past_key", "past_value"), rows, strict=True))
    if "uint8" in running.get_inputs()[-1].type:
        caches = {name: array.view(np.uint8) for name, array in caches.items()}
    edges = (0, 4, 5, 8, 9)
    calls = (
        {"input_ids": rng.integers(3, TOKENS, (2, ids * (after - before))), **feed(before, after)}
        for before, after in pairwise(edges)
    )
    return fed_back(running, calls, caches)


def whole(before: int, after: int) -> Feeds:
    mask = np.ones((2, after), np.int64)
    mask[0, 1:3] = 0
    return {
        "attention_mask": mask,
        "position_ids": np.tile(np.arange(before, after), (2, 1)),
        "segments": np.array([[1, 1, 0, 1], [1, 0, 1, 1]]),
        "hidden": np.array([[1, 3], [2, 99]]),
    }


COUNTED = (("bools = Cast<to = 9>(attention_mask)", ""),)
GIVEN = "bools = Cast<to = 9>(attention_mask)"
SHOWN = """prefix = Constant<value_ints = [2]>()
        before = Sub(slots, prefix)
        of_prefix = Less(before, zero)
        real = Max(before, zero)
"""
TAIL = "\n        bools = Or(of_prefix, tail)"
PREFIXED = {
    "gather": f"{SHOWN}all = Cast<to = 9>(attention_mask)\n"
    f"tail = Gather<axis = 1>(all, real){TAIL}",
    "gather nd": f"""{SHOWN}all = Cast<to = 9>(attention_mask)
        turned = Transpose<perm = [1, 0]>(all)
        column = Unsqueeze(real, one)
        found = GatherND(turned, column)
        tail = Transpose<perm = [1, 0]>(found){TAIL}""",
    "matmul": f"""{SHOWN}length = Shape<start = 1, end = 2>(attention_mask)
        length0 = Squeeze(length)
        entries = Range(zero, length0, step)
        column = Unsqueeze(entries, one)
        same = Equal(column, real)
        shifts = Cast<to = 1>(same)
        numbers = Cast<to = 1>(attention_mask)
        taken = MatMul(numbers, shifts)
        tail = Cast<to = 9>(taken){TAIL}""",
    "scatter": """two0 = Constant<value_ints = [2]>()
        yes = Constant<value = bool[1] {1}>()
        rows = Shape<start = 0, end = 1>(input_ids)
        wide = Concat<axis = 0>(total, rows)
        seen = Expand(yes, wide)
        all = Cast<to = 9>(attention_mask)
        turned = Transpose<perm = [1, 0]>(all)
        length = Shape<start = 1, end = 2>(attention_mask)
        length0 = Squeeze(length)
        entries = Range(zero, length0, step)
        later = Add(entries, two0)
        column = Unsqueeze(later, one)
        written = ScatterND(seen, column, turned)
        bools = Transpose<perm = [1, 0]>(written)""",
}
POSITIONS = """places2 = Constant<value_ints = [2]>()
        asked = Unsqueeze(position_ids, places2)
        causal1 = LessOrEqual(slots, asked)
        keep = Unsqueeze(causal1, one)"""
SEGMENTS = """four = Constant<value_int = 4>()
        turn = Mod(slots, four)
        taken = Gather<axis = 1>(segments, turn)
        bools = Cast<to = 9>(taken)"""
HIDDEN = """last1 = Constant<value_ints = [2]>()
        column = Unsqueeze(hidden, last1)
        hit = Equal(column, slots)
        hits = Cast<to = 6>(hit)
        any = ReduceMax<keepdims = 0>(hits, one)
        some = Cast<to = 9>(any)
        bools = Not(some)"""
OTHERS = {
    "positions": (
        [
            (GIVEN, ""),
            ("kept = Unsqueeze(bools, middle)\n", ""),
            ("keep = And(kept, causal)", POSITIONS),
        ],
        "int64[B, Q] position_ids, ",
    ),
    "segments": ([(GIVEN, SEGMENTS)], "int64[B, G] segments, "),
    "hidden slots": ([(GIVEN, HIDDEN)], "int64[B, I] hidden, "),
}


def same(make: Callable[[], ir.Model], feed: Callable[[int, int], Feeds], **options: int) -> bool:
    converted = make()
    convert(converted, "raw")
    expected, found = run(make(), feed, **options), run(converted, feed, **options)
    return bool(np.abs(found - expected).max() <= EXACT * np.abs(expected).max())


@pytest.mark.parametrize("case", OTHERS)
def test_an_input_that_is_no_mask_does_not_tell_the_length(case: str) -> None:
    pairs, inputs = OTHERS[case]

    def make() -> ir.Model:
        return model_of(*pairs, inputs=inputs)

    found = recognise(make())
    assert found.lengths is None
    assert found.interface is not None and found.interface.attention_mask is None
    positions = "position_ids" if case == "positions" else None
    assert found.interface.position_ids == positions
    assert same(make, whole)


@pytest.mark.parametrize("way", PREFIXED)
def test_a_mask_without_entries_for_a_learned_prefix_does_not_tell_the_length(way: str) -> None:
    def make() -> ir.Model:
        return model_of((GIVEN, PREFIXED[way]))

    assert recognise(make()).lengths is None
    assert same(make, whole, start=PREFIX)


def test_a_mask_of_a_fixed_length_does_not_tell_the_length() -> None:
    def make() -> ir.Model:
        cut = "held = Slice(bools, zero_1, total, one)\n kept = Unsqueeze(held, middle)"
        pair = ("kept = Unsqueeze(bools, middle)", cut)
        return model_of(pair, inputs="int64[B, 12] attention_mask, ")

    assert recognise(make()).lengths is None
    assert same(make, lambda _, after: {"attention_mask": np.ones((2, 12), np.int64)})


def test_a_huge_table_is_not_computed() -> None:
    table = """size = Constant<value_ints = [1000000, 1000000]>()
        huge = ConstantOfShape(size)
        flags = Cast<to = 9>(huge)
        some = Slice(flags, zero_1, new, zero_1)
        part = Slice(some, zero_1, total, one)
        shown = Not(part)
        keep0 = And(kept, causal)
        keep = And(keep0, shown)"""
    model = model_of(("keep = And(kept, causal)", table))

    assert recognise(model).lengths is None
    assert not reason(model)


def test_ids_that_the_graph_joins_do_not_tell_the_new_tokens() -> None:
    """Two ids make one token."""

    def make() -> ir.Model:
        model = decoder(
            changed(("Shape<start = 1, end = 2>(input_ids)", "Shape<start = 2, end = 3>(q)")),
            inputs=MASK + CACHES,
        )
        graph = model.graph
        words = next(node for node in graph if node.op_type == "Gather")
        pairs = ir.Value(
            name="pairs", const_value=ir.tensor(np.array([0, -1, 2, 32]), name="pairs")
        )
        axis = ir.Value(name="axis", const_value=ir.tensor(np.array([2]), name="axis"))
        for value in (pairs, axis):
            graph.register_initializer(value)
        split = ir.node("Reshape", [words.outputs[0], pairs])
        joined = ir.node("ReduceSum", [split.outputs[0], axis], attributes={"keepdims": 0})
        for use in list(words.outputs[0].uses()):
            if use.node is not split:
                use.node.replace_input_with(use.idx, joined.outputs[0])
        split.outputs[0].name, joined.outputs[0].name = "split", "joined"
        graph.insert_after(words, [split, joined])
        for node in graph:
            for value in node.outputs:
                if value.dtype is not None and value.dtype.is_floating_point():
                    value.shape = None
        graph.outputs[0].shape = ir.Shape(["B", "fewer", TOKENS])
        return model

    assert recognise(make()).lengths is None
    assert same(make, whole, ids=2)


FEWER = {
    "every second by a reshape": """pairs = Constant<value_ints = [0, -1, 2, 32]>()
        x4 = Reshape(x, pairs)
        halves = Constant<value_int = 0>()
        x2 = Gather<axis = 2>(x4, halves)""",
    "the mean of pairs": """pairs = Constant<value_ints = [0, -1, 2, 32]>()
        x4 = Reshape(x, pairs)
        second = Constant<value_ints = [2]>()
        x2 = ReduceMean<keepdims = 0>(x4, second)""",
    "a sum over a part of the width": """pairs = Constant<value_ints = [0, -1, 64]>()
        x4 = Reshape(x, pairs)
        other = Constant<value_ints = [32]>()
        last2 = Constant<value_ints = [2]>()
        x2 = Slice(x4, zero_1, other, last2)""",
    "pooling": """xt = Transpose<perm = [0, 2, 1]>(x)
        x4 = AveragePool<kernel_shape = [2], strides = [2]>(xt)
        x2 = Transpose<perm = [0, 2, 1]>(x4)""",
    "a convolution": """ones = Constant<value_ints = [32, 32, 2]>()
        kernel = ConstantOfShape<value = float[1] {0.1}>(ones)
        xt = Transpose<perm = [0, 2, 1]>(x)
        x4 = Conv<strides = [2]>(xt, kernel)
        x2 = Transpose<perm = [0, 2, 1]>(x4)""",
    "a product over pairs": """pairs = Constant<value_ints = [0, -1, 2, 32]>()
        x4 = Reshape(x, pairs)
        weights = Constant<value = float[1, 1, 1, 2] {1.0, 0.0}>()
        xm = MatMul(weights, x4)
        second = Constant<value_ints = [2]>()
        x2 = Squeeze(xm, second)""",
}
ASKING = """
        q2 = MatMul(x2, w_q)
        q3 = Reshape(q2, heads_shape)
        q4 = Transpose<perm = [0, 2, 1, 3]>(q3)
        qs = Mul(q4, quarter)"""
SUMMED = """o1 = Transpose<perm = [0, 2, 1, 3]>(o)
        o2 = Reshape(o1, merged_shape)
        merged = ReduceMax<keepdims = 1>(o2, one)"""


@pytest.mark.parametrize("way", FEWER)
def test_queries_that_are_fewer_than_the_new_rows_are_refused(way: str) -> None:
    model = model_of(
        ("qs = Mul(q, quarter)", FEWER[way] + ASKING),
        ("keep = And(kept, causal)", "keep = Identity(kept)"),
        (MERGED, SUMMED),
    )

    assert "the number of tokens that ask differs" in reason(model)


def test_new_rows_that_are_fewer_than_the_queries_are_refused() -> None:
    pairs = """pairs = Constant<value_ints = [0, 0, -1, 2, 16]>()
        k5 = Reshape(k, pairs)
        v5 = Reshape(v, pairs)
        half = Constant<value_int = 0>()
        k6 = Gather<axis = 3>(k5, half)
        v6 = Gather<axis = 3>(v5, half)
"""
    model = model_of(
        (
            "present_key = Concat<axis = 2>(past_key, k)",
            f"{pairs}present_key = Concat<axis = 2>(past_key, k6)",
        ),
        ("Concat<axis = 2>(past_value, v)", "Concat<axis = 2>(past_value, v6)"),
        ("keep = And(kept, causal)", "keep = Identity(kept)"),
    )

    assert "the number of tokens that ask differs" in reason(model)


def test_queries_that_a_reshape_splits_and_joins_again_are_as_many() -> None:
    def make() -> ir.Model:
        pairs = """flat = Constant<value_ints = [-1, 32]>()
        x4 = Reshape(x, flat)
        shape = Shape(x)
        x2 = Reshape(x4, shape)"""
        return model_of(("qs = Mul(q, quarter)", pairs + ASKING))

    assert same(make, whole)
