"""The reason why a part of a graph is not of a known form."""

from __future__ import annotations

import onnx_ir as ir


class NoMatch(Exception):  # noqa: N818 - control flow inside the converter, never shown as an error
    """A layer is not what the dialect knows."""

    def __init__(self, reason: str, node: ir.Node | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node
