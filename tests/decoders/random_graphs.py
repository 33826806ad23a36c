"""Random decoders of one layer with caches: right or wrong, whatever ONNX Runtime can run.

A graph is put together from choices, most of them the usual one: who counts the tokens, who says
which keys are visible, how caches are updated, what else reads them. Nothing says that a choice
makes sense with another. The only oracle is the graph itself: a conversion computes what it
computes, call by call, or is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir
from hypothesis import strategies as st

from tests.decoders.onelayer import decoder

MASK, POSITIONS = "attention_mask", "position_ids"
CAPACITY = 24
"""Slots of a cache of fixed size."""
PREFIX = 2


@dataclass
class RandomGraph:
    """A decoder, and what its caller has to know.

    Attributes:
        body: its attention, as ``onelayer.decoder`` takes it.
        inputs: its inputs but ids and caches, name to declaration.
        choices: what was drawn.
        heads: H.
        kv_heads: N.
        opset: of the default domain.
        prefix: rows in the caches before the first call.
        rate: rows of a cache for each two ids.
        static: whether caches are of ``CAPACITY`` slots.
        coarse: whether an answer stands for two tokens.
        cut: whether the mask may be longer than the tokens.
        floor: a value whose queries see nothing where it is very low; empty if there is none.
        tool: what a post-processor has left: "nothing" it changed, made-up "names" of sizes, no
            "shapes", or the "order" of the nodes.
    """

    body: str = ""
    inputs: dict[str, str] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)
    heads: int = 2
    kv_heads: int = 2
    opset: int = 20
    prefix: int = 0
    rate: int = 2
    static: bool = False
    coarse: bool = False
    cut: bool = False
    floor: str = ""
    tool: str = "nothing"

    @property
    def masked(self) -> bool:
        """Whether the caller can leave out tokens."""
        return MASK in self.inputs

    def model(self, *, floor: bool = False) -> ir.Model:
        """Builds it; with ``floor`` as one more output."""
        past, present = ("M", "M") if self.static else ("P", "S")
        pasts, presents = (
            ", ".join(
                f"float[B, {self.kv_heads}, {slots}, 16] {time}_{role}" for role in ("key", "value")
            )
            for time, slots in (("past", past), ("present", present))
        )
        if floor and self.floor:
            presents += f", float[a, b, c, d] {self.floor}"
        model = decoder(
            self.body,
            inputs=", ".join([*self.inputs.values(), pasts]),
            outputs=presents,
            heads=self.heads,
            kv_heads=self.kv_heads,
            opset=self.opset,
        )
        _leave(model.graph, self.tool)
        return model

    def __repr__(self) -> str:
        """Tells what hypothesis shows of an example."""
        chosen = ", ".join(f"{what}: {choice}" for what, choice in self.choices.items())
        return f"RandomGraph({chosen})\n{', '.join(self.inputs.values())}\n{self.body}"


def _leave(graph: ir.Graph, tool: str) -> None:
    """Leaves a graph as a post-processor does."""
    nodes = list(graph)
    if tool == "order":
        graph.remove(nodes)
        graph.extend(reversed(nodes))
    for node in nodes if tool in ("names", "shapes") else ():
        for value in node.outputs:
            if value.shape is not None and not value.is_graph_output():
                names = [f"unk__{value.name}_{axis}" for axis in range(len(value.shape))]
                value.shape = ir.Shape(names) if tool == "names" else None


class Writer:
    """Writes the body of one graph, choice by choice."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.graph = RandomGraph()
        self.lines: list[str] = []
        self.selects = False
        self.by_ids = False

    def pick(self, what: str, *choices: str, usual: int = 3) -> str:
        """Draws one of some choices, the first of them more often."""
        choice = self.draw(st.sampled_from((choices[0],) * usual + choices[1:]))
        if choice != choices[0] or usual < 3:
            self.graph.choices[what] = choice
        return choice

    def leave(self) -> None:
        """Has a post-processor go over the graph, perhaps."""
        self.graph.tool = self.pick("left by a tool", "nothing", "names", "shapes", "order")

    def write(self, text: str) -> None:
        """Adds lines."""
        self.lines += [line.strip() for line in text.strip().splitlines()]

    def take(self, name: str, declaration: str) -> None:
        """Adds an input."""
        self.graph.inputs.setdefault(name, f"{declaration} {name}")

    def mask(self) -> None:
        """Takes the mask of the tokens."""
        axis = self.pick("axis of the mask", "S", "M", "T", "P", usual=6)
        self.take(MASK, f"int64[B, {axis}]")

    def positions(self) -> None:
        """Takes the positions of the tokens."""
        axis = self.pick("axis of the positions", "T", "L", usual=1)
        self.take(POSITIONS, f"int64[B, {axis}]")


HEADER = """
middle = Constant<value_ints = [1, 2]>()
sides = Constant<value_ints = [1, 3]>()
third = Constant<value_ints = [2]>()
end = Constant<value_ints = [100000]>()
pair = Constant<value_ints = [2]>()
four = Constant<value_int = 4>()
four_d = Constant<value = float[1, 1, 1, 1] {0.0}>()
"""
SPLIT = """
q8 = Reshape({q}, heads_shape)
k8 = Reshape({k}, kv_shape)
v8 = Reshape({v}, kv_shape)
q9 = Transpose<perm = [0, 2, 1, 3]>(q8)
k9 = Transpose<perm = [0, 2, 1, 3]>(k8)
v9 = Transpose<perm = [0, 2, 1, 3]>(v8)
"""
PAIRS = """
width = Shape<start = 2, end = 3>({x})
pairs = Concat<axis = 0>(zero_1, minus_one, pair, width)
{y}2 = Reshape({x}, pairs)
"""
TWICE = """
{y}1 = Unsqueeze({x}, third)
{y}s = Shape({x})
{y}b = Slice({y}s, zero_1, pair, zero_1)
{y}w = Slice({y}s, pair, end, zero_1)
{y}e = Concat<axis = 0>({y}b, pair, {y}w)
{y}x = Expand({y}1, {y}e)
{y}r = Concat<axis = 0>(zero_1, minus_one, {y}w)
{y} = Reshape({y}x, {y}r)
"""
