"""The text of an answer that an Engine computes, as it comes."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

from tq_onnx.errors import UsageError
from tq_onnx.language.text import STOP, Piece, Transcript, Usage
from tq_onnx.runtime.engine import EngineThread
from tq_onnx.runtime.jobs import Job, Step


class Stream(Iterator[Piece]):
    """Pieces of an answer; the last one says why it ended.

    The rest is cancelled as soon as nobody can read it: when the stream is closed, when an error or
    a stop string ends it, or when the last reference to it is gone.
    """

    _job: Job | None = None
    _last: Step | None = None

    def __init__(
        self,
        engine: EngineThread,
        submit: Callable[[Callable[[Step], None]], Job],
        transcript: Transcript,
        *,
        has_text: bool,
    ) -> None:
        """Hand the prompt over; see the class for arguments and errors."""
        self._engine = engine
        self._transcript = transcript
        self._has_text = has_text
        self._ids: list[int] = []
        # The Engine knows the queue and not the stream, which can so be dropped at any time.
        self._steps: queue.SimpleQueue[Step] = queue.SimpleQueue()
        self._job = submit(self._steps.put)
        self._prompt_tokens = len(self._job.tokens)
        self._count = 0

    def __next__(self) -> Piece:
        """Wait for the next piece."""
        self._expect_elsewhere()
        try:
            while self._job is not None:
                piece = self._taken(self._steps.get())
                if piece is not None:
                    return piece
        except BaseException:
            self.close()
            raise
        raise StopIteration

    @property
    def usage(self) -> Usage | None:
        """The tokens that the answer took; None before its end.

        After ``close``, or a stop string, it waits until the Engine has ended the rest. Tokens that
        were computed and not read do not count.
        """
        if self._job is not None:
            return None
        while self._last is None:
            self._expect_elsewhere()
            step = self._steps.get()
            self._last = step if step.is_last else None
        return Usage(self._prompt_tokens, self._last.cached_tokens, self._count)

    def close(self) -> None:
        """Cancel what has not been read; nothing more comes."""
        job, self._job = self._job, None
        if job is not None:
            self._engine.cancel(job)

    def __enter__(self) -> Stream:
        """Return the stream, which is closed at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the stream."""
        self.close()

    def __del__(self) -> None:
        """Close a stream that nobody has any more."""
        self.close()

    def _expect_elsewhere(self) -> None:
        if self._engine.is_current:
            raise UsageError(
                "a stream cannot be read in deliver, where the Engine waits for its end",
                fix="read it in another thread",
            )

    def _taken(self, step: Step) -> Piece | None:
        """Return the piece that is complete with a step; None if there is none."""
        if step.is_last:
            self._last = step
        if self._job is None:  # closed in another thread
            return None
        if step.is_last:
            self._job = None
        if step.error is not None:
            raise step.error
        text = ""
        if step.token is not None:
            self._ids.append(step.token)
            self._count += 1
            text = self._transcript.take(step.token)
        finish = step.finish
        if self._transcript.stopped:
            self.close()
            finish = STOP
        elif step.is_last:
            text += self._transcript.rest()
        if finish is None and not text and self._has_text:
            return None
        tokens, self._ids = tuple(self._ids), []
        return Piece(text, tokens, finish)
