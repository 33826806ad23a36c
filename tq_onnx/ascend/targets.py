"""The rows of the targets for Ascend: ``cann``, node by node, and ``cann-graph``, one graph.

What is imported inside of the functions takes onnx with it, and the command line reads these rows
for its help.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from tq_onnx.ascend.features import CAPABILITIES
from tq_onnx.codec.spec import CODECS
from tq_onnx.conversion.capabilities import Capabilities
from tq_onnx.conversion.target import (
    PROMPT_FILE,
    STEP_FILE,
    Lowering,
    Target,
    TargetOption,
    Values,
)
from tq_onnx.errors import UsageError
from tq_onnx.ops.features import COMMON, FIRST_PROMPT, OFFSETS, ROW_WIDTH
from tq_onnx.plan import Plan

DEFAULT_POSITIONS: Final = 32_768
MOST_POSITIONS: Final = 1 << 20
"""The tables of a head size of 128 are 512 MiB then."""

DEFAULT_CAPACITY: Final = 1024
"""Of caches whose size is in the graph; every step copies and reads all of it."""

PROMPT_TOKENS: Final = 128
"""Of a call of the graph for prompts, in a folder with two."""


def _lower(plan: Plan, path: Path, values: Values) -> Lowering:
    from tq_onnx.ascend.lowering.decoder import lowering_of
    from tq_onnx.ascend.lowering.refusals import WholeBlocksPass

    lowering = lowering_of(plan, _positions(path, values["max_positions"]))
    passes = (*lowering.passes, WholeBlocksPass())
    if values["expand_weights"] is None:
        return replace(lowering, passes=passes)

    from tq_onnx.ascend.lowering.weights import TYPES, ExpandWeightsPass, NarrowProductsPass

    narrow = NarrowProductsPass(TYPES[values["expand_weights"]])
    return replace(lowering, passes=(ExpandWeightsPass(), *passes, narrow), has_all_weights=True)


def _positions(path: Path, chosen: int | None) -> int:
    """Return the rows of the rotary tables of a model file."""
    from tq_onnx.files.configuration import configured_positions

    if chosen is None:
        return min(configured_positions(path) or DEFAULT_POSITIONS, MOST_POSITIONS)
    if chosen > MOST_POSITIONS:
        raise UsageError(
            f"{chosen} positions are not between 1 and {MOST_POSITIONS:,}",
            fix="give the longest context that the model is to be used with",
        )
    return chosen


def _lower_graph(plan: Plan, path: Path, values: Values) -> Lowering:
    from tq_onnx.ascend.graph_mode.passes import lowering_of

    return lowering_of(plan, capacity=values["capacity"], tokens=values["call_tokens"])


CANN: Final = Target(
    name="cann",
    help="Ascend NPUs, with every floating-point node on CANNExecutionProvider",
    summary="every floating-point node on CANNExecutionProvider",
    example={"max_positions": 8192},
    options=(
        TargetOption(
            "max_positions",
            "longest context in tokens, which sets the size of the rotary tables.  [default: "
            "max_position_embeddings of config.json beside MODEL, else 32768]",
        ),
        TargetOption(
            "expand_weights",
            "store quantized weights (MatMulNBits) as this type, in a data file beside the output.",
            words=("float16", "float32"),
        ),
    ),
    capabilities=CAPABILITIES,
    lower=_lower,
    provider="cann",
    # The provider copies an output that shares its memory before it is computed.
    exposes_views=False,
)

CANN_GRAPH: Final = Target(
    name="cann-graph",
    help="graph mode of CANNExecutionProvider, with fixed sizes (docs/ascend.md)",
    summary="one graph of fixed sizes for CANNExecutionProvider (docs/ascend.md)",
    example={"capacity": 2048, "output": "graphs/"},
    options=(
        TargetOption("capacity", "capacity of the caches in tokens.", default=DEFAULT_CAPACITY),
        TargetOption("call_tokens", "tokens per call.", default=1),
    ),
    capabilities=Capabilities(
        means="graph",
        features=COMMON | {FIRST_PROMPT, ROW_WIDTH, OFFSETS},
        codecs=tuple(codec for codec in CODECS if not codec.is_split),
    ),
    lower=_lower_graph,
    provider="cann-graph",
    has_operators=False,
    has_fixed_sizes=True,
    has_weights=True,
    files={STEP_FILE: {"call_tokens": 1}, PROMPT_FILE: {"call_tokens": PROMPT_TOKENS}},
    no_folders="graphs for CANN are made of one decoder, and no runtime of folders runs them",
)
