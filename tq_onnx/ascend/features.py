"""What the kernels for CANN can do: the one record, of the converter, the host bridge and the docs.

The converter refuses plans by it (``lacking``), the host bridge nodes (``devicefeatures.h``, which
``tq_onnx.ascend.featureheader`` renders), and docs/ascend.md shows it as a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from tq_onnx.codec.rotated import LLOYD_MAX
from tq_onnx.codec.search import MAX_GAINS
from tq_onnx.codec.spec import CODECS as ALL_CODECS
from tq_onnx.codec.spec import row_layout
from tq_onnx.codec.window import MAX_ENTRIES
from tq_onnx.ops.operators import Attention, Encode
from tq_onnx.plan import LayerPlan, Plan

CODECS: Final = tuple(codec for codec in ALL_CODECS if codec.kind == LLOYD_MAX)
"""The codecs of keys and of values, in any pair."""

HEAD_SIZES: Final = (64, 128)

ELEMENTS: Final = ("FLOAT", "FLOAT16")

SOFTCAPS: Final = (1, 100)
"""The least and the most: the error of a capped score is a few 1e-8 of its softcap."""

LEAST_ROW_BYTES: Final = {"Ascend910B": 1, "Ascend910_93": 1, "Ascend310P": 32}
"""The shortest rows that a device can move, by the beginning of its name."""


def least_row_bytes(soc: str) -> int:
    """Return the shortest row that a device can move, by its name; 1 for an unknown device."""
    return max((size for name, size in LEAST_ROW_BYTES.items() if soc.startswith(name)), default=1)


Asked = Callable[[LayerPlan, Plan], str]
"""Returns what a layer has that there are no kernels for, as a noun; empty for nothing."""


@dataclass(frozen=True)
class Feature:
    """One row of the table.

    Attributes:
        name: what it is about, in lower case.
        there: what there is; ``NOTHING`` for nothing.
        asked: what a layer has beyond that; None where no plan can have it.
        fix: what to do about it; empty for nothing but leaving the target out.
        inputs: optional inputs of the operators that the kernels take for it.
    """

    name: str
    there: str
    asked: Asked | None = None
    fix: str = ""
    inputs: tuple[str, ...] = ()


NOTHING: Final = "none"


def lacking(layer: LayerPlan, plan: Plan) -> Iterator[tuple[str, Feature]]:
    """Yield what a layer has that there are no kernels for, with the feature that it is of."""
    for feature in FEATURES:
        asked = "" if feature.asked is None else feature.asked(layer, plan)
        if asked:
            yield asked, feature


def either(words: tuple[object, ...]) -> str:
    """Return words as a choice."""
    *most, last = map(str, words)
    return f"{', '.join(most)} or {last}" if most else last


def _element(layer: LayerPlan, plan: Plan) -> str:
    return "" if layer.dtype in ELEMENTS else f"the element type {layer.dtype}"


def _head_size(layer: LayerPlan, plan: Plan) -> str:
    return "" if layer.head_size in HEAD_SIZES else f"a head size of {layer.head_size}"


def _codecs(layer: LayerPlan, plan: Plan) -> str:
    known = all(codec in CODECS for codec in layer.codecs)
    return "" if known else f"caches of {layer.key.codec} and {layer.value.codec}"


def _wide_rows(layer: LayerPlan, plan: Plan) -> str:
    if not all(codec in CODECS for codec in layer.codecs):
        return ""
    used = [row_layout(codec, layer.head_size).row_bytes for codec in layer.codecs]
    given = [cache.row_bytes for cache in layer.caches]
    return "" if given == used else f"rows of {given[0]} and {given[1]} bytes"


def _first_prompt(layer: LayerPlan, plan: Plan) -> str:
    without = "a graph for a first prompt, which takes no caches"
    return without if layer.key.past is None else ""


def _feedback(layer: LayerPlan, plan: Plan) -> str:
    return "error feedback of keys" if layer.key.feedback else ""


def _softcap(layer: LayerPlan, plan: Plan) -> str:
    least, most = SOFTCAPS
    known = not layer.softcap or least <= layer.softcap <= most
    return "" if known else f"a softcap of {layer.softcap}"


def _readers(layer: LayerPlan, plan: Plan) -> str:
    return f"caches that {layer.readers} layers read" if layer.readers > 1 else ""


FEATURES: Final = (
    Feature("elements", "float or float16", _element, fix="export it in float32 or float16"),
    Feature(
        "caches",
        "of one layer each, given and returned",
        _first_prompt,
        fix="export it with past key/value inputs and outputs",
    ),
    Feature("readers of a cache", "one layer", _readers),
    Feature("head size", either(HEAD_SIZES), _head_size),
    Feature(
        "codec",
        f"{LLOYD_MAX} with {either(tuple(codec.bits for codec in CODECS))} bits",
        _codecs,
        fix="use --preset int4, int3 or int2 for all layers",
    ),
    Feature("row width", "the bytes of the codec", _wide_rows, fix="convert without equal_rows"),
    Feature(
        "shortest row",
        "910B and 910C: any; 310P: "
        f"{LEAST_ROW_BYTES['Ascend310P']} bytes (4 bits, 5 bits; with head size 128 also 2 and 3)",
    ),
    Feature("gains", f"none, or 1 to {MAX_GAINS}", inputs=(Encode.gains.name,)),
    Feature("norm correction", "0, 1 or 2"),
    Feature("error feedback", NOTHING, _feedback, fix="convert without feedback"),
    Feature(
        "calibration offsets",
        "none, or 1 to 64 rows",
        inputs=(Encode.offset.name, Attention.key_offset.name, Attention.value_offset.name),
    ),
    Feature(
        "exact window",
        f"none, or up to {MAX_ENTRIES:,} recent tokens and sinks together",
        inputs=(Attention.new_keys.name, Attention.new_values.name),
    ),
    Feature("sliding window", "none, or any; keys before it are not read"),
    Feature("softcap", f"none, or {SOFTCAPS[0]} to {SOFTCAPS[1]}", _softcap),
    Feature("head sink", "none, or one for each query head", inputs=(Attention.head_sink.name,)),
    Feature("attention bias", NOTHING),
    Feature(
        "left padding",
        "none, or slots for all sequences, or of each (neighbours that share it, a launch)",
        inputs=(Attention.left_padding.name,),
    ),
    Feature("masks", "causal, with or without a sliding window"),
    Feature("lengths", "one for all sequences, or one each (neighbours that share it, a launch)"),
)
"""In the order of the table."""
