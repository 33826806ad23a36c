"""The operators' records: slots, optional inputs, a node's inputs by name."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from tq_onnx.ops.domain import (
    ATTENTION,
    DECODER,
    DOMAIN,
    ENCODE,
    PAGED_ATTENTION,
    PAGED_ENCODE,
)
from tq_onnx.ops.features import ATTENTION_BIAS, HEAD_SINK, OFFSETS
from tq_onnx.ops.operator import Input, Operator
from tq_onnx.ops.operators import BY_NAME, OPERATORS, Attention, Encode, Gather


def values(count: int) -> list[ir.Value]:
    return [ir.Value(name=f"v{index}") for index in range(count)]


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_members_know_their_names_and_slots(operator: type[Operator]) -> None:
    for parameters in (operator.inputs, operator.outputs):
        assert [each.slot for each in parameters] == list(range(len(parameters)))
        assert all(getattr(operator, each.name) is each for each in parameters)
    required = [not each.is_optional for each in operator.inputs]
    assert required == sorted(required, reverse=True)
    needed = [attribute.default is None for attribute in operator.attributes]
    assert needed == sorted(needed, reverse=True)
    assert all((each.default is None) == (not each.when) for each in operator.attributes)


def test_there_is_a_record_for_each_name() -> None:
    assert tuple(BY_NAME) == (ENCODE, ATTENTION, PAGED_ENCODE, PAGED_ATTENTION, *DECODER)


def test_a_node_is_read_by_the_names_of_its_inputs() -> None:
    data, indices, other = values(3)
    node = ir.Node(DOMAIN, Gather.name, [data, indices])
    assert (Gather.data.of(node), Gather.indices.of(node)) == (data, indices)
    assert Encode.offset.of(node) is None
    Gather.indices.replace(node, other)
    assert Gather.indices.of(node) is other


def test_nodes_of_an_operator() -> None:
    ours, theirs = (ir.Node(domain, "Gather", values(2)) for domain in (DOMAIN, ""))
    assert Gather.nodes([theirs, ours]) == [ours]
    assert Encode.nodes([theirs, ours]) == []


def test_arguments_stand_in_their_slots_and_end_with_the_last() -> None:
    query, sink = values(2)
    given: dict[Input, ir.Value | None] = {Attention.head_sink: sink, Attention.query: query}
    expected = [query, *[None] * 8, sink]
    assert Attention.arguments(given) == expected
    assert Attention.arguments(given | {Attention.value_offset: None}) == expected
    assert Attention.arguments({}) == []


def test_a_model_has_the_inputs_up_to_the_last_that_it_uses() -> None:
    assert Encode.inputs_with(frozenset()) == Encode.inputs[:6]
    assert Encode.inputs_with({ATTENTION_BIAS, HEAD_SINK}) == Encode.inputs[:6]
    assert Encode.inputs_with({OFFSETS})[-1] is Encode.offset
    assert Attention.inputs_with(frozenset()) == Attention.inputs[:8]
    assert Attention.inputs_with({ATTENTION_BIAS})[-1] is Attention.attention_bias
    assert Attention.inputs_with({HEAD_SINK})[-1] is Attention.head_sink
    assert Attention.inputs_with({OFFSETS, ATTENTION_BIAS})[-1] is Attention.value_offset
