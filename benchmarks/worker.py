"""One peer in a process of its own: takes JSON lines, answers each with one.

    {"do": "open", "peer": {"module": ..., "kind": ..., "arguments": {...}}}   -> {"version": ...}
    {"do": "size", "step": {...}}                      -> {"cache_bytes": ..., "most_copies": ...}
    {"do": "prepare", "step": {...}, "threads": n, "copies": n, "cold_bytes": n}
                                                                        -> {"readable": whether}
    {"do": "burst", "wake": seconds, "seconds": s, "most": n}  -> {"ms": [...]}
    {"do": "read", "library": path, "seconds": s, "most": n}
                                               -> {"plain": [bytes/s, ...], "prefetching": [...]}
    {"do": "free"}                                                                    -> {}

What goes wrong is answered with {"error": "a sentence"}. A process of its own, because environment
variables are read when a library is loaded, and so that nobody's threads are in another's process.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from bandwidth import Reader
from contender import Peer, Prepared, Step

FEWEST = 2
"""Timed steps of a burst, however long they take."""


# Peers make their models as the tests do.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))


class Worker:
    """Answers the messages."""

    def __init__(self) -> None:
        self._peer: Peer | None = None
        self._prepared: Prepared | None = None
        self._flush: np.ndarray | None = None
        self._threads = 1
        self._at = 0

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Does what a message says; raises whatever the peer raises."""
        if message["do"] == "open":
            named = message["peer"]
            kind = getattr(importlib.import_module(named["module"]), named["kind"])
            self._peer = kind(**named["arguments"])
            return {"version": self._peer.version()}
        assert self._peer is not None
        if message["do"] == "size":
            step = Step(**message["step"])
            bytes_, most = self._peer.cache_bytes(step), self._peer.most_copies
            return {"cache_bytes": bytes_, "most_copies": most}
        if message["do"] == "prepare":
            return self._prepare(message)
        if message["do"] == "burst":
            return self._burst(message)
        if message["do"] == "read":
            return self._read(message)
        self._prepared = self._flush = None
        gc.collect()
        return {}

    def _prepare(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._peer is not None
        step, copies = Step(**message["step"]), message["copies"]
        if copies * self._peer.cache_bytes(step) < message["cold_bytes"]:
            self._flush = np.ones(message["cold_bytes"], np.uint8)
        self._prepared = self._peer.prepare(step, message["threads"], copies)
        self._threads = message["threads"]
        self._at = 0
        self._once()
        return {"readable": bool(self._prepared.caches)}

    def _once(self) -> float:
        assert self._prepared is not None
        if self._flush is not None:
            self._flush.max()
        begin = time.perf_counter()
        self._prepared.run(self._at)
        seconds = time.perf_counter() - begin
        self._at += 1
        return seconds * 1e3

    def _burst(self, message: dict[str, Any]) -> dict[str, Any]:
        # Until the system has put the threads on cores of their own, nothing is timed.
        end = time.perf_counter() + message["wake"]
        self._once()
        while time.perf_counter() < end:
            self._once()
        times: list[float] = []
        end = time.perf_counter() + message["seconds"]
        while len(times) < FEWEST or (len(times) < message["most"] and time.perf_counter() < end):
            times.append(self._once())
        return {"ms": times}

    def _read(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._prepared is not None
        reader = Reader(message["library"], self._prepared.caches, self._threads)
        rates: dict[bool, list[float]] = {False: [], True: []}
        end = time.perf_counter() + message["seconds"]
        # The copies are gone through on and on, by steps and readings: the next one is cold.
        while len(rates[True]) < FEWEST or (
            len(rates[True]) < message["most"] and time.perf_counter() < end
        ):
            for prefetch, values in rates.items():
                values.append(reader.bytes_per_second(self._at, prefetch=prefetch))
                self._at += reader.at_a_time
        return {"plain": rates[False], "prefetching": rates[True]}


def main() -> None:
    """Answers until there are no more messages."""
    # Libraries print; what they print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        try:
            answer = worker.answer(json.loads(line))
        except Exception as error:  # whatever it is, it is the reason that a peer is missing
            said = str(error).strip().splitlines() or [type(error).__name__]
            answer = {"error": said[0]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
