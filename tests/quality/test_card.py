"""The card of ``report``: needles, copies, tool calls and greedy texts against the original's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
import pytest

from tests.quality.test_generation import WORDS, Copier
from tests.runtime.models import DYNAMO, VOCABULARY, ids, opened, original
from tests.verification.damages.codecs import table
from tests.verification.damages.editing import change
from tq_onnx.conversion.pipeline import convert
from tq_onnx.errors import OutputExistsError, UsageError
from tq_onnx.integrations.bundled import build_bundled, heldout_text
from tq_onnx.integrations.huggingface import load_tokenizer
from tq_onnx.measure.divergence import log_softmax
from tq_onnx.measure.greedy import greedy_tokens
from tq_onnx.ops.operators import Encode
from tq_onnx.quality import departure
from tq_onnx.quality.answers import Preferences, Steps, forced, share_error, written
from tq_onnx.quality.card import Card, CardFigures
from tq_onnx.quality.cardtables import card_tables
from tq_onnx.quality.departure import loop_start
from tq_onnx.quality.drift import decoding
from tq_onnx.quality.longtext import LongText
from tq_onnx.quality.readme import card_path, to_card
from tq_onnx.quality.report import report
from tq_onnx.quality.tables import report_notes, report_tables
from tq_onnx.quality.toolcalls import ToolCalls, Writer, call_in
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.opening import open_converted, open_original

CONTEXT = 700
TEXT = ids(400, seed=7)[0]


class Letters:
    """A tokenizer: a token is a character, as far as the vocabulary goes."""

    eos_ids = ()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(char) - 32 if char != "\n" else 95 for char in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join("\n" if token == 95 else chr(token + 32) for token in tokens)


def logits(*rows: Sequence[float]) -> np.ndarray:
    return np.asarray(rows, np.float32)


def test_the_likeliest_token_is_that_of_greedy_decoding() -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 3, (200, 40)).astype(np.float32)  # many ties
    read = Preferences.of(rows)
    np.testing.assert_array_equal(read.likely[:, 0], rows.argmax(axis=1))
    np.testing.assert_array_equal(read.answer, rows.argmax(axis=1))
    assert (np.diff(read.scores, axis=1) <= 0).all()
    assert read.is_greedy and not Preferences.of(rows, (read.answer + 1) % 40).is_greedy


def test_steps_that_differ_and_near_ties() -> None:
    tie, clear = [0.0, 1.0, 1.05, -3.0], [0.0, 1.0, 1.2, -3.0]
    before = Preferences.of(logits(tie, clear, clear))
    after = Preferences.of(logits([0, 2, 1, 0], [0, 2, 1, 0], clear), before.answer)
    steps = Steps.between(before, after)
    assert steps.differs.tolist() == [True, True, False]
    assert steps.near.tolist() == [True, False, False]
    assert (steps.first, steps.is_near) == (0, True)
    assert steps.rises[2] == 0 < steps.rises[1]
    same = Steps.between(before, before)
    assert (same.first, same.is_near) == (None, False)


def test_a_share_of_all_has_an_error() -> None:
    assert share_error(0.5, 10_000) == pytest.approx(0.005, rel=1e-3)
    assert (
        share_error(1.0, 100)
        == pytest.approx(share_error(0.0, 100))
        == pytest.approx(0.00985, rel=1e-2)
    )


def test_forced_is_what_the_whole_text_gives() -> None:
    decoder = opened(DYNAMO, "original").decoder()
    whole = log_softmax(decoder.prefill(TEXT[None, :60])[0])
    for vocabulary in (VOCABULARY, 1 << 20):  # in one call, and in calls of 8 tokens
        decoder.reset()
        decoder.prefill(TEXT[None, :20])
        read = forced(decoder, TEXT[20:27], TEXT[27:60], vocabulary)
        np.testing.assert_allclose(read.losses, -whole[np.arange(26, 59), TEXT[27:60]], rtol=1e-4)
        np.testing.assert_array_equal(read.likely[:, 0], whole[26:59].argmax(axis=1))


def test_texts_are_the_greedy_ones_alone_and_together() -> None:
    model = opened(DYNAMO, "original")
    prompts = TEXT[:40].reshape(2, 20)
    together = written(model.decoder(batch=2), prompts, 30)
    for prompt, text in zip(prompts, together, strict=True):
        (alone,) = written(model.decoder(), prompt[None], 30)
        assert text.answer.tolist() == alone.answer.tolist()
        assert tuple(alone.answer) == greedy_tokens(model.decoder(), prompt.tolist(), 30)
        (short,) = written(model.decoder(), prompt[None], 30, {int(alone.answer[4])})
        assert short.answer.tolist() == alone.answer[: len(short.answer)].tolist()
        assert len(short.answer) <= 5
    reading = forced(model.decoder(), prompts[0], together[0].answer, VOCABULARY)
    assert reading.is_greedy
    np.testing.assert_allclose(reading.losses, together[0].losses, rtol=1e-3, atol=1e-5)


class Rememberer(Copier):
    """Copies whatever came before, and can be put back."""

    size = 8
    rows = None

    def read(self, tokens: np.ndarray, *, most: int) -> np.ndarray:
        return self.prefill(np.asarray(tokens))[:, -1]

    def step(self, tokens: np.ndarray) -> np.ndarray:
        return self.prefill(np.asarray(tokens)[None])[:, -1]

    def snapshot(self) -> Any:
        return list(self.seen), dict(self.followers)

    def restore(self, held: Any) -> None:
        self.seen, self.followers = list(held[0]), dict(held[1])


def rememberer(logit: Callable[[int], float]) -> Decoder:
    return cast(Any, Rememberer(logit))


def test_what_is_far_is_found_or_not() -> None:
    # A text without what questions have, so that nothing but needles answers them.
    text = np.random.default_rng(1).integers(100, WORDS, 700)
    options: dict[str, Any] = {"context": 2000, "words": Letters(), "vocabulary": WORDS}
    test = LongText(rememberer(lambda _: 9.0), text, **options)
    assert test.has_needles and test.has_copies
    needles, copies = test.compare(rememberer(lambda _: 9.0), name="")
    assert [stage.needles for stage in needles] == sorted(stage.needles for stage in needles)
    for stage in needles:
        assert stage.original_right == stage.right == stage.same_answer == stage.needles > 0
        assert (stage.near_ties, stage.rise) == (0, 0)
    assert [round(stage.distance, -2) for stage in copies] == [400, 900, 1900]
    for copy in copies:
        assert copy.gain > 4 and copy.rise == 0 and copy.tokens == 2 * (64 - 8)
    # One that sees 600 tokens back: it loses the passages and the first needles.
    needles, copies = test.compare(
        rememberer(lambda distance: 9.0 if distance < 600 else 0.0), name=""
    )
    assert needles[0].right == needles[0].needles
    assert 0 < needles[-1].right < needles[-1].needles / 2
    assert needles[-1].right == needles[-1].same_answer
    assert needles[-1].rise > 10 * needles[-1].rise_error / 2 > 0
    assert copies[0].relative_rise == pytest.approx(0, abs=1e-3)
    assert copies[1].relative_rise == pytest.approx(1, abs=0.05)


def test_what_there_is_no_room_for() -> None:
    text = np.random.default_rng(1).integers(100, WORDS, 700)
    for words, context, has in (
        (None, 2000, (False, True)),
        (Letters(), 272, (True, True)),
        (None, 200, (False, False)),
        (Letters(), 16, (False, False)),
    ):
        test = LongText(
            rememberer(lambda _: 9.0), text, context=context, words=words, vocabulary=WORDS
        )
        assert (test.has_needles, test.has_copies) == has, context
        needles, copies = test.compare(rememberer(lambda _: 9.0), name="")
        assert (bool(needles), bool(copies)) == has


class Scripted(Copier):
    """Answers every request with one text, whatever it is fed of an answer."""

    rows = None

    def __init__(self, answer: str) -> None:
        super().__init__(lambda _: 0.0)
        self.answer = [*Letters().encode(answer), *[0] * 200]
        self.begun = Letters().encode(Writer(Letters()).begun)

    def reset(self) -> None:
        super().reset()
        self.answered = -1

    def prefill(self, tokens: np.ndarray) -> np.ndarray:
        rows = np.zeros((1, tokens.shape[1], 97))
        for row, token in enumerate(np.asarray(tokens)[0]):
            self.seen.append(int(token))
            self.answered += self.answered >= 0
            if self.seen[-len(self.begun) :] == self.begun:
                self.answered = 0
            rows[0, row, self.answer[max(self.answered, 0) % len(self.answer)]] = 9
        return rows

    read, step = Rememberer.read, Rememberer.step


def test_calls_are_compared_as_json() -> None:
    call = 'transfer_money", "arguments": {"account": "DE1", "amount": 5}}'
    options: dict[str, Any] = {"prompts": 2, "room": None, "vocabulary": 97}
    test = ToolCalls(lambda _: cast(Any, Scripted(call)), Writer(Letters()), **options)
    for answer, (names, arguments, answers) in {
        call: (2, 2, 2),
        call.replace("DE1", "DE2"): (2, 0, 0),
        call.replace("transfer", "send"): (0, 0, 0),
        call.replace('"amount"', ' "amount"'): (2, 2, 0),
        "no call": (0, 0, 0),
    }.items():
        figures = test.compare(cast(Any, Scripted(answer)), name="")
        assert figures is not None
        assert (figures.prompts, figures.calls) == (2, 2)
        assert (figures.same_name, figures.same_arguments) == (names, arguments), answer
        assert figures.same_answer == answers
        assert (figures.same_token < 1) is (answers == 0)
        assert figures.near_ties == figures.near_tie_answers == 0
    options["room"] = 200
    test = ToolCalls(lambda _: cast(Any, Scripted(call)), Writer(Letters()), **options)
    assert test.tokens == 0 and test.compare(cast(Any, Scripted(call)), name="") is None


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('{"name": "f", "arguments": {"x": 1}} and more', {"name": "f", "arguments": {"x": 1}}),
        ('Well: {not} {"name": "f", "parameters": {}}', {"name": "f", "arguments": {}}),
        ('{"x": {"name": "f"}}', {"name": "f", "arguments": None}),
        ('{"name": 3}', None),
        ('{"name": "f", "arguments"', None),
        ("{" * 5000, None),
        ("", None),
    ],
)
def test_a_call_in_a_text(text: str, call: dict[str, Any] | None) -> None:
    assert call_in(text) == call


def test_requests_are_written_for_the_template() -> None:
    seen: list[Any] = []

    def render(messages: Any, *, tools: Any = None) -> str:
        seen.append((messages, tools))
        return "P"

    for knows in (True, False):
        template = SimpleNamespace(takes_tools=knows, render=render)
        prompt = Writer(Letters(), cast(Any, template)).prompt(0)
        assert Letters().decode(prompt.tolist()) == ("P" if knows else 'P{"name": "')
    (turn,), tools = seen[0]
    assert tools[0]["function"]["name"] == "transfer_money"
    assert "Transfer the open amount" in turn["content"]
    (system, example, call, user), nothing = seen[1]
    assert [m["role"] for m in seen[1][0]] == ["system", "user", "assistant", "user"]
    assert json.dumps(tools[0]) in system["content"] and nothing is None
    assert turn["content"].endswith(user["content"]) and turn["content"].startswith("Customers:")
    made = call_in(call["content"])
    assert made is not None and made["arguments"]["address"] in system["content"]
    assert example["content"] != user["content"]
    plain = Letters().decode(Writer(Letters()).prompt(0).tolist())
    assert plain.endswith(user["content"] + '\n{"name": "') and json.dumps(tools[0]) in plain


def test_requests_for_a_template_without_a_system() -> None:
    def render(messages: Any, *, tools: Any = None) -> str:
        if messages[0]["role"] == "system":
            raise UsageError("no system")
        return messages[0]["content"]

    template = SimpleNamespace(takes_tools=False, render=render)
    prompt = Letters().decode(Writer(Letters(), cast(Any, template)).prompt(0).tolist())
    assert "Functions:" in prompt and prompt.endswith('{"name": "')


@pytest.mark.parametrize(
    ("text", "start"),
    [
        (range(30), 30),
        ([1, 2, 3, *[7, 8] * 5], 5),
        ([7, 8] * 5, 2),
        ([*range(10), *[4, 4, 4]], 11),
        ([1, 2, 1, 2, 3], 5),
    ],
)
def test_where_a_text_begins_to_repeat_itself(text: Sequence[int], start: int) -> None:
    assert loop_start(np.asarray(text)) == start


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("card") / "int4.onnx"
    convert(original(DYNAMO), output, preset="int4")
    return output


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CardFigures]:
    """Cards of conversions of the bundled model, one of them with wrong codes."""
    source = build_bundled("dynamo", tmp_path_factory.mktemp("bundled") / "m")
    words = load_tokenizer(source.parent)
    paths = {kind: source.with_name(f"{kind}.onnx") for kind in ("int4", "wrong")}
    convert(source, paths["int4"], preset="int4")
    model = onnx.load(paths["int4"], load_external_data=False)
    change(table(model, Encode.centroids.slot), lambda centroids: centroids[::-1])
    onnx.save(model, paths["wrong"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(departure, "NEW_TOKENS", 100)
        card = Card(
            open_original(source, threads=1),
            np.asarray(words.encode(heldout_text())[:CONTEXT]),
            context=CONTEXT,
            prompts=1,
            writer=Writer(words),
            room=None,
        )
        assert card.notes == []
        return {
            kind: card.compare(decoding(open_converted(path, threads=1)), name=kind)
            for kind, path in paths.items()
        }


def test_wrong_codes_show_in_every_part(figures: dict[str, CardFigures]) -> None:
    int4, wrong = figures["int4"], figures["wrong"]
    assert int4.tool_calls is not None and int4.greedy is not None
    assert wrong.tool_calls is not None and wrong.greedy is not None
    last = wrong.needles[-1]
    assert last.same_answer < int4.needles[-1].same_answer <= last.needles
    for part in ("needles", "copies"):
        sizes = [np.abs([entry.rise for entry in getattr(card, part)]) for card in (int4, wrong)]
        assert sizes[1].mean() > 3 * sizes[0].mean(), part
    assert wrong.tool_calls.same_token < int4.tool_calls.same_token
    assert wrong.greedy.same_token < int4.greedy.same_token
    assert wrong.greedy.median < 0.5 * int4.greedy.median


def test_a_report_has_the_cards_of_all_models(
    int4: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(departure, "NEW_TOKENS", 20)
    raw = tmp_path / "raw.onnx"
    convert(original(DYNAMO), raw, preset="raw")
    comparison = report(
        original(DYNAMO), [int4, raw], TEXT, source="", context=256, threads=1, card_prompts=1
    )
    model, exact = comparison.models
    assert exact.card is not None and exact.card.greedy is not None
    assert all(abs(copy.rise) < 1e-5 for copy in exact.card.copies) and exact.card.copies
    assert (exact.card.greedy.same_token, exact.card.greedy.median) == (1, 20)
    assert model.card is not None and model.card.needles == () and model.card.tool_calls is None
    assert all(peer.card is not None and peer.card.greedy for peer in comparison.peers)
    assert comparison.seconds > 0
    notes = "\n".join(report_notes(comparison))
    assert "needles and tool calls are left out: the model has no tokenizer" in notes
    titles = [each.title.split(":")[0] for each in card_tables(comparison)]
    assert titles == ["Quality by position in the context", "Copies", "Greedy texts"]
    for each in report_tables(comparison):
        assert {len(row) for row in each.rows} == {len(each.columns)}
        assert {*each.brief} <= {*each.columns}
    page = to_card(comparison)
    head, _, rest = page.removeprefix("---\n").partition("\n---\n")
    fields = {key: json.loads(value) for key, value in re.findall(r"^([\w-]+): (.*)$", head, re.M)}
    assert fields["tags"] == ["onnx", "kv-cache", "turboquant"]
    assert not {"license", "base_model"} & fields.keys()
    value = fields["model-index"][0]["results"][0]["metrics"][0]["value"]
    assert value == pytest.approx(model.quality.converted_perplexity, abs=1e-6)
    assert "\n### Greedy texts: 1 of 20 tokens by the original" in rest
    assert [entry["name"] for entry in fields["model-index"]] == ["int4", "raw"]
    assert f'tq_onnx.load("{int4.name}")' in rest
    with_names = tmp_path / "model.onnx"
    (tmp_path / "config.json").write_text('{"_name_or_path": "owner/Name-1.5"}')
    (tmp_path / "README.md").write_text("---\ntags: [x]\nlicense: apache-2.0\n---\nText\n")
    named = to_card(cast(Any, SimpleNamespace(**{**vars(comparison), "original": with_names})))
    assert 'base_model: "owner/Name-1.5"' in named and 'license: "apache-2.0"' in named
    (tmp_path / "config.json").write_text('{"_name_or_path": "/home/user/checkpoint"}')
    (tmp_path / "README.md").write_text("# Text\n\nlicense: none of this\n")
    named = to_card(cast(Any, SimpleNamespace(**{**vars(comparison), "original": with_names})))
    assert "base_model" not in named and "license" not in named.partition("\n---\n")[0]


def test_a_graph_without_caches_has_no_card(tmp_path: Path) -> None:
    output = tmp_path / "int4.onnx"
    convert(original("hf-prefill"), output, preset="int4")
    comparison = report(
        original("hf-prefill"), [output], 32, source="", context=16, threads=1, card_prompts=1
    )
    assert "does not go on from its caches" in "\n".join(report_notes(comparison))
    assert comparison.models[0].card == CardFigures((), (), None, None)


def test_the_file_of_a_card(tmp_path: Path) -> None:
    model, readme = tmp_path / "model.onnx", tmp_path / "README.md"
    assert card_path(None, [model], overwrite=False) == readme
    assert card_path(None, [model, tmp_path / "b.onnx"], overwrite=False) == readme
    readme.write_text("# Somebody's\n")
    with pytest.raises(OutputExistsError, match="no card"):
        card_path(None, [model], overwrite=False)
    assert card_path(None, [model], overwrite=True) == readme
    readme.write_text("---\n---\n\n<!-- the card of a conversion by tq-onnx -->\n")
    assert card_path(None, [model], overwrite=False) == readme
    with pytest.raises(UsageError, match="2 folders"):
        card_path(None, [model, tmp_path / "b" / "model.onnx"], overwrite=False)
    with pytest.raises(UsageError, match=r"ends with \.md"):
        card_path(tmp_path / "card.onnx", [model], overwrite=True)
