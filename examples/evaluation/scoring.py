"""Log likelihoods and greedy texts of an original or a converted model, for test suites."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tq_onnx
from tq_onnx.files.configuration import context_length
from tq_onnx.measure.divergence import call_tokens, log_softmax


class Scorer:
    """A model that is asked for log likelihoods, in nats, and for texts.

    Args:
        model: the model file, or a folder with one decoder; its tokenizer lies beside it.
        max_length: tokens of the longest input, if the model takes as many.
        threads: threads of onnxruntime; None for its own choice.
        library: False to run the function bodies of a converted model instead of the kernels.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        max_length: int = 2048,
        threads: int | None = None,
        library: bool = True,
    ) -> None:
        """Open the model; see the class for arguments."""
        self.model = tq_onnx.load(model, threads=threads, library=library)
        opened = self.model.opened
        rooms = (max_length, opened.longest, context_length(opened.path))
        self.max_length = min(room for room in rooms if room is not None)
        self._decoder = self.model.decoder(capacity=opened.capacity_for(self.max_length, 0))
        words = self.model.tokenizer
        begin = words.encode("")[:1] or list(words.eos_ids[:1]) or words.encode("\n")[:1]
        self.prefix: int = begin[0]
        """The token before the first one of a text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text."""
        return self.model.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def score(self, lead: Sequence[int], answer: Sequence[int]) -> tuple[float, bool]:
        """Return the log likelihood of an answer, and whether the model itself would write it.

        Args:
            lead: tokens before it, one or more; the first ones are left out if there are too many.
            answer: tokens of the answer; none have the likelihood of 1.
        """
        if not answer:
            return 0.0, True
        lead = list(lead)[-max(self.max_length + 1 - len(answer), 1) :]
        self._decoder.reset()
        fed = np.asarray([*lead, *answer[:-1]], np.int64)[None]
        size = call_tokens(self._decoder, self.model.vocabulary)
        tokens, likelihood, is_greedy = iter(answer), 0.0, True
        for start in range(0, fed.shape[1], size):
            logits = self._decoder.prefill(fed[:, start : start + size])[0]
            for scores in log_softmax(logits[max(len(lead) - 1 - start, 0) :]):
                token = next(tokens)
                likelihood += float(scores[token])
                is_greedy &= int(scores.argmax()) == token
        return likelihood, is_greedy

    def score_text(self, text: str) -> float:
        """Return the log likelihood of a whole text, every token of it predicted once."""
        tokens = self.encode(text, add_special_tokens=False)
        windows = rolling(tokens, self.prefix, self.max_length)
        return sum(self.score(lead, answer)[0] for lead, answer in windows)

    def write(self, prompt: str, stops: Sequence[str], max_new_tokens: int) -> str:
        """Return the greedy continuation of a prompt, up to the first of the stops."""
        room = max(self.max_length - max_new_tokens, 1)
        ids = self.encode(prompt)[-room:]
        return self.model.generate(ids, stop=stops, max_new_tokens=max_new_tokens).text


def rolling(
    tokens: Sequence[int], prefix: int, length: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield inputs of ``length`` tokens at most that predict each token once: lead and answer.

    The last one has as much context as fits, as in lm-eval's own models.
    """
    before = [prefix, *tokens]
    for start in range(0, len(tokens), length):
        stop = min(start + length, len(tokens))
        yield before[max(stop - length, 0) : start + 1], list(tokens[start:stop])


def arguments_of(request: Any) -> tuple[list[str], int]:
    """Return the stop strings and the number of tokens in lm-eval's arguments of a generation."""
    stops = request.get("until") or []
    count = request.get("max_gen_toks", request.get("max_new_tokens", 256))
    return [stops] if isinstance(stops, str) else [stop for stop in stops if stop], int(count)
