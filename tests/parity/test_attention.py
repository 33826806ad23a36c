"""TurboQuantDequantAttention: every backend gives the oracle's attention over the same bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.parity.backends import LEVELS, run
from tests.parity.compare import check_attention
from tests.parity.graphs import (
    KEY_LAYER,
    VALUE_LAYER,
    Attention,
    attention_model,
    codec_of,
    rotation,
)
from tests.parity.test_encode import as_dtype
from tq_onnx.codec import reference
from tq_onnx.codec.codebook import Codebook, lloyd_max
from tq_onnx.codec.rotated import LLOYD_MAX
from tq_onnx.codec.spec import KINDS

# The evaluator computes in numpy, which warns where the operators mean to overflow.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

NAN_SCALE = [0x00, 0x7E]
PLAIN = Attention()
B = Attention(has_bias=True)
SINKS = Attention(has_bias=True, has_sink=True)
PADDED = Attention(has_left_padding=True)


@dataclass(frozen=True)
class Case:
    """One call of the operator."""

    graph: Attention = PLAIN
    kv_heads: int = 2
    group: int = 2
    new: int = 1
    past: tuple[int, ...] = (16,)
    batch: int = 1
    capacity: int = 0  # 0: exactly as many slots as there are tokens
    bias: str = ""
    sharpness: float = 1.0
    left_padding: tuple[int, ...] = ()


CASES: dict[str, Case] = {
    # Codecs and head sizes, decode and prompt.
    **{
        f"{head_size}-{bits}-bits-T{new}": Case(
            Attention(head_size, bits, bits), new=new, past=(past,)
        )
        for head_size in (64, 80, 128)
        for bits in KINDS[LLOYD_MAX].bits
        for new, past in ((1, 40), (17, 0))
    },
    "k4-v2": Case(Attention(128, 4, 2), new=2, past=(30,)),
    "k3-v4": Case(Attention(64, 3, 4), new=17, past=(9,)),
    "24": Case(Attention(24, 3, 4), new=3, past=(20,)),
    "256": Case(Attention(256, 4, 4, scale=0.0625), new=2, past=(20,)),
    # Lengths.
    "T1-no-past": Case(past=(0,)),
    "T2": Case(new=2, past=(5,)),
    "T17-past": Case(new=17, past=(40,)),
    "T128": Case(new=128, past=(0,), batch=2),
    "T128-past": Case(Attention(128), new=128, past=(100,)),
    "S1100": Case(Attention(128, 4, 4), group=4, past=(1099,)),
    "S700-T2": Case(Attention(64, 3, 3), group=5, new=2, past=(700,)),
    # Grouped queries.
    **{
        f"group-{group}": Case(Attention(128), group=group, new=2, past=(19,))
        for group in (1, 2, 4, 5, 8)
    },
    # Fixed capacity; what lies behind the last token is garbage.
    "fixed": Case(capacity=64, past=(20,)),
    "fixed-T17": Case(capacity=64, new=17, past=(20,)),
    "own-lengths": Case(batch=3, new=2, past=(14, 0, 5)),
    "own-lengths-fixed": Case(batch=3, new=17, past=(40, 0, 5), capacity=64),
    "own-lengths-bidirectional": Case(
        Attention(causal=False), batch=3, new=3, past=(14, 0, 5), capacity=20
    ),
    # Attributes.
    "not-causal": Case(Attention(causal=False), new=17, past=(8,)),
    "window-1": Case(Attention(sliding_window=1), new=5, past=(8,)),
    "window-8": Case(Attention(128, sliding_window=8), new=17, past=(30,)),
    "window-beyond": Case(Attention(sliding_window=1000), new=2, past=(30,)),
    "window-not-causal": Case(Attention(causal=False, sliding_window=4), new=9, past=(6,)),
    "softcap": Case(Attention(softcap=5.0), new=3, past=(30,), sharpness=8),
    "softcap-window-bias": Case(
        replace(B, softcap=5.0, sliding_window=8), new=17, past=(20,), bias="full"
    ),
    "sharp": Case(Attention(128), new=4, past=(300,), sharpness=6),
    "scale": Case(Attention(scale=0.3), past=(30,)),
    # Bias.
    "bias-full": Case(B, batch=2, new=3, past=(12,), bias="full"),
    "bias-heads": Case(B, batch=2, new=3, past=(12,), bias="heads"),
    "bias-row": Case(B, batch=2, new=3, past=(12,), bias="row"),
    "bias-column": Case(B, batch=2, new=3, past=(12,), bias="column"),
    "bias-longer": Case(B, batch=2, new=3, past=(12, 4), bias="longer", capacity=30),
    "bias-not-causal": Case(replace(B, causal=False), new=17, past=(3,), bias="full"),
    "left-padding": Case(B, batch=3, new=2, past=(20,), bias="left-padding"),
    "left-padding-prompt": Case(B, batch=3, new=17, past=(0,), bias="left-padding"),
    # The same by their number: in every form of a task, also where some queries are padding.
    "padded-T1": Case(PADDED, batch=3, past=(40,), left_padding=(7, 0, 41)),
    "padded-T2": Case(PADDED, batch=2, new=2, group=5, past=(20, 9), left_padding=(3,)),
    "padded-T17": Case(PADDED, batch=3, new=17, past=(0,), left_padding=(3, 16, 17)),
    "padded-T128": Case(
        replace(PADDED, head_size=128), batch=3, new=128, past=(0,), left_padding=(5, 0, 100)
    ),
    "padded-T128-past": Case(PADDED, batch=2, new=128, past=(100,), left_padding=(70, 130)),
    "padded-S1100": Case(PADDED, batch=2, group=4, past=(1099,), left_padding=(600, 3)),
    "padded-fixed": Case(PADDED, batch=2, new=3, past=(20, 5), capacity=64, left_padding=(4, 60)),
    "padded-window": Case(
        replace(PADDED, sliding_window=8), batch=2, new=17, past=(9,), left_padding=(12, 0)
    ),
    "padded-not-causal": Case(
        replace(PADDED, causal=False), batch=2, new=9, past=(6,), left_padding=(8, 0)
    ),
    "padded-bias-sink-softcap": Case(
        replace(SINKS, has_left_padding=True, softcap=5.0),
        batch=2,
        new=5,
        past=(30,),
        bias="full",
        left_padding=(32, 3),
    ),
    "padded-raw": Case(
        Attention(64, 32, 32, has_left_padding=True),
        batch=2,
        new=17,
        past=(20,),
        left_padding=(25, 3),
    ),
    **{
        f"padded-{dtype}": Case(
            replace(PADDED, dtype=dtype), batch=2, new=17, past=(3,), left_padding=(5, 1)
        )
        for dtype in ("float16", "bfloat16")
    },
    "hidden-rows": Case(B, batch=2, new=5, past=(6,), bias="hidden-rows"),
    "all-hidden": Case(B, new=2, past=(6,), bias="all-hidden"),
    # Sinks: in both forms of a task, over several chunks, with every other attribute, and alone.
    "sink-T1": Case(SINKS, batch=2, group=3, past=(40, 7), bias="row"),
    "sink-T17": Case(SINKS, new=17, past=(9,), bias="full"),
    "sink-T128-past": Case(replace(SINKS, head_size=128), new=128, past=(100,), bias="row"),
    "sink-S1100": Case(replace(SINKS, head_size=128), group=4, past=(1099,), bias="zero"),
    "sink-S1100-window": Case(
        replace(SINKS, sliding_window=600), batch=2, group=2, past=(1099, 300), bias="zero"
    ),
    "sink-window-softcap": Case(
        replace(SINKS, sliding_window=8, softcap=5.0), new=17, past=(30,), bias="full", sharpness=8
    ),
    "sink-not-causal": Case(replace(SINKS, causal=False), new=5, past=(6,), bias="full"),
    "sink-hidden-rows": Case(SINKS, batch=2, new=5, past=(6,), bias="hidden-rows"),
    "sink-all-hidden": Case(SINKS, new=2, past=(6,), bias="all-hidden"),
    "sink-raw": Case(replace(SINKS, key_bits=32, value_bits=32), new=2, past=(60,), bias="full"),
    **{
        f"sink-{dtype}-T{new}": Case(
            replace(SINKS, head_size=128, dtype=dtype), new=new, past=(past,), bias="full"
        )
        for dtype in ("float16", "bfloat16")
        for new, past in ((1, 60), (17, 5))
    },
    # Raw: alone, beside codes, and in every form that a kernel tells apart.
    "raw-T1": Case(Attention(64, 32, 32), past=(40,)),
    "raw-24-T17": Case(Attention(24, 32, 32), new=17, past=(9,)),
    "raw-80-group": Case(Attention(80, 32, 32), group=5, new=2, past=(150,)),
    "raw-512": Case(Attention(512, 32, 32, scale=0.04), new=3, past=(20,)),
    "raw-T128-past": Case(Attention(128, 32, 32), new=128, past=(100,)),
    "raw-S1100": Case(Attention(128, 32, 32), group=4, past=(1099,)),
    "raw-keys": Case(Attention(64, 32, 4), new=3, past=(70,)),
    "raw-values": Case(Attention(128, 3, 32), new=3, past=(70,)),
    "raw-own-lengths-fixed": Case(
        Attention(64, 32, 32), batch=3, new=17, past=(40, 0, 5), capacity=64
    ),
    "raw-window-softcap": Case(
        Attention(64, 32, 32, sliding_window=8, softcap=5.0), new=17, past=(30,), sharpness=8
    ),
    "raw-not-causal": Case(Attention(64, 32, 32, causal=False), new=17, past=(8,)),
    "raw-left-padding": Case(
        Attention(64, 32, 32, has_bias=True), batch=3, new=17, past=(20,), bias="left-padding"
    ),
    "raw-all-hidden": Case(
        Attention(64, 32, 32, has_bias=True), new=2, past=(6,), bias="all-hidden"
    ),
    **{
        f"raw-{key}-{value}-{dtype}-T{new}": Case(
            Attention(128, key, value, dtype=dtype), new=new, past=(past,), capacity=90
        )
        for dtype in ("float16", "bfloat16")
        for key, value in ((16, 16), (16, 2), (4, 16))
        for new, past in ((1, 60), (17, 5))
    },
    # Element types.
    **{
        f"{dtype}-T{new}{'-' * bool(bias)}{bias}": Case(
            Attention(128, dtype=dtype, has_bias=bool(bias)), new=new, past=(past,), bias=bias
        )
        for dtype in ("float16", "bfloat16")
        for new, past, bias in (
            *((1, 60, ""), (17, 5, ""), (3, 20, "full")),
            *((2, 12, "left-padding"), (2, 9, "hidden-rows")),
        )
    },
}


@cache
def inputs(case: Case) -> dict[str, np.ndarray]:
    """The feeds of a case; a slot that no query may see holds garbage with a NaN scale."""
    graph = case.graph
    random = np.random.RandomState(len(repr(case)))
    total = max(case.past) + case.new
    slots = case.capacity or total
    heads = case.kv_heads * case.group
    query = random.standard_normal((case.batch, heads, case.new, graph.head_size)) * case.sharpness
    feeds = {
        "query": as_dtype(query, graph.dtype),
        "past_length": np.array(case.past, np.int64),
    }
    sides = (("key", graph.key_bits, KEY_LAYER), ("value", graph.value_bits, VALUE_LAYER))
    for side, bits, layer in sides:
        x = random.standard_normal((case.batch, case.kv_heads, slots, graph.head_size))
        x *= 10 ** random.uniform(-0.3, 0.3, (case.batch, case.kv_heads, slots, 1))
        rows = reference.encode(
            x,
            codec_of(bits),
            rotation(graph.head_size, layer),
            codebook(bits, graph.head_size),
            element=graph.dtype,
        )
        for b in range(case.batch):
            spoil(rows[b, :, case.past[b % len(case.past)] + case.new :], bits)
        feeds[f"{side}_cache"] = rows
    if case.bias:
        feeds["attention_bias"] = bias(case, random, feeds)
    if case.left_padding:
        feeds["left_padding"] = np.array(case.left_padding, np.int64)
        for b, hidden in enumerate(np.broadcast_to(case.left_padding, case.batch)):
            spoil(feeds["key_cache"][b, :, :hidden], case.graph.key_bits)
            spoil(feeds["value_cache"][b, :, :hidden], case.graph.value_bits)
    if graph.has_sink:
        sinks = random.uniform(-2, 4, case.kv_heads * case.group)
        sinks[-1] = -np.inf
        feeds["head_sink"] = as_dtype(sinks, graph.dtype)
    return feeds


def codebook(bits: int, head_size: int) -> Codebook:
    if codec_of(bits).is_raw:
        return Codebook(np.zeros(1, np.float32), np.zeros(1, np.float32), 0.0)
    return lloyd_max(bits, head_size)


def spoil(rows: np.ndarray, bits: int) -> None:
    """Makes NaN of all that rows hold."""
    if codec_of(bits).is_raw:
        rows[:] = 0xFF
    else:
        rows[..., -2:] = NAN_SCALE


def bias(case: Case, random: np.random.RandomState, feeds: dict[str, np.ndarray]) -> np.ndarray:
    batch, heads = case.batch, case.kv_heads * case.group
    total = max(case.past) + case.new
    shape = {
        "full": (batch, heads, case.new, total),
        "heads": (1, heads, 1, total),
        "row": (1, 1, 1, total),
        "zero": (1, 1, 1, 1),
        "column": (batch, 1, case.new, 1),
        "longer": (batch, 1, case.new, total + 7),
    }.get(case.bias, (batch, 1, case.new, total))
    values = random.standard_normal(shape)
    lowest = {"float16": -65504.0, "float32": -3.4028234663852886e38}.get(
        case.graph.dtype, -3.3895313892515355e38
    )
    if case.bias == "longer":
        values[..., total:] = np.nan
    elif case.bias == "left-padding":
        # As exporters write it: the lowest value, or minus infinity, on slots that hold anything.
        values = np.zeros(shape)
        for b in range(batch):
            padding = 3 * b + 1
            values[b, ..., :padding] = -np.inf if b == 1 else lowest
            spoil(feeds["key_cache"][b, :, :padding], case.graph.key_bits)
            spoil(feeds["value_cache"][b, :, :padding], case.graph.value_bits)
    elif case.bias == "hidden-rows":
        values[:, :, 1] = lowest
        values[0, :, 0, 2] = -np.inf
    elif case.bias == "zero":
        values[:] = 0
    elif case.bias == "all-hidden":
        values[:] = -np.inf
    return as_dtype(values, case.graph.dtype)


@cache
def oracle(case: Case) -> np.ndarray:
    feeds, graph = inputs(case), case.graph
    mask = feeds.get("attention_bias")
    return reference.attention(
        feeds["query"],
        feeds["key_cache"],
        feeds["value_cache"],
        feeds["past_length"],
        key=graph.key,
        value=graph.value,
        key_rotation=rotation(graph.head_size, KEY_LAYER),
        key_codebook=codebook(graph.key_bits, graph.head_size).centroids,
        value_rotation=rotation(graph.head_size, VALUE_LAYER),
        value_codebook=codebook(graph.value_bits, graph.head_size).centroids,
        scale=graph.scale,
        causal=graph.causal,
        sliding_window=graph.sliding_window,
        softcap=graph.softcap,
        attention_bias=mask,
        head_sink=feeds.get("head_sink"),
        left_padding=feeds.get("left_padding"),
        element=graph.dtype,
    )


def attend(backend: str, graph: Attention, feeds: dict[str, np.ndarray]) -> Any:
    return run(backend, attention_model(graph), feeds)[0]


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("name", CASES)
def test_oracle(name: str, backend: str) -> None:
    case = CASES[name]
    expected = oracle(case)
    assert np.isfinite(expected).all()
    output = attend(backend, case.graph, inputs(case))
    check_attention(backend, case.graph.dtype, output, expected)


@pytest.mark.parametrize("backend", LEVELS)
def test_a_bad_query_spoils_only_itself(backend: str) -> None:
    case = CASES["T17-past"]
    feeds = dict(inputs(case))
    feeds["query"] = feeds["query"].copy()
    feeds["query"][0, 1, 4, 9] = np.nan
    expected = oracle(case).copy()
    expected[0, 1, 4] = np.nan
    check_attention(backend, "float32", attend(backend, case.graph, feeds), expected)


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("bits", [4, 32])
def test_a_bad_row_spoils_only_who_sees_it(bits: int, backend: str) -> None:
    case = replace(CASES["T17-past"], graph=Attention(value_bits=bits))
    feeds = dict(inputs(case))
    feeds["value_cache"] = feeds["value_cache"].copy()
    spoil(feeds["value_cache"][0, 0, 50], bits)
    expected = oracle(case).copy()
    expected[0, :2, 10:] = np.nan  # queries from position 50 on, heads of KV head 0
    check_attention(backend, "float32", attend(backend, case.graph, feeds), expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "name", ["T128-past", "S1100", "own-lengths-fixed", "raw-S1100", "sink-S1100"]
)
def test_levels_agree(name: str, level: str) -> None:
    case = CASES[name]
    scalar = attend("scalar", case.graph, inputs(case))
    own = attend(level, case.graph, inputs(case))
    check_attention(f"{level}-scalar", "float32", own, scalar.astype(np.float64))


@pytest.mark.parametrize("level", LEVELS)
def test_same_result_every_time(level: str) -> None:
    case = CASES["S1100"]
    first = attend(level, case.graph, inputs(case))
    for _ in range(5):
        assert np.array_equal(attend(level, case.graph, inputs(case)), first)


@pytest.mark.parametrize("backend", LEVELS)
def test_sinks_are_seen(backend: str) -> None:
    """The negative twin: without them the oracle says something else."""
    case = CASES["sink-S1100"]
    feeds = {name: array for name, array in inputs(case).items() if name != "head_sink"}
    graph = replace(case.graph, has_sink=False)
    with pytest.raises(AssertionError):
        check_attention("negative", "float32", attend(backend, graph, feeds), oracle(case))


def test_a_wrong_backend_would_be_noticed() -> None:
    case = CASES["T2"]
    output = attend("body", case.graph, inputs(case))
    output[0, 0, 0] *= 1 + 3e-4
    with pytest.raises(AssertionError):
        check_attention("negative", "float32", output, oracle(case))
