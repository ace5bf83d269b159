"""A step's time runs from the last one's end while there is work, and dear steps are not forgotten for cheap ones."""

from __future__ import annotations

from service.engine.queueing.step_timing import StepTiming


def step(timing: StepTiming, began: float, ended: float, *, has_prompts: bool = False) -> None:
    timing.begin(began)
    timing.end(ended, has_prompts=has_prompts)


def test_timing_counts_what_lies_between_steps_but_no_pause() -> None:
    timing = StepTiming()
    assert timing.longest == 0.0
    step(timing, 1.0, 2.0)
    step(timing, 4.0, 4.5)
    assert timing.longest == 2.5
    timing.pause()
    step(timing, 100.0, 100.5)
    assert timing.longest == 2.5


def test_timing_remembers_a_prompt_through_any_number_of_steps_without_one() -> None:
    timing = StepTiming()
    step(timing, 0.0, 8.0, has_prompts=True)
    step(timing, 8.0, 12.0)
    for number in range(100):
        step(timing, 12.0 + number, 13.0 + number)
    assert timing.longest == 8.0


def test_timing_forgets_a_hiccup_after_as_many_steps_of_its_kind() -> None:
    timing = StepTiming()
    step(timing, 0.0, 8.0)
    for number in range(15):
        step(timing, 8.0 + number, 9.0 + number)
    assert timing.longest == 8.0
    step(timing, 23.0, 24.0)
    assert timing.longest == 1.0


def test_timing_does_not_count_a_step_that_came_to_nothing() -> None:
    timing = StepTiming()
    step(timing, 0.0, 1.0)
    timing.begin(1.0)
    timing.pause()
    step(timing, 9.0, 9.5)
    assert timing.longest == 1.0
