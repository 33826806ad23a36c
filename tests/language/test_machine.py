"""A language model and its caches beside a model of what must be true, in whatever order of calls.

A cache holds the tokens that were read into it, and nothing changes it but a call that it was given
to; greedy tokens are the best ones for a fresh cache; what was refused changes nothing; files give
back what was saved.

A normal run takes few steps. With ``TQ_CACHE_STEPS=100000`` it takes as many, from another seed
each time, and prints memory before and after (``pytest -s``).
"""

from __future__ import annotations

import gc
import hashlib
import os
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import tq_onnx
from tests.language.models import folder, language_model
from tests.language.test_interrupts import Interrupts
from tq_onnx import Cache, Completion, LanguageModel, Sampling
from tq_onnx.errors import ModelFileError, UsageError
from tq_onnx.language.text import LENGTH, Piece

STEPS: Final = int(os.environ.get("TQ_CACHE_STEPS", "0"))
EXAMPLE: Final = 50
CONTEXT: Final = 48
TEXT: Final = list(b"Call me Ishmael. Some years ago, never mind how long")
MOST_CACHES: Final = 5
TIE: Final = 0.05
"""Logits that calls of other sizes may change, by their rounding before a quantisation."""

PROMPTS = st.integers(1, 12)
ANY: Final = st.integers(0, 1 << 16)
NEW: Final = st.integers(0, 8)


@dataclass
class Held:
    """A cache, and what is known of it."""

    cache: Cache
    tokens: tuple[int, ...] = ()
    digest: bytes = b""
    exact: bool = True
    """Whether greedy tokens are those of a fresh cache: a window that went back has codes."""
    running: Generator[Piece, None, Completion] | None = None
    prompt: list[int] = field(default_factory=list)

    def note(self, tokens: Sequence[int]) -> None:
        self.tokens = tuple(tokens)
        self.digest = digest_of(self.cache)

    def check(self) -> None:
        assert self.cache.tokens == self.tokens
        assert len(self.cache) == len(self.tokens) == self.cache.decoder.length


def digest_of(cache: Cache) -> bytes:
    found = hashlib.blake2b(digest_size=8)
    for index in range(8):
        found.update(cache.decoder.plane(index).tobytes())
    return found.digest()


class Machine(RuleBasedStateMachine):
    """The calls of a program, one after another."""

    form: ClassVar[str]
    steps: ClassVar[int] = 0
    others: ClassVar[dict[str, LanguageModel]] = {}

    @initialize()
    def begin(self) -> None:
        self.model = self.others[self.form]
        self.held = [Held(self.model.new_cache())]
        self.chat = self.model.chat()
        self.turns: list[str] = []
        self.turn = 0
        self._folder = tempfile.TemporaryDirectory()
        self.file = Path(self._folder.name, "cache.safetensors")
        self.saved: tuple[tuple[int, ...], bool] | None = None

    def teardown(self) -> None:
        if hasattr(self, "_folder"):
            for each in self.held:
                if each.running is not None:
                    each.running.close()
            self._folder.cleanup()

    @invariant()
    def caches_are_what_they_were(self) -> None:
        type(self).steps += 1
        if not hasattr(self, "held"):
            return
        idle = [each for each in self.held if each.running is None]
        for each in idle:
            each.check()
        if idle:  # one after another: it takes a millisecond
            self.turn += 1
            each = idle[self.turn % len(idle)]
            assert digest_of(each.cache) == each.digest or not each.tokens

    def one(self, index: int) -> Held:
        return self.held[index % len(self.held)]

    def prompt(self, of: Held, keep: int, kind: int, more: int) -> list[int]:
        """A prompt that goes on with a cache, differs from it somewhere, or is another one."""
        begin = list(of.tokens[: keep % (len(of.tokens) + 1)]) if kind else list(of.tokens)
        if kind > 1:
            begin = []
        fill = TEXT[keep % 9 :] if kind > 1 else TEXT[more:]
        found = [*begin, *fill[:more]]
        return found[: self.room or 96]

    @property
    def room(self) -> int | None:
        return CONTEXT if self.model.context else None

    def best(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Check that tokens are what a fresh cache goes on with."""
        if not tokens:
            return
        logits = self.model.decoder(capacity=None).prefill([[*prompt, *tokens[:-1]]])[0]
        for place, token in enumerate(tokens, len(prompt) - 1):
            assert logits[place].max() - logits[place, token] < TIE

    def read(self, each: Held, prompt: Sequence[int], done: Completion, *, greedy: bool) -> None:
        """Note what a call has read, and check what it gave."""
        shared = next(
            (at for at, (a, b) in enumerate(zip(each.tokens, prompt, strict=False)) if a != b),
            min(len(each.tokens), len(prompt)),
        )
        kept = min(shared, len(prompt) - 1)
        if self.form == "window" and kept < len(each.tokens):
            each.exact = kept == 0
        assert done.usage.cached_tokens == kept
        whole = [*prompt, *done.tokens]
        if done.finish_reason == LENGTH and done.tokens:
            whole.pop()  # the last one was not read
        if greedy and each.exact:
            self.best(prompt, done.tokens)
        each.note(whole)

    @rule()
    @precondition(lambda self: len(self.held) < MOST_CACHES)
    def new(self) -> None:
        self.held.append(Held(self.model.new_cache()))

    @rule(index=ANY)
    @precondition(lambda self: len(self.held) > 1)
    def forget(self, index: int) -> None:
        """Streams that run are dropped with their caches."""
        del self.held[index % len(self.held)]

    @rule(index=ANY, keep=ANY, more=PROMPTS, new=NEW, seed=st.none() | ANY)
    def generate(self, index: int, keep: int, more: int, new: int, seed: int | None) -> None:
        each = self.one(index)
        prompt = self.prompt(each, keep, keep % 3, more)
        sampling = None if seed is None else Sampling(1.0, top_k=5, seed=seed)
        if not prompt or each.running is not None:
            with pytest.raises(UsageError):
                self.model.generate(prompt, cache=each.cache, max_new_tokens=new)
            return
        done = self.model.generate(prompt, cache=each.cache, max_new_tokens=new, sampling=sampling)
        room = new if self.room is None else min(new, self.room - len(prompt) + 1)
        assert len(done.tokens) == room or done.finish_reason != LENGTH
        self.read(each, prompt, done, greedy=seed is None)

    @rule(index=ANY, keep=ANY, more=PROMPTS, begun=st.booleans())
    def begin_stream(self, index: int, keep: int, more: int, begun: bool) -> None:
        each = self.one(index)
        prompt = self.prompt(each, keep, keep % 3, more)
        if not prompt:
            return
        running = self.model.stream(prompt, cache=each.cache, max_new_tokens=9)
        if each.running is not None:
            with pytest.raises(UsageError, match="in use"):
                next(running)
            return
        if begun:
            if len(prompt) <= len(each.tokens) or each.tokens != tuple(prompt[: len(each.tokens)]):
                each.exact &= self.form != "window"
            each.running, each.prompt = running, prompt
            next(running)

    @rule(index=ANY, how=st.integers(0, 3))
    def go_on(self, index: int, how: int) -> None:
        """Take another piece, all of them, or leave."""
        each = self.one(index)
        if each.running is None:
            return
        if how == 0 and next(each.running, None) is not None:
            return
        if how == 1:
            for _ in each.running:
                pass
        if how == 2:
            each.running.close()
        each.running = None  # which drops it
        tokens = each.cache.tokens
        assert tokens[: len(each.prompt)] == tuple(each.prompt)
        if each.exact:
            self.best(each.prompt, tokens[len(each.prompt) :])
        each.note(tokens)

    @rule(index=ANY, keep=ANY)
    def rewind(self, index: int, keep: int) -> None:
        each = self.one(index)
        kept = keep % (len(each.tokens) + 3)
        if each.running is not None or kept > len(each.tokens):
            with pytest.raises(UsageError):
                each.cache.rewind(kept)
            return
        each.cache.rewind(kept)
        if kept < len(each.tokens) and self.form == "window":
            each.exact = kept == 0
        each.note(each.tokens[:kept])

    @rule(index=ANY, count=st.integers(1, 2))
    def fork(self, index: int, count: int) -> None:
        each = self.one(index)
        if each.running is not None:
            with pytest.raises(UsageError, match="in use"):
                each.cache.fork(count)
            return
        for cache in each.cache.fork(count)[: MOST_CACHES - len(self.held)]:
            self.held.append(Held(cache, each.tokens, each.digest, each.exact))

    @rule(index=ANY)
    def save(self, index: int) -> None:
        each = self.one(index)
        if each.running is not None or not each.tokens:
            with pytest.raises(UsageError, match=r"in use|empty"):
                each.cache.save(self.file)
            return
        each.cache.save(self.file)
        self.saved = each.tokens, each.exact

    @rule(index=ANY)
    def load(self, index: int) -> None:
        if self.saved is None:
            with pytest.raises(ModelFileError, match="no such file"):
                self.model.load_cache(self.file)
            return
        with pytest.raises(UsageError, match="belongs to another"):
            self.others["another"].load_cache(self.file)
        with pytest.raises(ModelFileError, match="no conversation"):
            self.model.load_chat(self.file)
        kept = Held(self.model.load_cache(self.file), exact=self.saved[1])
        kept.note(self.saved[0])
        kept.check()
        self.held[index % len(self.held)] = kept

    @rule(place=ANY, byte=st.integers(0, 255))
    def damage(self, place: int, byte: int) -> None:
        """A file with another byte is refused, or any cache of the model."""
        if self.saved is None:
            return
        content = bytearray(self.file.read_bytes())
        content[place % len(content)] = byte
        path = self.file.with_name("damaged")
        path.write_bytes(content)
        try:
            kept = self.model.load_cache(path)
        except (ModelFileError, UsageError) as error:
            assert "\n" not in str(error)
            return
        if self.room is None or len(kept) < self.room:
            self.model.generate([*kept.tokens, 65], cache=kept, max_new_tokens=1)

    @rule(index=ANY, keep=ANY, more=PROMPTS, at=st.integers(1, 4000))
    def interrupt(self, index: int, keep: int, more: int, at: int) -> None:
        """A call that is interrupted somewhere."""
        each = self.one(index)
        prompt = self.prompt(each, keep, keep % 3, more)
        if each.running is not None or not prompt:
            return
        Interrupts(at).run(lambda: self.model.generate(prompt, cache=each.cache, max_new_tokens=3))
        tokens = each.cache.tokens
        is_old = tokens == each.tokens[: len(tokens)]
        assert is_old or tokens[: len(prompt)] == tuple(prompt[: len(tokens)])
        each.exact = self.form != "window"
        each.note(tokens)

    @rule(
        new=st.integers(0, 6),
        text=st.sampled_from(["Who?", "And then?", "ä"]),
        how=st.integers(0, 3),
    )
    def talk(self, new: int, text: str, how: int) -> None:
        before = list(self.chat.messages)
        try:
            if how == 0:
                done = self.chat.ask(text, max_new_tokens=new).text
            else:
                running = self.chat.stream(text, max_new_tokens=new)
                pieces = [piece.text for piece in (running if how > 1 else [next(running)])]
                done = "".join(pieces)
                running.close()
        except UsageError as error:
            assert "the cache holds" in str(error)
            assert self.chat.messages == before
            self.chat.rewind(len(self.turns))
            self.turns.clear()
            return
        self.turns += [text]
        assert self.chat.messages == [
            *before,
            {"role": "user", "content": text},
            {"role": "assistant", "content": done},
        ]

    @rule(turns=st.integers(1, 3))
    def forget_turns(self, turns: int) -> None:
        if turns > len(self.turns):
            with pytest.raises(UsageError, match="cannot go back"):
                self.chat.rewind(turns)
            return
        self.chat.rewind(turns)
        del self.turns[len(self.turns) - turns :]
        assert len(self.chat.messages) == 2 * len(self.turns)

    @rule()
    def save_talk(self) -> None:
        path = self.file.with_name("talk")
        if not len(self.chat.cache):
            with pytest.raises(UsageError, match="empty"):
                self.chat.save(path)
            return
        self.chat.save(path)
        if not self.chat.messages:
            return
        kept = self.model.load_chat(path)
        assert kept.messages == self.chat.messages
        assert kept.cache.tokens == self.chat.cache.tokens
        self.chat = kept


def resident() -> int:
    """Return the megabytes of this process."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return 0
    lines = status.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) >> 10


@pytest.mark.parametrize("form", ["growing", "in place", "window"])
def test_caches_keep_their_promises(form: str) -> None:
    kind = "window" if form == "window" else "int4"
    context = None if form == "growing" else CONTEXT
    model = tq_onnx.load(folder(kind), threads=1, context=context)
    again = tq_onnx.load(folder(kind), threads=1, context=context)
    another = language_model("growing" if form == "window" else "window")
    Machine.others = {form: model, "again": again, "another": another}
    Machine.form, Machine.steps = form, 0
    chosen = settings(
        max_examples=max(STEPS // EXAMPLE // 10, 3),
        stateful_step_count=EXAMPLE,
        derandomize=not STEPS,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    before = None
    while before is None or Machine.steps < STEPS:
        run_state_machine_as_test(Machine, settings=chosen)
        gc.collect()
        before = before or resident()
    print(f"{form}: {Machine.steps} steps, {before} MB before, {resident()} MB after")
