"""Tokens per second and the time to a first token, of many requests at a time.

    python benchmarks/serving.py qwen3-int4-paged qwen3-int4 --concurrent 1,4,16
    python benchmarks/serving.py qwen3-int4-paged qwen3-int4 --workload prefix

Both are folders of onnxruntime-genai, converted from one original with and without --paged. So many
clients ask one request after the other, of random token ids and of mixed lengths; the requests are
the same for all contenders. Each number of clients and each round has other texts, so that no pages
are known from before. Workloads:

- uneven: requests that have nothing in common;
- prefix: all requests of a round begin with the same tokens, then each has its own;
- conversation: each request of a client goes on behind the answer to the one before.

Contenders:

- paged: the Engine over pages; requests join and leave at any step;
- plain: the same without guesses of tokens (--plain);
- prefixes: the same without kept conversations, so that only full pages are known (--prefixes);
- static: the Engine over the caches of sequences, in batches of up to four;
- generators: a Generator for each client, which take steps in turn, and one more for each request.

Contenders take turns; figures are medians over the rounds, between the rounds' lowest and highest.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
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
WORKLOADS = ("uneven", "prefix", "conversation")


@dataclass(frozen=True)
class Request:
    """Token ids, and how many more are asked for."""

    prompt: list[int]
    new: int


Client = Generator[Request, list[int], None]
"""Asks one request after the other, and gets the answers."""


@dataclass(frozen=True)
class Round:
    """What one round took.

    Attributes:
        seconds: until the last answer was complete.
        tokens: generated.
        first: seconds from asking to the first token, of each request.
        prompts: tokens of all prompts.
        cached: those of them whose pages were known.
    """

    seconds: float
    tokens: int
    first: list[float]
    prompts: int
    cached: int = 0


@dataclass(frozen=True)
class Row:
    """A line of the table: medians of the rounds, and the lowest and highest throughput.

    ``cached`` is the share of prompt tokens whose pages were known.
    """

    contender: str
    concurrent: int
    requests: int
    tokens_per_second: float
    lowest: float
    highest: float
    first_token_ms: float
    cached: float
    workload: str


class Texts:
    """Random requests of a round.

    Args:
        random: other numbers for each number of clients and each round.
        vocabulary: token ids that there are.
        prompt: bounds of the tokens of a prompt, or of what it has of its own.
        new: bounds of the tokens of an answer.
    """

    def __init__(
        self,
        random: np.random.Generator,
        vocabulary: int,
        prompt: Sequence[int],
        new: Sequence[int],
    ) -> None:
        self._random = random
        self._vocabulary = vocabulary
        self._prompt = prompt
        self._new = new

    def ids(self, count: int | None = None) -> list[int]:
        """Return token ids; as many as a prompt has if no number is given."""
        size = self._between(self._prompt) if count is None else count
        ids: list[int] = self._random.integers(5, self._vocabulary, size).tolist()
        return ids

    def _between(self, bounds: Sequence[int]) -> int:
        low, high = bounds
        return int(self._random.integers(low, high))

    def request(self, before: Sequence[int] = ()) -> Request:
        """Return a request that begins with some tokens."""
        return Request([*before, *self.ids()], self._between(self._new))

    def clients(self, workload: str, count: int, requests: int, shared: int) -> list[Client]:
        """Return what each client asks."""
        if workload == "conversation":
            turns = [[self.request() for _ in range(requests)] for _ in range(count)]
            return [_conversation(each) for each in turns]
        prefix = self.ids(shared) if workload == "prefix" else []
        waiting = iter([self.request(prefix) for _ in range(count * requests)])
        return [_one_by_one(waiting) for _ in range(count)]


def _one_by_one(waiting: Iterator[Request]) -> Client:
    """Ask what nobody has asked yet."""
    while (request := next(waiting, None)) is not None:
        yield request


def _conversation(turns: Sequence[Request]) -> Client:
    history: list[int] = []
    for turn in turns:
        history += turn.prompt
        history += yield Request(list(history), turn.new)


def _following(client: Client, answer: list[int] | None = None) -> Request | None:
    """Return what a client asks next, with the answer to its last request."""
    try:
        return next(client) if answer is None else client.send(answer)
    except StopIteration:
        return None


def with_engine(engine: EngineThread, clients: Sequence[Client]) -> Round:
    """Have clients ask an Engine, each its next request when the one before is answered."""
    ended: queue.SimpleQueue[tuple[Step, Client, list[int]]] = queue.SimpleQueue()
    first: list[float] = []
    tokens = prompts = cached = running = 0

    def ask(client: Client, request: Request) -> None:
        begin = time.perf_counter()
        answer: list[int] = []

        def deliver(step: Step) -> None:
            if step.token is not None:
                if not answer:
                    first.append(time.perf_counter() - begin)
                answer.append(step.token)
            if step.is_last:
                ended.put((step, client, answer))

        engine.submit(request.prompt, deliver, max_new_tokens=request.new, choice=GREEDY)

    begin = time.perf_counter()
    queries = [(client, _following(client)) for client in clients]
    while True:
        for client, request in queries:
            if request is not None:
                running, prompts = running + 1, prompts + len(request.prompt)
                ask(client, request)
        if not running:
            return Round(time.perf_counter() - begin, tokens, first, prompts, cached)
        step, client, answer = ended.get()
        if step.error is not None:
            raise step.error
        running, tokens, cached = running - 1, tokens + len(answer), cached + step.cached_tokens
        queries = [(client, _following(client, answer))]


def with_generators(model: Any, rows: int, clients: Sequence[Client]) -> Round:
    """Have generators take steps in turn; a client asks again when its answer is complete."""
    first: list[float] = []
    tokens = prompts = 0

    def answers(client: Client) -> Iterator[None]:
        nonlocal tokens, prompts
        request = _following(client)
        while request is not None:
            begin = time.perf_counter()
            prompts += len(request.prompt)
            params = og.GeneratorParams(model)
            most = len(request.prompt) + request.new + rows
            params.set_search_options(max_length=most, do_sample=False)
            generator = og.Generator(model, params)
            generator.append_tokens(np.asarray(request.prompt, np.int32))
            answer: list[int] = []
            while len(answer) < request.new and not generator.is_done():
                generator.generate_next_token()
                if not answer:
                    first.append(time.perf_counter() - begin)
                answer.append(int(generator.get_next_tokens()[0]))
                tokens += 1
                yield
            request = _following(client, answer)

    begin = time.perf_counter()
    running = [answers(client) for client in clients]
    while running:
        running = [steps for steps in running if next(steps, steps) is not steps]
    return Round(time.perf_counter() - begin, tokens, first, prompts)


def row_of(contender: str, concurrent: int, rounds: Sequence[Round], workload: str) -> Row:
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
        sum(entry.cached for entry in rounds) / sum(entry.prompts for entry in rounds),
        workload,
    )


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text."""
    lines = [
        f"{'contender':<12}{'concurrent':>11}{'tokens/s':>10}{'lowest':>9}{'first token':>13}"
        f"{'cached':>8}"
    ]
    lines += [
        f"{row.contender:<12}{row.concurrent:>11}{row.tokens_per_second:>10.1f}{row.lowest:>9.1f}"
        f"{row.first_token_ms:>10.0f} ms{row.cached:>7.0%}"
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
    add("--workload", choices=WORKLOADS, default="uneven")
    add("--shared", type=int, default=1024, help="first tokens of all requests, of prefix")
    add("--plain", action="store_true", help="also the Engine over pages without guessed tokens")
    add("--prefixes", action="store_true", help="also without kept conversations")
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
    engines = [paged, static]
    contenders: dict[str, Callable[[Sequence[Client]], Round]] = {
        "paged": lambda clients: with_engine(paged, clients),
        "static": lambda clients: with_engine(static, clients),
        "generators": lambda clients: with_generators(model, rows, clients),
    }
    batching, without = batching_of(options.paged), {"threads": options.threads}
    if options.plain:
        plain = EngineThread(options.paged, batching, **without, speculates=False)
        engines.append(plain)
        contenders["plain"] = lambda clients: with_engine(plain, clients)
    if options.prefixes:
        prefixes = EngineThread(options.paged, batching, **without, conversations=0)
        engines.append(prefixes)
        contenders["prefixes"] = lambda clients: with_engine(prefixes, clients)
    table_rows = []
    for concurrent in map(int, options.concurrent.split(",")):
        rounds: dict[str, list[Round]] = {name: [] for name in contenders}
        for number in range(options.rounds):
            for name, run in contenders.items():
                random = np.random.default_rng(
                    [WORKLOADS.index(options.workload), concurrent, number]
                )
                texts = Texts(random, vocabulary, options.prompt, options.new)
                clients = texts.clients(
                    options.workload, concurrent, options.requests, options.shared
                )
                rounds[name].append(run(clients))
        table_rows += [
            row_of(name, concurrent, rounds[name], options.workload) for name in contenders
        ]
    for engine in engines:
        engine.close()
    versions = {"onnxruntime-genai": og.__version__, "threads": str(options.threads)}
    if options.json:
        print(json.dumps({"machine": describe(versions), "rows": [asdict(r) for r in table_rows]}))
    else:
        print(table(table_rows))


if __name__ == "__main__":
    main()
