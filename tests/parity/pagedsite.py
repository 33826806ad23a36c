"""One attention layer over pages: its model, mixed requests for it, and what the oracle says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from tests.operatormodels import OperatorModel, attention_attributes, encode_attributes
from tests.ops.site import ATTRIBUTES, Arrays, Site
from tests.parity.compare import assert_rows, check_attention
from tests.singleop import optional_inputs
from tq_onnx.codec import paged
from tq_onnx.codec.paged import Packing
from tq_onnx.codec.pagewindow import PageWindow, page_width
from tq_onnx.ops.features import EXACT_WINDOW, Features
from tq_onnx.ops.operators import PagedAttention, PagedEncode

Requests = Sequence[tuple[int, int]]
"""Past and new tokens of each."""


@dataclass(frozen=True)
class PagedSite(Site):
    """The same layer as ``Site``, with packed requests and pages of ``page_size`` slots.

    With ``exact``, the newest tokens and the first ones have entries at most, and a full page as
    many as the third number.
    """

    page_size: int = 16
    exact: tuple[int, int, int] | None = None

    @property
    def pages(self) -> PageWindow | None:
        """Where entries lie."""
        if self.exact is None:
            return None
        recent, sinks, kept = self.exact
        stride = max(self.width(codec) for codec in (self.key, self.value))
        width = page_width(stride, kept, self.page_size, self.head_size)
        return PageWindow(recent, sinks, self.head_size, self.page_size, stride, width)

    @property
    def features(self) -> Features:
        return super().features | ({EXACT_WINDOW} if self.exact else set())

    @property
    def entry_attributes(self) -> dict[str, int]:
        """Attributes of both operators; none without entries."""
        names = ("recent", "sinks", "row_stride")
        return {name: getattr(self.pages, name) for name in names} if self.pages else {}

    def model(self, **attributes: Any) -> onnx.ModelProto:
        build = OperatorModel(
            self.element, constants=self.constants, shapes=self.shapes, as_float32=True
        )
        for side, codec in (("key", self.key), ("value", self.value)):
            tables = ("rotation", "centroids", "boundaries", "offset", "frequencies")
            names = {
                PagedEncode.vectors: side,
                PagedEncode.past: f"past_{side}",
                **{getattr(PagedEncode, table): f"{side}_{table}" for table in tables},
            }
            build.operator(
                PagedEncode,
                {
                    **encode_attributes(codec),
                    **self.entry_attributes,
                },
                f"present_{side}",
                names=names,
                optional=optional_inputs(self.features, PagedEncode),
            )
        given = {**attention_attributes(self.key, self.value, 0.0), **ATTRIBUTES, **attributes}
        given |= self.entry_attributes
        declared = {each.name for each in PagedAttention.attributes}
        build.operator(
            PagedAttention,
            {name: value for name, value in given.items() if name in declared},
            "attended",
            names={
                PagedAttention.key_cache: "present_key",
                PagedAttention.value_cache: "present_value",
                PagedAttention.new_keys: "key",
                PagedAttention.new_values: "value",
            },
            optional=optional_inputs(self.features, PagedAttention),
        )
        outputs = ["attended", "present_key", "present_value"]
        return build.build(outputs, opsets={"": self.opset})

    @property
    def shapes(self) -> dict[str, list[int | str]]:
        queries: list[int | str] = [1, self.heads, "T", self.head_size]
        made: dict[str, list[int | str]] = {"query": queries, "attended": queries}
        for side, codec in (("key", self.key), ("value", self.value)):
            made[side] = [1, self.kv_heads, "T", self.head_size]
            width = self.pages.width if self.pages else self.width(codec)
            made[f"past_{side}"] = ["P", self.page_size, self.kv_heads, width]
            made[f"present_{side}"] = made[f"past_{side}"]
        made["cumulative_sequence_length"] = ["bounds"]
        made["past_seqlens"] = ["R"]
        return {**made, "block_table": ["R", "C"], "head_sink": [self.heads]}

    def requests(
        self, rng: np.random.Generator, requests: Requests, *, pages: int | None = None
    ) -> Arrays:
        """Random inputs of requests in shuffled pages; what no token needs is -1 or garbage."""
        needed = [-(-(past + new) // self.page_size) for past, new in requests]
        count = sum(needed) + 3 if pages is None else pages
        order = rng.permutation(count)
        table = np.full((len(requests), max(needed) + 1), -1, np.int32)
        for row, columns in zip(table, needed, strict=True):
            row[:columns], order = order[:columns], order[columns:]
        new = sum(tokens for _, tokens in requests)
        arrays: Arrays = {
            "query": rng.standard_normal((1, self.heads, new, self.head_size)),
            "key": rng.standard_normal((1, self.kv_heads, new, self.head_size)) * 3,
            "value": rng.standard_normal((1, self.kv_heads, new, self.head_size)),
        }
        arrays = {name: self.rounded(array) for name, array in arrays.items()}
        bounds = np.cumsum([0, *(tokens for _, tokens in requests)])
        arrays["cumulative_sequence_length"] = bounds.astype(np.int32)
        arrays["past_seqlens"] = np.array([past for past, _ in requests], np.int32)
        arrays["block_table"] = table
        longest = self.feeds(rng, past_length=tuple(past for past, _ in requests))
        for name in ("past_key", "past_value"):
            rows = longest[name]
            cache = rng.integers(
                0, 256, (count, self.page_size, self.kv_heads, rows.shape[-1]), np.uint8
            )
            for request, (own, past) in enumerate(zip(table, rows, strict=True)):
                length = requests[request][0]
                before = Packing(np.array([0, length]), np.array([0]), own[None])
                cache = paged.write(cache, past[None, :, :length], before)
            arrays[name] = cache
        return arrays

    def taken(self, feeds: Arrays, name: str, offset: np.ndarray[Any, Any]) -> Any:
        return paged.offset_rows(offset, packing_of(feeds), frequencies=self.turning(name))

    def over_pages(self, feeds: Arrays, *caches: Any, **attributes: Any) -> Any:
        """Float64 attention over given pages."""
        options = ATTRIBUTES | attributes
        return paged.attention(
            feeds["query"],
            *caches,
            packing_of(feeds),
            key=self.key,
            value=self.value,
            key_rotation=self.key_rotation,
            key_codebook=self.codebook(self.key).centroids,
            value_rotation=self.value_rotation,
            value_codebook=self.codebook(self.value).centroids,
            head_sink=feeds.get("head_sink"),
            window=self.pages,
            new_keys=feeds["key"],
            new_values=feeds["value"],
            **self.offsets,
            scale=options["scale"],
            sliding_window=options["sliding_window"],
            softcap=options["softcap"],
            element=self.element,
        )


def packing_of(feeds: Arrays) -> Packing:
    """Where the tokens are."""
    return Packing(feeds["cumulative_sequence_length"], feeds["past_seqlens"], feeds["block_table"])


def assert_pages(site: PagedSite, feeds: Arrays, presents: list[Any]) -> None:
    """New rows are good, and all other bytes of all pages are those that were there."""
    packing = packing_of(feeds)
    for present, codec, name in (
        (presents[0], site.key, "key"),
        (presents[1], site.value, "value"),
    ):
        past = feeds[f"past_{name}"]
        vectors = site.centered(feeds, name).astype(np.float32)
        for tokens, length, own in packing:
            count = tokens.stop - tokens.start
            if not count:
                continue
            written = paged.rows_of_request(present, own, length + count)[:, :, length:]
            new = vectors[0, :, tokens]
            assert_rows(
                written[0], new, codec, site.tables(name), element=site.element, tie_rate=1.0
            )
            assert not written[..., site.width(codec) - site.spare_bytes :].any()
        rest = paged.write(present, new_rows(past, packing), packing)
        np.testing.assert_array_equal(rest, past)


def assert_paged(
    site: PagedSite,
    feeds: Any,
    results: list[Any],
    *,
    limit: float | None = None,
    **attributes: Any,
) -> None:
    """Pages and the attention over them are those of the oracle."""
    output, *presents = results
    assert_pages(site, feeds, presents)
    wanted = site.over_pages(feeds, *presents, **attributes)
    assert output.shape == wanted.shape
    if limit is None:
        check_attention(site.element, output, wanted)
        return
    error = np.abs(output - wanted).max() / max(np.abs(wanted).max(), 1e-30)
    assert error <= limit


def new_rows(cache: Any, packing: Packing, *, row_stride: int = 0) -> Any:
    """Rows of a cache in the slots of the new tokens, packed."""
    return np.concatenate(
        [
            paged.rows_of_request(
                cache, own, past + tokens.stop - tokens.start, row_stride=row_stride
            )[:, :, past:]
            for tokens, past, own in packing
        ],
        axis=2,
    )


def assert_calls(
    site: PagedSite,
    run: Callable[[Any, Arrays], list[Any]],
    rng: np.random.Generator,
    calls: Sequence[Requests],
    *,
    limit: float,
    **attributes: Any,
) -> None:
    """Every call over the same pages does what the oracle says; at first they are random bytes.

    Args:
        site: a layer with entries.
        run: returns the outputs of its model for feeds.
        rng: makes vectors.
        calls: past and new tokens of each request, call by call; a request may go back.
        limit: largest error of attention, relative to its largest number.
        **attributes: of attention.
    """
    assert site.pages is not None
    model = site.model(**attributes)
    longest = [max(past + new for past, new in steps) for steps in zip(*calls, strict=True)]
    table = site.requests(rng, [(0, count) for count in longest])["block_table"]
    blocks = int(table.max()) + 2
    shape = (blocks, site.page_size, site.kv_heads, site.pages.width)
    caches = [rng.integers(0, 256, shape, np.uint8) for _ in range(2)]
    for requests in calls:
        feeds = site.requests(rng, requests) | {"block_table": table}
        if site.has_sink:
            feeds["head_sink"] = site.rounded(rng.standard_normal(site.heads))
        feeds |= {"past_key": caches[0], "past_value": caches[1]}
        output, *presents = run(model, feeds)
        packing = packing_of(feeds)
        for name, past, present in zip(("key", "value"), caches, presents, strict=True):
            stride = site.pages.row_stride
            rows = new_rows(present, packing, row_stride=stride)
            said = paged.write(past, rows, packing, window=site.pages, vectors=feeds[name])
            np.testing.assert_array_equal(present, said)
        wanted = site.over_pages(feeds, *presents, **attributes)
        error = np.abs(output - wanted).max() / max(np.abs(wanted).max(), 1e-30)
        assert error <= limit, requests
        caches = presents
