"""One bar for all steps of a verification."""

from __future__ import annotations

from tests.runtime.models import DYNAMO, converted, ids, original
from tq_onnx.progress import Progress
from tq_onnx.verification import steps
from tq_onnx.verification.steps import Steps
from tq_onnx.verification.verify import verify


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
