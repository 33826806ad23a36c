"""What the decoder's own operators say about themselves, and what they take.

One ``Operator`` per name of ``domain.DECODER``: its texts, element types and attributes, from which
schemas, function bodies and their documentation are made. All of an operator's inputs and
attributes are required.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tq_onnx.ops import domain
from tq_onnx.ops.documentation import markdown

Entries = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Operator:
    """One operator.

    Attributes:
        summary: what it computes.
        inputs: names and meanings.
        output: the name and the meaning of what it returns.
        types: element types of inputs, by name, that are not the model's floats.
        attributes: names and meanings.
    """

    summary: str
    inputs: Entries
    output: tuple[str, str]
    types: Mapping[str, str]
    attributes: Entries = ()

    @property
    def documentation(self) -> str:
        """All of it as Markdown."""
        sections = {"inputs": self.inputs, "outputs": (self.output,), "attributes": self.attributes}
        return markdown(self.summary, **{title: text for title, text in sections.items() if text})


FLOAT: Final = "tensor(float)"
INT64: Final = "tensor(int64)"

OPERATORS: Final[Mapping[str, Operator]] = {
    domain.RMS_NORMALIZATION: Operator(
        """\
Divides vectors by the root of the mean of their squares.

    Y = X / sqrt(mean(X * X) + epsilon) * scale

The mean is over the last dimension; in float32, rounded once.""",
        (("X", "vectors [..., E]"), ("scale", "factors [E]")),
        ("Y", "normalised vectors, of X's type and shape"),
        {},
        (("epsilon", "added to the mean of the squares; not negative"),),
    ),
    domain.ROTARY_EMBEDDING: Operator(
        """\
Rotates queries or keys by the angles of their positions.

With x1 and x2 the halves of a vector, and the cosines and sines of its position's row:

    y1 = x1 * cos - x2 * sin
    y2 = x2 * cos + x1 * sin

In float32, rounded once.""",
        (
            ("X", "vectors [B, N, T, D]: batch, heads, tokens, head size"),
            ("cos_cache", "cosines by position [P, D / 2]"),
            ("sin_cache", "sines by position [P, D / 2]"),
            (
                "position_ids",
                "positions of the tokens, per sequence [B, T] or one row for all [1, T]; from 0, "
                "below P",
            ),
        ),
        ("Y", "rotated vectors, of X's type and shape"),
        {"cos_cache": FLOAT, "sin_cache": FLOAT, "position_ids": INT64},
    ),
    domain.SWISH: Operator(
        "The activation Y = X / (1 + exp(-X)), also called SiLU; in float32, rounded once.",
        (("X", "numbers of any shape"),),
        ("Y", "their activations, of X's type and shape"),
        {},
    ),
    domain.TRANSPOSE: Operator(
        "Exchanges the two dimensions in the middle: tokens and heads.",
        (("X", "vectors [B, A, C, E]"),),
        ("Y", "the same vectors [B, C, A, E]"),
        {},
        (("perm", "0, 2, 1, 3: which dimension of X each one of Y is"),),
    ),
    domain.GATHER: Operator(
        "Looks up rows of a table by their numbers: the embeddings of tokens.",
        (
            ("data", "table of rows [V, E]"),
            (
                "indices",
                "numbers of rows [B, T] or [T]; from -V, which count from the end, below V",
            ),
        ),
        ("Y", "the rows [B, T, E] or [T, E]"),
        {"indices": INT64},
    ),
}
"""All of them, in the order of ``domain.DECODER``."""
