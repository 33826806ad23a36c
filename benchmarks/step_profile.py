"""Where the time of a decode step of a whole model goes, by operator.

Run it from the repository with tq-onnx installed, on a model that was converted:

    python benchmarks/step_profile.py int4.onnx
    python benchmarks/step_profile.py int4.onnx --contexts 1024,16384 --threads 1 --json

ONNX Runtime's own profiler times every node. Caches hold copies of the rows of a short prompt,
which for the speed of decode is the same as a long one. The method is in README.md of this folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import machine
import numpy as np
import onnxruntime

import tq_onnx
from tq_onnx.ops.operators import Attention, Encode
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.opening import open_model
from tq_onnx.runtime.session import RECORD_ASSIGNMENT

SEED_TOKENS = 64
WAKE_STEPS = 2


@dataclass(frozen=True)
class Row:
    """One context.

    Attributes:
        context: tokens in the caches.
        threads: threads within an operator.
        ms: of a step within ONNX Runtime, the median.
        nodes: of a step, how many have run.
        operators: milliseconds of a step by the type of the nodes, of the median step.
        rest_ms: of that step, what no node takes.
        own_share: of that step, what our operators take.
    """

    context: int
    threads: int
    ms: float
    nodes: int
    operators: dict[str, float]
    rest_ms: float
    own_share: float


def profiled(model: OpenModel, context: int, threads: int, steps: int) -> Row:
    """Decodes some steps behind ``context`` tokens with the profiler on."""
    options = tq_onnx.session_options()
    options.intra_op_num_threads = threads
    options.enable_profiling = True
    options.add_session_config_entry(RECORD_ASSIGNMENT, "1")  # decoders ask where nodes run
    with tempfile.TemporaryDirectory() as folder:
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = onnxruntime.InferenceSession(
            str(model.path), options, providers=["CPUExecutionProvider"]
        )
        total = context + WAKE_STEPS + steps
        fixed = model.signature.fixed_capacity and model.room is None
        decoder = replace(model, session=session).decoder(capacity=total if fixed else None)
        ids = np.random.default_rng(0).integers(0, model.vocabulary, SEED_TOKENS)
        decoder.prefill(ids[None, : min(context, SEED_TOKENS)])
        decoder.repeat(context)
        for number in range(WAKE_STEPS + steps):
            decoder.step([int(ids[number % SEED_TOKENS])])
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    return _row(events, context, threads, steps)


def _row(events: Sequence[dict[str, object]], context: int, threads: int, steps: int) -> Row:
    """Sums up the run that is the median of the last ones; times are microseconds."""
    runs = [event for event in events if event.get("name") == "model_run"][-steps:]
    median = statistics.median_low(int(str(run["dur"])) for run in runs)
    run = next(each for each in runs if int(str(each["dur"])) == median)
    begin = int(str(run["ts"]))
    operators: Counter[str] = Counter()
    nodes = 0
    for event in events:
        arguments = event.get("args")
        if not str(event.get("name")).endswith("_kernel_time") or not isinstance(arguments, dict):
            continue
        if begin <= int(str(event["ts"])) < begin + median:
            operators[arguments["op_name"]] += int(str(event["dur"]))
            nodes += 1
    ours = (Encode.name, Attention.name)
    kernels = sum(spent for name, spent in operators.items() if name in ours)
    return Row(
        context,
        threads,
        median / 1e3,
        nodes,
        {name: spent / 1e3 for name, spent in operators.most_common()},
        (median - operators.total()) / 1e3,
        kernels / median,
    )


def _print(row: Row, lines: int) -> None:
    print(f"{row.context:,} tokens, {row.threads} threads: {row.ms:.2f} ms, {row.nodes} nodes")
    shown = list(row.operators.items())[:lines]
    elsewhere = sum(row.operators.values()) - sum(spent for _, spent in shown)
    for name, spent in [*shown, ("other operators", elsewhere), ("between nodes", row.rest_ms)]:
        print(f"  {name:<32} {spent:9.3f} ms {spent / row.ms:7.1%}")
    print(f"  {'of tq-onnx':<32} {row.own_share * row.ms:9.3f} ms {row.own_share:7.1%}", flush=True)


def _integers(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


def main() -> None:
    """Prints a table for each context, or one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="that tq-onnx has converted")
    parser.add_argument("--contexts", type=_integers, default=[1024, 4096, 16384])
    parser.add_argument("--threads", type=_integers, default=[1, 2])
    parser.add_argument("--steps", type=int, default=15, help="whose median is shown")
    parser.add_argument("--lines", type=int, default=8, help="operators of a table")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model = open_model(options.model)
    rows = []
    for threads in options.threads:
        for context in options.contexts:
            rows.append(profiled(model, context, threads, options.steps))
            if not options.json:
                _print(rows[-1], options.lines)
    if options.json:
        about = machine.describe({"onnxruntime": onnxruntime.__version__})
        document = {"machine": about, "rows": [asdict(row) for row in rows]}
        json.dump(document, sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    main()
