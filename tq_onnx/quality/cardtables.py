"""The cards of ``report`` as tables of text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tq_onnx.measure.divergence import STRETCH
from tq_onnx.measure.tables import TextTable, small
from tq_onnx.quality.answers import NEAR_TIE

if TYPE_CHECKING:
    from tq_onnx.quality.figures import ComparisonReport


def card_tables(report: ComparisonReport) -> Iterator[TextTable]:
    """Yield a table of each part of the cards that there is; nothing without cards."""
    cards = [(each.name, each.card) for each in (*report.models, *report.peers) if each.card]
    if not cards:
        return
    yield _positions(report)
    needles = [(name, each) for name, card in cards for each in card.needles]
    if needles:
        yield TextTable.of(
            (
                *("model", ">tokens", ">right answers", ">of the original"),
                *(">same answer", ">near-ties", ">loss", ">rise"),
            ),
            [
                (
                    name,
                    f"{each.context:,}",
                    f"{each.right} of {each.needles}",
                    f"{each.original_right} of {each.needles}",
                    f"{each.same_answer} of {each.needles}",
                    each.near_ties,
                    f"{each.original_loss:.3f}",
                    _change(each.rise, each.rise_error),
                )
                for name, each in needles
            ],
            "Needles: names and numbers in a long text, asked for after so many tokens",
            ("model", ">tokens", ">right answers", ">of the original", ">same answer", ">rise"),
        )
    copies = [(name, each) for name, card in cards for each in card.copies]
    if copies:
        yield TextTable.of(
            ("model", ">tokens back", ">gain of copying", ">rise", ">relative to the gain"),
            [
                (
                    name,
                    f"{each.distance:,}",
                    f"{each.gain:+.3f}",
                    _change(each.rise, each.rise_error),
                    "-" if each.relative_rise is None else f"{100 * each.relative_rise:+.1f} %",
                )
                for name, each in copies
            ],
            "Copies: passages of random tokens that come again after so many tokens",
        )
    calls = [(name, card.tool_calls) for name, card in cards if card.tool_calls]
    if calls:
        yield TextTable.of(
            (
                *("model", ">same token", ">near-ties", ">same answer", ">others at a near-tie"),
                *(">calls", ">same function", ">same arguments"),
            ),
            [
                (
                    name,
                    _share(each.same_token, each.same_token_error),
                    f"{100 * each.near_ties:.2f} %",
                    f"{each.same_answer} of {each.prompts}",
                    _of(each.near_tie_answers, each.prompts - each.same_answer),
                    f"{each.calls} of {each.prompts}",
                    _of(each.same_name, each.calls),
                    _of(each.same_arguments, each.calls),
                )
                for name, each in calls
            ],
            f"Tool calls: answers of {calls[0][1].tokens:,} tokens by the original to "
            f"{calls[0][1].prompts} request{'' if calls[0][1].prompts == 1 else 's'}",
            ("model", ">same token", ">near-ties", ">same function", ">same arguments"),
        )
    greedy = [(name, card.greedy) for name, card in cards if card.greedy]
    if greedy:
        first = greedy[0][1]
        repeats = f", which repeats itself after {first.loops_at:,.0f} (median)"
        yield TextTable.of(
            (
                *("model", ">median departure", ">texts that depart", ">at a near-tie"),
                *(">same token", ">before repeating", ">near-ties"),
            ),
            [
                (
                    name,
                    f"{each.median:,.0f}"
                    if each.median < each.new_tokens
                    else f"not within {each.new_tokens:,}",
                    f"{each.departed} of {each.prompts}",
                    _of(each.near_ties, each.departed),
                    _share(each.same_token, each.same_token_error),
                    _share(each.same_token_new, each.same_token_new_error),
                    f"{100 * each.near_tie_steps:.2f} %",
                )
                for name, each in greedy
            ],
            f"Greedy texts: {first.prompts} of {first.new_tokens:,} tokens by the original"
            f"{repeats if first.loops_at < first.new_tokens else ''}",
            (
                "model",
                ">median departure",
                ">texts that depart",
                ">same token",
                ">before repeating",
            ),
        )


def card_notes(report: ComparisonReport) -> Iterator[str]:
    """Yield notes for the reader of the tables, one sentence each."""
    cards = [each.card for each in (*report.models, *report.peers) if each.card]
    if any(card.needles for card in cards):
        yield (
            "needles: a small model may not find them itself; the same answer as the original's is "
            "what a conversion owes; loss and rise: of the right answer, in nats per token"
        )
    if any(card.copies for card in cards):
        yield (
            "copies: gain: how much better the original predicts the second copy than the first, "
            "in nats per token; rise: how much worse than the original this model does; without a "
            "figure relative to the gain, the original itself hardly copies"
        )
    if any(card.tool_calls or card.greedy for card in cards):
        yield (
            "same token: each model reads what the original wrote greedily, and prefers the same "
            f"next token; near-ties: it does not, but the original gave its own at most {NEAR_TIE} "
            "nats more, so that rounding alone may turn it"
        )
    if any(card.greedy for card in cards):
        yield (
            "greedy texts: a text that departs is not a worse one; the median counts one that does "
            "not as its whole length; where a text repeats itself, every model agrees"
        )
    if any(card.tool_calls and not card.tool_calls.calls for card in cards):
        yield "calls: the original itself writes no call as JSON, so that none can be compared"
    yield from report.notes


def _positions(report: ComparisonReport) -> TextTable:
    rows = []
    for model in (*report.models, *report.peers):
        for each in model.quality.by_position:
            end = min(each.start + STRETCH, report.context)
            change = 100 * each.perplexity_change
            rows.append(
                (
                    model.name,
                    f"{each.start:,} to {end:,}",
                    f"{small(each.kl_mean)} ± {small(each.kl_error)}",
                    f"{change:+.2f} ± {100 * each.perplexity_change_error:.2f} %",
                    f"{100 * each.top1_agreement:.2f} %",
                )
            )
    return TextTable.of(
        ("model", ">positions", ">KL mean", ">perplexity", ">same top token"),
        rows,
        "Quality by position in the context",
    )


def _change(rise: float, error: float) -> str:
    return f"{rise:+.3f} ± {error:.3f}"


def _of(count: int, total: int) -> str:
    return f"{count} of {total}" if total else "-"


def _share(share: float, error: float) -> str:
    return f"{100 * share:.2f} ± {100 * error:.2f} %"
