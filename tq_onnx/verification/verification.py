"""One verification: an original, its conversion, the plan, and their results on a text.

Verifications of several conversions of one original can share a ``Baseline``. A session is closed
as soon as it is not needed, because a model may take most of the memory.
"""

from __future__ import annotations

import time
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec import reference
from tq_onnx.codec.extremes import warnings_of
from tq_onnx.conversion.calibrationrecord import CalibrationRecord, record_in
from tq_onnx.errors import TqOnnxError, UnsupportedModelError, VerificationError
from tq_onnx.files.load import LoadedModel
from tq_onnx.measure import divergence
from tq_onnx.measure.divergence import QualityFigures
from tq_onnx.measure.expose_internals import expose_internals, with_operators
from tq_onnx.measure.feeding_modes import (
    FeedingFigures,
    all_caches,
    chunk_of,
    compare_feeding_modes,
)
from tq_onnx.measure.greedy import GreedyFigures, compare_greedy, greedy_tokens
from tq_onnx.measure.loss import (
    LOSS_TOKENS,
    LossFigures,
    measure_loss,
    predict,
    written_text,
)
from tq_onnx.measure.oracle import BackendFigures, judge_backends
from tq_onnx.measure.probe import Probe
from tq_onnx.measure.readings import with_all_logits, with_float_products
from tq_onnx.measure.reconstruction import cache_distances
from tq_onnx.measure.windows import MIN_TOKENS, Ids, windows
from tq_onnx.plan import Plan, plan_in
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.opening import open_converted
from tq_onnx.runtime.placement import report_placement
from tq_onnx.verification import checks, pages, steps
from tq_onnx.verification.baseline import Baseline
from tq_onnx.verification.calibrated import TEXT_TOKENS, advice, calibration_checks
from tq_onnx.verification.checks import PropertyCheck, failed
from tq_onnx.verification.devices import (
    ProviderFigures,
    compare_providers,
    on_device,
    providers_agree,
)
from tq_onnx.verification.fidelity import PROMPT_TOKENS, fidelity
from tq_onnx.verification.findings import Inputs, MemoryFigures, VerifyReport
from tq_onnx.verification.interfaces import (
    call_warnings,
    failing,
    interface_kept,
    not_made_from,
    refuse_stranger,
)
from tq_onnx.verification.loss import QUALITY, quality_advice, quality_check
from tq_onnx.verification.planned import expect_layers
from tq_onnx.verification.steps import Seconds, Steps

PROBE_TOKENS: Final = 512
MODE_TOKENS: Final = 8
ANY_ROOM: Final = 1 << 30
_TIMED_TOKENS: Final = 64


class Verification:
    """A conversion against its original."""

    def __init__(
        self,
        baseline: Baseline,
        converted: Path,
        loaded: LoadedModel,
        inputs: Inputs,
        progress: Steps,
    ) -> None:
        """Compare nothing yet."""
        self.baseline = baseline
        self.converted = converted
        self.loaded = loaded
        self.inputs = inputs
        self._steps = progress
        self._started = time.monotonic()

    @cached_property
    def form(self) -> LoadedModel:
        """The conversion with operators, which are made again where its target has none."""
        return with_operators(self.loaded)

    @property
    def plan(self) -> Plan:
        """The plan of that."""
        plan = plan_in(self.form.model.metadata_props)
        assert plan is not None  # strangers are refused
        return plan

    @cached_property
    def record(self) -> CalibrationRecord | None:
        """What the conversion says of its calibration."""
        with failing(self.converted):
            return record_in(self.loaded.model.metadata_props, self.plan)

    @cached_property
    def library(self) -> bool:
        """Whether the library's kernels are checked; they have nothing to do in other forms."""
        return self.inputs.library and self.form is self.loaded

    @cached_property
    def room(self) -> int:
        """Tokens that both models can hold."""
        room = min(model.longest or ANY_ROOM for model in (self.baseline.opened, self._after))
        if room < MIN_TOKENS:
            raise UnsupportedModelError(
                f"the model takes no more than {room} tokens, too few to compare anything",
                where=str(self.baseline.path),
                fix=f"export it with room for {MIN_TOKENS} or more",
            )
        return room

    @cached_property
    def prompt(self) -> Ids:
        """The beginning of the text, which everything short reads."""
        text = self.inputs.text
        return text[: min(PROMPT_TOKENS, len(text), self.room // 2)]

    @cached_property
    def probe(self) -> Probe:
        """The conversion with its internals exposed."""
        probe = expose_internals(self.converted, loaded=self.loaded)
        if any(layer.is_shortened for layer in probe.layers):
            raise UnsupportedModelError(
                "the caches keep a window of the tokens, and verify compares all tokens",
                where=str(self.converted),
                fix="measure its quality with `tq-onnx report`",
            )
        return probe

    @cached_property
    def fidelity(self) -> list[PropertyCheck]:
        """Everything but the codecs against the original."""
        raw = self.baseline.raw(self.prompt, library=self.library)
        with failing(self.converted, self.inputs.ep):
            return fidelity(
                raw,
                self.converted,
                self.form,
                self.plan,
                library=self.library,
                threads=self.inputs.threads,
            )

    @cached_property
    def tables(self) -> PropertyCheck:
        """The baked tables against the plan."""
        return checks.tables(self.form.model, self.plan)

    def report(self, source: str = "") -> VerifyReport:
        """Compare everything, as far as the inputs ask for it."""
        inputs, baseline = self.inputs, self.baseline
        refuse_stranger(baseline.opened, self.converted, self.loaded)
        results = [self._kept()]
        memory, original_caches, converted_caches = self._read()
        new_tokens = self._new_tokens  # while the original is still open
        quality, greedy = (None, None) if inputs.quick else self._predict(new_tokens)
        nodes = report_placement(self._after.session, self.loaded.model)
        results += [
            checks.placed(self._after, self.library),
            checks.cache_sizes(self._after, memory.converted_bytes, memory.tokens),
        ]
        self._steps.begin(steps.CALIBRATION)
        results += calibration_checks(
            self.record,
            baseline.opened,
            inputs.text,
            tokens=PROMPT_TOKENS if inputs.quick else TEXT_TOKENS,
        )
        requests = pages.alone(baseline.floats, inputs.text) if self.plan.block_size else None
        chunk = chunk_of(self._after)
        feeds = not inputs.quick
        calls = [] if not feeds else baseline.call_distances(self.prompt, chunk)
        with failing(self.converted, inputs.ep):
            distances = cache_distances(original_caches, converted_caches, self.probe)
            modes = None
            if feeds:
                modes, pieces = self._feed(chunk)
                results += checks.feeding_modes_agree(
                    modes,
                    self.loaded.model,
                    call_drift=calls,
                    drift=distances,
                    chunked_drift=cache_distances(original_caches, pieces, self.probe)
                    if pieces
                    else [],
                )
        self._close()
        loss, check = self._lose()
        results.append(check)
        self._steps.begin(steps.FIDELITY)
        results += self.fidelity
        results += [self.tables, checks.same_weights(distances, self.probe)]
        if requests is not None:
            results += pages.packed_requests(
                self.loaded,
                self.plan,
                inputs.text,
                requests,
                library=self.library,
                threads=inputs.threads,
            )
        baseline.release()
        judged = self._judge()
        results += [
            *checks.backends_hold(self.probe, judged.layers, has_planes=self.plan.planes),
            *checks.theory_holds(judged.reconstruction),
        ]
        device = None
        if inputs.ep.has_own_memory:
            device = self._compare_providers(new_tokens)
            # Attention of float16 may read planes.
            element = "FLOAT16" if self.plan.planes else self.plan.layers[0].dtype
            results += [on_device(nodes), *providers_agree(device, element)]
        self._steps.end_part()
        return VerifyReport(
            original=baseline.path,
            converted=self.converted,
            source=source,
            tokens=len(self.prompt if inputs.quick else inputs.text),
            kernels=self.library,
            checks=tuple(results),
            quality=quality,
            greedy=greedy,
            memory=memory,
            modes=modes,
            layers=judged.reconstruction,
            drift=tuple(distances),
            ladder=judged.layers,
            logits_kernel_body=judged.logit_gap,
            placement=nodes,
            device=device,
            warnings=(
                *call_warnings(baseline.path, self.plan),
                *warnings_of(row.extremes for row in judged.reconstruction if row.extremes),
            ),
            left_out=checks.LEFT_OUT if inputs.quick else (),
            loss=loss,
            advice=self._advice(results, loss),
        )

    @cached_property
    def _after(self) -> OpenModel:
        """The conversion as it is."""
        inputs = self.inputs
        with failing(self.converted, inputs.ep):
            return open_converted(
                self.converted,
                loaded=self.loaded,
                library=self.library,
                threads=inputs.threads,
                ep=inputs.ep,
            )

    def _close(self) -> None:
        """Give up the session of the conversion as it is."""
        self.__dict__.pop("_after", None)

    def _kept(self) -> PropertyCheck:
        """Compare what both models take and give; refuse what is no conversion of the original."""
        before, after = self.baseline.opened, self._after
        interface = interface_kept(before, after)
        if not interface.holds:
            raise not_made_from(before.path, after.path, interface.detail)
        expect_layers(after.path, self.loaded.model, after.plan)
        return interface

    def _read(self) -> tuple[MemoryFigures, list[npt.NDArray[Any]], list[npt.NDArray[Any]]]:
        """Read the prompt with both models; return the sizes of their caches, and the caches.

        Its last token is a call of its own, as in decoding.
        """
        before, after, prompt = self.baseline.opened, self._after, self.prompt
        original, converted = before.decoder(), after.decoder(most=len(prompt))
        once = before.signature.first_only
        calls = (prompt,) if once else (prompt[:-1], prompt[-1:])
        moments = [self._started, time.monotonic()]
        for call in calls:
            original.prefill(call[None])
            with failing(after.path, self.inputs.ep):
                converted.prefill(call[None])
            moments.append(time.monotonic())
        self._expect(np.diff(moments))
        per_token = before.signature.bytes_per_token
        # A page that is begun, or a buffer that was enlarged, has room for more than was read.
        original_bytes = original.cache_bytes
        if after.signature.is_enlarged or before.signature.is_enlarged:
            original_bytes = sum(
                # A ring keeps its window.
                spec.bytes_per_token * min(converted.slots, spec.spare_rows or converted.slots)
                for spec in before.signature.caches
            )
        memory = MemoryFigures(
            tokens=converted.slots,
            original_bytes=original_bytes,
            converted_bytes=converted.cache_bytes,
            original_bytes_per_token=per_token,
            converted_bytes_per_token=after.signature.bytes_per_token,
        )
        caches = all_caches(original), all_caches(converted)
        for spec, expected, cache in zip(after.signature.caches, *caches, strict=True):
            if cache.shape[2] != expected.shape[2]:
                raise VerificationError(
                    f"{spec.pair.present} has {cache.shape[2]} rows after a prompt of "
                    f"{len(prompt)} tokens, and the original's {expected.shape[2]}",
                    where=str(after.path),
                    fix="convert the original again",
                )
        return memory, *caches

    def _predict(self, new_tokens: int) -> tuple[QualityFigures, GreedyFigures]:
        before, after, inputs = self.baseline.opened, self._after, self.inputs
        context = min(inputs.context, len(inputs.text), self.room)
        logits = with_all_logits(after, self.loaded, library=self.library, threads=inputs.threads)
        self._steps.begin(steps.TEXT)
        figures = divergence.compare(
            before.decoder(),
            logits.decoder(most=context),
            inputs.text,
            vocabulary=before.vocabulary,
            context=context,
            stride=max(1, context // 2),
            on_progress=self._steps.within,
        )
        noise = figures.logit_rms_difference
        self._steps.begin(steps.GREEDY)
        prompt = self.prompt.tolist()
        original_tokens, converted_tokens = (
            greedy_tokens(model.decoder(most=len(prompt) + new_tokens), prompt, new_tokens)
            for model in (before, after)
        )
        return figures, compare_greedy(
            before.decoder(), prompt, original_tokens, converted_tokens, noise
        )

    def _lose(self) -> tuple[LossFigures | None, PropertyCheck]:
        """Compare both models on a short text, which the original writes unless one is named."""
        self._steps.begin(steps.QUALITY)
        inputs, before = self.inputs, self.baseline.opened
        count = min(LOSS_TOKENS, self.room)
        text, source = inputs.text[:count], "the text"
        if not inputs.is_named:
            written = written_text(before, int(text[0]), count)
            text, source = (text, source) if written is None else (written, "the original's own")
        calls = predict(before, text)
        try:
            with failing(self.converted, inputs.ep):
                loss = measure_loss(
                    self.probe,
                    text,
                    calls,
                    source=source,
                    library=self.library,
                    threads=inputs.threads,
                )
        except TqOnnxError as error:  # what other checks find says more
            return None, PropertyCheck(QUALITY, False, error.what)
        return loss, quality_check(loss)

    def _advice(self, results: list[PropertyCheck], loss: LossFigures | None) -> str:
        """Return what to do if a check does not hold."""
        if loss is not None and [check.name for check in failed(results)] == [QUALITY]:
            return quality_advice(loss, is_calibrated=self.record is not None)
        return advice(results, self.record)

    @property
    def _new_tokens(self) -> int:
        once = self.baseline.opened.signature.first_only
        return min(self.inputs.new_tokens, 1 if once else self.room - len(self.prompt))

    def _feed(self, chunk: int) -> tuple[FeedingFigures, list[npt.NDArray[Any]]]:
        self._steps.begin(steps.FEEDING)
        threads = self.inputs.threads
        room, after = self.room, self._after
        if self.library:
            self._close()  # before its place is taken
            after = open_converted(self.converted, loaded=self.loaded, threads=threads, exact=True)
        after = with_float_products(
            after, self.loaded, library=self.library, threads=threads, exact=True
        )
        new_tokens = min(MODE_TOKENS, room - len(self.prompt))
        return compare_feeding_modes(after, self.prompt, new_tokens=new_tokens, chunk=chunk)

    def _judge(self) -> BackendFigures:
        self._steps.begin(steps.LAYERS)
        inputs = self.inputs
        with failing(self.converted, inputs.ep):
            return judge_backends(
                self.probe,
                self.prompt if inputs.quick else inputs.text[: self._probed],
                library=self.library,
                ep=inputs.ep,
                threads=inputs.threads,
                quick=inputs.quick,
                on_progress=self._steps.within,
            )

    @property
    def _probed(self) -> int:
        """Tokens whose rows are compared with theory."""
        inputs = self.inputs
        return min(inputs.context, len(inputs.text), self.room, PROBE_TOKENS)

    def _compare_providers(self, new_tokens: int) -> ProviderFigures:
        self._steps.begin(steps.DEVICE)
        return compare_providers(
            self.probe,
            self.prompt,
            new_tokens=new_tokens,
            ep=self.inputs.ep,
            threads=self.inputs.threads,
        )

    def _expect(self, timed: npt.NDArray[np.float64]) -> None:
        """Say how long it will take, from what opening, a prompt and a token took with both."""
        opening, prompt, token = (*timed.tolist(), *timed[-1:].tolist())[:3]
        inputs, count = self.inputs, len(self.prompt)
        seconds = Seconds(opening, prompt / count, token, self._encoding_seconds())
        context = min(inputs.context, len(inputs.text), self.room)
        read = windows(len(inputs.text), context, max(1, context // 2))
        text = None if inputs.quick else sum(window.stop - window.start for window in read)
        self._steps.expect(
            seconds.of_steps(
                prompt=count,
                text=text,
                new_tokens=inputs.new_tokens,
                chunk=chunk_of(self._after),
                probed=self._probed,
                backends=2 if self.library and not inputs.quick else 1,
                has_device=inputs.ep.has_own_memory,
            )
        )

    def _encoding_seconds(self) -> float:
        """Return what the reference takes to encode one token of all layers."""
        layer = self.probe.layers[0]
        begin = time.monotonic()
        for names in layer.caches:
            if names.rotation is not None:
                shape = (1, layer.plan.kv_num_heads, _TIMED_TOKENS, names.head_size)
                reference.encode(
                    np.random.default_rng(0).standard_normal(shape),
                    names.codec,
                    names.rotation,
                    names.codebook,
                    names.norm_correction,
                    gains=names.gains,
                    feedback=names.feedback,
                )
        return (time.monotonic() - begin) / _TIMED_TOKENS * len(self.probe.layers)
