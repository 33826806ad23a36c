"""Hold the requests to an Engine, and its answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tq_onnx.errors import TqOnnxError, UsageError
from tq_onnx.runtime.batching import Batching
from tq_onnx.runtime.drafts import Drafts
from tq_onnx.runtime.guidance import Guidance
from tq_onnx.runtime.sampling import Sampling

STOP: Final = "stop"
"""The text ended by itself."""
LENGTH: Final = "length"
"""The text has all tokens that were asked for."""
CANCELLED: Final = "cancelled"
"""The text was ended by ``cancel``."""


@dataclass(frozen=True)
class Choice:
    """How the Engine chooses tokens; None for what the configuration of the folder says."""

    temperature: float | None = None  #: 0 for the best token every time
    top_p: float | None = None  #: probability of the tokens that are drawn from
    top_k: int | None = None  #: number of those tokens; 0 for all
    repetition_penalty: float | None = None  #: see ``Sampling``
    #: of the draws; only an Engine whose requests join at any step takes one
    seed: int | None = None

    def __post_init__(self) -> None:
        """Refuse what no draw can use; ``Sampling`` has the ranges."""
        Sampling(**{name: value for name, value in vars(self).items() if value is not None})

    @property
    def is_greedy(self) -> bool:
        """True for the best token every time."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def takes_drafts(self) -> bool:
        """True if the Engine checks guesses, and a seed does not ask for the same draws again.

        It takes none with penalties, nor with draws from all tokens.
        """
        draws = self.seed is None and bool(self.top_k)
        return (self.is_greedy or draws) and self.repetition_penalty in (None, 1)

    def within(self, batching: Batching) -> Choice:
        """Return the choice as the Engine takes it for a folder."""
        if self.seed is not None and not self.is_greedy and not batching.joins:
            raise UsageError(
                f"seed is {self.seed}, and this Engine takes none, because the caches of its "
                "folder are not in pages",
                fix='convert with `target="paged"`, or leave the seed out',
            )
        if self.top_k is None or batching.vocabulary is None:
            return self
        # The Engine refuses more candidates than there are tokens.
        return replace(self, top_k=min(self.top_k, batching.vocabulary))

    def tell(self, turn: Any) -> None:
        """Set the options of a turn, which takes none of the others with the best token."""
        if self.repetition_penalty is not None:
            turn.set_repetition_penalty(self.repetition_penalty)
        if self.is_greedy:
            turn.set_do_sample(False)
            return
        settings = (
            (self.temperature, turn.set_temperature),
            (self.top_p, turn.set_top_p),
            (self.top_k, turn.set_top_k),
            (self.seed, turn.set_seed),
        )
        for value, give in settings:
            if value is not None:
                turn.set_do_sample(True)
                give(value)


@dataclass(frozen=True)
class Step:
    """A token, the end, or both."""

    token: int | None = None  #: None if there is none in this step
    finish: str | None = None  #: at the end ``stop``, ``length`` or ``cancelled``
    error: TqOnnxError | None = None  #: at the end, what went wrong
    #: at the end, those of the prompt whose pages were there and not computed
    cached_tokens: int = 0

    @property
    def is_last(self) -> bool:
        """True if no other step follows."""
        return self.finish is not None or self.error is not None


@dataclass(eq=False)
class Job:
    """A prompt that waits or is being answered."""

    engine: object = field(repr=False)  #: what answers it
    tokens: list[int]  #: the prompt
    max_new_tokens: int  #: most tokens of the answer
    choice: Choice  #: how they are chosen
    deliver: Callable[[Step], None]  #: called with every step, in the thread of the Engine
    pages: int = 0  #: that the prompt and its longest answer take of a cache in pages
    #: of the full pages of the prompt, see ``tq_onnx.runtime.prefixes``
    page_hashes: tuple[int, ...] = field(default=(), repr=False)
    #: of onnxruntime-genai, as long as the Engine has it
    request: Any = field(default=None, repr=False)
    turn: int = field(default=0, repr=False)  #: its number in the request
    #: guesses of its next tokens; None if none are made
    drafts: Drafts | None = field(default=None, repr=False)
    guidance: Guidance | None = None  #: what the answer has to look like; None for anything
    answer: list[int] = field(default_factory=list, repr=False)  #: tokens of the answer so far
    resumed: int = 0  #: tokens of the prompt that the former conversation has computed
    #: at the end, tokens of prompt and answer in its pages; 0 if that is not known
    computed: int = 0
    idle_passes: int = 0  #: of the Engine since it gave the last token
    _ended: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def end(self) -> bool:
        """Mark the end; False if it has been marked before, by whatever thread."""
        return self._ended.acquire(blocking=False)
