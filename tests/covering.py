"""Small subsets that cover much: of features, and of the real exports.

Subsets of features have every pair of them in all four ways: both, either, neither. A feature that
needs another one is not there without that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations, product

from tq_onnx.ops.features import FEATURES, MIXED_CODECS, Feature
from tq_onnx.ops.operator import Operator

_ALIKE = {
    *("dynamo-op20-eager", "dynamo-op20-sdpa", "dynamo-op23-eager", "dynamo-op24-sdpa"),
    *("legacy-op17-sdpa-fp16", "genai-cpu-int4-hd128", "genai-cuda-fp16", "genai-cuda-int4"),
    *("genai-webgpu-fp16", "genai09-cpu-fp32", "hf-ortcuda-prefill", "hf-static-ortcuda-decode"),
}
"""Exports that differ from another one in opset, precision or spelling only."""

_Pair = tuple[Feature, bool, Feature, bool]


def exports(names: Iterable[str]) -> list[str]:
    """Exports of different forms."""
    return [name for name in names if name not in _ALIKE]


def features_of_operators(*operators: type[Operator]) -> tuple[Feature, ...]:
    """Features that bring inputs or attributes to some operators, in the order of the table.

    Without that of several codecs, which follows from the codecs.
    """
    named = {
        feature
        for operator in operators
        for part in (*operator.inputs, *operator.attributes)
        for feature in part.when
    }
    return tuple(feature for feature in FEATURES if feature in named - {MIXED_CODECS})


def covering(features: Iterable[Feature]) -> list[frozenset[Feature]]:
    """Few subsets; every pair of features is together, apart and absent in one of them."""
    rows: list[frozenset[Feature]] = []
    order = list(features)
    wanted = {
        (one, has_one, other, has_other)
        for one, other in combinations(order, 2)
        for has_one, has_other in product((True, False), repeat=2)
        if _is_possible({one: has_one, other: has_other})
    }
    while wanted:
        first, has_first, second, has_second = min(wanted, key=_place(order))
        row = {first: has_first, second: has_second}
        for feature in order:
            if feature not in row:
                gains = {
                    has: len(wanted & _met({**row, feature: has}, order))
                    for has in (True, False)
                    if _is_possible({**row, feature: has})
                }
                row[feature] = max(gains, key=gains.__getitem__)
        wanted -= _met(row, order)
        rows.append(frozenset(feature for feature, has in row.items() if has))
    return rows


def _place(order: list[Feature]) -> Callable[[_Pair], tuple[int, int, bool, bool]]:
    return lambda pair: (order.index(pair[0]), order.index(pair[2]), not pair[1], not pair[3])


def _is_possible(row: dict[Feature, bool]) -> bool:
    """Whether all features of a row may be there with what they need."""
    present = [feature for feature, has in row.items() if has]
    return all(row.get(feature.needs, True) for feature in present if feature.needs)


def _met(
    row: dict[Feature, bool], order: list[Feature]
) -> set[tuple[Feature, bool, Feature, bool]]:
    named = [feature for feature in order if feature in row]
    return {(one, bool(row[one]), other, bool(row[other])) for one, other in combinations(named, 2)}
