"""Describe what a target can do, and refuse what it cannot.

Every target has a ``Capabilities`` in its row. What it does not name is refused: a codec, an
element type, a head size, or a row of ``tq_onnx.ops.features``. The table of docs/operators.md is
made of the same data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from tq_onnx.codec.elements import ELEMENTS
from tq_onnx.codec.presets import LISTED_PRESETS
from tq_onnx.codec.spec import CODECS, KINDS, Codec
from tq_onnx.errors import TqOnnxError, UnsupportedModelError, UsageError
from tq_onnx.ops.features import (
    FEATURES,
    PLANES,
    Feature,
    Features,
)
from tq_onnx.plan import LayerPlan, Plan

_OFFERED: Final = 3
"""Presets that a refusal of a codec names."""


@dataclass(frozen=True)
class Capabilities:
    """What a target takes."""

    #: what it lacks for everything else, as refusals have it: ``kernels``, ``graph``
    means: str = "kernels"
    features: Features = frozenset(FEATURES)  #: of the rows of ``tq_onnx.ops.features``
    codecs: tuple[Codec, ...] = CODECS  #: of keys and of values, in any pair
    elements: tuple[str, ...] = tuple(ELEMENTS)  #: ONNX element types of queries, keys and values
    head_sizes: tuple[int, ...] = ()  #: empty for all
    #: the least and the most value of a feature
    ranges: Mapping[Feature, tuple[float, float]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    #: what there is of a feature, in words, for tables
    notes: Mapping[Feature, str] = field(default_factory=lambda: MappingProxyType({}))
    in_planes: tuple[Codec, ...] = ()  #: codecs that it takes in planes alone, for both caches

    @property
    def lacking(self) -> tuple[Feature, ...]:
        """The features that it does not take."""
        return tuple(feature for feature in FEATURES if feature not in self.features)

    @property
    def codec_names(self) -> str:
        """The codecs in words: by kind, with bits where the kind is the only one or has others."""
        bits: dict[str, list[int]] = {}
        for codec in self.codecs:
            bits.setdefault(codec.kind, []).append(codec.bits)
        return words(
            kind
            if len(bits) > 1 and known == [*KINDS[kind].bits]
            else f"{kind} with {words(known)} bits"
            for kind, known in bits.items()
        )

    def note(self, feature: Feature) -> str:
        """Return what there is of a feature, in words."""
        if feature in self.ranges:
            return f"none, or {' to '.join(f'{bound:g}' for bound in self.ranges[feature])}"
        return self.notes.get(feature, "yes" if feature in self.features else "none")

    def expect(
        self, target: str, plan: Plan, nodes: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        """Refuse a plan with something that the target does not take."""
        for layer in plan.layers:
            for noun, known, fix, error in (*self._facts(layer), *self._features(layer, plan)):
                alternatives = f", only for {known}" if known else ""
                node = f" (node {nodes[layer.layer]})" if layer.layer in nodes else ""
                raise error(
                    f"the target {target} has no {self.means} for {noun}{alternatives}",
                    where=f"layer {layer.layer}{node}",
                    fix=f"{fix}, or convert for another target" if fix else "use another target",
                )

    def _facts(self, layer: LayerPlan) -> Iterator[tuple[str, str, str, type[TqOnnxError]]]:
        if layer.dtype not in self.elements:
            known = words(element.lower() for element in self.elements)
            noun = f"the element type {layer.dtype.lower()}"
            yield noun, known, f"export it in {known}", UnsupportedModelError
        if self.head_sizes and layer.head_size not in self.head_sizes:
            noun = f"a head size of {layer.head_size}"
            yield noun, words(self.head_sizes), "", UnsupportedModelError
        for codec in layer.codecs:
            if codec not in self.codecs:
                rows = [row for row in LISTED_PRESETS if {row.key, row.value} <= {*self.codecs}]
                names = [row.name for row in rows[:_OFFERED]]
                fix = f"use a preset such as {words(names)} for all layers"
                yield f"caches of {codec}", self.codec_names, fix, UsageError

    def _features(
        self, layer: LayerPlan, plan: Plan
    ) -> Iterator[tuple[str, str, str, type[TqOnnxError]]]:
        for feature in FEATURES:
            value = feature.value(layer, plan)
            least, most = self.ranges.get(feature, (value, value))
            if feature is PLANES and self.in_planes:
                yield from self._planes(layer, plan)
            elif value and not (feature in self.features and least <= value <= most):
                known = f"{least:g} to {most:g}" if feature in self.ranges else ""
                chosen = UsageError if feature.options else UnsupportedModelError
                yield feature.noun.format(value), known, feature.way_out, chosen

    def _planes(
        self, layer: LayerPlan, plan: Plan
    ) -> Iterator[tuple[str, str, str, type[TqOnnxError]]]:
        codecs, known = {*layer.codecs}, f"{words(self.in_planes)} in both caches of a layer"
        fix = "use one preset for all layers"
        if plan.planes and not codecs <= {*self.in_planes}:
            yield f"caches of {words(sorted(map(str, codecs)))} in planes", known, fix, UsageError
        if not plan.planes and not codecs.isdisjoint(self.in_planes):
            yield f"caches of {words(self.in_planes)} beside others", known, fix, UsageError


def words(choices: Iterable[object]) -> str:
    """Return words as a choice."""
    *most, last = map(str, choices)
    return f"{', '.join(most)} or {last}" if most else last
