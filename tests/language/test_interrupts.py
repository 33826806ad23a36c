"""Whatever instruction an interrupt comes at, a cache holds what it says and goes on."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np
import pytest

import tq_onnx
from tests.language.models import PROMPT, folder, language_model
from tq_onnx import Cache, LanguageModel, PromptStore
from tq_onnx.errors import UsageError
from tq_onnx.language import cache, call, promptstore
from tq_onnx.runtime import buffers, contents, decoder, generate

FILES: Final = {
    module.__file__ for module in (cache, call, promptstore, buffers, contents, decoder, generate)
}
POINTS: Final = int(os.environ.get("TQ_INTERRUPTS", "16"))
"""Instructions that have their turn, evenly spread; some 2,000 to 8,000 are all."""
FORMS: Final = ("growing", "in place", *(("window", "bodies in place") if POINTS > 16 else ()))

IDS: Final = list(PROMPT.encode())
AGAIN: Final = [*IDS[:20], 65, *IDS[:5]]


class Interrupts:
    """Counts the instructions of what it traces, and interrupts one of them."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.seen = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.seen += 1
            if self.seen == self.at:
                raise KeyboardInterrupt
        return self

    def run(self, run: Callable[[], object]) -> bool:
        """Return True if the run was interrupted."""
        sys.settrace(self)
        try:
            run()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False


def filled(model: LanguageModel, ids: list[int] = IDS) -> Cache:
    kept = model.new_cache()
    model.generate(ids, cache=kept, max_new_tokens=3)
    return kept


def streamed(model: LanguageModel, kept: Cache) -> None:
    running = model.stream(AGAIN, cache=kept, max_new_tokens=3)
    next(running)
    running.close()


CALLS: dict[str, Callable[[LanguageModel, Cache, Cache], object]] = {
    "generate": lambda model, kept, _: model.generate(AGAIN, cache=kept, max_new_tokens=3),
    "prompt store": lambda model, _, more: model.generate(AGAIN, cache=more, max_new_tokens=3),
    "stream": lambda model, kept, _: streamed(model, kept),
    "rewind": lambda _, kept, __: kept.rewind(7),
}


def model_of(form: str) -> LanguageModel:
    if form == "bodies in place":
        return tq_onnx.load(folder("int4"), threads=1, library=False, context=160)
    return language_model(form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_call_leaves_caches_true(
    name: str, form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tq_onnx.runtime.generate.PROMPT_PIECE", 4)
    model = model_of(form)
    if name == "prompt store":
        store = PromptStore(tmp_path)
        model = LanguageModel(model.opened, context=model.context, prompt_store=store)
    first = filled(model), filled(model, [70])
    texts = [kept.tokens for kept in first]
    counter = Interrupts()
    pair = [each.fork(1)[0] for each in first]
    assert not counter.run(lambda: CALLS[name](model, *pair))
    step = max(counter.seen // POINTS, 1)
    longer = model.generate(AGAIN, max_new_tokens=8).tokens
    for at in range(1, counter.seen + 1, step):
        pair = [each.fork(1)[0] for each in first]
        for file in list(tmp_path.iterdir())[at % 3 :]:  # of a prompt store
            file.unlink()
        Interrupts(at).run(lambda pair=pair: CALLS[name](model, *pair))
        for kept, text in zip(pair, texts, strict=True):
            held = kept.tokens
            assert len(kept) == len(held) == kept.decoder.length
            ends = len(AGAIN) + 3
            assert held == text[: len(held)] or held[: len(AGAIN)] == tuple(AGAIN)[: len(held)]
            assert len(held) <= max(ends, len(text))
            if held and form != "window":  # a rewind leaves codes for exact tokens
                fresh = model.new_cache()
                fresh.decoder.read([held], most=4)
                for index in range(8):
                    assert np.array_equal(kept.decoder.plane(index), fresh.decoder.plane(index))
        done = model.generate(AGAIN, cache=pair[0], max_new_tokens=8)
        assert form == "window" or done.tokens == longer


def test_every_instruction_of_taking_a_cache_leaves_it_free() -> None:
    """And one of several threads gets it."""
    kept = language_model("growing").new_cache()

    def take() -> None:
        with kept.in_use():
            pass

    counter = Interrupts()
    counter.run(take)
    for at in range(1, counter.seen + 1):
        assert Interrupts(at).run(take)
        take()

    takers, refused = [], []
    begin, end = threading.Barrier(8), threading.Event()

    def hold(number: int) -> None:
        begin.wait()
        try:
            with kept.in_use():
                takers.append(number)
                end.wait()
        except UsageError:
            refused.append(number)
        if len(refused) == 7:
            end.set()

    threads = [threading.Thread(target=hold, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(takers), len(refused)) == (1, 7)
    take()
