"""How the contenders are timed: interleaved, cold, the median; see README.md of this folder."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import onnxruntime as ort
from peers import YARDSTICK, Array, Contender, Peer, Shape

from tq_onnx.runtime.library import get_library_path

STEPS = 8
"""Timed steps of a contender's turn."""

WAKE_SECONDS = 0.02
"""Untimed steps before them, until the system has put the threads on cores of their own."""

SPIN_SECONDS = 0.1
"""How long the threads of the contender before may spin, waiting for work, on our cores."""


@dataclass
class Result:
    """Timing of one contender at one shape."""

    name: str
    query_heads: int
    kv_heads: int
    context: int
    threads: int
    cache_bytes: int = 0
    milliseconds: float | None = None
    fastest_ms: float | None = None
    times_float32_gqa: float | None = None
    reason: str = ""
    samples: list[float] = field(default_factory=list, repr=False)


class Runner:
    """A session with as many copies of the caches as do not fit into the processor's cache."""

    def __init__(self, contender: Contender, threads: int, cold_bytes: int) -> None:
        """Binds copies of the caches, ``cold_bytes`` together."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        if contender.custom_ops:
            options.register_custom_ops_library(str(get_library_path()))
        self.session = ort.InferenceSession(
            contender.model, options, providers=["CPUExecutionProvider"]
        )
        self.cache_bytes = sum(content.nbytes for _, content in contender.caches.values())
        self.bindings = []
        self.alive: list[object] = []
        for _ in range(max(2, -(-cold_bytes // self.cache_bytes))):
            binding = self.session.io_binding()
            for name, array in contender.constants.items():
                binding.bind_ortvalue_input(name, self._keep(array))
            for name, (output, content) in contender.caches.items():
                value = self._keep(content.copy())
                binding.bind_ortvalue_input(name, value)
                binding.bind_ortvalue_output(output, value)
            binding.bind_output("output")
            self.bindings.append(binding)
        self.at = 0

    def _keep(self, array: Array) -> ort.OrtValue:
        value = ort.OrtValue.ortvalue_from_numpy(array)
        self.alive += [array, value]
        return value

    def wake(self) -> None:
        """Steps that nobody times."""
        end = time.perf_counter() + WAKE_SECONDS
        self.step()
        while time.perf_counter() < end:
            self.step()

    def step(self) -> float:
        """Milliseconds of one decode step on the next copy of the caches."""
        binding = self.bindings[self.at % len(self.bindings)]
        self.at += 1
        begin = time.perf_counter()
        self.session.run_with_iobinding(binding)
        return (time.perf_counter() - begin) * 1e3


def measure(
    shape: Shape, threads: int, peers: Sequence[Peer], *, cold_mb: int, seconds: float
) -> list[Result]:
    """Times all contenders at one shape, taking turns; a contender that fails says why."""
    results = {
        peer.name: Result(peer.name, shape.query_heads, shape.kv_heads, shape.context, threads)
        for peer in peers
    }
    runners = {}
    for peer in peers:
        result = results[peer.name]
        try:
            runner = Runner(peer.contender(shape), threads, cold_mb << 20)
            runner.step()
        except Exception as error:  # whatever a peer's session raises is the reason it is missing
            result.reason = str(error).splitlines()[0]
            continue
        runners[peer.name] = runner
        result.cache_bytes = runner.cache_bytes
    end = time.perf_counter() + seconds * max(1, len(runners))
    rounds = 0
    while rounds < 5 or time.perf_counter() < end:
        for name, runner in runners.items():
            if threads > 1:
                time.sleep(SPIN_SECONDS)
            runner.wake()
            results[name].samples += [runner.step() for _ in range(STEPS)]
        rounds += 1
    for result in results.values():
        if result.samples:
            result.milliseconds = statistics.median(result.samples)
            result.fastest_ms = min(result.samples)
    yardstick = results[YARDSTICK].milliseconds if YARDSTICK in results else None
    for result in results.values():
        if result.milliseconds and yardstick:
            result.times_float32_gqa = yardstick / result.milliseconds
    return list(results.values())
