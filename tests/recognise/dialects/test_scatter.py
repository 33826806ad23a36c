"""Static caches written by ScatterND: what transformers' exporter makes, and what is refused.

The oracle is the original itself in ONNX Runtime: with ``raw`` caches a converted model must agree
with it but for float noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import onnx_ir as ir
import pytest

from tests.decoders.onelayer import TOKENS, assert_refused, decoder
from tests.decoders.running import Array, caches_of, convert, fed_back, load, session

CLOSE: Final = 1e-5
CAPACITY: Final = 24

Feeds = dict[str, Array]


# Real exports: B = 2, a prompt of 6 tokens, then one token at a time, caches of 24.


def test_caches_become_bytes_of_the_same_capacity() -> None:
    for name in ("hf-static-prefill", "hf-static-decode"):
        model = load(name)
        plan = convert(model, "int4")

        width = plan.layers[0].key.row_bytes
        caches = [value for value in model.graph.outputs if value.dtype is ir.DataType.UINT8]
        assert [list(value.shape) for value in caches] == [[2, 2, CAPACITY, width]] * 4
        assert not [node for node in model.graph if node.op_type == "ScatterND"]


# A decoder of our own: every size is free.

DATA: Final = "past_key_t = Transpose<perm = [2, 0, 1, 3]>(past_key)\n" + (
    "past_value_t = Transpose<perm = [2, 0, 1, 3]>(past_value)\n"
)
ZEROS: Final = """batch = Shape<start = 0, end = 1>(input_ids)
        sizes = Concat<axis = 0>(batch, rest)
        zeros = Expand(nothing, sizes)
        past_key_t = Transpose<perm = [2, 0, 1, 3]>(zeros)
        past_value_t = Identity(past_key_t)"""
INDICES: Final = """new = Shape<start = 1, end = 2>(input_ids)
        new0 = Squeeze(new)
        steps = Range(zero, new0, step)
        slots = Add(steps, start)
        indices = Unsqueeze(slots, minus_one)
        value_indices = Identity(indices)"""
WRITE: Final = """k_t = Transpose<perm = [2, 0, 1, 3]>(k)
        v_t = Transpose<perm = [1, 0, 2, 3]>(v1)
        key_t = ScatterND(past_key_t, indices, k_t)
        value_t = ScatterND(past_value_t, value_indices, v_t)"""
ATTENTION: Final = """present_key = Transpose<perm = [1, 2, 0, 3]>(key_t)
        present_value = Transpose<perm = [1, 2, 0, 3]>(value_t)
        kt = Transpose<perm = [0, 1, 3, 2]>(present_key)
        s0 = MatMul(q, kt)
        s1 = Mul(s0, quarter)
        s2 = Where(mask, s1, lowest)
        p = Softmax<axis = -1>(s2)
        o = MatMul(p, present_value)
        o1 = Transpose<perm = [0, 2, 1, 3]>(o)
        merged = Reshape(o1, merged_shape)"""
PASTS: Final = "float[B, 2, M, 16] past_key, float[B, 2, M, 16] past_value"
PRESENTS: Final = "float[B, 2, M, 16] present_key, float[B, 2, M, 16] present_value"
OTHERS: Final = "bool[B, 1, T, M] mask, int64 start"


def written(
    *,
    data: str = DATA,
    indices: str = INDICES,
    write: str = WRITE,
    attention: str = ATTENTION,
    inputs: str = f"{OTHERS}, {PASTS}",
    outputs: str = PRESENTS,
) -> ir.Model:
    model = decoder("\n".join([data, indices, write, attention]), inputs=inputs, outputs=outputs)
    rest = ir.tensor(np.array([2, 12, 16], np.int64), name="rest")
    model.graph.register_initializer(
        ir.Value(name="rest", type=ir.TensorType(rest.dtype), shape=rest.shape, const_value=rest)
    )
    return model


def run(
    model: ir.Model,
    chunks: Sequence[int],
    *,
    library: bool = False,
    again: tuple[int, int, Array] | None = None,
) -> Array:
    """Logits ``[2, total, vocabulary]``, caches of 12 slots fed back.

    Args:
        model: original or converted.
        chunks: tokens of each call.
        library: whether to run the kernels.
        again: first and last slot and the mask of one more call.
    """
    made = session(model, library=library)
    ids = np.random.default_rng(5).integers(0, TOKENS, (2, 12))
    starts = {entry.name: entry.shape for entry in made.get_inputs() if "start" in entry.name}
    edges = [
        (begin, end, np.tile(np.arange(12) <= np.arange(begin, end)[:, None], (2, 1, 1, 1)))
        for begin, end in pairwise((0, *np.cumsum(chunks)))
    ]
    calls = (
        {"input_ids": ids[:, begin:end], "mask": mask}
        | {name: np.full(shape, begin) for name, shape in starts.items()}
        for begin, end, mask in (*edges, *([again] if again else []))
    )
    return fed_back(made, calls, caches_of(made, 2, 12))


STARTS: Final[dict[str, Callable[[], ir.Model]]] = {
    "a number": written,
    "a list of one": lambda: written(inputs=f"bool[B, 1, T, M] mask, int64[1] start, {PASTS}"),
    "start first": lambda: written(indices=INDICES.replace("(steps, start)", "(start, steps)")),
    "reshaped start": lambda: written(
        indices=INDICES.replace("slots =", "begin = Reshape(start, one)\n slots =").replace(
            "(steps, start)", "(steps, begin)"
        )
    ),
    "rows expanded to what they are": lambda: written(
        write=WRITE.replace("(past_key_t, indices, k_t)", "(past_key_t, indices, k_e)").replace(
            "v_t =", "k_s = Shape(k_t)\n k_e = Expand(k_t, k_s)\n v_t ="
        )
    ),
}


@pytest.mark.parametrize("form", STARTS)
def test_converted_form_agrees(form: str) -> None:
    model = STARTS[form]()
    convert(model, "raw")

    expected = run(STARTS[form](), (5, 1, 3, 1))
    found = run(model, (5, 1, 3, 1), library=True)
    assert np.abs(found - expected).max() < CLOSE * np.abs(expected).max()
    # The harness feeds caches back as it should: all tokens at once give the same.
    at_once = run(STARTS[form](), (10,))
    assert np.abs(expected - at_once).max() < CLOSE * np.abs(at_once).max()


FORMS: Final[dict[str, Callable[[], ir.Model]]] = {
    "MatMul": written,
    "a float that is added": lambda: written(
        attention=ATTENTION.replace(
            "s2 = Where(mask, s1, lowest)",
            "bias = Where(mask, nothing, lowest)\ns2 = Add(s1, bias)",
        ).replace("kt =", "kt =")
    ),
    "MultiHeadAttention": lambda: written(
        attention="""present_key = Transpose<perm = [1, 2, 0, 3]>(key_t)
        present_value = Transpose<perm = [1, 2, 0, 3]>(value_t)
        key_r = Transpose<perm = [0, 2, 1, 3]>(present_key)
        value_r = Transpose<perm = [0, 2, 1, 3]>(present_value)
        key_flat = Reshape(key_r, merged_shape)
        value_flat = Reshape(value_r, merged_shape)
        bias = Where(mask, nothing, lowest)
        merged = com.microsoft.MultiHeadAttention<num_heads = 2>
            (q0, key_flat, value_flat, , , bias)"""
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_behind_those_just_written_are_seen_where_the_mask_shows_them(form: str) -> None:
    """Two of eight tokens are verified again, by what is cached behind them too."""
    seen = np.arange(12) < 8
    again = (3, 5, np.tile(seen, (2, 1, 2, 1)))

    expected = run(FORMS[form](), (8,), again=again)
    model = FORMS[form]()
    convert(model, "raw")
    found = run(model, (8,), library=True, again=again)

    assert np.abs(found - expected).max() < CLOSE * np.abs(expected).max()
    alone = run(FORMS[form](), (8,), again=(3, 5, again[2] & (np.arange(12) < 5)))
    assert np.abs(alone - expected).max() > 100 * CLOSE  # the rows matter


def test_one_token_needs_no_range() -> None:
    """Traced with one token: the indices are the number itself."""
    indices = """indices = Unsqueeze(start, first_two)
        value_indices = Identity(indices)"""
    one = f"{OTHERS}, {PASTS}".replace("T,", "1,")

    def make() -> ir.Model:
        model = written(indices=indices, inputs=one)
        model.graph.inputs[0].shape = ir.Shape(["B", 1])
        return model

    model = make()
    convert(model, "raw")
    expected, found = run(make(), (1, 1, 1)), run(model, (1, 1, 1))
    assert np.abs(found - expected).max() < CLOSE * np.abs(expected).max()


def test_a_first_prompt_that_starts_from_zeros() -> None:
    """It takes no caches, and returns ones of the full capacity.

    Its mask may show slots behind the rows that it writes; they hold zeros.
    """

    def make() -> ir.Model:
        return written(data=ZEROS, inputs=OTHERS, outputs=PRESENTS.replace("M", "12"))

    model = make()
    plan = convert(model, "raw")
    again = (0, 5, np.tile(np.arange(12) < 9, (2, 1, 5, 1)))
    expected = run(make(), (5,), again=again)
    found = run(model, (5,), library=True, again=again)
    assert np.abs(found - expected).max() < CLOSE * np.abs(expected).max()
    assert plan.layers[0].key.past is None
    assert [value.shape[2] for value in model.graph.outputs[1:]] == [12, 12]


REFUSALS: Final[dict[str, tuple[Callable[[], ir.Model], str]]] = {
    "positions chosen by the caller": (
        lambda: written(
            indices="indices = Unsqueeze(slots, minus_one)\nvalue_indices = Identity(indices)",
            inputs=f"bool[B, 1, T, M] mask, int64[T] slots, {PASTS}",
        ),
        "does not prove that they follow each other",
    ),
    "every other slot": (
        lambda: written(indices=INDICES.replace("zero, new0, step", "zero, new0, two")),
        "does not prove that they follow each other",
    ),
    "slots from one on": (
        lambda: written(indices=INDICES.replace("zero, new0, step", "step, new0, step")),
        "does not prove that they follow each other",
    ),
    "steps counted twice": (
        lambda: written(indices=INDICES.replace("(steps, start)", "(steps, steps)")),
        "does not prove that they follow each other",
    ),
    "a start of every sequence": (
        lambda: written(inputs=f"bool[B, 1, T, M] mask, int64[T] start, {PASTS}"),
        "does not prove that they follow each other",
    ),
    "keys and values apart": (
        lambda: written(
            indices=INDICES.replace(
                "value_indices = Identity(indices)",
                "others = Add(steps, other_start)\nvalue_indices = Unsqueeze(others, minus_one)",
            ),
            inputs=f"{OTHERS}, int64 other_start, {PASTS}",
        ),
        "written to different slots",
    ),
    "slots that nothing hides": (
        lambda: written(attention=ATTENTION.replace("Where(mask, s1, lowest)", "Identity(s1)")),
        "nothing hides the slots of the cache that hold no key",
    ),
    "added to what is there": (
        lambda: written(write=WRITE.replace("ScatterND", 'ScatterND<reduction = "add">')),
        "adds to what is there",
    ),
    "a past that is computed": (
        lambda: written(
            data=DATA.replace("(past_key)", "(doubled)").replace(
                "past_key_t =", "doubled = Add(past_key, past_key)\npast_key_t =", 1
            )
        ),
        "does not continue a graph input",
    ),
    "a constant that is not zero": (
        lambda: written(
            data=ZEROS.replace("nothing", "quarter"),
            inputs=OTHERS,
            outputs=PRESENTS.replace("M", "12"),
        ),
        "the cache has become a constant",
    ),
    "zeros of unknown size": (
        lambda: written(
            data=ZEROS.replace("Concat<axis = 0>(batch, rest)", "Identity(cache_shape)"),
            inputs=f"{OTHERS}, int64[4] cache_shape",
        ),
        "does not declare how many tokens",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses_with_a_reason(case: str) -> None:
    make, reason = REFUSALS[case]

    assert_refused(make(), reason)
