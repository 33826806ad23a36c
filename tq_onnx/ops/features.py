"""The optional parts of converted models: one row each, the only place that lists them.

A row has the test whether a layer has the feature, its name in refusals and ``inspect``, and the
options of a conversion that leave it out. Other modules use the rows: inputs and attributes of the
operators name the row that needs them (``when`` in ``tq_onnx.ops.operators``), function bodies are
made for the rows of a model, the raw form drops rows that belong to codes, and a target names the
rows that it takes (``tq_onnx.conversion.capabilities``). This module imports neither onnx nor
onnx-ir, so that the command line can read it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType
from typing import Any, Final

from tq_onnx.codec.kind import UNBIASED
from tq_onnx.codec.spec import row_layout
from tq_onnx.plan import LayerPlan, Plan


@dataclass(frozen=True, eq=False)
class Feature:
    """One row.

    Attributes:
        name: as tables and ``inspect`` have it.
        noun: what a layer has of it, in refusals; ``{}`` stands for its value.
        value: how much of it a layer of a plan has; false for none.
        options: values of ``conversion.options.Options`` that leave it out; empty where the model
            brings it.
        fix: what to do about it instead of leaving it out by these options; empty for nothing.
        of_codes: whether it belongs to codes, so that a cache of raw rows has nothing of it.
        needs: the feature without which no layer has it; None for none.
        says: what ``inspect`` says of a plan whose layers have it; None for nothing.
    """

    name: str
    noun: str
    value: Callable[[LayerPlan, Plan], Any]
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    fix: str = ""
    of_codes: bool = False
    needs: Feature | None = None
    says: Callable[[Plan, Sequence[LayerPlan]], str] | None = None

    @property
    def way_out(self) -> str:
        """What to do where it is refused; empty for nothing."""
        parts = [
            f"`{name}={value}`" if type(value) is int else f"no `{name}`"
            for name, value in self.options.items()
        ]
        return self.fix or (f"convert with {' and '.join(parts)}" if parts else "")

    def layers(self, plan: Plan) -> list[LayerPlan]:
        """Return the layers that have it."""
        return [layer for layer in plan.layers if self.value(layer, plan)]


Features = AbstractSet[Feature]


def features_of(plan: Plan) -> frozenset[Feature]:
    """Return the features of a model."""
    return frozenset(feature for feature in FEATURES if feature.layers(plan))


def layer_names(layers: Sequence[LayerPlan]) -> str:
    """Return names like ``layers 0-3, 7``."""
    plural = "s" if len(layers) > 1 else ""
    return f"layer{plural} {number_ranges([layer.layer for layer in layers])}"


def number_ranges(numbers: Sequence[int]) -> str:
    """Return rising numbers like ``0-3, 7``."""
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def in_some(plan: Plan, layers: Sequence[LayerPlan]) -> str:
    """Return `` in layers 0-3``; empty if they are all layers."""
    return "" if len(layers) == len(plan.layers) else f" in {layer_names(layers)}"


def _window_text(plan: Plan, layers: Sequence[LayerPlan]) -> str:
    parts = [f"the newest {plan.recent} tokens"] * (plan.recent > 0)
    parts += [f"the first {plan.sinks}"] * (plan.sinks > 0)
    exact = f"{' and '.join(parts)} in float16"
    if plan.page_window is not None:
        kept = plan.page_window.capacity(plan.block_size - 1, is_first=False)
        width = plan.page_window.width - plan.page_window.row_stride
        return f"{exact}, as far as a page has room: {width} bytes a row, {kept} tokens if full"
    if not plan.overlay_rows:
        return f"{exact}, in rows of a cache that no tokens need yet"
    return (
        f"{exact}, {plan.window_bytes:,} bytes of each sequence "
        f"({plan.overlay_rows} rows of each cache)"
    )


def _gains_text(plan: Plan, layers: Sequence[LayerPlan]) -> str:
    unbiased = ", unbiased scales" if plan.norm_correction == UNBIASED else ""
    return f"the best of {plan.gains}{unbiased}"


def _states_text(plan: Plan, layers: Sequence[LayerPlan]) -> str:
    text = f"{len(plan.interface.states)}, which stay as they are"
    most = plan.interface.call_tokens
    if most is None:
        return text
    return (
        f"{text}; as in the original, calls of more than {most} tokens fail or compute wrong logits"
    )


def _wide_rows(layer: LayerPlan, plan: Plan) -> str:
    used = [row_layout(codec, layer.head_size).row_bytes for codec in layer.codecs]
    widths = [cache.row_bytes for cache in layer.caches]
    return "" if widths == used else f"{widths[0]} and {widths[1]}"


ATTENTION_BIAS: Final = Feature(
    "attention bias", "an additive attention mask", lambda layer, plan: layer.has_bias
)
HEAD_SINK: Final = Feature("head sink", "sinks of the heads", lambda layer, plan: layer.has_sink)
SLIDING_WINDOW: Final = Feature(
    "sliding window", "a sliding window of {}", lambda layer, plan: layer.sliding_window
)
SOFTCAP: Final = Feature("softcap", "a softcap of {:g}", lambda layer, plan: layer.softcap)
LEFT_PADDING: Final = Feature(
    "left padding", "a number of slots that are padding", lambda layer, plan: layer.has_padding
)
NARROW_VALUES: Final = Feature(
    "values narrower than keys",
    "values of {} numbers",
    lambda layer, plan: layer.value.size if layer.value.size < layer.head_size else 0,
)
SHARED_CACHES: Final = Feature(
    "caches that layers share",
    "caches that {} layers read",
    lambda layer, plan: layer.readers if layer.readers > 1 else 0,
)
FIRST_PROMPT: Final = Feature(
    "graphs for a first prompt",
    "a graph for a first prompt, which takes no caches",
    lambda layer, plan: layer.key.past is None,
    fix="export it with past key/value inputs and outputs",
)
STATES: Final = Feature(
    "recurrent states",
    "the recurrent state {}",
    lambda layer, plan: plan.interface.states and plan.interface.states[0].present,
    says=_states_text,
)
MIXED_CODECS: Final = Feature(
    "caches of several codecs",
    "caches of {} codecs",
    lambda layer, plan: len(plan.codecs) if len(plan.codecs) > 1 else 0,
    of_codes=True,
)
ROW_WIDTH: Final = Feature(
    "padded rows", "rows of {} bytes", _wide_rows, options={"equal_rows": False}
)
GAINS: Final = Feature(
    "gains",
    "an encoder that tries {} gains",
    lambda layer, plan: any(codec.searches for codec in layer.codecs) and plan.gains,
    options={"gains": False},
    of_codes=True,
    says=_gains_text,
)
FEEDBACK: Final = Feature(
    "error feedback",
    "error feedback of keys",
    lambda layer, plan: layer.key.feedback,
    options={"feedback": False},
    of_codes=True,
    says=lambda plan, layers: f"of keys{in_some(plan, layers)}",
)
OFFSETS: Final = Feature(
    "offsets",
    "offsets of keys and values",
    lambda layer, plan: layer.centered,
    options={"calibration": None},
    of_codes=True,
    says=lambda plan, layers: (
        f"of keys and values, kept once for all tokens{in_some(plan, layers)}"
    ),
)
ROTARY_OFFSETS: Final = Feature(
    "rotary offsets",
    "offsets of keys that turn with their positions",
    lambda layer, plan: layer.key.rotary,
    options={"calibration": None},
    of_codes=True,
    needs=OFFSETS,
    says=lambda plan, layers: f"of keys, turned by their positions{in_some(plan, layers)}",
)
EXACT_WINDOW: Final = Feature(
    "exact tokens",
    "exact tokens",
    lambda layer, plan: plan.has_window,
    options={"residual_length": 0, "sink_tokens": 0},
    says=_window_text,
)
SPARE_ROWS: Final = Feature(
    "exact tokens in spare rows",
    "exact tokens in the spare rows of a cache",
    lambda layer, plan: plan.has_window and not plan.overlay_rows,
    options={"spare_rows": False},
    fix="convert with `residual_length=0` and `sink_tokens=0`",
    needs=EXACT_WINDOW,
)
PLANES: Final = Feature(
    "planes",
    "codes and scales apart",
    lambda layer, plan: plan.planes,
    options={"planes": False},
    of_codes=True,
    says=lambda plan, layers: "scales lie apart from codes",
)
PAGES: Final = Feature("pages", "caches in pages", lambda layer, plan: plan.block_size)

FEATURES: Final = (
    *(ATTENTION_BIAS, HEAD_SINK, SLIDING_WINDOW, SOFTCAP, NARROW_VALUES),
    *(SHARED_CACHES, FIRST_PROMPT, STATES, MIXED_CODECS, ROW_WIDTH),
    *(GAINS, FEEDBACK, OFFSETS, ROTARY_OFFSETS, LEFT_PADDING, EXACT_WINDOW, SPARE_ROWS, PLANES),
    PAGES,
)
"""All of them: first what an original brings, then what a conversion chooses."""

COMMON: Final = frozenset(
    (ATTENTION_BIAS, HEAD_SINK, SLIDING_WINDOW, SOFTCAP, NARROW_VALUES, STATES, MIXED_CODECS)
)
"""Those that most targets take."""
