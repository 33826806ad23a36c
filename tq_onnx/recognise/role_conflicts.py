"""Find layers that are attention by their form, and still no layers of a decoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from tq_onnx.graph.values import label
from tq_onnx.recognise.caches import Cache
from tq_onnx.recognise.site import GraphView, Site


def role_conflicts(sites: Sequence[Site], view: GraphView) -> Iterator[tuple[int, str, str]]:
    """Yield layer, node and reason of attention that a conversion would not leave as it is.

    Its result is read by nothing, or is an operand of attention itself; or a past cache is an
    operand in another role than its own.
    """
    pasts: dict[ir.Value, Cache] = {}
    for site in sites:
        for cache in (site.key, site.value):
            if cache.past is not None:
                pasts[cache.past] = cache
                pasts.update(dict.fromkeys(cache.update.views if cache.update else (), cache))
    results = {site.output for site in sites}
    for site in sites:
        node = label(site.node)
        if not site.output.is_graph_output() and not view.consumers(site.output):
            yield site.layer, node, "nothing reads the result of attention"
        updates = [cache.update for cache in (site.key, site.value) if cache.update is not None]
        for value in dict.fromkeys((*site.inputs, *(update.rows for update in updates))):
            if value in results:
                yield (
                    site.layer,
                    node,
                    "the result of attention is an operand of attention as it is",
                )
            if value in pasts:
                past = pasts[value].past
                assert past is not None  # by the loop above
                yield site.layer, node, f"the cache {past.name} is also another operand"
