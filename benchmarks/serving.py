"""Tokens per second and the time to a first token, of many requests at a time.

    python benchmarks/serving.py qwen3-int4-paged qwen3-int4 --concurrent 1,4,16

Both are folders of onnxruntime-genai, converted from one original with and without --paged. So many
clients ask one request after the other, of random token ids and of mixed lengths; the requests are
the same for all contenders:

- paged: the Engine over pages; requests join and leave at any step;
- static: the Engine over the caches of sequences, in batches of up to four;
- generators: a Generator for each client, which take steps in turn.

Contenders take turns; figures are medians over the rounds, between the rounds' lowest and highest.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og
from machine import describe

from tq_onnx.language.engine import batching_of
from tq_onnx.runtime.engine import EngineThread
from tq_onnx.runtime.jobs import Choice, Step

GREEDY = Choice(temperature=0)


@dataclass(frozen=True)
class Request:
    """Token ids, and how many more are asked for."""

    prompt: list[int]
    new: int


@dataclass(frozen=True)
class Round:
    """What one round took.

    Attributes:
        seconds: until the last answer was complete.
        tokens: generated.
        first: seconds from asking to the first token, of each request.
    """

    seconds: float
    tokens: int
    first: list[float]


@dataclass(frozen=True)
class Row:
    """A line of the table: medians of the rounds, and the lowest and highest throughput."""

    contender: str
    concurrent: int
    requests: int
    tokens_per_second: float
    lowest: float
    highest: float
    first_token_ms: float


def made_requests(
    count: int, vocabulary: int, prompt: Sequence[int], new: Sequence[int], seed: int
) -> list[Request]:
    """Return requests of random ids, with sizes between two bounds."""
    random = np.random.default_rng(seed)
    return [
        Request(
            random.integers(5, vocabulary, random.integers(*prompt)).tolist(),
            int(random.integers(*new)),
        )
        for _ in range(count)
    ]


def with_engine(engine: EngineThread, requests: Sequence[Request], concurrent: int) -> Round:
    """Have clients ask an Engine, each its next request when the one before is answered."""
    ended: queue.SimpleQueue[Step] = queue.SimpleQueue()
    first: list[float] = []
    tokens = 0

    def ask(request: Request) -> None:
        begin, steps_seen = time.perf_counter(), []

        def deliver(step: Step) -> None:
            nonlocal tokens
            if step.token is not None:
                tokens += 1
                if not steps_seen:
                    steps_seen.append(step)
                    first.append(time.perf_counter() - begin)
            if step.is_last:
                ended.put(step)

        engine.submit(request.prompt, deliver, max_new_tokens=request.new, choice=GREEDY)

    begin = time.perf_counter()
    waiting = iter(requests)
    for request in [next(waiting) for _ in range(concurrent)]:
        ask(request)
    for _ in requests:
        step = ended.get()
        if step.error is not None:
            raise step.error
        following = next(waiting, None)
        if following is not None:
            ask(following)
    return Round(time.perf_counter() - begin, tokens, first)


def with_generators(model: Any, rows: int, requests: Sequence[Request], concurrent: int) -> Round:
    """Have generators take steps in turn; a client asks again when its answer is complete."""
    first: list[float] = []
    tokens = 0

    def answer(request: Request) -> Iterator[None]:
        nonlocal tokens
        begin = time.perf_counter()
        params = og.GeneratorParams(model)
        most = len(request.prompt) + request.new + rows
        params.set_search_options(max_length=most, do_sample=False)
        generator = og.Generator(model, params)
        generator.append_tokens(np.asarray(request.prompt, np.int32))
        for step in range(request.new):
            if generator.is_done():
                break
            generator.generate_next_token()
            if step == 0:
                first.append(time.perf_counter() - begin)
            tokens += 1
            yield

    begin = time.perf_counter()
    waiting = iter(requests)
    running = [answer(next(waiting)) for _ in range(concurrent)]
    while running:
        for answer_steps in list(running):
            if next(answer_steps, answer_steps) is answer_steps:
                running.remove(answer_steps)
                following = next(waiting, None)
                if following is not None:
                    running.append(answer(following))
    return Round(time.perf_counter() - begin, tokens, first)


def row_of(contender: str, concurrent: int, rounds: Sequence[Round]) -> Row:
    """Return the medians of the rounds."""
    rates = [entry.tokens / entry.seconds for entry in rounds]
    first = [statistics.fmean(entry.first) for entry in rounds]
    return Row(
        contender,
        concurrent,
        len(rounds[0].first),
        statistics.median(rates),
        min(rates),
        max(rates),
        statistics.median(first) * 1e3,
    )


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text."""
    lines = [f"{'contender':<12}{'concurrent':>11}{'tokens/s':>10}{'lowest':>9}{'first token':>13}"]
    lines += [
        f"{row.contender:<12}{row.concurrent:>11}{row.tokens_per_second:>10.1f}{row.lowest:>9.1f}"
        f"{row.first_token_ms:>10.0f} ms"
        for row in rows
    ]
    return "\n".join(lines)


def _pair(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    return int(low), int(high or low) + 1


def main() -> None:
    """Print a table, or one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("paged", type=Path, help="folder that was converted with --paged")
    add("contiguous", type=Path, help="folder that was converted without")
    add("--concurrent", default="1,4,16", metavar="N,...", help="clients")
    add("--requests", type=int, default=3, help="of each client")
    add("--prompt", type=_pair, default="16-400", metavar="A-B", help="tokens of a prompt")
    add("--new", type=_pair, default="16-96", metavar="A-B", help="tokens of an answer")
    add("--rounds", type=int, default=3)
    add("--threads", type=int, default=2)
    add("--json", action="store_true", help="one document in place of a table")
    options = parser.parse_args()
    paged, static = (
        EngineThread(folder, batching_of(folder), threads=options.threads)
        for folder in (options.paged, options.contiguous)
    )
    # The threads of this one are those of the Engine over the same folder.
    model, rows = static.model, static.batching.exact_rows
    configuration = json.loads((options.contiguous / "genai_config.json").read_text())
    vocabulary = configuration["model"]["vocab_size"]
    contenders: dict[str, Callable[[Sequence[Request], int], Round]] = {
        "paged": lambda requests, count: with_engine(paged, requests, count),
        "static": lambda requests, count: with_engine(static, requests, count),
        "generators": lambda requests, count: with_generators(model, rows, requests, count),
    }
    table_rows = []
    for concurrent in map(int, options.concurrent.split(",")):
        rounds: dict[str, list[Round]] = {name: [] for name in contenders}
        for number in range(options.rounds):
            requests = made_requests(
                concurrent * options.requests, vocabulary, options.prompt, options.new, number
            )
            for name, run in contenders.items():
                rounds[name].append(run(requests, concurrent))
        table_rows += [row_of(name, concurrent, rounds[name]) for name in contenders]
    for engine in (paged, static):
        engine.close()
    versions = {"onnxruntime-genai": og.__version__, "threads": str(options.threads)}
    if options.json:
        print(json.dumps({"machine": describe(versions), "rows": [asdict(r) for r in table_rows]}))
    else:
        print(table(table_rows))


if __name__ == "__main__":
    main()
