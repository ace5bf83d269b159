"""Requests by number: distributions of lengths, shared prefixes, seeds."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from loadtest.core.workload import FIRST_TOKEN_ID, Workload, parse_lengths

VOCAB = 1000
COUNT = 4000


def workload(prompt: str = "32", answer: str = "8", **fields: object) -> Workload:
    return Workload(
        prompt_tokens=parse_lengths(prompt, "--prompt-tokens"),
        max_tokens=parse_lengths(answer, "--max-tokens", column=1),
        vocab_size=VOCAB,
        **fields,  # type: ignore[arg-type]
    )


def lengths(work: Workload) -> list[int]:
    return [len(work.prompt(number).token_ids) for number in range(COUNT)]


def test_uniform_lengths_take_every_value_alike() -> None:
    drawn = lengths(workload("uniform:10:19"))
    assert set(drawn) == set(range(10, 20))
    for length in range(10, 20):
        assert drawn.count(length) / COUNT == pytest.approx(0.1, abs=4.0 * (0.1 * 0.9 / COUNT) ** 0.5)


def test_geometric_lengths_have_their_mean_and_no_memory() -> None:
    drawn = lengths(workload("geometric:12.5"))
    deviation = (12.5 * 11.5) ** 0.5
    assert min(drawn) == 1
    assert statistics.fmean(drawn) == pytest.approx(12.5, abs=4.0 * deviation / COUNT**0.5)
    assert statistics.stdev(drawn) == pytest.approx(deviation, rel=0.1)
    # Of those longer than ten, the rest is as long as all are.
    rest = [length - 10 for length in drawn if length > 10]
    assert statistics.fmean(rest) == pytest.approx(12.5, abs=4.0 * deviation / len(rest) ** 0.5)


def test_lengths_from_a_file_are_those_seen_and_keep_what_belongs_together(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text("# prompt answer\n5 50\n7 70\n7 71\n", encoding="utf-8")
    work = workload(f"file:{path}", f"file:{path}")
    pairs = [(len(each.token_ids), each.max_tokens) for each in map(work.prompt, range(COUNT))]
    assert set(pairs) == {(5, 50), (7, 70), (7, 71)}
    assert pairs.count((5, 50)) / COUNT == pytest.approx(1 / 3, abs=0.03)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0", "--x: '0': 0 is below 1"),
        ("many", "--x: 'many'"),
        ("uniform:5:4", "4 is below 5"),
        ("uniform:5", "--x: 'uniform:5'"),
        ("geometric:0.5", "a mean of 0.5 is below 1"),
        ("normal:1:2", "none of N, uniform:LEAST:MOST"),
    ],
)
def test_a_notation_that_is_none_is_refused_by_its_option(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_lengths(text, "--x")


def test_a_bad_line_of_lengths_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text("3\n0\n", encoding="utf-8")
    with pytest.raises(ValueError, match="lengths:2: 0 is below 1"):
        parse_lengths(f"file:{path}", "--x")


def test_a_request_is_a_function_of_seed_stream_and_number_alone() -> None:
    forwards = [workload(seed=3).prompt(number) for number in range(10)]
    work = workload(seed=3)
    backwards = [work.prompt(number) for number in reversed(range(10))]
    assert forwards == backwards[::-1]
    others = [workload(seed=4).prompt(0), workload(seed=3, stream=1).prompt(0), workload(seed=-3).prompt(0)]
    assert forwards[0] not in [*others, *forwards[1:]]


def test_tokens_are_drawn_from_all_that_are_no_control_tokens() -> None:
    drawn = [token for number in range(500) for token in workload("100").prompt(number).token_ids]
    assert min(drawn) == FIRST_TOKEN_ID
    assert max(drawn) == VOCAB - 1
    assert statistics.fmean(drawn) == pytest.approx((FIRST_TOKEN_ID + VOCAB - 1) / 2, rel=0.01)


@pytest.mark.parametrize("asked", [0.0, 0.3, 1.0])
def test_as_many_prompts_as_asked_share_the_beginning_and_no_token_more(asked: float) -> None:
    work = workload("20", prefix_tokens=8, prefix_share=asked)
    prompts = [work.prompt(number).token_ids for number in range(1000)]
    beginnings = [prompt[:8] for prompt in prompts]
    most = max(set(beginnings), key=beginnings.count)
    with_it = [prompt for prompt in prompts if prompt[:8] == most]
    assert (len(with_it) if len(with_it) > 1 else 0) / 1000 == pytest.approx(asked, abs=0.06)
    # What follows is each prompt's own: a token in common is chance.
    assert len({prompt[8:] for prompt in prompts}) == 1000
    assert all(len(prompt) == 20 for prompt in prompts)


def test_a_prompt_no_longer_than_the_beginning_keeps_a_token_of_its_own() -> None:
    work = workload("uniform:1:8", prefix_tokens=8)
    for prompt in (work.prompt(number).token_ids for number in range(100)):
        assert prompt[:-1] == work.prompt(0).token_ids[: len(prompt) - 1] or len(prompt) > len(work.prompt(0).token_ids)
    assert {len(work.prompt(number).token_ids) for number in range(100)} == set(range(1, 9))


def test_a_stage_s_length_takes_the_place_of_the_drawn_one() -> None:
    assert len(workload("uniform:1:8").prompt(3, prompt_tokens=50).token_ids) == 50


def test_as_many_clients_as_asked_give_up() -> None:
    work = workload(cancel_share=0.25, cancel_after_seconds=2.0)
    patience = [work.prompt(number).patience_seconds for number in range(COUNT)]
    assert set(patience) == {None, 2.0}
    assert patience.count(2.0) / COUNT == pytest.approx(0.25, abs=0.03)


def test_fields_that_do_not_fit_are_all_named() -> None:
    with pytest.raises(ValueError, match=r"vocab_size: 4 .*; prefix_tokens: -1 .*; prefix_share: 2 .*cancel_after"):
        Workload(
            prompt_tokens=parse_lengths("1", ""),
            max_tokens=parse_lengths("1", ""),
            vocab_size=4,
            prefix_tokens=-1,
            prefix_share=2,
            cancel_after_seconds=0.0,
        )
