"""States of linear attention in packed requests: each request keeps its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from tests.conversion.test_raw import NOISE, load_exact
from tests.decoders.hybrid import STATES, add_linear_attention
from tests.decoders.running import session
from tests.targets.paged.test_lower import CALLS, paged, together, tokens_of
from tq_onnx.errors import UnsupportedModelError

EXPORT = "mobius-default"
PACKED_STATES = (1, 32)
"""The first version with operators on packed tokens."""

needs_kernels = pytest.mark.skipif(
    tuple(int(part) for part in onnxruntime.__version__.split(".")[:2]) < PACKED_STATES,
    reason="ONNX Runtime has no GatedDeltaNet before 1.32",
)


def alone() -> list[dict[str, np.ndarray]]:
    """What the original says after each call, of each request by itself."""
    model = load_exact(EXPORT)
    add_linear_attention(model)
    original = session(model)
    pasts = {}
    for entry in original.get_inputs():
        sizes = [size if isinstance(size, int) else 0 for size in entry.shape[1:]]
        pasts[entry.name] = np.zeros((1, *sizes), np.float32)
    names = [entry.name for entry in original.get_outputs()]
    found: dict[str, list[np.ndarray]] = {}
    for request, ids in tokens_of(CALLS).items():
        held = {name: value for name, value in pasts.items() if "past" in name}
        begin, found[request] = 0, []
        for call in CALLS:
            end = begin + call.get(request, 0)
            if begin == end:
                continue
            feeds = {
                "input_ids": ids[None, begin:end],
                "attention_mask": np.ones((1, end), np.int64),
                "position_ids": np.arange(begin, end)[None],
            }
            results = dict(zip(names, original.run(names, feeds | held), strict=True))
            held = {name: results[name.replace("past_key_values", "present")] for name in held}
            found[request].append(results["logits"][0, -1])
            begin = end
    return [{request: found[request].pop(0) for request in call} for call in CALLS]


@needs_kernels
def test_each_request_has_a_state_of_its_own() -> None:
    prepared = paged(EXPORT, damage=add_linear_attention)
    for answer, its in zip(together(prepared, CALLS), alone(), strict=True):
        for request, logits in its.items():
            noise = NOISE[ir.DataType.FLOAT] * np.abs(logits).max()
            assert np.abs(answer[request] - logits).max() <= noise


def test_states_of_linear_attention_have_values_first() -> None:
    graph = paged(EXPORT, damage=add_linear_attention).loaded.model.graph
    shapes = {value.name: list(value.shape or ())[1:] for value in (*graph.inputs, *graph.outputs)}
    heads, size, value_size = STATES["recurrent_state"]
    for name in ("past_key_values.2", "present.2"):
        assert shapes[f"{name}.recurrent_state"] == [heads, value_size, size]
        assert shapes[f"{name}.conv_state"] == STATES["conv_state"]


def without_operator(model: ir.Model) -> None:
    add_linear_attention(model)
    graph = model.graph
    index, present = next(
        (index, value) for index, value in enumerate(graph.outputs) if "conv" in (value.name or "")
    )
    node = ir.node("Neg", [present])
    state = node.outputs[0]
    present.name, state.name = "state", present.name
    state.type, state.shape = present.type, present.shape
    graph.append(node)
    graph.outputs[index] = state


REFUSALS: Mapping[str, tuple[Callable[[ir.Model], None], str]] = {
    "another operator": (without_operator, "is not made by CausalConvWithState or LinearAttention"),
    "an attribute of other layouts": (
        partial(add_linear_attention, channels_last=1),
        "CausalConvWithState has the attribute channels_last",
    ),
    "fewer value heads than key heads": (
        partial(add_linear_attention, q_num_heads=8),
        "a multiple of value heads",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_states_that_are_refused(case: str) -> None:
    damage, reason = REFUSALS[case]
    with pytest.raises(UnsupportedModelError, match=reason):
        paged(EXPORT, damage=damage)
