"""Layers that read the caches of another one, as those of Gemma 3n and Gemma 4 do.

The first layer that reads two caches makes them; the others only attend: new rows are encoded once.
All of them have the same facts, so that one plan holds for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import onnx_ir as ir

from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.values import rank
from tq_onnx.recognise.caches import Cache
from tq_onnx.recognise.site import Site

_SAME: Final = {
    "num_heads": "query heads",
    "dtype": "element types",
    "scale": "scales",
    "causal": "masks",
    "sliding_window": "windows",
    "softcap": "softcaps",
    "has_sink": "sinks",
}
"""What has to be the same, by the name of the fact and in words."""
_DIALECTS: Final = ("decomposed", "onnx")


def share_caches(sites: Sequence[Site], order: Mapping[ir.Node, int]) -> list[Site]:
    """Put layers that read the same caches together.

    Returns:
        The layers that make caches, counted anew.
    """
    groups: dict[tuple[ir.Value, ir.Value], list[Site]] = {}
    for site in sites:
        groups.setdefault((site.key.present, site.value.present), []).append(site)
    if len(groups) == len(sites):
        return list(sites)
    return [_together(layer, group, order) for layer, group in enumerate(groups.values())]


def _together(layer: int, group: Sequence[Site], order: Mapping[ir.Node, int]) -> Site:
    first = group[0]
    for site in group[1:]:
        for fact, words in _SAME.items():
            if getattr(site, fact) != getattr(first, fact):
                raise NoMatch(f"layers that share one cache have different {words}", site.node)
    if len(group) > 1 and (first.dialect not in _DIALECTS or rank(first.key.present) != 4):
        raise NoMatch(f"layers of the form {first.dialect} share one cache", first.node)
    key, value = (
        _whole([getattr(site, role) for site in group], order) for role in ("key", "value")
    )
    alike = [replace(site, layer=layer, key=key, value=value) for site in group]
    alike.sort(key=lambda site: order[site.node])
    return replace(alike[0], sharing=tuple(alike[1:]))


def _whole(caches: Sequence[Cache], order: Mapping[ir.Node, int]) -> Cache:
    """Return one cache with all the values that hold it, made before the first of its readers."""
    views = {view: dims for cache in caches for view, dims in cache.views.items()}
    first = min((cache.node for cache in caches), key=order.__getitem__)
    return replace(caches[0], views=views, node=first)
