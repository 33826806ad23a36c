"""Decoders that were exported with pages (``com.microsoft.PagedAttention``).

The operator has no CPU kernel. The oracle is its schema in numpy, float64, inside of onnx's
reference evaluator, over real pages in a random order.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from tests.decoders.running import EXACT, FIXTURES, Array, session
from tq_onnx.conversion.original import recognise_original
from tq_onnx.conversion.pipeline import convert, prepare
from tq_onnx.conversion.unpaged import load
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.runtime.opening import open_original
from tq_onnx.targets.registry import target_of
from tq_onnx.verification.pages import PagedDecoder
from tq_onnx.verification.verify import verify

EXPORT: Final = FIXTURES / "paged" / "genai-cuda-fp16.onnx"
UNPAGED: Final = FIXTURES / "genai-cpu-fp32.onnx"
"""The same checkpoint, exported without pages."""

HEADS, KV, SIZE, VOCABULARY, POSITIONS = 4, 2, 8, 61, 64
PAGES, SLOTS = 24, 4
CALLS: Final = ({0: 19, 1: 2}, {0: 1, 2: 11, 1: 1}, {1: 15, 2: 1, 3: 1}, {3: 6, 0: 1, 2: 1})
"""New tokens of requests, call by call."""

MODEL: Final = """
<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
decoder (int64[tokens] input_ids, float[pages, slots, 2, 8] past_key,
         float[pages, slots, 2, 8] past_value, int32[requests, most] block_table,
         int32[ends] cumulative_sequence_lengths, int32[requests] past_sequence_lengths,
         int32[3] attention_metadata, int32[chosen] logits_indices)
     => (float[chosen, 61] logits, float[pages, slots, 2, 8] present_key,
         float[pages, slots, 2, 8] present_value)
<float[tokens, 16] x, float[tokens, 64] packed, float[tokens, 32] q, float[tokens, 16] k,
 float[tokens, 16] v, float[tokens, 32] attended, float[tokens, 16] y, int64[2] halves = {-1, 8},
 int64[2] whole = {-1, 16}>
{
        x = Gather(table, input_ids)
        packed = MatMul(x, w)
        q = MatMul(x, w_q)
        k = MatMul(x, w_k)
        v = MatMul(x, w_v)
        attended, present_key, present_value = com.microsoft.PagedAttention<
            num_heads = 4, kv_num_heads = 2 ATTRIBUTES>(
            QKV, past_key, past_value, cumulative_sequence_lengths, past_sequence_lengths,
            block_table, ANGLES, , SINK, NORMS, , , attention_metadata)
        y = MatMul(attended, w_o)
        rows = Gather<axis = 0>(y, logits_indices)
        logits = MatMul(rows, head)
}
"""
WEIGHTS: Final = {
    **{"table": (VOCABULARY, 16), "w": (16, 64), "w_q": (16, 32), "w_k": (16, 16), "w_v": (16, 16)},
    **{
        "w_o": (32, 16),
        "head": (16, VOCABULARY),
        "sinks": (4,),
        "q_weight": (8,),
        "k_weight": (8,),
    },
}
PLAIN: Final = {"ATTRIBUTES": "", "QKV": "q, k, v", "ANGLES": ", ", "SINK": "", "NORMS": ", "}
ROTARY: Final = {"ATTRIBUTES": ", do_rotary = 1", "ANGLES": "cos, sin"}
FORMS: Final[dict[str, dict[str, str]]] = {
    "plain": {},
    "packed": {"QKV": "packed, , "},
    "rotary": ROTARY,
    "packed_rotary": {**ROTARY, "QKV": "packed, , "},
    "interleaved": {**ROTARY, "ATTRIBUTES": ", do_rotary = 1, rotary_interleaved = 1"},
    "half_of_the_head": {**ROTARY, "ANGLES": "cos_half, sin_half"},
    "norms": {**ROTARY, "NORMS": "q_weight, k_weight"},
    "epsilon": {"ATTRIBUTES": ", qk_norm_epsilon = 0.5", "NORMS": "q_weight, k_weight"},
    "sinks": {"SINK": "sinks"},
    "window": {"ATTRIBUTES": ", local_window_size = 3"},
    "softcap": {"ATTRIBUTES": ", softcap = 0.7"},
    "scale": {"ATTRIBUTES": ", scale = 1.5"},
    "defaults": {"ATTRIBUTES": ', is_causal = 1, kv_cache_layout = "SEPARATE", scale = 0.0'},
}


class PagedAttention(OpRun):
    """The schema of the operator: norms, rotation, pages, attention; in float64."""

    op_domain = "com.microsoft"

    def _run(self, query: Array, *inputs: Any, **attributes: Any) -> tuple[Array, ...]:
        slots = [query, *inputs, *[None] * 17]
        bounds, past, table = slots[5:8]
        heads, kv_heads = attributes["num_heads"], attributes["kv_num_heads"]
        caches = [np.array(slots[3]), np.array(slots[4])]
        size = caches[0].shape[-1]
        rows = slots[:3]
        if rows[1] is None:
            rows = np.split(query, [heads * size, (heads + kv_heads) * size], axis=1)
        count = len(query)
        q, k, v = (np.asarray(each, np.float64).reshape(count, -1, size) for each in rows)
        if slots[12] is not None:
            epsilon = attributes.get("qk_norm_epsilon") or 1e-6
            q, k = normed(q, slots[12], epsilon), normed(k, slots[13], epsilon)
        output = np.zeros((count, heads, size))
        sinks = np.full(heads, -np.inf) if slots[11] is None else slots[11]
        window = attributes.get("local_window_size") or -1
        softcap = attributes.get("softcap") or 0.0
        scale = attributes.get("scale") or size**-0.5
        for request, (begin, end) in enumerate(pairwise(bounds)):
            for token in range(begin, end):
                place = past[request] + token - begin
                if attributes.get("do_rotary"):
                    angles = slots[8][place], slots[9][place]
                    for each in (q, k):
                        turn(each[token], *angles, bool(attributes.get("rotary_interleaved")))
                page, slot = table[request, place // SLOTS], place % SLOTS
                caches[0][page, slot], caches[1][page, slot] = k[token], v[token]
                first = max(0, place + 1 - window) if window > 0 else 0
                seen = [(table[request, at // SLOTS], at % SLOTS) for at in range(first, place + 1)]
                keys, values = (np.stack([cache[at] for at in seen]) for cache in caches)
                for head in range(heads):
                    scores = scale * keys[:, head // (heads // kv_heads)] @ q[token, head]
                    if softcap:
                        scores = softcap * np.tanh(scores / softcap)
                    top = max(scores.max(), sinks[head])
                    weights = np.exp(scores - top)
                    weights /= weights.sum() + np.exp(sinks[head] - top)
                    output[token, head] = weights @ values[:, head // (heads // kv_heads)]
        return output.reshape(count, -1).astype(query.dtype), *caches


def normed(rows: Array, weight: Array, epsilon: float) -> Array:
    root = np.sqrt((rows**2).mean(-1, keepdims=True) + epsilon)
    result: Array = rows / root * weight
    return result


def turn(rows: Array, cos: Array, sin: Array, interleaved: bool) -> None:
    half = len(cos)
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if interleaved
        else (slice(0, half), slice(half, 2 * half))
    )
    left, right = rows[:, first].copy(), rows[:, second].copy()
    rows[:, first] = left * cos - right * sin
    rows[:, second] = left * sin + right * cos


def paged(**changes: str) -> onnx.ModelProto:
    """A decoder of one layer as the builder writes it, with random weights."""
    text = MODEL
    for part, instead in (
        changes | {name: changes.get(name, PLAIN[name]) for name in PLAIN}
    ).items():
        text = text.replace(part, instead)
    proto = onnx.parser.parse_model(text)
    rng = np.random.default_rng(5)
    angles = np.outer(np.arange(POSITIONS), [1.0, 0.3, 0.1, 0.03])
    tables = {"cos": np.cos(angles), "sin": np.sin(angles)}
    tables |= {f"{name}_half": table[:, :2] for name, table in tables.items()}
    tables |= {name: rng.normal(size=shape) * 0.7 for name, shape in WEIGHTS.items()}
    used = {name for node in proto.graph.node for name in node.input}
    for name in sorted(used & set(tables)):
        tensor = onnx.numpy_helper.from_array(tables[name].astype(np.float32), name)
        proto.graph.initializer.append(tensor)
    return proto


def saved(proto: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "paged.onnx"
    onnx.save(proto, path)
    return path


def texts() -> dict[int, list[Array]]:
    rng = np.random.default_rng(11)
    return {
        index: [rng.integers(0, VOCABULARY, call.get(index, 0)) for call in CALLS]
        for index in range(len(CALLS))
    }


def expected(proto: onnx.ModelProto) -> Array:
    """Logits after the tokens of each call, by request, of the decoder as it was exported."""
    evaluator = ReferenceEvaluator(proto, new_ops=[PagedAttention])
    rng = np.random.default_rng(7)
    table = rng.permutation(PAGES).reshape(len(CALLS), -1).astype(np.int32)
    caches = {name: rng.normal(size=(PAGES, SLOTS, KV, SIZE)).astype(np.float32) for name in "kv"}
    lengths, found, tokens = dict.fromkeys(range(len(CALLS)), 0), [], texts()
    for number, call in enumerate(CALLS):
        bounds = np.cumsum([0, *call.values()]).astype(np.int32)
        feeds = {
            "input_ids": np.concatenate([tokens[index][number] for index in call]),
            "past_key": caches["k"],
            "past_value": caches["v"],
            "block_table": table[list(call)],
            "cumulative_sequence_lengths": bounds,
            "past_sequence_lengths": np.array([lengths[index] for index in call], np.int32),
            "attention_metadata": np.zeros(3, np.int32),
            "logits_indices": bounds[1:] - 1,
        }
        logits, caches["k"], caches["v"] = evaluator.run(None, feeds)
        found.append(logits)
        for index, count in call.items():
            lengths[index] += count
    return np.concatenate(found)


@pytest.mark.parametrize("form", FORMS)
def test_packed_requests_get_the_logits_of_the_original(form: str, tmp_path: Path) -> None:
    proto = paged(**FORMS[form])
    target = target_of("paged", block_size=16)
    prepared = prepare(saved(proto, tmp_path), preset="raw", target=target)
    decoder = PagedDecoder(session(prepared.loaded.model), prepared.plan, blocks=PAGES)
    tokens = texts()
    found = [
        decoder.run({index: tokens[index][number] for index in call})
        for number, call in enumerate(CALLS)
    ]
    wanted = expected(proto)
    assert np.abs(np.concatenate(found) - wanted).max() <= EXACT * np.abs(wanted).max()


def test_each_form_is_another_function() -> None:
    """Or the test above would not see a feature that is lost."""
    found = {form: expected(paged(**changes)) for form, changes in FORMS.items()}
    alike = {
        frozenset((one, other))
        for one in found
        for other in found
        if one < other and np.allclose(found[one], found[other], rtol=0, atol=1e-3)
    }
    assert alike == {frozenset(("defaults", "plain"))}


def test_an_export_is_the_unpaged_export_of_its_checkpoint(tmp_path: Path) -> None:
    original, unpaged = (recognise_original(load(path), path) for path in (EXPORT, UNPAGED))
    assert not original.recognition.misses
    sites, others = (each.recognition.sites for each in (original, unpaged))
    for site, other in zip(sites, others, strict=True):
        for name in ("dialect", "num_heads", "kv_num_heads", "head_size", "scale", "causal"):
            assert getattr(site, name) == getattr(other, name)

    # Weights are rounded to float16 in one of them.
    ids = np.random.default_rng(3).integers(0, 97, (1, 24))
    logits = []
    for path in (EXPORT, UNPAGED):
        decoder = open_original(path).decoder()
        logits.append(
            np.concatenate([decoder.prefill(ids[:, :20])[0], decoder.prefill(ids[:, 20:])[0]])
        )
    assert np.abs(logits[0] - logits[1]).max() <= 1e-2 * np.abs(logits[1]).max()

    output = tmp_path / "paged.onnx"
    convert(EXPORT, output, preset="int4", target=target_of("paged", block_size=16))
    report = verify(EXPORT, output, 200, source="random", threads=1, quick=True)
    assert report.holds, report.checks
    assert any("has no kernel for CPUs" in warning for warning in report.warnings)


def with_attribute(text: str) -> dict[str, str]:
    return {"ATTRIBUTES": f", {text}"}


OUTPUTS: Final = "present_value)"
LAST: Final = "logits = MatMul(rows, head)"
ROWS: Final = "rows = Gather<axis = 0>(y, logits_indices)"
PRESENTS: Final = "attended, present_key, present_value = com"
LENGTHS: Final = "cumulative_sequence_lengths, past_sequence_lengths,\n            block_table"
REFUSED: Final[dict[str, tuple[dict[str, str], str]]] = {
    "latent": (with_attribute('kv_cache_layout = "LATENT"'), "latent vectors"),
    "not causal": (with_attribute("is_causal = 0"), "the attribute is_causal is 0"),
    "turned cache": (with_attribute('qk_rotation = "HADAMARD"'), "qk_rotation is not known"),
    "rotary offset": (with_attribute("rotary_offset = 8"), "rotary_offset is 8"),
    "quantised": (with_attribute('k_quant_type = "PER_TENSOR"'), "k_quant_type is"),
    "scales": ({"NORMS, , ,": ", , sinks, ,"}, "quantised already (k_scale)"),
    "slots of its own": ({"ANGLES, , SINK": ", , logits_indices, "}, "slot_mapping"),
    "one norm": ({"NORMS": "q_weight, "}, "of the inputs 12 and 13 it has only one"),
    "computed lengths": (
        {
            LENGTHS: LENGTHS.replace("past_", "other_"),
            "x = G": "other_sequence_lengths = Identity(past_sequence_lengths)\n x = G",
        },
        "input 6 of the operator is no input of the model",
    ),
    "two meanings": (
        {LENGTHS: LENGTHS.replace("past_sequence", "cumulative_sequence")},
        "input 6 of the operator is no input of the model",
    ),
    # As the builder chooses between tables of short and of long texts.
    "a table read elsewhere": (
        {
            LAST: "sizes = Shape(block_table)\n size = Cast<to = 1>(sizes)\n"
            "sum = ReduceSum(size)\n more = Add(rows, sum)\n logits = MatMul(more, head)"
        },
        "block_table is read by Shape",
    ),
    "positions": (
        {
            "(int64[tokens] input_ids,": "(int64[tokens] input_ids, int64[tokens] position_ids,",
            "x = G": "x0 = Gather(table, position_ids)\n x = G",
            "MatMul(x, w_v)": "MatMul(x0, w_v)",
        },
        "the model takes position_ids",
    ),
    "no caches returned": (
        {
            PRESENTS: "attended = com",
            ", float[pages, slots, 2, 8] present_key,\n         "
            "float[pages, slots, 2, 8] present_value)": ")",
        },
        "does not return its caches",
    ),
    "a cache read elsewhere": (
        {
            "y = MatMul(attended, w_o)": "y0 = MatMul(attended, w_o)\n size = Size(past_key)\n"
            "number = Cast<to = 1>(size)\n y = Add(y0, number)"
        },
        "past_key is read more than once",
    ),
    "more outputs": ({OUTPUTS: f"{OUTPUTS[:-1]}, float[tokens, 16] y)"}, "y besides its caches"),
    "ids read elsewhere": (
        {
            "y = MatMul(attended, w_o)": "y0 = MatMul(attended, w_o)\n"
            "number = Cast<to = 1>(input_ids)\n sum = ReduceSum(number)\n y = Add(y0, sum)"
        },
        "input_ids is read by Cast",
    ),
    "sizes of the ids": (
        {
            "y = MatMul(attended, w_o)": "y0 = MatMul(attended, w_o)\n size = Shape(input_ids)\n"
            "number = Cast<to = 1>(size)\n y = Add(y0, number)"
        },
        "input_ids is read by Shape",
    ),
    "rows that are half of a token": (
        {
            ROWS: "y1 = Reshape(y, halves)\n rows1 = Gather<axis = 0>(y1, logits_indices)\n"
            "rows = Reshape(rows1, whole)"
        },
        "logits_indices chooses",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_to_mean_the_same_is_refused(case: str, tmp_path: Path) -> None:
    changes, reason = REFUSED[case]
    proto = paged(**changes)
    with pytest.raises(UnsupportedModelError, match="was exported with pages") as refusal:
        load(saved(proto, tmp_path))
    assert reason in str(refusal.value)
    assert "use_paged_attention" in str(refusal.value)
