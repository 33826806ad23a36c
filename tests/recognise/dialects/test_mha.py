"""Dialect mha: what transformers' and genai's exporters make of it, its own caches, refusals.

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

from tests.decoders.onelayer import CACHES, TOKENS, assert_refused, decoder
from tests.decoders.running import (
    Array,
    Decoder,
    batch,
    caches_of,
    convert,
    fed_back,
    load,
    session,
)
from tq_onnx.conversion.biases import find_biases
from tq_onnx.recognise.match import recognise

CLOSE: Final = 1e-5
HALF: Final = 2e-3
"""Noise of float16, relative to the largest logit."""


def test_float16_export_agrees_with_its_own_first_prompt() -> None:
    """The original fails in ONNX Runtime at its second call; one call is what it can do.

    Its mask is made for a first prompt or for one token.
    """
    original, model = load("genai-cpu-fp16"), load("genai-cpu-fp16")
    convert(model, "raw")
    data = batch(10, 2)
    expected = Decoder(session(original), 2, head_size=16).run(data, (10,))
    found = Decoder(session(model, library=True), 2).run(data, (7, 1, 1, 1))

    assert np.abs(found - expected).max() < HALF * np.abs(expected).max()


# A decoder of our own.

OPERATOR: Final = "com.microsoft.MultiHeadAttention"
INSIDE: Final = (
    "merged, present_key, present_value = "
    f'{OPERATOR}<num_heads = 2>(q0, k0, v0, "", "", bias, past_key, past_value)'
)
OUTSIDE: Final = f"""present_key = Concat<axis = 2>(past_key, k)
        present_value = Concat<axis = 2>(past_value, v)
        key_bsnd = Transpose<perm = [0, 2, 1, 3]>(present_key)
        value_bsnd = Transpose<perm = [0, 2, 1, 3]>(present_value)
        keys = Reshape(key_bsnd, merged_shape)
        values = Reshape(value_bsnd, merged_shape)
        merged = {OPERATOR}<num_heads = 2>(q0, keys, values, "", "", bias)"""
FIRST: Final = f"""merged = {OPERATOR}<num_heads = 2>(q0, k0, v0, "", "", bias)
        present_key = Transpose<perm = [0, 2, 1, 3]>(k1)
        present_value = Transpose<perm = [0, 2, 1, 3]>(v1)"""
FIRST_INSIDE: Final = (
    f'merged, present_key, present_value = {OPERATOR}<num_heads = 2>(q0, k0, v0, "", "", bias)'
)
BIAS: Final = "float[B, 1, T, S] bias"
INPUTS: Final = f"{BIAS}, {CACHES}"
BIASES: Final = np.random.default_rng(3).normal(0, 20, 96).round(2).tolist()
CAUSAL: Final = "<num_heads = 2, unidirectional = 1>"


def inside(attributes: str = "<num_heads = 2>", inputs: str = INPUTS, **options: str) -> ir.Model:
    body = INSIDE.replace("<num_heads = 2>", attributes)
    for old, new in options.items():
        body = body.replace(old, new)
    return decoder(body, inputs=inputs)


FORMS: Final[dict[str, Callable[[], ir.Model]]] = {
    "cache inside": inside,
    "cache outside": lambda: decoder(OUTSIDE, inputs=INPUTS),
    "scale": lambda: inside("<num_heads = 2, scale = 0.4>"),
    "causal": lambda: inside(CAUSAL),
    "no bias": lambda: inside(inputs=CACHES, bias='""'),
    "causal without bias": lambda: inside(CAUSAL, inputs=CACHES, bias='""'),
    "biases of the projections": lambda: inside(
        **{
            'v0, "", ""': 'v0, biases, ""',
            "merged, present_key": f"biases = Constant<value_floats = {BIASES}>()\n"
            "merged, present_key",
        }
    ),
    "bias of every head": lambda: inside(inputs=INPUTS.replace("[B, 1,", "[B, 2,")),
}
FIRST_PROMPTS: Final[dict[str, Callable[[], ir.Model]]] = {
    "first prompt": lambda: decoder(FIRST, inputs=BIAS),
    "first prompt, causal": lambda: decoder(FIRST.replace("<num_heads = 2>", CAUSAL), inputs=BIAS),
    "first prompt, returned by the operator": lambda: decoder(FIRST_INSIDE, inputs=BIAS),
    "first prompt, turned before it is split": lambda: decoder(
        FIRST.replace("q0, k0, v0", "q0, keys, values").replace(
            "merged", "keys = Reshape(k1, merged_shape)\nvalues = Reshape(v1, merged_shape)\nmerged"
        ),
        inputs=BIAS,
    ),
}


def run(model: ir.Model, chunks: Sequence[int], *, library: bool = False) -> Array:
    made = session(model, library=library)
    rng = np.random.default_rng(5)
    ids = rng.integers(0, TOKENS, (2, 12))
    biases = rng.normal(size=(2, 2, 12, 12))
    heads = next((entry.shape[1] for entry in made.get_inputs() if entry.name == "bias"), 1)
    calls = (
        {"input_ids": ids[:, begin:end], "bias": biases[:, :heads, begin:end, :end]}
        for begin, end in pairwise((0, *np.cumsum(chunks)))
    )
    return fed_back(made, calls, caches_of(made, 2))


@pytest.mark.parametrize("form", [*FORMS, *FIRST_PROMPTS])
def test_converted_form_agrees(form: str) -> None:
    make = {**FORMS, **FIRST_PROMPTS}[form]
    chunks = (5, 1, 3, 1) if form in FORMS else (5,)
    model = make()
    plan = convert(model, "raw")

    expected, found = run(make(), chunks), run(model, chunks, library=True)
    assert plan.layers[0].dialect == "mha"
    assert np.abs(found - expected).max() < CLOSE * np.abs(expected).max()


REFUSALS: Final[dict[str, tuple[Callable[[], ir.Model], str]]] = {
    "biases that are no constant": (
        lambda: inside(inputs=f"{INPUTS}, float[96] biases", **{'v0, "", ""': 'v0, biases, ""'}),
        "biases of the projections are no constant",
    ),
    "biases over a cache from outside": (
        lambda: decoder(OUTSIDE.replace('values, "", ""', 'values, w_v, ""'), inputs=INPUTS),
        "adds biases to keys that are cached already",
    ),
    "a mask of padding": (
        lambda: inside(inputs=f"{INPUTS}, int32[B, S] padding", **{'"", "",': '"", padding,'}),
        "key_padding_mask",
    ),
    "one buffer for past and present": (
        lambda: inside(
            inputs=f"{INPUTS}, int32[1] length", **{"past_value)": "past_value, length)"}
        ),
        "share one buffer",
    ),
    "beam search": (
        lambda: inside(
            inputs=f"{INPUTS}, int32[B, 1, M] beams",
            **{"past_value)": 'past_value, "", beams)'},
        ),
        "searches with beams",
    ),
    "an input from the future": (
        lambda: inside(**{"past_value)": 'past_value, "", "", bias)'}),
        "11 inputs",
    ),
    "an attribute from the future": (
        lambda: inside("<num_heads = 2, novelty = 1>"),
        "attribute novelty",
    ),
    "packed keys and values": (
        lambda: decoder(
            "merged, present_key, present_value = com.microsoft.MultiHeadAttention<num_heads = 2>"
            '(q0, packed, "", "", "", bias, past_key, past_value)',
            inputs=f"{INPUTS}, float[B, T, 2, 2, 16] packed",
        ),
        "packed",
    ),
    "keys of other rank": (
        lambda: inside(**{"(q0, k0, v0": "(q0, k, v"}),
        "not [B, T, H * D]",
    ),
    "no past": (
        lambda: inside(**{"past_key, past_value": '"", ""'}),
        "takes no past, though the model takes caches",
    ),
    "half a past": (
        lambda: inside(**{"past_key, past_value": 'past_key, ""'}),
        "past keys or past values, but not both",
    ),
    "causality over a cache from outside": (
        lambda: decoder(OUTSIDE.replace("<num_heads = 2>", CAUSAL), inputs=INPUTS),
        "has no input for the number of past keys",
    ),
    "a past inside and outside": (
        lambda: decoder(
            OUTSIDE.replace('"", "", bias)', '"", "", bias, other_key, other_value)'),
            inputs=f"{INPUTS}, float[B, 2, P, 16] other_key, float[B, 2, P, 16] other_value",
        ),
        "past besides a cache that is updated outside",
    ),
    "keys for values": (
        lambda: decoder(OUTSIDE.replace("(q0, keys, values,", "(keys, q0, values,"), inputs=INPUTS),
        "not the keys and the values",
    ),
    "heads that nobody repeated": (
        lambda: decoder(OUTSIDE.replace("num_heads = 2", "num_heads = 4"), inputs=INPUTS),
        "4 heads meet 2 key/value heads",
    ),
    "widths that do not fit": (lambda: inside("<num_heads = 3>"), "not a multiple of 3 heads"),
    "a past that is computed": (
        lambda: inside(
            **{
                "merged, present_key": "doubled = Add(past_key, past_key)\nmerged, present_key",
                "bias, past_key": "bias, doubled",
            }
        ),
        "does not continue a graph input",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses_with_a_reason(case: str) -> None:
    make, reason = REFUSALS[case]

    assert_refused(make(), reason)


def test_biases_of_keys_and_values_leave_the_caches() -> None:
    model = FORMS["biases of the projections"]()
    recognition = recognise(model)
    assert recognition.interface is not None
    bias = find_biases(model, recognition).layers[0]
    expected = np.reshape(BIASES, (3, 2, 16))
    assert not bias.reason
    assert np.allclose(bias.key, expected[1]) and np.allclose(bias.value, expected[2])
