"""A scenario's command line: what is not given sets nothing, what does not fit is refused by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from benchmarks.scenario import BUILD
from benchmarks.scenario_options import DOCS, ScenarioSettings, above, at_least, new_parser, read_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ScenarioSettings):
    model: str = "tiny"
    long_prompt: int = 9
    seconds: float = 2.0
    load: float = 1.5


def parse(*arguments: str) -> tuple[Settings, Path]:
    parser = new_parser("some", "What it does.\n\nAnd how.", quick="next to nothing")
    parser.add_argument("--prompt", type=at_least(1), dest="long_prompt")
    parser.add_argument("--seconds", type=at_least(0.5))
    parser.add_argument("--load", type=above(0.0))
    return read_settings(
        parser, arguments, Settings(threads=6), lambda given: replace(given, seconds=min(1.0, given.seconds))
    )


def test_what_is_not_given_is_as_the_settings_have_it() -> None:
    assert parse() == (Settings(threads=6), BUILD)
    assert parse("--load", "0.1", "--docs") == (Settings(threads=6, load=0.1), DOCS)


def test_every_option_sets_its_field() -> None:
    common = ("--model", "law", "--precision", "int4", "--threads", "3", "--seed", "-2")
    settings, _ = parse(*common, "--prompt", "1", "--seconds", "7")
    assert settings == Settings(model="law", precision="int4", threads=3, seed=-2, long_prompt=1, seconds=7.0, load=1.5)
    assert (type(settings.long_prompt), type(settings.seconds)) == (int, float)


def test_quick_shortens_what_was_given() -> None:
    assert parse("--quick", "--seconds", "3")[0].seconds == 1.0
    assert parse("--quick", "--seconds", "0.5")[0].seconds == 0.5
    assert parse("--seconds", "3")[0].seconds == 3.0


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        (("--threads", "0"), "whole number of at least 1"),
        (("--prompt", "1.5"), "whole number of at least 1"),
        (("--prompt", "many"), "whole number of at least 1"),
        (("--seconds", "0.4"), "number of at least 0.5"),
        (("--seconds", "nan"), "number of at least 0.5"),
        (("--seconds", "inf"), "number of at least 0.5"),
        (("--load", "0"), "number above 0"),
    ],
)
def test_a_number_beyond_its_limit_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], given: tuple[str, str], limit: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*given)
    assert ended.value.code == 2
    name, value = given
    said = capsys.readouterr().err
    assert "python -m benchmarks.some" in said
    assert f"argument {name}: is '{value}', must be a {limit}" in said


def test_a_scenario_may_have_a_model_option_of_its_own() -> None:
    parser = new_parser("some", __doc__, quick="next to nothing", model="")
    parser.add_argument("--model", action="append")
    assert parser.parse_args(["--model", "a", "--model", "b"]).model == ["a", "b"]
