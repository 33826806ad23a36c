"""The inputs and outputs of a graph, taken down before a conversion."""

from __future__ import annotations

from dataclasses import dataclass

Dims = tuple[int | str | None, ...]


@dataclass(frozen=True)
class Port:
    """One input or output of a graph: its name, element type and dimensions."""

    name: str
    dtype: str | None
    dims: Dims | None


@dataclass(frozen=True)
class InterfaceSnapshot:
    """The interface that a conversion must not change.

    Attributes:
        inputs: the graph inputs in order.
        outputs: the graph outputs in order.
        complaint: what onnx's checker says of the model; empty if it is content. An original that
            it refuses (runtimes accept more than it does) is not held against the result.
    """

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    complaint: str
