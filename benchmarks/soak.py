"""Let requests join and leave an Engine over pages for thousands of steps, and watch memory.

    python benchmarks/soak.py qwen3-int4-paged --steps 10000

More requests wait than the pages hold, so that nearly all pages are in use all the time. Prints how
many they were, answers that are not as long as was asked for, the share of pages in use, and the
memory of the process by tenths of the run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np

from tq_onnx.language.engine import batching_of
from tq_onnx.runtime.engine import EngineThread
from tq_onnx.runtime.jobs import LENGTH, Choice, Step

TENTHS = 10
WAITING = 32
MEGABYTE = 2**20


class Watched(EngineThread):
    """An Engine that counts its steps, and the pages that are in use in each."""

    steps = 0

    def __init__(self, folder: Path, blocks: int, threads: int) -> None:
        """Open a folder with so many pages."""
        self.used: list[int] = []
        batching = replace(batching_of(folder), num_blocks=blocks)
        super().__init__(folder, batching, threads=threads)

    def _obey(self) -> bool:
        if self._running:
            self.steps += 1
            self.used.append(self.batching.num_blocks - self._free)
        return super()._obey()


def resident() -> float:
    """Return the megabytes of memory that the process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MEGABYTE


def main() -> None:
    """Print what was seen, as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=Path, help="converted with --paged; its configuration says the pages")
    add("--steps", type=int, default=10_000)
    add("--threads", type=int, default=2)
    options = parser.parse_args()
    configuration = json.loads((options.folder / "genai_config.json").read_text())
    blocks = configuration["engine"]["dynamic_batching"]["num_blocks"]
    vocabulary = configuration["model"]["vocab_size"]
    engine = Watched(options.folder, blocks, options.threads)
    random = np.random.default_rng(0)
    room = threading.Semaphore(WAITING)
    ended: list[bool] = []

    def ask() -> None:
        size, new = int(random.integers(2, 160)), int(random.integers(1, 80))
        count = 0

        def deliver(step: Step) -> None:
            nonlocal count
            count += step.token is not None
            if step.is_last:
                ended.append(step.error is None and (step.finish != LENGTH or count == new))
                room.release()

        prompt = random.integers(5, vocabulary, size).tolist()
        engine.submit(prompt, deliver, max_new_tokens=new, choice=Choice(temperature=0))

    memory: list[float] = []
    while engine.steps < options.steps:
        room.acquire()
        ask()
        if engine.steps >= len(memory) * options.steps // TENTHS:
            memory.append(round(resident(), 1))
    for _ in range(WAITING):  # the last ones
        room.acquire()
    free = engine._free
    engine.close()
    figures = {
        "steps": engine.steps,
        "requests": len(ended),
        "not as asked": ended.count(False),
        "pages": blocks,
        "pages in use": round(statistics.fmean(engine.used[100:]) / blocks, 3),
        "pages free at the end": free,
        "megabytes": memory,
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
