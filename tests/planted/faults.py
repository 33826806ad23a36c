"""Faults of real models, planted in the projections of exports: what they compute is changed.

Each adds to keys, values or queries of a layer behind its projection, or multiplies them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.conversion.biases import _Search
from tq_onnx.conversion.original import recognise_original
from tq_onnx.files.load import load
from tq_onnx.recognise.site import Site

Floats = npt.NDArray[np.float64]
Change = Callable[[ir.Model, ir.Value, int, np.random.Generator], None]
"""Changes a value whose last dimension is so many channels, of heads of ``head_size``."""


def bias(norm: float, channels: int | None = None) -> Change:
    """Add a constant, of so long a part for each head, in so many channels or all."""

    def change(model: ir.Model, value: ir.Value, head_size: int, rng: np.random.Generator) -> None:
        heads = rng.standard_normal((width_of(value, head_size) // head_size, head_size))
        if channels is not None:
            chosen = rng.choice(head_size, channels, replace=False)
            heads *= np.isin(np.arange(head_size), chosen)
        heads *= norm / np.linalg.norm(heads, axis=1, keepdims=True)
        _insert(model, value, "Add", heads.reshape(-1))

    return change


def outliers(largest: float) -> Change:
    """Multiply a few channels."""

    def change(model: ir.Model, value: ir.Value, head_size: int, rng: np.random.Generator) -> None:
        factors = np.ones(width_of(value, head_size))
        factors[rng.choice(factors.size, factors.size // 16, replace=False)] = largest
        _insert(model, value, "Mul", factors)

    return change


def huge_tokens(norm: float) -> Change:
    """Add a long constant to the tokens whose id is a multiple of 16, as to attention sinks."""

    def change(model: ir.Model, value: ir.Value, head_size: int, rng: np.random.Generator) -> None:
        heads = rng.standard_normal((width_of(value, head_size) // head_size, head_size))
        heads *= norm / np.linalg.norm(heads, axis=1, keepdims=True)
        ids = next(port for port in model.graph.inputs if port.name == "input_ids")
        assert value.shape is not None
        axes = [*range(2, len(value.shape))]
        if len(value.shape) == 4 and isinstance(value.shape[1], int):  # heads before tokens
            axes = [1, 3]
        _insert(model, value, "Add", heads.reshape(-1), ids=ids, axes=axes)

    return change


def factor(size: float) -> Change:
    """Multiply all."""

    def change(model: ir.Model, value: ir.Value, head_size: int, rng: np.random.Generator) -> None:
        _insert(model, value, "Mul", np.full(width_of(value, head_size), size))

    return change


FAULTS: Final[dict[str, tuple[str, bool, Change]]] = {
    "bias of 30": ("key", True, bias(30)),
    "bias of 100 in one layer": ("key", False, bias(100)),
    "bias of 100 in two channels": ("key", True, bias(100, 2)),
    "bias of 300": ("key", True, bias(300)),
    "bias of 300 in two channels": ("key", True, bias(300, 2)),
    "bias of 1,000 in one layer": ("key", False, bias(1000)),
    "bias of 1,000 in two channels of one layer": ("key", False, bias(1000, 2)),
    "bias of values": ("value", True, bias(100)),
    "outliers of 16": ("key", True, outliers(16)),
    "outliers of 64": ("key", True, outliers(64)),
    "huge keys of some tokens": ("key", True, huge_tokens(3000)),
    "huge values of some tokens": ("value", True, huge_tokens(3000)),
    "values beyond float16": ("value", False, factor(3e6)),
}
"""Role, whether all layers have it, and the change."""


def plant(form: Path, fault: str, output: Path) -> None:
    """Write an export with a fault."""
    role, everywhere, change = FAULTS[fault]
    loaded = load(form)
    recognition = recognise_original(loaded, form).recognition
    assert recognition.interface is not None
    search = _Search(loaded.model, recognition.interface, recognition)
    sites: list[Site] = [*recognition.sites][: None if everywhere else 1]
    rng = np.random.default_rng(0)
    for site in sites:
        (value,) = search._sources(site, "key" if role == "key" else "value").values
        change(loaded.model, value, site.head_size, rng)
    ir.save(loaded.model, output)


def width_of(value: ir.Value, head_size: int) -> int:
    """Return how many channels a value has."""
    width = None if value.shape is None else value.shape[-1]
    return width if isinstance(width, int) else head_size


def _insert(
    model: ir.Model,
    value: ir.Value,
    operator: str,
    numbers: Floats,
    *,
    ids: ir.Value | None = None,
    axes: Sequence[int] = (),
) -> None:
    """Put a node with a constant between a value and what reads it."""
    graph, maker, uses = model.graph, value.producer(), [*value.uses()]
    assert maker is not None and value.dtype is not None
    made: list[ir.Node] = []

    def constant(name: str, array: npt.NDArray) -> ir.Value:
        tensor = ir.tensor(array, name=f"planted.{name}.{value.name}")
        result = ir.Value(name=tensor.name, const_value=tensor, type=ir.TensorType(tensor.dtype))
        result.shape = ir.Shape(array.shape)
        graph.register_initializer(result)
        return result

    def node(kind: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        one = ir.node(kind, [*inputs], attributes=attributes or None)
        one.outputs[0].name = f"planted.{kind}.{value.name}"
        made.append(one)
        return one.outputs[0]

    added = constant("numbers", numbers.astype(value.dtype.numpy()))
    if ids is not None:
        assert ids.dtype is not None
        remainder = node("Mod", ids, constant("sixteen", np.array(16, ids.dtype.numpy())))
        chosen = node("Equal", remainder, constant("zero", np.array(0, ids.dtype.numpy())))
        flags = node("Cast", chosen, to=int(value.dtype))
        added = node("Mul", node("Unsqueeze", flags, constant("axes", np.array(axes))), added)
    changed = node(operator, value, added)
    changed.type, changed.shape = value.type, value.shape
    graph.insert_after(maker, made)
    for use in uses:
        use.node.replace_input_with(use.idx, changed)
