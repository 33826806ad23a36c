"""One value in the place of another."""

from __future__ import annotations

import onnx_ir as ir


def substitute(old: ir.Value, new: ir.Value) -> None:
    """Lets every reader of a value read another one; an output of the graph keeps its name.

    Args:
        old: what is read now.
        new: what is to be read; no input and no output of the graph.
    """
    new.type = new.type or old.type
    if old.is_graph_output():
        old.name, new.name = f"{old.name}/replaced", old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
