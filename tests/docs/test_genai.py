"""docs/genai.md says of onnxruntime-genai what it does: features, messages, changes of a folder."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integrations.genai_folder import bundled_genai
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import convert
from tq_onnx.integrations.bundled import heldout_text
from tq_onnx.integrations.folderconversion import convert_folder
from tq_onnx.runtime.library import library_name
from tq_onnx.targets.registry import target_of

og = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")

PAGE = Path(__file__).parents[2] / "docs" / "genai.md"
FORMS = ("default", "pages")
TEXT = list(heldout_text().encode())
PROMPT = TEXT[:40]
NEW = 8
NOT_PAGES = "Invalid rank for input: input_ids Got: 2 Expected: 1"
FIXED = "not supported for models with a fixed kv-cache shape"


def rows_of(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| (.*) \|$", section, re.M)
    return [line.split(" | ") for line in lines[2:]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    source = bundled_genai(tmp_path_factory.mktemp("genai") / "qwen3", "genai")
    pages = target_of("paged", num_blocks=20)
    return {
        "original": source,
        "default": convert_folder(source, source.with_name("int4")).output,
        "pages": convert_folder(source, source.with_name("paged"), target=pages).output,
    }


def started(
    folder: Path,
    batch: list[list[int]],
    *,
    speculation: Mapping[str, int] | None = None,
    pattern: str = "",
    **search: Any,
) -> Any:
    model = og.Model(str(folder))
    params = og.GeneratorParams(model)
    length = len(batch[0]) + 5 * NEW
    params.set_search_options(max_length=length, batch_size=len(batch), **search)
    params.set_speculative_options(**speculation or {})
    if pattern:
        params.set_guidance("regex", pattern)
    generator = og.Generator(model, params)
    generator.append_tokens(np.asarray(batch if len(batch) > 1 else batch[0], np.int32))
    return generator


def answers(generator: Any, count: int = 1, new: int = NEW) -> list[list[int]]:
    for _ in range(new):
        if not generator.is_done():
            generator.generate_next_token()
    return [[int(token) for token in generator.get_sequence(index)] for index in range(count)]


def greedy(folder: Path, **options: Any) -> list[int]:
    [answer] = answers(started(folder, [PROMPT], do_sample=False, **options))
    return answer


def sampled(folder: Path) -> None:
    draw = partial(started, folder, [PROMPT], do_sample=True, top_k=50, temperature=2.0)
    first, second, third = (answers(draw(random_seed=seed)) for seed in (3, 3, 4))
    assert first == second != third


def batch(folder: Path) -> None:
    padded = PROMPT[20:] + [257] * 20
    together = answers(started(folder, [PROMPT, padded], do_sample=False), 2)
    assert together[0] == greedy(folder)
    assert together[1][40:] == answers(started(folder, [PROMPT[20:]], do_sample=False))[0][20:]


def beams(folder: Path) -> None:
    options = {"do_sample": False, "num_beams": 3, "num_return_sequences": 2}
    first, second = answers(started(folder, [PROMPT], **options), 2)
    assert len(first) == len(second) == 40 + NEW
    assert first != second


def rewound(folder: Path) -> None:
    generator = started(folder, [PROMPT], do_sample=False)
    answers(generator)
    generator.rewind_to(30)
    generator.append_tokens(np.asarray(PROMPT[30:], np.int32))
    assert answers(generator) == [greedy(folder)]


def second_prompt(folder: Path) -> None:
    generator = started(folder, [PROMPT[:20]], do_sample=False)
    [text] = answers(generator)
    second = TEXT[len(TEXT) // 2 :][:20]
    generator.append_tokens(np.asarray(second, np.int32))
    [text_and_answer] = answers(generator)
    text += second
    assert text_and_answer == answers(started(folder, [text], do_sample=False))[0]


def guided(folder: Path) -> None:
    generator = started(folder, [PROMPT], do_sample=False, pattern="[A-Z]{5} [0-9]{4}")
    [answer] = answers(generator, new=10)
    assert re.fullmatch("[A-Z]{5} [0-9]{4}", bytes(answer[40:]).decode())


Setup = Callable[[Any], object]


class Session:
    """An Engine of onnxruntime-genai, with one request at a time."""

    def __init__(self, folder: Path) -> None:
        self.engine = og.Engine(og.Model(str(folder)))
        self.cached = 0

    def request(self, turns: int = 1) -> Any:
        options = og.RequestOptions()
        options.set_max_session_tokens(turns * 400)
        return self.engine.create_request(options=options)

    def turn(
        self, request: Any, prompt: list[int], setup: Setup = lambda turn: None, new: int = NEW
    ) -> tuple[list[int], int]:
        """The tokens of the answer, and the identifier of the turn."""
        turn = og.TurnOptions(request)
        turn.set_max_generated_tokens(new)
        setup(turn)
        number = request.begin_turn(np.asarray(prompt, np.int32), turn)
        events, tokens = self.engine.create_event_buffer(8), []
        while self.engine.has_pending_requests():
            for event in self.engine.run(events):
                if event.flags.value & og.EngineEventFlags.TOKEN.value:
                    tokens.append(int(event.token))
                if event.flags.value & og.EngineEventFlags.TURN_FINISHED.value:
                    self.cached = event.usage.cached_prompt_tokens
        return tokens, number

    def answer(self, prompt: list[int], setup: Setup = lambda turn: None, new: int = NEW) -> Any:
        request = self.request()
        tokens, _ = self.turn(request, prompt, setup, new)
        request.close()
        return tokens


def turns(folder: Path) -> None:
    session = Session(folder)
    request = session.request(3)
    first, _ = session.turn(request, PROMPT)
    second, number = session.turn(request, PROMPT[:20])
    request.rewind_to_start_of_turn(number)
    again, _ = session.turn(request, PROMPT[:20])
    assert again == second != first
    assert second == session.answer(PROMPT + first + PROMPT[:20])


def guided_turn(folder: Path) -> None:
    def setup(turn: Any) -> None:
        turn.set_guidance("regex", "[A-Z]{5} [0-9]{4}")

    answer = Session(folder).answer(PROMPT, setup, 20)
    assert re.fullmatch("[A-Z]{5} [0-9]{4}", bytes(answer).decode())


def seeded_turn(folder: Path) -> None:
    def setup(turn: Any) -> None:
        turn.set_do_sample(True)
        turn.set_temperature(2.0)
        turn.set_seed(5)

    session = Session(folder)
    assert session.answer(PROMPT, setup) == session.answer(PROMPT, setup)


def stopped_turn(folder: Path) -> None:
    session = Session(folder)
    whole = session.answer(PROMPT, new=20)
    stop = bytes(whole[4:8]).decode()
    assert len(session.answer(PROMPT, lambda turn: turn.set_stop_strings([stop]), 20)) == 8


def prefix(folder: Path) -> None:
    session = Session(folder)
    session.answer(TEXT[:300])
    session.answer(TEXT[:310])
    assert session.cached == 256


def drafts(folder: Path) -> None:
    assert Session(folder).engine.max_draft_tokens_per_proposal() > 0


def speculated(folder: Path) -> None:
    assert greedy(folder, speculation={"ngram_size": 4}) == greedy(folder)


def in_chunks(folder: Path) -> None:
    assert greedy(folder, chunk_size=16) == greedy(folder)


NEEDS_PAGES = "requires an Engine configured for dynamic batching|require an Engine configured"
GENERATOR = {"pages": f"{NOT_PAGES}|{FIXED}"}
FEATURES: dict[str, tuple[Callable[[Path], object], dict[str, str]]] = {
    "`Generator`: greedy search": (greedy, GENERATOR),
    "`Generator`: sampling with a seed": (sampled, GENERATOR),
    "`Generator`: a batch, also of prompts of different lengths": (batch, GENERATOR),
    "`Generator`: beam search, `num_return_sequences`": (beams, GENERATOR),
    "`Generator`: `rewind_to`": (rewound, GENERATOR),
    "`Generator`: a second prompt behind an answer (`past_present_share_buffer` is true)": (
        second_prompt,
        GENERATOR,
    ),
    "`Generator`: `chunk_size`": (in_chunks, GENERATOR),
    "`Generator`: n-gram speculation, `set_speculative_options(ngram_size=4)`": (
        speculated,
        GENERATOR,
    ),
    "`Generator`: constrained output, `set_guidance`": (guided, GENERATOR),
    "`Engine`: several turns, `rewind_to_start_of_turn`": (turns, {}),
    "`Engine`: constrained output, `set_guidance`": (guided_turn, {}),
    "`Engine`: seeds per request": (seeded_turn, {"default": NEEDS_PAGES}),
    "`Engine`: stop strings": (stopped_turn, {"default": NEEDS_PAGES}),
    "`Engine`: prefix caching": (prefix, {"default": "0 == 256"}),
    "`Engine`: own draft tokens, `set_draft_tokens`": (drafts, {"default": "0 > 0"}),
}
"""What each row of the table does, and how the forms fail whose cell is "no"."""
ELSEWHERE = {
    "`Generator`: LoRA, `Adapters`": "tests/serving/test_adapters.py",
    "`Engine`: many requests": "tests/serving/test_engine.py, tests/serving/test_paged_engine.py",
    "[Foundry Local](serving.md#foundry-local), manually": "docs/serving.md",
}


def test_every_row_is_tried_or_says_that_it_was_not() -> None:
    rows = {feature: cells for feature, *cells in rows_of("What works")}
    untried = {feature for feature, cells in rows.items() if set(cells) == {"not tried"}}
    assert untried | {*FEATURES} | {*ELSEWHERE} == {*rows}
    for feature, (_, refusals) in FEATURES.items():
        expected = ["no" if form in refusals else "yes" for form in FORMS]
        assert rows[feature] == expected, feature


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature(folders: dict[str, Path], feature: str, form: str) -> None:
    act, refusals = FEATURES[feature]
    if form not in refusals:
        act(folders[form])
        return
    with pytest.raises((RuntimeError, AssertionError), match=refusals[form]):
        act(folders[form])


def test_a_converted_folder_answers_like_the_original(folders: dict[str, Path]) -> None:
    texts = {tuple(greedy(folders[form])) for form in ("original", "default")}
    assert len(texts) == 1


def test_entries_that_change_are_named(folders: dict[str, Path]) -> None:
    def entries(document: Any, path: str = "") -> dict[str, Any]:
        if not isinstance(document, dict):
            return {path: document}
        return {
            name: value
            for key, part in document.items()
            for name, value in entries(part, f"{path}.{key}".removeprefix(".")).items()
        }

    before, *after = (
        entries(json.loads((folder / "genai_config.json").read_text()))
        for folder in folders.values()
    )
    changed = {
        name
        for document in after
        for name in {*before, *document}
        if before.get(name) != document.get(name)
    }
    named = re.findall(r"`([\w.]+\.\w+)`", "".join(row[0] for row in rows_of("Convert the folder")))
    assert {name for name in changed if not name.startswith(tuple(named))} == set()
    unshared = {"search.past_present_share_buffer"}  # of graphs whose caches must grow
    stateful = {"model.type", "model.decoder.state_groups", "search.chunk_size"}  # of hybrids
    ringed = {"model.decoder.sliding_window"}
    places = {name for name in named if any(each.startswith(name) for each in changed)}
    assert places | unshared | stateful | ringed == {*named}


def raised(folder: Path, act: Callable[[Path], object]) -> str:
    with pytest.raises(RuntimeError) as error:
        act(folder)
    return str(error.value)


def opened(folder: Path) -> str:
    """What a process says that opens a folder, without a library that another one left there."""
    script = "import sys, onnxruntime_genai as og; og.Model(sys.argv[1])"
    command = [sys.executable, "-c", script, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_messages_are_those_that_are_shown(folders: dict[str, Path], tmp_path: Path) -> None:
    def copied(name: str, change: Callable[[Path], object]) -> Path:
        shutil.copytree(folders["default"], tmp_path / name)
        change(tmp_path / name)
        return tmp_path / name

    def with_unknown_entry(folder: Path) -> None:
        path = folder / "genai_config.json"
        path.write_text(path.read_text().replace('"search": {', '"search": {"unknown": 1,'))

    def linked(folder: Path) -> None:
        (folder / library_name()).rename(tmp_path / library_name())
        (folder / library_name()).symlink_to(tmp_path / library_name())

    def too_long(folder: Path) -> None:
        started(folder, [PROMPT], do_sample=False).append_tokens(np.asarray(TEXT[:400], np.int32))

    def with_rows_in_front(folder: Path) -> None:
        original, options = folders["original"] / "model.onnx", Options(equal_rows=True)
        convert(original, folder / "model.onnx", options=options, overwrite=True)

    default, pages = (folders[form] for form in FORMS)
    library = library_name()
    shown = [
        raised(copied("front", with_rows_in_front), greedy),
        raised(pages, greedy),
        raised(default, seeded_turn),
        raised(default, stopped_turn),
        raised(default, too_long),
        opened(copied("missing", lambda folder: (folder / library).unlink())),
        raised(copied("other", lambda folder: (folder / library).write_bytes(b"MZ" * 99)), greedy),
        raised(copied("linked", linked), greedy),
        raised(copied("unknown", with_unknown_entry), greedy),
    ]
    quoted = [row[0].strip("`") for row in rows_of("Troubleshooting") if row[0].startswith("`")]
    for message in quoted:
        pattern = ".*".join(map(re.escape, message.split("...")))
        assert any(re.search(pattern, text, re.S) for text in shown), (message, shown)
