"""What the check of prompts in chunks takes for roundings, and what not."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import pytest

from tests.runtime.models import DYNAMO, converted, ids, original
from tq_onnx.measure.feeding_modes import CallDistance, FeedingFigures
from tq_onnx.measure.reconstruction import CacheDistance
from tq_onnx.progress import Progress
from tq_onnx.verification import steps
from tq_onnx.verification.checks import feeding_modes_agree
from tq_onnx.verification.steps import Steps
from tq_onnx.verification.verify import verify

LAYERS = 30
LAYER_BYTES = 13_056
"""Of 64 tokens of SmolLM2."""


def figures(
    differing: int, *, layer: int | None, there: int, rows: int = 50, share: float = 1.0
) -> FeedingFigures:
    return FeedingFigures(
        prompt_tokens=64,
        new_tokens=8,
        cache_bytes=LAYERS * LAYER_BYTES,
        fixed_capacity=False,
        in_place_bytes_differing=0,
        in_place_tokens_equal=True,
        chunk=1,
        chunk_bytes_differing=differing,
        chunk_layer=layer,
        chunk_layer_bytes_differing=there,
        chunk_layer_bytes=LAYER_BYTES,
        chunk_layer_rows_differing=rows,
        chunk_layer_token_share=share,
    )


def drift(*squares: float) -> list[CacheDistance]:
    return [CacheDistance(at, one, one, 0.007, 0.007) for at, one in enumerate(squares)]


def verdict(
    modes: FeedingFigures,
    *,
    noise: float = 1e-6,
    largest: float = 1e-5,
    chunked: Sequence[float] = (0.007, 0.011),
) -> bool | None:
    model = ir.Model(ir.Graph([], [], nodes=[]), ir_version=10)
    (check,) = feeding_modes_agree(
        modes,
        model,
        call_drift=[CallDistance(noise, largest)] * (2 * LAYERS),
        drift=drift(0.007, 0.010),
        chunked_drift=drift(*chunked),
    )
    return check.holds


@pytest.mark.parametrize(
    ("modes", "holds"),
    [
        (figures(0, layer=None, there=0), True),
        (figures(390, layer=0, there=390), True),  # 1 in 1,000 of all
        (figures(3_439, layer=3, there=2), True),
        (figures(3_439, layer=3, there=14), False),
        (figures(3_439, layer=3, there=136, rows=4, share=0.5), True),  # other gains
        (figures(3_439, layer=3, there=136, rows=5, share=0.5), False),
        (figures(3_439, layer=3, there=100, rows=3, share=0.6), False),  # a token of its own
        (figures(3_439, layer=0, there=3_000), False),
    ],
)
def test_few_bytes_differ_in_the_first_layer_where_any_do(
    modes: FeedingFigures, holds: bool
) -> None:
    assert verdict(modes) is holds


def test_caches_are_as_near_to_the_original_as_after_one_call() -> None:
    modes = figures(3_439, layer=3, there=2)
    assert verdict(modes, chunked=(0.007, 0.0149)) is True
    assert verdict(modes, chunked=(0.007, 0.0151)) is False
    assert verdict(modes, chunked=(0.007, float("nan"))) is False


def test_the_noise_of_the_original_tips_codes() -> None:
    modes = figures(2_000, layer=0, there=200)  # of a float16 model
    assert verdict(modes) is False
    assert verdict(modes, noise=5e-4, largest=1e-3) is True
    assert verdict(figures(9_000, layer=0, there=9_000), noise=5e-4, largest=1e-3) is False


def test_an_original_that_depends_on_its_calls_gives_no_verdict() -> None:
    assert verdict(figures(200_000, layer=1, there=9_000), largest=0.5) is None


# One bar for all steps of a verification.


def test_steps_share_one_bar_by_their_time() -> None:
    seen: list[Progress] = []
    progress = Steps(seen.append, parts=2)
    progress.begin(steps.OPENING)
    assert seen == [Progress(steps.OPENING)]
    progress.expect({steps.OPENING: 1.0, steps.TEXT: 2.0, steps.LAYERS: 1.0})
    progress.begin(steps.TEXT)
    progress.within(Progress("Reading", 1, 4))
    progress.begin(steps.LAYERS)
    progress.within(Progress("Comparing", 1, 1))
    progress.end_part()
    progress.begin(steps.OPENING)
    assert [moment.done for moment in seen[1:]] == [0, 1000, 1500, 3000, 4000, 4000]
    assert {(moment.total, moment.seconds) for moment in seen[1:]} == {(8000, 8.0)}


def test_a_verification_goes_on_and_ends_at_the_end() -> None:
    seen: list[Progress] = []
    options = {"source": "", "new_tokens": 2, "context": 32, "threads": 1}
    text = ids(48, seed=7)[0]
    verify(original(DYNAMO), converted(DYNAMO), text, on_progress=seen.append, **options)
    known = [moment for moment in seen if moment.seconds]
    assert seen[0] == Progress(steps.OPENING)
    assert len({(moment.total, moment.seconds) for moment in known}) == 1
    assert [moment.done for moment in known] == sorted(moment.done for moment in known)
    assert known[0].doing == steps.OPENING  # from the first call on
    assert known[-1].done == known[-1].total
    done = list(dict.fromkeys(moment.doing for moment in seen))
    assert done == [step for step in steps.ORDER if step in done]
