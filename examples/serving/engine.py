"""Answer many prompts on onnxruntime-genai's Engine, through ``tq_onnx.Engine``.

    python examples/serving/engine.py qwen3-genai-paged prompts.txt --max-tokens 32

A folder that was converted with --paged takes new prompts at any step. Others are computed in
batches of up to four, or one prompt at a time where such a batch would be wrong.

Needs onnxruntime-genai 0.18 and tq-onnx.
"""

from __future__ import annotations

import argparse
import queue
import sys
from collections.abc import Callable
from pathlib import Path

from tq_onnx import Engine, Sampling
from tq_onnx.errors import TqOnnxError
from tq_onnx.runtime.jobs import Step


def genai_folder(text: str) -> Path:
    """Take a folder from the command line."""
    if not (Path(text) / "genai_config.json").is_file():
        raise argparse.ArgumentTypeError(
            f"{text} is no folder of onnxruntime-genai: it has no genai_config.json"
        )
    return Path(text)


def lines_of(text: str) -> list[str]:
    """Take the lines of a text file from the command line."""
    try:
        return Path(text).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{text} is no text file: {error}") from error


def answer_all(
    engine: Engine,
    prompts: list[list[int]],
    *,
    max_new_tokens: int | None = None,
    sampling: Sampling | None = None,
) -> list[list[int]]:
    """Answer prompts together, and return the tokens of each answer.

    Raises:
        TqOnnxError: a prompt is empty or too long, or the Engine failed.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    ended: queue.SimpleQueue[Step] = queue.SimpleQueue()

    def into(answer: list[int]) -> Callable[[Step], None]:
        def deliver(step: Step) -> None:
            if step.token is not None:
                answer.append(step.token)
            if step.is_last:
                ended.put(step)

        return deliver

    for tokens, answer in zip(prompts, answers, strict=True):
        engine.submit(tokens, into(answer), max_new_tokens=max_new_tokens, sampling=sampling)
    for _ in prompts:
        step = ended.get()
        if step.error is not None:
            raise step.error
    return answers


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=genai_folder, help="of onnxruntime-genai, converted")
    parser.add_argument("prompts", type=lines_of, help="text file, a prompt in every line")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each answer (default: 64)")
    parser.add_argument("--alone", action="store_true", help="compute one prompt at a time")
    given = parser.parse_args()
    try:
        with Engine(given.folder, alone=given.alone) as engine:
            if engine.batching.reason:
                print(engine.batching.reason, file=sys.stderr)
            streams = [
                engine.stream(line, max_new_tokens=given.max_tokens) for line in given.prompts
            ]
            for line, pieces in zip(given.prompts, streams, strict=True):
                print(line + "".join(piece.text for piece in pieces), flush=True)
    except TqOnnxError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
