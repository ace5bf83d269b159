"""A step's time runs from the last one's end while there is work, and dear steps are not forgotten for cheap ones."""

from __future__ import annotations

from service.engine.queueing.step_timing import Pace


def step(pace: Pace, began: float, ended: float, *, has_prompts: bool = False) -> None:
    pace.begin(began)
    pace.end(ended, has_prompts=has_prompts)


def test_pace_counts_what_lies_between_steps_but_no_pause() -> None:
    pace = Pace()
    assert pace.longest == 0.0
    step(pace, 1.0, 2.0)
    step(pace, 4.0, 4.5)
    assert pace.longest == 2.5
    pace.pause()
    step(pace, 100.0, 100.5)
    assert pace.longest == 2.5


def test_pace_remembers_a_prompt_through_any_number_of_steps_without_one() -> None:
    pace = Pace()
    step(pace, 0.0, 8.0, has_prompts=True)
    step(pace, 8.0, 12.0)
    for number in range(100):
        step(pace, 12.0 + number, 13.0 + number)
    assert pace.longest == 8.0


def test_pace_forgets_a_hiccup_after_as_many_steps_of_its_kind() -> None:
    pace = Pace()
    step(pace, 0.0, 8.0)
    for number in range(15):
        step(pace, 8.0 + number, 9.0 + number)
    assert pace.longest == 8.0
    step(pace, 23.0, 24.0)
    assert pace.longest == 1.0


def test_pace_does_not_count_a_step_that_came_to_nothing() -> None:
    pace = Pace()
    step(pace, 0.0, 1.0)
    pace.begin(1.0)
    pace.pause()
    step(pace, 9.0, 9.5)
    assert pace.longest == 1.0
