"""Many texts at a time, on the Engine of onnxruntime-genai.

``LanguageModel.engine`` opens one. With a model that was converted for the target ``paged``,
requests join and leave at any step; with others the Engine computes batches of up to four, or one
at a time where its batches would be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Final

from tq_onnx.errors import UsageError
from tq_onnx.integrations.folderinspection import inspect_folder
from tq_onnx.integrations.huggingface import Tokenizer
from tq_onnx.integrations.tokens import require_tokenizer, tokenizer_folder
from tq_onnx.language.stream import Stream
from tq_onnx.language.text import Transcript, stop_strings
from tq_onnx.runtime import arguments
from tq_onnx.runtime.batching import Batching, most_tokens, read_configuration
from tq_onnx.runtime.engine import EngineThread, Occupancy
from tq_onnx.runtime.guidance import Guidance
from tq_onnx.runtime.jobs import Choice, Job, Step
from tq_onnx.runtime.sampling import Sampling

UNEVEN: Final = (
    "one request at a time: the Engine would answer prompts of different lengths in one batch "
    'wrongly with this graph; convert with `target="paged"` to have them computed together'
)
UNKNOWN: Final = (
    "one request at a time: tq-onnx did not convert this folder, so its graph is not known"
)
DEFAULT_PLACES: Final = 16
"""Of a configuration that says nothing."""
ALONE: Final = "one request at a time, because alone is True"


def batching_of(
    folder: Path,
    *,
    max_length: int | None = None,
    alone: bool = False,
    max_batch_size: int | None = None,
) -> Batching:
    """Read how the Engine batches requests of a folder, from its models and its configuration.

    Args:
        alone: see ``Engine``. In a batch, matrix products round differently, and a quantised cache
            amplifies the difference, so that a token may change if two are nearly as likely.
    """
    configuration = read_configuration(folder)
    models = inspect_folder(folder).of_role("converted")
    plans = [model.report.plan for model in models if model.report.plan is not None]
    # A file that was converted alone has them in front of the rows of the tokens.
    front = max((plan.overlay_rows for plan in plans), default=0)
    rows = front + max((plan.spare_rows for plan in plans), default=0)
    joins = bool(plans) and all(plan.block_size for plan in plans)
    even_only = not joins and not all(plan.interface.right_padding for plan in plans)
    reason = UNKNOWN if not plans else UNEVEN if even_only else ALONE if alone else ""
    largest = most_tokens(configuration)
    most = largest - front
    sizes = [plan.interface.vocabulary for plan in plans]
    sizes.append(configuration.get("model", {}).get("vocab_size"))
    vocabulary = min((size for size in sizes if size is not None), default=None)
    if not joins:
        most = min(most, max_length or most)
        return Batching(not reason, reason, most, rows, largest, vocabulary=vocabulary)
    pages = configuration.get("engine", {}).get("dynamic_batching", {})
    size, count = (pages.get(name, 0) for name in ("block_size", "num_blocks"))
    most = min(most, size * count, max_length or most)
    shares = bool(pages.get("prefix_caching", True))
    places = max_batch_size or pages.get("max_batch_size", DEFAULT_PLACES)
    return Batching(
        not reason, reason, most, rows, largest, size, count, vocabulary, places, shares
    )


class Engine:
    """A folder of onnxruntime-genai whose Engine computes many texts.

    Its methods may be called from any thread.

    Args:
        folder: of onnxruntime-genai, converted.
        max_length: most tokens of a prompt and its answer, if fewer than the configuration allows.
        alone: whether to compute one request at a time, so that a text never depends on others.
        threads: of ONNX Runtime; None for what the configuration says, or all cores.
        tokenizer: the folder of the tokenizer; None for the folder itself.
        max_batch_size: most requests that are computed at a time; None for what the configuration
            says. Needs pages.
        conversations: most answers that are kept after their end, so that a prompt that goes on
            with one computes only what is new; None for up to ``max_batch_size``. They go when
            others need their pages or places, or after ten idle minutes. Needs pages.
        speculate: whether greedy requests guess tokens that follow as they did before in their own
            text. The model checks several in one pass, and the text stays the same. Needs pages.

    Raises:
        UsageError: an argument cannot be used.
        ModelFileError: it is no folder of onnxruntime-genai.
        EngineError: onnxruntime-genai is not installed, or does not open the folder.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        max_length: int | None = None,
        alone: bool = False,
        threads: int | None = None,
        tokenizer: str | PathLike[str] | None = None,
        max_batch_size: int | None = None,
        conversations: int | None = None,
        speculate: bool = True,
    ) -> None:
        """Open the folder; see the class for arguments and errors."""
        if max_length is not None:
            max_length = arguments.count(max_length, "max_length", least=1)
        threads = arguments.thread_count(threads)
        self._folder = arguments.path(folder, "folder")
        self._tokenizer_folder = (
            None if tokenizer is None else arguments.path(tokenizer, "tokenizer")
        )
        if max_batch_size is not None:
            max_batch_size = arguments.count(max_batch_size, "max_batch_size", least=1)
        if conversations is not None:
            conversations = arguments.count(conversations, "conversations")
        batching = batching_of(
            self._folder, max_length=max_length, alone=alone, max_batch_size=max_batch_size
        )
        self._thread = EngineThread(
            self._folder,
            batching,
            threads=threads,
            speculates=bool(speculate),
            conversations=conversations,
        )

    @property
    def batching(self) -> Batching:
        """How the Engine batches requests of the folder, and its limits."""
        return self._thread.batching

    @property
    def model(self) -> Any:
        """The ``onnxruntime_genai.Model``, for its tokenizers."""
        return self._thread.model

    @property
    def broken(self) -> Exception | None:
        """The reason why the Engine has stopped, or None."""
        return self._thread.broken

    @property
    def occupancy(self) -> Occupancy:
        """How many answers run and wait, and the pages that are free."""
        return self._thread.occupancy

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ModelFileError: there is none, or it cannot be read.
        """
        return require_tokenizer(self._tokenizer_folder or self._folder, self._folder)

    def submit(
        self,
        prompt: str | Iterable[int],
        deliver: Callable[[Step], None],
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling | Choice | None = None,
        guidance: Guidance | None = None,
    ) -> Job:
        """Start an answer and pass its tokens to a function.

        Args:
            prompt: a text or its ids.
            deliver: called with every step, in the thread of the Engine: it must not wait. If it
                raises, its answer ends with an error, and others go on.
            max_new_tokens: tokens at most; None for as many as there is room for.
            sampling: how tokens are chosen; None for what the configuration says.
            guidance: what the answer has to look like, of ``Guidance.of(schema=...)``, ``regex`` or
                ``grammar``. If it cannot be read, the answer ends with an error. No tokens are
                guessed then.

        Returns:
            What ``cancel`` takes.

        Raises:
            UsageError: the prompt is empty, too long or has unknown ids, another argument cannot be
                used, or the Engine has no such sampling.
            EngineError: the Engine answers nothing any more.
        """
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        choice = self._choice(sampling)
        return self._thread.submit(
            ids, deliver, max_new_tokens=max_new_tokens, choice=choice, guidance=guidance
        )

    def stream(
        self,
        prompt: str | Iterable[int],
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        guidance: Guidance | None = None,
    ) -> Stream:
        """Continue a prompt piece by piece; a stream that is closed or dropped cancels the rest.

        The prompt is handed to the Engine at once, so that several streams that are begun one after
        the other are computed together.

        Args:
            prompt: a text or its ids.
            max_new_tokens: tokens at most; None for as many as there is room for.
            sampling: how tokens are chosen; the most likely if None.
            stop: strings that end the text and are no part of it.
            guidance: as for ``submit``.

        Returns:
            Pieces of text; the last one says why the text ends.

        Raises:
            UsageError: as for ``submit``.
            EngineError: likewise; also while iterating.
        """
        stops = stop_strings(stop)
        words = self.tokenizer if stops or isinstance(prompt, str) else self._words
        return Stream(
            self._thread,
            lambda deliver: self.submit(
                prompt,
                deliver,
                max_new_tokens=max_new_tokens,
                sampling=sampling or Sampling(),
                guidance=guidance,
            ),
            Transcript(words, stops),
            has_text=words is not None,
        )

    def warm(self, prompt: str | Iterable[int]) -> int:
        """Read a prompt, so that requests that begin with it compute only what is their own.

        Waits until it is read. What is kept are full pages of ``batching.block_size`` tokens, until
        the Engine needs them for others.

        Args:
            prompt: a text or its ids, such as a system prompt as the chat template writes it.

        Returns:
            The tokens that are kept.

        Raises:
            UsageError: as for ``submit``; also if the Engine keeps no pages for later requests.
            EngineError: likewise.
        """
        batching = self.batching
        if not batching.shares_prefixes:
            raise UsageError(
                "this Engine keeps nothing of a prompt for later ones",
                fix='convert with `target="paged"`',
            )
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        for _ in self.stream(ids, max_new_tokens=1):
            pass
        return len(ids) // batching.block_size * batching.block_size

    def cancel(self, job: Job) -> None:
        """End an answer early; does nothing if it has ended.

        It does not wait, and takes no lock.

        Raises:
            UsageError: the job is not one of this Engine.
        """
        self._thread.cancel(job)

    def close(self) -> None:
        """End the Engine; answers that are not complete end with an error.

        Waits until all are told, unless a ``deliver`` calls it.
        """
        self._thread.close()

    def __enter__(self) -> Engine:
        """Return the engine, which is closed at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the engine."""
        self.close()

    @property
    def _words(self) -> Tokenizer | None:
        """The tokenizer, if there is one."""
        has = tokenizer_folder(self._tokenizer_folder or self._folder, self._folder) is not None
        return self.tokenizer if has else None

    def _choice(self, sampling: Sampling | Choice | None) -> Choice | None:
        if sampling is None or isinstance(sampling, Choice):
            return sampling
        if arguments.instance(sampling, Sampling, "sampling").min_p:
            raise UsageError("the Engine of onnxruntime-genai knows no min-p")
        draws = sampling.temperature > 0
        penalty = sampling.repetition_penalty
        return Choice(
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            penalty if penalty != 1 else None,
            sampling.seed if draws and self.batching.joins else None,
        )
