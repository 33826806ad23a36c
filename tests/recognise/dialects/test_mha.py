"""Dialect mha: what transformers' and genai's exporters make of it, its own caches, refusals.

The oracle is the original itself in ONNX Runtime: with ``raw`` caches a converted model must agree
with it but for float noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import onnx_ir as ir
import pytest

from tests.decoders.onelayer import CACHES, TOKENS, assert_refused, decoder
from tests.decoders.running import NUMPY, Array, convert, load, session
from tq_onnx.recognise.match import recognise

CLOSE: Final = 1e-5
HALF: Final = 2e-3
"""Noise of float16, relative to the largest logit."""

Feeds = dict[str, Array]


# Real exports: hidden heads repeated outside, a bias for the mask.


def run_export(
    name: str, chunks: Sequence[int], *, padding: int = 0, preset: str | None, library: bool = False
) -> Array:
    """Logits ``[2, total, vocabulary]`` of random tokens, caches fed back."""
    model = load(name)
    if preset is not None:
        convert(model, preset)
    made = session(model, library=library)
    rng = np.random.default_rng(3)
    ids = rng.integers(3, TOKENS, (2, 12))
    kept = np.ones((2, 12), np.int64)
    kept[0, :padding] = 0
    positions = np.maximum(np.cumsum(kept, axis=1) - 1, 0)
    caches: Feeds = {
        entry.name: np.zeros((2, 2, 0, _width(entry.shape[3])), NUMPY[entry.type])
        for entry in made.get_inputs()
        if "past_key_values" in entry.name
    }
    logits, begin = [], 0
    for chunk in chunks:
        end = begin + chunk
        feeds = {
            "input_ids": ids[:, begin:end],
            "attention_mask": kept[:, :end],
            "position_ids": positions[:, begin:end],
            **caches,
        }
        named = [entry.name for entry in made.get_inputs()]
        results = made.run(None, {key: value for key, value in feeds.items() if key in named})
        for entry, result in zip(made.get_outputs(), results, strict=True):
            name = entry.name.replace("output.", "input.").replace("present", "past_key_values")
            if name in caches:
                caches[name] = result
            if name == "logits":
                logits.append(np.asarray(result, np.float64))
        begin = end
    return np.concatenate(logits, axis=1)


def _width(dim: int | str) -> int:
    return int(dim) if str(dim).isdigit() else 16


@pytest.mark.parametrize("name", ["hf-ortcuda-decode", "hf-ortcuda-prefill", "genai-cpu-fp16"])
def test_recognises_every_layer_of_an_export(name: str) -> None:
    recognition = recognise(load(name))

    assert recognition.misses == ()
    assert [site.layer for site in recognition.sites] == [0, 1]
    for site in recognition.sites:
        assert site.dialect == "mha"
        assert (site.num_heads, site.kv_num_heads, site.head_size) == (4, 2, 16)
        assert site.scale == pytest.approx(0.25)
        assert (site.causal, site.has_bias) == (False, True)
        assert (site.key.past is None) == name.endswith("prefill")


@pytest.mark.parametrize("padding", [0, 3])
def test_converted_export_agrees(padding: int) -> None:
    chunks = (7, 1, 3, 1)
    expected = run_export("hf-ortcuda-decode", chunks, padding=padding, preset=None)
    found = run_export("hf-ortcuda-decode", chunks, padding=padding, preset="raw", library=True)

    real = np.ones(expected.shape[:2], bool)
    real[0, :padding] = False
    assert np.abs(found - expected)[real].max() < CLOSE * np.abs(expected[real]).max()


@pytest.mark.parametrize("padding", [0, 3])
def test_converted_first_prompt_agrees(padding: int) -> None:
    name = "hf-ortcuda-prefill"
    expected = run_export(name, (7,), padding=padding, preset=None)
    found = run_export(name, (7,), padding=padding, preset="raw", library=True)

    real = np.ones(expected.shape[:2], bool)
    real[0, :padding] = False
    assert np.abs(found - expected)[real].max() < CLOSE * np.abs(expected[real]).max()


def test_float16_export_agrees_with_its_own_first_prompt() -> None:
    """The original fails in ONNX Runtime at its second call; one call is what it can do.

    Its mask is made for a first prompt or for one token.
    """
    expected = run_export("genai-cpu-fp16", (10,), preset=None)
    found = run_export("genai-cpu-fp16", (7, 1, 1, 1), preset="raw", library=True)

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
    inputs = {entry.name: entry for entry in made.get_inputs()}
    caches = {
        name: np.zeros((2, 2, 0, entry.shape[3]), NUMPY[entry.type])
        for name, entry in inputs.items()
        if name.startswith("past")
    }
    logits, begin = [], 0
    for chunk in chunks:
        end = begin + chunk
        feeds = {"input_ids": ids[:, begin:end], **caches}
        if "bias" in inputs:
            heads = inputs["bias"].shape[1]
            feeds["bias"] = biases[:, :heads, begin:end, :end].astype(np.float32)
        result, key, value = made.run(["logits", "present_key", "present_value"], feeds)
        if caches:
            caches = {"past_key": key, "past_value": value}
        logits.append(np.asarray(result, np.float64))
        begin = end
    return np.concatenate(logits, axis=1)


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
    "biases of the projections": (
        lambda: inside(inputs=f"{INPUTS}, float[96] biases", **{'v0, "", ""': 'v0, biases, ""'}),
        "biases of the projections",
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
