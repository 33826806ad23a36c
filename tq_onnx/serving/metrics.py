"""What requests took: a line of the log for each, and sums in Prometheus' text format."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

LOG: Final = logging.getLogger(__name__)
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
CLIENT_CLOSED: Final = 499
"""The status of a request whose client has left, in the log only; nginx calls it so."""
BOUNDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Seconds, of histograms."""


@dataclass
class Record:
    """What a request took."""

    route: str  #: that it asked for
    begin: float = field(default_factory=time.monotonic)  #: when it came, by ``time.monotonic``
    status: int = 0  #: of HTTP; 0 before there is one
    prompt_tokens: int = 0
    cached_tokens: int = 0  #: those of them that did not have to be computed
    new_tokens: int = 0  #: of its answers
    first: float | None = None  #: seconds to the first token; None before it
    finish: str | None = None  #: why the answer ended, if it has

    def note_token(self) -> None:
        """Count a token."""
        self.new_tokens += 1
        if self.first is None:
            self.first = time.monotonic() - self.begin


class Metrics:
    """Sums over all requests since the start."""

    def __init__(self) -> None:
        """Begin with no request."""
        self._statuses: Counter[int] = Counter()
        self._tokens: Counter[str] = Counter()
        self._first = _Histogram()
        self._whole = _Histogram()

    def add(self, record: Record) -> None:
        """Count a request that has ended, and log it."""
        seconds = time.monotonic() - record.begin
        self._statuses[record.status] += 1
        self._tokens["prompt"] += record.prompt_tokens
        self._tokens["cached_prompt"] += record.cached_tokens
        self._tokens["generation"] += record.new_tokens
        if record.first is not None:
            self._first.add(record.first)
        if record.finish is not None:
            self._whole.add(seconds)
        words = [f"{record.route} {record.status}"]
        if record.prompt_tokens:
            words.append(f"{record.prompt_tokens} prompt tokens, {record.cached_tokens} cached")
            words.append(f"{record.new_tokens} new tokens")
        if record.first is not None:
            words.append(f"first after {record.first:.3f} s")
        words += [f"{seconds:.3f} s", record.finish or "no end"]
        LOG.info("%s", ", ".join(words if record.prompt_tokens else words[:-1]))

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """Return all figures in Prometheus' format."""
        return "\n".join([*self._lines(gauges), ""])

    def _lines(self, gauges: Mapping[str, tuple[str, float]]) -> Iterator[str]:
        yield from _head("requests_total", "counter", "Requests that have ended, by HTTP status.")
        for status, count in sorted(self._statuses.items()):
            yield f'tq_onnx_requests_total{{status="{status}"}} {count}'
        for kind, meaning in (
            ("prompt", "Tokens of prompts."),
            ("cached_prompt", "Tokens of prompts that did not have to be computed."),
            ("generation", "Tokens of answers."),
        ):
            yield from _head(f"{kind}_tokens_total", "counter", meaning)
            yield f"tq_onnx_{kind}_tokens_total {self._tokens[kind]}"
        for name, (meaning, value) in gauges.items():
            yield from _head(name, "gauge", meaning)
            yield f"tq_onnx_{name} {value:g}"
        yield from self._first.lines("time_to_first_token_seconds", "Time to the first token.")
        yield from self._whole.lines("request_seconds", "Time of requests that were answered.")


class _Histogram:
    """Counts of seconds up to each bound."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str, meaning: str) -> Iterator[str]:
        yield from _head(name, "histogram", meaning)
        count = 0
        for bound, size in zip((*map(str, BOUNDS), "+Inf"), self._counts, strict=True):
            count += size
            yield f'tq_onnx_{name}_bucket{{le="{bound}"}} {count}'
        yield f"tq_onnx_{name}_sum {self._sum:.6f}"
        yield f"tq_onnx_{name}_count {count}"


def _head(name: str, kind: str, meaning: str) -> tuple[str, str]:
    return f"# HELP tq_onnx_{name} {meaning}", f"# TYPE tq_onnx_{name} {kind}"
