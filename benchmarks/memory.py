"""Peak memory of processes that run a model at a context, beside what ``tq-onnx fit`` foretells.

Each model runs in a process of its own, as ``LanguageModel.generate`` does: a prompt is read in
pieces up to the context, and some tokens are decoded. Then the cache is saved, and another process
loads it and decodes a token. Peaks are VmHWM, so this runs on Linux.

    python benchmarks/memory.py model.onnx model.int4.onnx --context 8192
    python benchmarks/memory.py model.onnx model.int4.onnx --context 32768 --pieces 5

With ``--pieces`` only so many pieces of the prompt are read, the first and the last among them. In
between the caches are filled with copies of their rows. The time of a piece in between is
interpolated: it grows with the tokens in front of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the process that starts the others imports little
    import numpy as np
    import numpy.typing as npt

    from tq_onnx.runtime.decoder import Decoder

STEPS = 16


def peak() -> int:
    """The largest resident set of this process so far, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def run(
    model: Path, context: int, threads: int | None, saved: Path | None, pieces: int | None
) -> dict[str, Any]:
    """Reads, decodes and saves, if it is told where."""
    import numpy as np

    import tq_onnx
    from tq_onnx.language.cachefile import write_cache

    lm = tq_onnx.load(model, threads=threads)
    fixed = lm.signature.fixed_capacity
    decoder = lm.decoder(capacity=context if fixed else None)
    ids = np.random.default_rng(0).integers(0, lm.vocabulary, context)
    prompt_seconds = _read(decoder, ids[: context - STEPS], pieces)
    steps = []
    for token in ids[context - STEPS :]:
        began = time.perf_counter()
        decoder.step([token])
        steps.append(time.perf_counter() - began)
    sizes = {
        "peak": peak(),
        "caches": decoder.cache_bytes,
        "prompt_seconds": prompt_seconds,
        "tokens_per_second": 1 / statistics.median(steps),
    }
    if saved is None:
        return sizes
    write_cache(saved, ids.tolist(), decoder.snapshot(), lm.identity)
    return sizes | {"file": saved.stat().st_size}


def _read(decoder: Decoder, ids: npt.NDArray[np.int64], pieces: int | None) -> float:
    """Fills the caches with a prompt, or with some pieces of it; returns its seconds."""
    import numpy as np

    from tq_onnx.runtime.generate import PROMPT_PIECE

    starts = np.arange(0, len(ids), PROMPT_PIECE)
    read = starts if pieces is None else np.linspace(0, starts[-1], pieces).astype(np.int64)
    seconds = []
    for start in read:
        if decoder.length < start:
            decoder.repeat(int(start))
        piece = ids[None, start : start + PROMPT_PIECE]
        began = time.perf_counter()
        decoder.read(piece, most=PROMPT_PIECE)
        seconds.append(time.perf_counter() - began)
    return float(np.interp(starts, read, seconds).sum())


def resume(model: Path, context: int, threads: int | None, saved: Path) -> dict[str, Any]:
    """Loads what was saved, and decodes one token."""
    import tq_onnx

    fixed = tq_onnx.inspect(model).plan is not None
    lm = tq_onnx.load(model, threads=threads, context=context + 1 if fixed else None)
    _ = lm.identity
    started = time.perf_counter()
    cache = lm.load_cache(saved)
    lm.generate([*cache.tokens, 1], cache=cache, max_new_tokens=1)
    return {"resume_seconds": time.perf_counter() - started}


def _child(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, __file__, *map(str, arguments)]
    process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    answer: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return answer


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--pieces", type=int, help="of the prompt that are read; default: all")
    parser.add_argument(
        "--no-save", action="store_true", help="save no cache, which takes twice its memory"
    )
    parser.add_argument("--do", choices=("run", "resume"), help=argparse.SUPPRESS)
    parser.add_argument("--saved", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.do:
        call = (options.models[0], options.context, options.threads, options.saved)
        print(json.dumps(run(*call, options.pieces) if options.do == "run" else resume(*call)))
        return
    import tq_onnx

    threads = () if options.threads is None else ("--threads", options.threads)
    pieces = () if options.pieces is None else ("--pieces", options.pieces)
    for model in options.models:
        row = tq_onnx.fit(model, context=options.context).rows[0]
        with tempfile.TemporaryDirectory() as folder:
            saved = () if options.no_save else ("--saved", f"{folder}/cache")
            call = (model, "--context", options.context, *threads, *saved)
            measured = _child(*call, *pieces, "--do", "run")
            if saved:
                measured |= _child(*call, "--do", "resume")
        off = row.peak_bytes / measured["peak"] - 1
        print(
            json.dumps(
                {"model": str(model), "context": options.context, "forecast": row.peak_bytes}
                | measured
                | {"off_percent": round(100 * off, 1)}
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
