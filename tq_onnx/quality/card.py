"""The card: what a conversion costs in use, beside the quality of its predictions.

``longtext`` has needles and copies in a long text, ``toolcalls`` requests for calls of functions,
and ``departure`` greedy texts. The original does its part once; every other model is compared with
that, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tq_onnx.measure.windows import Ids
from tq_onnx.progress import OnProgress
from tq_onnx.quality.copy_test import CopyFigures
from tq_onnx.quality.departure import DepartureFigures, DepartureTest
from tq_onnx.quality.drift import MakeDecoder, decoding
from tq_onnx.quality.longtext import LongText, NeedleFigures
from tq_onnx.quality.toolcalls import ToolCallFigures, ToolCalls, Writer
from tq_onnx.runtime.model import OpenModel

EVERYTHING: Final = "needles, copies, tool calls and greedy texts"


@dataclass(frozen=True)
class CardFigures:
    """The card of one model; a part is empty or None where the report's notes say why.

    Attributes:
        needles: needles in a long text, after 25, 50 and 100 % of the context.
        copies: passages of random tokens that come again, likewise; keys as in `copying`.
        tool_calls: requests for calls of functions.
        greedy: greedy texts.
    """

    needles: tuple[NeedleFigures, ...]
    copies: tuple[CopyFigures, ...]
    tool_calls: ToolCallFigures | None
    greedy: DepartureFigures | None


class Card:
    """What the original has done; other models are compared with it.

    Args:
        model: the original.
        text: ids ``[n]``.
        context: tokens of the long text.
        prompts: number of requests for calls, and of passages that are continued.
        writer: the tokenizer and the chat template; None if there is no tokenizer.
        room: tokens that the models take; None for any number.
        on_progress: called as the parts go on.

    Attributes:
        notes: one sentence for each part that is left out.
    """

    def __init__(
        self,
        model: OpenModel,
        text: Ids,
        *,
        context: int,
        prompts: int,
        writer: Writer | None,
        room: int | None,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Let the original do its part; see the class for arguments."""
        self.notes: list[str] = []
        make = decoding(model)
        self._decodes = make is not None
        if make is None:
            self.notes.append(_left_out(EVERYTHING, "the original does not go on from its caches"))
            return
        context = context if room is None else min(context, room)
        vocabulary = model.vocabulary
        self._long = LongText(
            make(context),
            text,
            context=context,
            words=None if writer is None else writer.words,
            vocabulary=vocabulary,
            on_progress=on_progress,
        )
        self._calls = ToolCalls(
            make,
            writer,
            prompts=prompts,
            room=room,
            vocabulary=vocabulary,
            on_progress=on_progress,
        )
        self._departure = DepartureTest(
            model, text, prompts=prompts, room=room, on_progress=on_progress
        )
        self._tokens = max(context, self._calls.tokens, self._departure.tokens)
        if writer is None:
            self.notes.append(_left_out("needles and tool calls", "the model has no tokenizer"))
        for part, has in (
            ("needles", self._long.has_needles or writer is None),
            ("copies", self._long.has_copies),
        ):
            if not has:
                reason = f"a context of {context:,} tokens is too short for them"
                self.notes.append(_left_out(part, reason))
        if writer is not None and not self._calls.tokens:
            reason = "the model takes fewer tokens than their prompts have"
            self.notes.append(_left_out("tool calls", reason))

    def compare(
        self, make: MakeDecoder | None, *, name: str, on_progress: OnProgress | None = None
    ) -> CardFigures:
        """Do the same with another model.

        Args:
            make: makes a decoder of the model; None if it does not go on from its caches.
            name: name of the model, for progress and notes.
            on_progress: called as the parts go on.
        """
        if make is None and self._decodes:
            reason = f"{name} does not go on from its caches"
            self.notes.append(_left_out(EVERYTHING, reason))
        if make is None or not self._decodes:
            return CardFigures((), (), None, None)
        decoder = make(self._tokens)
        needles, copies = self._long.compare(decoder, name=name, on_progress=on_progress)
        calls = self._calls.compare(decoder, name=name, on_progress=on_progress)
        greedy = self._departure.compare(decoder, name=name, on_progress=on_progress)
        return CardFigures(needles, copies, calls, greedy)


def _left_out(parts: str, reason: str) -> str:
    return f"{parts} are left out: {reason}"
