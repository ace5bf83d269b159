"""Who is let in, what is told to who is not, and what is learned from what became of them. No clock, no server."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest

from service.engine.types import FinishReason, GenerationRequest, RequestTimings, StoppingParams
from service.errors import DeadlineUnreachable
from service.forecasting.admission import Correction, DeadlineAdmission
from service.forecasting.prediction import LatencyPredictor, Prediction
from tests.fakes import request

QUEUE, PREFILL, TOKEN = 1.0, 0.5, 0.01


class Fortune(LatencyPredictor):
    """A predictor: a token takes 10 ms after the prompt's half second and a second of queue, alone half of that."""

    def __init__(self, *, is_warm: bool = True, queue: float = QUEUE) -> None:
        self.is_warm = is_warm
        self.queue = queue
        self.likely: int | None = None

    def predict(self, one: GenerationRequest) -> Prediction | None:
        if not self.is_warm:
            return None
        return told(self.queue, PREFILL, TOKEN * one.stopping.max_tokens)

    def predict_alone(self, one: GenerationRequest) -> Prediction | None:
        return told(0.0, PREFILL / 2, TOKEN / 2 * one.stopping.max_tokens)

    def likely_tokens(self, one: GenerationRequest) -> int | None:
        return one.stopping.max_tokens if one.stopping.ignore_eos else self.likely


def told(queue: float, prefill: float, decode: float) -> Prediction:
    return Prediction(queue_seconds=queue, prefill_seconds=prefill, decode_seconds=decode)


def exactly(max_tokens: int, **fields: object) -> GenerationRequest:
    """A request whose length is known."""
    stopping = StoppingParams(max_tokens=max_tokens, ignore_eos=True)
    return replace(request(stopping=stopping, deadline=100.0), **fields)  # type: ignore[arg-type]


def judge(
    admission: DeadlineAdmission, one: GenerationRequest, left: float, *, is_idle: bool = False
) -> GenerationRequest:
    """The request as it is let in at moment 0, with so many seconds left."""
    judged, _ = admission.judge(one, 0.0, left, is_idle=is_idle)
    return judged


def refusal(
    admission: DeadlineAdmission, one: GenerationRequest, left: float, *, is_idle: bool = False
) -> DeadlineUnreachable:
    with pytest.raises(DeadlineUnreachable) as caught:
        judge(admission, one, left, is_idle=is_idle)
    return caught.value


def end(
    admission: DeadlineAdmission,
    one: GenerationRequest,
    seconds: float,
    reason: FinishReason = FinishReason.LENGTH,
    *,
    was_served: bool = True,
) -> None:
    """A request that is let in, and over after so many seconds."""
    _, prediction = admission.judge(one, 0.0, 1e6, is_idle=False)
    assert prediction is not None
    timings = RequestTimings(
        arrival_time=0.0,
        scheduled_time=0.0 if was_served else None,
        first_token_time=None,
        finished_time=seconds,
    )
    admission.ended(prediction, timings, [reason])


def test_request_that_fits_is_let_in_and_must_begin_while_it_still_fits() -> None:
    judged = judge(DeadlineAdmission(Fortune()), exactly(100), left=2.6)
    assert judged.start_by == pytest.approx(2.6 - PREFILL - 1.0)
    assert replace(judged, start_by=None) == exactly(100)


def test_request_that_does_not_fit_is_refused_with_the_numbers() -> None:
    error = refusal(DeadlineAdmission(Fortune()), exactly(100), left=2.4)
    assert (error.queue_seconds, error.prefill_seconds, error.decode_seconds) == (QUEUE, PREFILL, pytest.approx(1.0))
    assert error.left_seconds == 2.4
    # With the whole timeout, which is what was left when it arrived, it fits as soon as the queue is this much shorter.
    assert error.retry_after_seconds == pytest.approx(0.1)


def test_retry_is_told_by_the_whole_timeout_and_not_by_what_is_left_of_it() -> None:
    late = exactly(100, arrival_time=-0.08)
    assert refusal(DeadlineAdmission(Fortune()), late, left=2.35).retry_after_seconds == pytest.approx(0.07)


def test_request_that_would_not_fit_alone_is_told_so() -> None:
    admission = DeadlineAdmission(Fortune())
    assert refusal(admission, exactly(100), left=0.76).retry_after_seconds is not None
    assert refusal(admission, exactly(100), left=0.74).retry_after_seconds is None


@pytest.mark.parametrize(("queue", "told"), [(0.0, 0.05), (1000.0, 60.0)])
def test_retry_is_told_within_reason(queue: float, told: float) -> None:
    admission = DeadlineAdmission(Fortune(queue=queue))
    assert refusal(admission, exactly(100), left=1.499).retry_after_seconds == told


def test_everyone_is_let_in_while_nothing_is_known_of_steps() -> None:
    one = exactly(100)
    assert judge(DeadlineAdmission(Fortune(is_warm=False)), one, left=1e-3) == one


def test_request_that_takes_what_there_is_needs_time_for_its_first_token_only() -> None:
    admission, partial = DeadlineAdmission(Fortune()), exactly(1000, partial_on_deadline=True)
    assert judge(admission, partial, left=1.6) == partial, "it runs shortened, however late it begins"
    error = refusal(admission, partial, left=1.4)
    assert (error.prefill_seconds, error.decode_seconds) == (PREFILL, 0.0)
    assert refusal(admission, partial, left=0.24).retry_after_seconds is None


@pytest.mark.parametrize(("likely", "decode"), [(50, 0.5), (200, 2.0), (None, TOKEN)])
def test_answer_that_may_stop_is_expected_to_have_as_many_tokens_as_is_likely_and_if_unknown_one(
    likely: int | None, decode: float
) -> None:
    fortune = Fortune()
    fortune.likely = likely
    admission, one = DeadlineAdmission(fortune), replace(exactly(200), stopping=StoppingParams(max_tokens=200))
    needed = QUEUE + PREFILL + decode
    assert judge(admission, one, left=needed + 0.1).start_by == pytest.approx(needed + 0.1 - PREFILL - decode)
    assert refusal(admission, one, left=needed - 0.1).decode_seconds == pytest.approx(decode)


def test_nothing_is_learned_of_a_request_whose_length_was_unknown_or_that_takes_what_there_is() -> None:
    admission, known = DeadlineAdmission(Fortune()), exactly(200)
    for one in (replace(known, stopping=StoppingParams(max_tokens=200)), replace(known, partial_on_deadline=True)):
        assert admission.judge(one, 0.0, 9.0, is_idle=False)[1] is None
    assert admission.judge(known, 0.0, 9.0, is_idle=False)[1] is not None


# What is learned.


def test_requests_that_take_longer_than_was_foretold_make_it_foretell_more() -> None:
    admission, one = DeadlineAdmission(Fortune()), exactly(100)
    assert judge(admission, one, left=2.6)
    for _ in range(5):
        end(admission, one, seconds=9.0)
    error = refusal(admission, one, left=2.6)
    assert error.queue_seconds > 1.4 * QUEUE
    assert error.queue_seconds / error.prefill_seconds == pytest.approx(QUEUE / PREFILL)
    judged = judge(admission, one, left=9.0)
    assert judged.start_by == pytest.approx(9.0 - error.prefill_seconds - error.decode_seconds, abs=0.05)


@pytest.mark.parametrize(
    ("seconds", "reason", "was_served", "change"),
    [
        (2.6, FinishReason.LENGTH, True, 1),
        (2.4, FinishReason.LENGTH, True, -1),
        (2.4, FinishReason.STOP, True, -1),
        # Cut off: longer than that, and nobody knows by how much.
        (2.4, FinishReason.DEADLINE, True, 0),
        (2.6, FinishReason.DEADLINE, True, 1),
        (2.4, FinishReason.CANCELLED, True, 0),
        # It left the queue, and would have had to be served besides.
        (1.2, FinishReason.DEADLINE, False, 1),
        (0.8, FinishReason.DEADLINE, False, 0),
    ],
)
def test_what_is_learned_of_a_request_is_what_is_known_of_it(
    seconds: float, reason: FinishReason, was_served: bool, change: int
) -> None:
    admission, one = DeadlineAdmission(Fortune()), exactly(100)
    end(admission, one, seconds, reason, was_served=was_served)
    queue = refusal(admission, one, left=0.8).queue_seconds
    assert (queue > QUEUE) - (queue < QUEUE) == change


def test_correction_settles_where_nine_of_ten_are_right() -> None:
    source, correction = random.Random(0), Correction()
    values: deque[float] = deque(maxlen=2000)
    for _ in range(4000):
        # As long as was foretold, up to three times that.
        if source.uniform(1.0, 3.0) > correction.factor:
            correction.rise()
        else:
            correction.fall()
        values.append(correction.factor)
    assert sum(values) / len(values) == pytest.approx(2.8, rel=0.05)


def test_correction_stays_within_an_eighth_and_eight() -> None:
    correction = Correction()
    for _ in range(1000):
        correction.rise()
    assert correction.factor == pytest.approx(8.0)
    for _ in range(1000):
        correction.fall()
    assert correction.factor == pytest.approx(1 / 8)


def test_no_error_refuses_for_ever() -> None:
    """Whoever is refused teaches nothing: each refusal takes a little of what was learned back."""
    admission, one = DeadlineAdmission(Fortune()), exactly(100)
    for _ in range(100):
        end(admission, one, seconds=1e3)
    for _ in range(300):
        refused = _is_refused(admission, one, left=2.6)
    assert not refused


def test_nothing_is_corrected_while_nobody_else_is_there() -> None:
    admission, one = DeadlineAdmission(Fortune(queue=0.0)), exactly(100)
    for _ in range(100):
        end(admission, one, seconds=1e3)
    assert judge(admission, one, left=1.6, is_idle=True) == one
    assert _is_refused(admission, one, left=1.6)


def test_each_sixteenth_that_an_idle_server_would_refuse_in_a_row_runs() -> None:
    admission, one = DeadlineAdmission(Fortune()), exactly(100)
    refused = [_is_refused(admission, one, left=1.0, is_idle=True) for _ in range(48)]
    assert [index for index, is_refused in enumerate(refused) if not is_refused] == [15, 31, 47]
    for _ in range(15):
        assert _is_refused(admission, one, left=1.0, is_idle=True)
    assert not _is_refused(admission, one, left=3.0, is_idle=True)
    assert _is_refused(admission, one, left=1.0, is_idle=True), "counted in a row"


def _is_refused(admission: DeadlineAdmission, one: GenerationRequest, left: float, *, is_idle: bool = False) -> bool:
    try:
        judge(admission, one, left, is_idle=is_idle)
    except DeadlineUnreachable:
        return True
    return False
