"""The inputs and outputs of a graph, taken down before a conversion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from tq_onnx.plan import (
    BLOCK_TABLE,
    CUMULATIVE_LENGTHS,
    LOGITS_INDICES,
    PAST_LENGTHS,
    Plan,
)

Dims = tuple[int | str | None, ...]

_RECURRENT_RANK: Final = 4
"""Of states of linear attention; those of convolutions have 3."""

BLOCKS: Final = "num_blocks"
TOKENS: Final = "total_tokens"
REQUESTS: Final = "batch_size"
LOGITS: Final = "num_logits"
PACKED_DIMS: Final[dict[str, Dims]] = {
    CUMULATIVE_LENGTHS: (f"{REQUESTS}+1",),
    PAST_LENGTHS: (REQUESTS,),
    BLOCK_TABLE: (REQUESTS, "pages_of_request"),
    LOGITS_INDICES: (LOGITS,),
}
"""Sizes of the inputs that say where packed tokens belong, and of which there are logits."""


@dataclass(frozen=True)
class Port:
    """One input or output of a graph: its name, element type and dimensions."""

    name: str
    dtype: str | None
    dims: Dims | None


@dataclass(frozen=True)
class InterfaceSnapshot:
    """The interface that a conversion must not change."""

    inputs: tuple[Port, ...]  #: the graph inputs in order
    outputs: tuple[Port, ...]  #: the graph outputs in order
    #: what onnx's checker says of the model; empty if it is content. An original that it refuses
    #: (runtimes accept more than it does) is not held against the result.
    complaint: str


def packed_inputs(names: Sequence[str], plan: Plan) -> list[str]:
    """Return the inputs of a model whose caches lie in pages, from those of its original."""
    pairs = (*plan.caches, *plan.interface.states)
    fed = {plan.interface.tokens, *(pair.past for pair in pairs)}
    found = [name for name in names if name in fed]
    at = found.index(plan.interface.tokens) + 1 if plan.interface.tokens in found else 0
    return [*found[:at], *PACKED_DIMS, *found[at:]]


def kept_names(plan: Plan) -> set[str | None]:
    """Return the logits, caches and states, which alone a model with pages returns."""
    pairs = (*plan.caches, *plan.interface.states)
    return {plan.interface.logits, *(name for pair in pairs for name in (pair.past, pair.present))}


def packed(original: InterfaceSnapshot, plan: Plan) -> InterfaceSnapshot:
    """Return the interface of an original with packed tokens, and logits of some."""
    ports = {port.name: port for port in original.inputs}
    ports |= {name: Port(name, "INT32", dims) for name, dims in PACKED_DIMS.items()}
    ports[plan.interface.tokens] = Port(plan.interface.tokens, "INT64", (TOKENS,))
    result_names = kept_names(plan)
    outputs = tuple(
        replace(port, dims=(LOGITS, port.dims[-1] if port.dims else None))
        if port.name == plan.interface.logits
        else port
        for port in original.outputs
        if port.name in result_names
    )
    names = packed_inputs([port.name for port in original.inputs], plan)
    inputs, outputs = (
        tuple(replace(port, dims=packed_dims(port.name, port.dims, plan)) for port in side)
        for side in ((ports[name] for name in names), outputs)
    )
    return replace(original, inputs=inputs, outputs=outputs)


def packed_dims(name: str, dims: Dims | None, plan: Plan) -> Dims | None:
    """Return the sizes of an input or output for packed tokens, other than those of tokens.

    States of linear attention have their values first there.
    """
    states = {one for pair in plan.interface.states for one in (pair.past, pair.present)}
    if name not in states or dims is None or len(dims) != _RECURRENT_RANK:
        return dims
    return (*dims[:2], dims[3], dims[2])
