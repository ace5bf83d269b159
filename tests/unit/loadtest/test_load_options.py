"""Options of the command line and of the web form, the stages that follow from them, and invalid ones."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from typing import Any

import pytest

from loadtest import bench, capacity
from loadtest.core.arrivals import Pattern
from loadtest.core.options import add_options, read_options
from loadtest.locust import stages
from loadtest.locust.options import add_run_options, option_names, read_run_options
from loadtest.locust.stages import Stage
from loadtest.scaling import command as scaling
from tests.environment import ROOT

LOCUSTS_OWN = {"--host", "--headless", "--processes", "--master", "--worker", "--master-host", "--expect-workers"}


def parse(*words: str, rate: float = math.inf, arrivals: str = "gamma") -> Any:
    parser = argparse.ArgumentParser()
    add_options(parser, rate=rate, arrivals=arrivals)
    return read_options(parser.parse_args(words))


def run_options(*words: str, num_users: int | None = 1, run_time: float | None = None, **form: Any) -> Any:
    """Parsed as by Locust, with its own options; `form` has the values of a web form."""
    parser = argparse.ArgumentParser()
    add_run_options(parser)
    values = parser.parse_args(words)
    vars(values).update({"num_users": num_users, "spawn_rate": None, "run_time": run_time, **form})
    return read_run_options(values)


def test_only_a_finite_rate_is_a_schedule() -> None:
    assert parse().arrivals is None
    assert parse("--request-rate", "4").arrivals.rate == 4.0
    assert parse("--rate", "4", "--burstiness", "0.5").arrivals.burstiness == 0.5
    assert parse(rate=1.0, arrivals="").arrivals is None


def test_a_trace_has_its_own_times(tmp_path: Any) -> None:
    path = tmp_path / "trace"
    path.write_text("0\n1\n", encoding="utf-8")
    arrivals = parse("--arrivals", "trace", "--trace", str(path), "--rate", "9").arrivals
    assert (arrivals.pattern, arrivals.trace, arrivals.rate) == (Pattern.TRACE, (0.0, 1.0), 0.0)


def test_every_invalid_option_is_named() -> None:
    with pytest.raises(ValueError, match="--prompt-tokens: 'x'") as caught:
        parse(
            "--prompt-tokens", "x", "--prefix-share", "2", "--goodput", "ttft:x", "--metric-percentiles", "101",
            "--percentile-metrics", "ttft,speed", "--timeout", "-1", "--request-rate", "0",
        )  # fmt: skip
    message = str(caught.value)
    for said in ("--prefix-share: 2.0", "'ttft:x'", "101 is not from 0", "'speed'", "--timeout: -1.0", "--rate: 0.0"):
        assert said in message, said


def test_zero_is_no_limit_and_answers_have_their_full_length_by_default() -> None:
    options = parse()
    assert (options.requests, options.timeout_seconds, options.sampling.ignore_eos) == (None, None, True)
    options = parse("--num-prompts", "5", "--timeout", "2", "--honour-eos")
    assert (options.requests, options.timeout_seconds, options.sampling.ignore_eos) == (5, 2.0, False)


def test_text_from_a_web_form_is_converted() -> None:
    options = run_options(
        rate="3.5", seed="7", requests="", goodput="ttft:500 tpot:50", arrivals="poisson", think="", honour_eos="true",
        max_tokens="20", prompt_tokens="64", stage_seconds="5", report_detailed="true", run_time=10,
    )  # fmt: skip
    assert (options.load.arrivals.rate, options.load.seed, options.load.requests) == (3.5, 7, None)
    assert options.load.wanted.objectives == {"ttft": 500.0, "tpot": 50.0}
    prompt = options.load.workload(100).prompt(0)
    assert (len(prompt.token_ids), prompt.max_tokens) == (64, 20)
    assert options.load.sampling.ignore_eos is False
    assert (options.think_seconds, options.stage_seconds, options.seconds) == (0.0, 5.0, 10.0)
    assert options.is_report_detailed


def test_a_leading_process_sends_every_option() -> None:
    names = option_names()
    assert {"model", "prompt_tokens", "rate", "requests", "seed", "shape", "steps", "report", "think"} <= set(names)
    assert "num_users" not in names


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--num-prompts", "5", "--shape", "ramp"), "--num-prompts: 5 with --shape ramp"),
        (("--arrivals", "poisson", "--shape", "spike"), "--arrivals: a schedule with --shape spike"),
        (("--steps", "1,x"), "--steps: '1,x'"),
        (("--stage-seconds", "0.5"), "--stage-seconds: 0.5 is below 1"),
        (("--connections", "0"), "--connections: 0 is below 1"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run_options(*words)


def test_a_run_that_would_never_end_or_leave_requests_unsent_is_refused() -> None:
    with pytest.raises(ValueError, match="poisson has no end of its own"):
        run_options("--arrivals", "poisson").check(1)
    run_options("--arrivals", "poisson", run_time=5.0).check(1)
    run_options("--arrivals", "poisson", "--requests", "5").check(4)
    with pytest.raises(ValueError, match="--users: 1 are fewer than the 2 processes"):
        run_options("--requests", "5").check(2)
    run_options("--requests", "5", num_users=2).check(2)


def test_an_open_loop_has_one_dispatcher_in_each_process_whatever_the_users() -> None:
    options = run_options("--arrivals", "gamma", "--requests", "5", num_users=50, run_time=1.0)
    assert options.stage("", 1000.0, 3) == Stage(3, 3.0)


# Shapes, by the seconds since the run began.


@pytest.mark.parametrize(
    ("words", "num_users", "run_time", "wanted"),
    [
        ("--shape constant", 3, None, {0.0: (3, "", None), 1e9: (3, "", None)}),
        ("--shape constant", 3, 5.0, {4.9: (3, "", None), 5.0: None}),
        (
            "--shape ramp --stage-seconds 10", 11, 20.0,
            {
                0.0: (1, "", None), 0.9: (1, "", None), 1.0: (2, "", None), 5.0: (6, "", None), 9.99: (10, "", None),
                10.0: (11, "", None), 19.9: (11, "", None), 20.0: None,
            },
        ),
        (
            "--shape spike --base-users 2 --stage-seconds 10", 9, 35.0,
            {
                0.0: (2, "before", None), 9.9: (2, "before", None), 10.0: (9, "spike", None), 19.9: (9, "spike", None),
                20.0: (2, "after", None), 34.9: (2, "after", None), 35.0: None,
            },
        ),
        (
            "--shape concurrency --steps 1,4,2 --stage-seconds 5", 1, None,
            {0.0: (1, "1 users", None), 5.0: (4, "4 users", None), 14.9: (2, "2 users", None), 15.0: None},
        ),
        (
            "--shape length --steps 128,512 --stage-seconds 5", 3, None,
            {0.0: (3, "128 tokens", 128), 5.0: (3, "512 tokens", 512), 10.0: None},
        ),
    ],
)  # fmt: skip
def test_a_shape_is_a_function_of_time(
    words: str, num_users: int, run_time: float | None, wanted: dict[float, tuple[int, str, int | None] | None]
) -> None:
    options = run_options(*words.split(), num_users=num_users, run_time=run_time)
    for at, expected in wanted.items():
        stage = options.stage("", at, 1)
        assert (stage and (stage.users, stage.name, stage.prompt_tokens)) == expected, at


@pytest.mark.parametrize("text", ["", "0,1", "1;2", "-1"])
def test_steps_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--steps"):
        stages.parse_steps(text)


# Commands.


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        (bench, "--max-concurrency -1", "--max-concurrency: -1 is below 0"),
        (bench, "--protocol oip", "--model: the Open Inference Protocol has no model by default"),
        (bench, "--duration 5", "--duration: without --request-rate or --max-concurrency everything is sent at once"),
        (bench, "--trace /nowhere", "--trace:"),
        (bench, "--connections 0 --num-warmups -1 --prompt-tokens 0", "--num-warmups: -1 is below 0"),
        (capacity, "--loads 0.5,x", "--loads: '0.5,x'"),
        (capacity, "--connections 0 --seconds 0", "--connections: 0 is below 1\n"),
        (capacity, "--connections 0 --seconds 0", "--seconds: 0.0 is not above 0\n"),
        (capacity, "--arrivals trace", "--arrivals: a trace has its own times"),
    ],
)
def test_a_command_names_its_invalid_options(
    command: Any, words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(words.split()) == 2
    assert said in capsys.readouterr().err


def test_the_documents_commands_are_commands() -> None:
    text = (ROOT / "docs" / "operate" / "loadtest.md").read_text(encoding="utf-8")
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith(("python -m loadtest", "locust "))]
    parsers = {each.__name__.rpartition(".")[2]: each.make_parser() for each in (bench, capacity)}
    parsers["scaling"] = scaling.make_parser()
    parsers["locust"] = argparse.ArgumentParser()
    add_run_options(parsers["locust"])
    for words in commands:
        name = "locust" if words[0] == "locust" else words[3]
        # This parser has none of Locust's own options.
        known, unknown = parsers[name].parse_known_args(words[1:] if name == "locust" else words[4:])
        ours = [word for word in unknown if word.startswith("--") and word not in LOCUSTS_OWN]
        assert ours == [], words
        assert known
    assert {words[0] for words in commands} == {"python", "locust"}


def test_nothing_here_has_brought_gevent_into_this_process() -> None:
    assert "gevent" not in sys.modules
    assert "locust" not in sys.modules
