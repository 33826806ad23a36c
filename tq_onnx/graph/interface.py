"""Which graph input is which: by what it does, by its Hugging Face name only to break a tie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import onnx_ir as ir

from tq_onnx.graph.builder import MICROSOFT, Builder
from tq_onnx.graph.dialects.constants import attribute_int
from tq_onnx.graph.dialects.site import FLOATS, Site, rank
from tq_onnx.graph.liveness import data_ancestors
from tq_onnx.graph.plan import Interface

_INTEGERS: Final = (ir.DataType.INT64, ir.DataType.INT32)
_MASKS: Final = (*_INTEGERS, ir.DataType.BOOL)


@dataclass(frozen=True, eq=False)
class Lengths:
    """Inputs whose shapes tell how many tokens there are, whatever the size of the caches.

    Attributes:
        total: dimension 1 is the total length, the attention mask.
        tokens: dimension 1 is the number of new tokens.
    """

    total: ir.Value
    tokens: ir.Value

    def total_length(self, build: Builder) -> ir.Value:
        """S, int64 ``[1]``."""
        return build.once("total_length", lambda: build.dim(self.total, 1, "total_length"))

    def past_length(self, build: Builder) -> ir.Value:
        """P, int64 ``[1]``."""

        def make() -> ir.Value:
            new = build.dim(self.tokens, 1, "new_tokens")
            return build.op(
                "Sub",
                [self.total_length(build), new],
                "past_length",
                dtype=ir.DataType.INT64,
                shape=[1],
            )

        return build.once("past_length", make)


@dataclass(frozen=True, eq=False)
class Roles:
    """The inputs and outputs of a decoder apart from its caches, as values of the graph."""

    tokens: ir.Value
    attention_mask: ir.Value | None
    position_ids: ir.Value | None
    logits: ir.Value

    def interface(self) -> Interface:
        """Their names."""
        mask, positions = self.attention_mask, self.position_ids
        return Interface(
            tokens=_name(self.tokens),
            attention_mask=None if mask is None else _name(mask),
            position_ids=None if positions is None else _name(positions),
            logits=_name(self.logits),
        )


def find_roles(graph: ir.Graph, sites: Sequence[Site]) -> Roles | None:
    """Finds the roles; None if there are no tokens to put in or no logits to get out."""
    tokens = _tokens(graph)
    logits = _logits(graph)
    if tokens is None or logits is None:
        return None
    sources = data_ancestors(value for site in sites for value in site.mask_sources())
    pairs = [
        value
        for value in graph.inputs
        if value is not tokens and rank(value) == 2 and value.dtype in _MASKS
    ]
    masks = [value for value in pairs if value in sources]
    longer = [value for value in masks if _differs(value, tokens)]
    mask = _choose(longer or masks, "attention_mask")
    if mask is None:
        mask = _named(pairs, "attention_mask")
    others = [value for value in pairs if value is not mask and value.dtype in _INTEGERS]
    same = [value for value in others if not _differs(value, tokens)]
    positions = _named(others, "position_ids") or (same[0] if len(same) == 1 else None)
    return Roles(tokens, mask, positions, logits)


def find_lengths(roles: Roles, sites: Sequence[Site]) -> Lengths | None:
    """Where the past length can be read without the caches; None if nowhere.

    That needs an input that flows into the mask of every layer, and whose length is by its name
    another than that of the tokens: the attention mask ``[B, S]``.
    """
    mask = roles.attention_mask
    if mask is None or rank(roles.tokens) not in (2, 3) or not _differs(mask, roles.tokens):
        return None
    checked: set[ir.Value] = set()
    for site in sites:
        sources = frozenset(site.mask_sources())
        if not sources <= checked:
            if mask not in data_ancestors(sources):
                return None
            checked |= sources
        if not sources:
            return None
    return Lengths(mask, roles.tokens)


def _tokens(graph: ir.Graph) -> ir.Value | None:
    ids = [value for value in graph.inputs if rank(value) == 2 and value.dtype in _INTEGERS]
    looked_up = [value for value in ids if _indexes_a_table(value)]
    embedded = [value for value in graph.inputs if rank(value) == 3 and value.dtype in FLOATS]
    return _choose(looked_up, "input_ids") or _choose(embedded, "inputs_embeds")


def _indexes_a_table(value: ir.Value) -> bool:
    for node, index in value.uses():
        if node.op_type in ("Cast", "Identity") and node.domain == "":
            if _indexes_a_table(node.outputs[0]):
                return True
            continue
        table = node.inputs[0]
        if index != 1 or table is None or attribute_int(node, "axis", 0) != 0:
            continue
        kind = (node.domain, node.op_type)
        if kind == (MICROSOFT, "GatherBlockQuantized") or (
            kind == ("", "Gather") and rank(table) == 2 and rank(node.outputs[0]) in (3, None)
        ):
            return True
    return False


def _logits(graph: ir.Graph) -> ir.Value | None:
    outputs = [value for value in graph.outputs if rank(value) == 3 and value.dtype in FLOATS]
    return _choose(outputs, "logits")


def _choose(values: Sequence[ir.Value], name: str) -> ir.Value | None:
    """The only one, the one of that name, or the first."""
    return _named(values, name) or (values[0] if values else None)


def _named(values: Iterable[ir.Value], name: str) -> ir.Value | None:
    return next((value for value in values if value.name == name), None)


def _differs(value: ir.Value, other: ir.Value) -> bool:
    """Whether dimensions 1 are known to have different names or sizes."""
    here, there = _dim(value), _dim(other)
    return here is not None and there is not None and here != there


def _dim(value: ir.Value) -> int | str | None:
    if value.shape is None or len(value.shape) < 2:
        return None
    dim = value.shape[1]
    return dim if isinstance(dim, int) else dim.value


def _name(value: ir.Value) -> str:
    return value.name or ""
