"""Tool calls: requests whose answer is a call of a function, with values that the prompt holds.

A prompt has a JSON list of functions, records with values, and a request. It is written by the
model's chat template. If that does not know functions, they are in the system message, an example
comes first, and the answer begins with the beginning of a call. Without a template it is plain
JSON, likewise.

The original answers greedily, and the converted model is fed that answer token by token. Where it
prefers another token, it also writes on from there, and the two calls are compared as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from tq_onnx.errors import UsageError
from tq_onnx.integrations.huggingface import Tokenizer
from tq_onnx.measure.windows import Ids
from tq_onnx.progress import OnProgress, Progress, silent
from tq_onnx.quality.answers import Preferences, Steps, forced, share_error, written
from tq_onnx.quality.drift import MakeDecoder
from tq_onnx.runtime.decoder import Decoder

NEW_TOKENS: Final = 96

_BEGUN: Final = '{"name": "'
_FUNCTIONS: Final[dict[str, tuple[str, dict[str, str]]]] = {
    "transfer_money": (
        "Transfer an amount in euros to an account.",
        {"account": "string", "amount": "number"},
    ),
    "send_email": ("Send an e-mail.", {"address": "string", "subject": "string"}),
    "book_visit": (
        "Book a visit of a technician.",
        {"customer": "string", "date": "string", "hours": "integer"},
    ),
}
_TOOLS: Final = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in parameters.items()},
                "required": list(parameters),
            },
        },
    }
    for name, (description, parameters) in _FUNCTIONS.items()
)
_RULES: Final = (
    'Answer every request with one call of a function, as JSON: {"name": NAME, "arguments": {...}}.'
    " Take the values from the customers."
)
_PEOPLE: Final = ("Anna Keller", "Bruno Costa", "Chen Wei", "Dana Novak", "Emil Berg", "Fay Young")
_REQUESTS: Final = (
    "Transfer the open amount of {person} to the account of {person}.",
    "Send an e-mail with the subject 'Invoice {amount}' to {person}.",
    "Book a technician for {person} on {date}, for {hours} hours.",
)


class Template(Protocol):
    """The part of a chat template that requests need."""

    takes_tools: bool
    """Whether it knows functions."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Write the messages, up to where the model is to answer."""


@dataclass(frozen=True, eq=False)
class Writer:
    """What writes prompts.

    Attributes:
        words: the tokenizer.
        template: the chat template; None for plain JSON.
    """

    words: Tokenizer
    template: Template | None = None

    @property
    def begun(self) -> str:
        """The text with which an answer begins."""
        return "" if self.template is not None and self.template.takes_tools else _BEGUN

    def prompt(self, index: int) -> Ids:
        """Return the ids of a request, with the beginning of its answer."""
        text = _prompt(index, self.template) + self.begun
        ids = self.words.encode(text, add_special_tokens=self.template is None)
        return np.asarray(ids, np.int64)


@dataclass(frozen=True)
class ToolCallFigures:
    """Answers to requests that want a function called, against the original's.

    Attributes:
        prompts: requests.
        tokens: tokens of the original's answers.
        same_token: share of the steps at which both models prefer the same token.
        same_token_error: its standard error, if steps are independent.
        near_ties: share of the steps that are near-ties, see ``tq_onnx.quality.answers``.
        same_answer: answers that are the same from the first token to the last.
        near_tie_answers: other answers, which depart at a near-tie.
        calls: answers of the original that are a call, as JSON with a name.
        same_name: those of them where this model calls the same function.
        same_arguments: those of them where it calls it with the same arguments.
    """

    prompts: int
    tokens: int
    same_token: float
    same_token_error: float
    near_ties: float
    same_answer: int
    near_tie_answers: int
    calls: int
    same_name: int
    same_arguments: int


class ToolCalls:
    """Requests that the original has answered; other models are compared with it.

    Args:
        make: makes a decoder of the original.
        writer: what writes the prompts; None for no requests.
        prompts: number of requests.
        room: tokens that the models take; None for any number.
        vocabulary: number of token ids, which bounds the calls.
        on_progress: called as requests are answered.

    Attributes:
        tokens: most tokens of a prompt and its answer; 0 if there is room for none.
    """

    def __init__(
        self,
        make: MakeDecoder,
        writer: Writer | None,
        *,
        prompts: int,
        room: int | None,
        vocabulary: int,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Let the original answer; see the class for arguments."""
        tell = on_progress or silent
        self._writer, self._vocabulary = writer, vocabulary
        self._prompts: list[Ids] = []
        if writer is not None:
            written_prompts = map(writer.prompt, range(prompts))
            most = np.inf if room is None else room - NEW_TOKENS
            self._prompts = [prompt for prompt in written_prompts if len(prompt) <= most]
        self.tokens = max((len(prompt) + NEW_TOKENS for prompt in self._prompts), default=0)
        self._answers: list[Preferences] = []
        if writer is None or not self._prompts:
            return
        decoder = make(self.tokens)
        for index, prompt in enumerate(self._prompts):
            decoder.reset()
            self._answers += written(decoder, prompt[None], NEW_TOKENS, writer.words.eos_ids)
            tell(Progress("Answering requests with the original", index + 1, len(self._prompts)))

    def compare(
        self, decoder: Decoder, *, name: str, on_progress: OnProgress | None = None
    ) -> ToolCallFigures | None:
        """Answer the requests with another model; None if there is room for none.

        Args:
            decoder: batch 1.
            name: name of the model, for progress.
            on_progress: called as requests are answered.
        """
        tell = on_progress or silent
        steps: list[Steps] = []
        pairs: list[tuple[dict[str, Any], dict[str, Any] | None]] = []
        for index, (prompt, answer) in enumerate(zip(self._prompts, self._answers, strict=True)):
            decoder.reset()
            converted = forced(decoder, prompt, answer.answer, self._vocabulary)
            steps.append(Steps.between(answer, converted))
            call = self._call(answer.answer)
            if call is not None:
                pairs.append((call, self._other_call(decoder, prompt, answer, converted, call)))
            tell(Progress(f"Answering requests with {name}", index + 1, len(self._prompts)))
        if not steps:
            return None
        differs = np.concatenate([step.differs for step in steps])
        same_token = 1 - float(differs.mean())
        return ToolCallFigures(
            prompts=len(steps),
            tokens=len(differs),
            same_token=same_token,
            same_token_error=share_error(same_token, len(differs)),
            near_ties=float(np.concatenate([step.near for step in steps]).mean()),
            same_answer=sum(step.first is None for step in steps),
            near_tie_answers=sum(step.is_near for step in steps),
            calls=len(pairs),
            same_name=sum(b is not None and b["name"] == a["name"] for a, b in pairs),
            same_arguments=sum(a == b for a, b in pairs),
        )

    def _other_call(
        self,
        decoder: Decoder,
        prompt: Ids,
        answer: Preferences,
        converted: Preferences,
        call: dict[str, Any],
    ) -> dict[str, Any] | None:
        """Return the call in the converted model's own answer; None if there is none."""
        first = Steps.between(answer, converted).first
        if first is None or self._writer is None:
            return call
        stops = self._writer.words.eos_ids
        begun = np.append(answer.answer[:first], converted.likely[first, 0])
        remaining = NEW_TOKENS - len(begun)
        if remaining < 1 or int(begun[-1]) in stops:
            return self._call(begun)
        decoder.reset()
        fed = np.concatenate([prompt, begun])[None]
        (ending,) = written(decoder, fed, remaining, stops)
        return self._call(np.concatenate([begun, ending.answer]))

    def _call(self, answer: Ids) -> dict[str, Any] | None:
        if self._writer is None:
            return None
        return call_in(self._writer.begun + self._writer.words.decode(answer.tolist()))


def call_in(text: str) -> dict[str, Any] | None:
    """Return the first JSON object in a text that has a name, as name and arguments; or None."""
    reader = json.JSONDecoder()
    at = text.find("{")
    while at >= 0:
        try:
            call, _ = reader.raw_decode(text, at)
        except (ValueError, RecursionError):
            call = None
        if isinstance(call, dict) and isinstance(call.get("name"), str):
            return {
                "name": call["name"],
                "arguments": call.get("arguments", call.get("parameters")),
            }
        at = text.find("{", at + 1)
    return None


def _prompt(index: int, template: Template | None) -> str:
    """Write one request."""
    rng = np.random.default_rng(index)
    records = [
        {
            "customer": person,
            "account": f"DE{rng.integers(10**9, 10**10)}",
            "address": f"{person.split()[0].lower()}{rng.integers(10, 100)}@example.org",
            "open amount": round(float(rng.uniform(10, 900)), 2),
        }
        for person in _PEOPLE
    ]
    example, record = (records[at] for at in rng.choice(len(records), 2, replace=False))
    request = _REQUESTS[index % len(_REQUESTS)].format(
        person=record["customer"],
        amount=rng.integers(100, 1000),
        date=f"2026-0{rng.integers(1, 10)}-{rng.integers(10, 29)}",
        hours=rng.integers(1, 7),
    )
    customers = "Customers:\n" + "\n".join(json.dumps(each) for each in records)
    if template is not None and template.takes_tools:
        turn = {"role": "user", "content": f"{customers}\n\n{request}"}
        return template.render([turn], tools=_TOOLS)
    rules = f"{_RULES}\nFunctions:\n{json.dumps(_TOOLS)}\n\n{customers}"
    values = {"address": example["address"], "subject": "Welcome"}
    call = json.dumps({"name": "send_email", "arguments": values})
    question = f"Send an e-mail with the subject 'Welcome' to {example['customer']}."
    if template is None:
        return f"{rules}\n\n{question}\n{call}\n\n{request}\n"
    turns = [(question, "user"), (call, "assistant"), (request, "user")]
    try:
        return _rendered(template, [(rules, "system"), *turns])
    except UsageError:  # some templates know no system
        return _rendered(template, [(f"{rules}\n\n{question}", "user"), *turns[1:]])


def _rendered(template: Template, turns: Sequence[tuple[str, str]]) -> str:
    return template.render([{"role": role, "content": text} for text, role in turns])
