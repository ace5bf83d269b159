"""The server as an operator runs it: a process of its own, real artifacts of both families, real exits."""

from __future__ import annotations

import io
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import grpc
import pytest
from openai import OpenAI

from model import kernels
from model.spec import artifact, golden
from onward import Client
from onward.v1 import generation_pb2 as pb
from onward.v1 import model_pb2
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from onward.v1.model_pb2_grpc import ModelServiceStub
from service.commands.ask import ask
from service.config import AskConfig
from tests.artifacts import ADDITIVE, random_model, tiny_artifact, tiny_config

FAMILIES = ("decoder-only", "encoder-decoder")
ADDITIVE_MODELS = {f"additive-{family}": family for family in FAMILIES}
COMMAND = (sys.executable, "-m", "service", "serve", "--port", "0", "--metrics-port", "0", "--threads", "1")
LISTENING = re.compile(r"listening on (?P<target>[\d.]+:\d+); .*metrics on (?P<metrics>\S+)")


@dataclass(frozen=True, slots=True)
class Served:
    process: subprocess.Popen[str]
    line: str
    target: str
    metrics: str


@contextmanager
def serving(models: Path, *flags: str, log: IO[str] | None = None) -> Iterator[Served]:
    command = [*COMMAND, "--models", models, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = LISTENING.search(line)
            assert found, line
            yield Served(process, line, found["target"], found["metrics"])
        finally:
            process.kill()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    # One as a model for one device, one as one of those that it has.
    (folder / FAMILIES[1]).symlink_to(tiny_artifact(FAMILIES[1]), target_is_directory=True)
    (folder / FAMILIES[0]).mkdir()
    (folder / FAMILIES[0] / "cpu").symlink_to(tiny_artifact(FAMILIES[0]), target_is_directory=True)
    for name, family in ADDITIVE_MODELS.items():
        (folder / name).symlink_to(tiny_artifact(family, **ADDITIVE[family]), target_is_directory=True)
    return folder


@pytest.fixture(scope="module")
def served(models: Path) -> Iterator[Served]:
    with serving(models, "--http-port", "0", "--no-calibrate") as served:
        yield served
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(30) == 0


@pytest.fixture
def channel(served: Served) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(served.target) as channel:
        yield channel


def request(model: str, **fields: object) -> pb.GenerateRequest:
    sampling, stopping = pb.SamplingParams(temperature=0.0), pb.StoppingParams(max_tokens=24, ignore_eos=True)
    return pb.GenerateRequest(**{"model": model, "text": "3 May", "sampling": sampling, "stopping": stopping, **fields})


def streamed(message: pb.GenerateRequest) -> pb.GenerateStreamRequest:
    return pb.GenerateStreamRequest.FromString(message.SerializeToString())


def test_ready_line_names_every_model_and_its_parity(served: Served) -> None:
    for family in (*FAMILIES, *ADDITIVE_MODELS):
        assert re.search(rf"\b{family} serving \(parity \d\.\de-\d\d\)", served.line)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_families_stream_what_they_answer_at_once(channel: grpc.Channel, family: str) -> None:
    stub = GenerationServiceStub(channel)
    (output,) = stub.Generate(request(family)).outputs
    events = list(stub.GenerateStream(streamed(request(family))))
    assert len(output.token_ids) == 24
    assert [token for event in events for token in event.delta.token_ids] == list(output.token_ids)
    assert "".join(event.delta.text for event in events) == output.text
    assert events[-1].WhichOneof("event") == "summary"


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_the_same_over_both_transports(served: Served, family: str) -> None:
    found = re.search(r"HTTP on port (\d+)", served.line)
    assert found, served.line
    with (
        OpenAI(base_url=f"http://127.0.0.1:{found[1]}/v1", api_key="none") as http,
        Client(served.target) as over_grpc,
    ):
        options: dict[str, Any] = {"model": family, "max_tokens": 12, "seed": 3, "temperature": 1.0}
        wanted = over_grpc.generate("abc", **options)
        answer = http.completions.create(prompt="abc", extra_body={"return_token_ids": True}, **options)
        assert answer.choices[0].to_dict()["token_ids"] == list(wanted.outputs[0].token_ids)
        assert answer.choices[0].text == wanted.text
        streamed = http.completions.create(prompt="abc", stream=True, **options)
        assert "".join(chunk.choices[0].text for chunk in streamed) == wanted.text


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_generated_tokens_equal_their_logprobs(channel: grpc.Channel, family: str) -> None:
    """Token by token, whether decoded one at a time or computed in chunks; and so does a forced beginning."""
    stub = GenerationServiceStub(channel)
    (output,) = stub.Generate(request(family, response=pb.ResponseOptions(logprobs=0))).outputs
    target = pb.TokenIds(ids=output.token_ids)
    score = stub.Score(pb.ScoreRequest(model=family, text="3 May", target_token_ids=target))
    assert [token.token_id for token in score.tokens] == list(output.token_ids)
    reported = [each.logprob for each in output.logprobs]
    assert [token.logprob for token in score.tokens] == pytest.approx(reported, abs=2e-4)
    assert score.total_logprob == pytest.approx(sum(reported), abs=24 * 2e-4)
    given = list(stub.Tokenize(pb.TokenizeRequest(model=family, text="3 May")).token_ids)
    longer = {"token_ids": pb.TokenIds(ids=given + list(output.token_ids)), "text": None}
    if family == "encoder-decoder":
        longer = {"target_prefix": output.text}
    again = stub.Generate(request(family, **longer, response=pb.ResponseOptions(prompt_logprobs=0)))
    scored = [each.logprob for each in again.prompt_logprobs]
    if family == "encoder-decoder":
        alone = stub.Score(pb.ScoreRequest(model=family, text="3 May", target_text=output.text))
        assert scored == [token.logprob for token in alone.tokens]
    else:
        assert len(scored) == len(given) + 24 - 1
        assert scored[-24:] == pytest.approx(reported, abs=2e-4)


@pytest.mark.parametrize(("name", "family"), ADDITIVE_MODELS.items())
def test_a_model_of_additive_scores_is_served_as_the_reference_decodes_it(
    channel: grpc.Channel, name: str, family: str
) -> None:
    from model.nn import reference

    stub = GenerationServiceStub(channel)
    prompt = list(stub.Tokenize(pb.TokenizeRequest(model=name, text="3 May", add_special_tokens=True)).token_ids)
    model = random_model(tiny_config(family, **ADDITIVE[family]))
    given, source = ([model.config.bos_id], prompt) if model.config.is_encoder_decoder else (prompt, None)
    expected = reference.greedy(model, given, source, max_tokens=24)
    events = list(stub.GenerateStream(streamed(request(name))))
    assert [token for event in events for token in event.delta.token_ids] == expected


def test_parity_is_verified_on_demand_case_by_case(channel: grpc.Channel) -> None:
    stub = ModelServiceStub(channel)
    for family in FAMILIES:
        report = stub.VerifyParity(model_pb2.VerifyParityRequest(model=family))
        assert report.parity.passed
        assert report.parity.num_cases == len(report.cases) > 1
        assert max(case.max_abs_error for case in report.cases) == report.parity.max_abs_error


def test_metrics_answer_where_the_ready_line_says(served: Served, channel: grpc.Channel) -> None:
    GenerationServiceStub(channel).Generate(request("decoder-only"))
    with urllib.request.urlopen(served.metrics) as answer:
        text = answer.read().decode()
    for family in FAMILIES:
        assert f'onward_parity_max_abs_error{{model_name="{family}"}}' in text
    assert 'onward_requests_total{finish_reason="length",model_name="decoder-only"}' in text


@pytest.mark.parametrize("stream", [False, True])
def test_ask_prints_the_text(served: Served, channel: grpc.Channel, stream: bool) -> None:
    out, err = io.StringIO(), io.StringIO()
    config = AskConfig(
        model="encoder-decoder", text="3 May", target=served.target, stream=stream, max_tokens=24, temperature=0.0
    )
    assert ask(config, out, err) == 0
    expected = request("encoder-decoder", stopping=pb.StoppingParams(max_tokens=24))
    assert out.getvalue() == GenerationServiceStub(channel).Generate(expected).outputs[0].text + "\n"


def test_ask_prints_the_error_and_fails(served: Served) -> None:
    out, err = io.StringIO(), io.StringIO()
    assert ask(AskConfig(model="unknown", text="a", target=served.target), out, err) == 1
    assert err.getvalue().startswith("NOT_FOUND: model: 'unknown' is not served")


def has_kernels(served: Served) -> bool:
    """Whether the library of our own kernels is in a server's memory."""
    return "/libonward-" in Path(f"/proc/{served.process.pid}/maps").read_text(encoding="utf-8")


def golden_tokens(models: Path, family: str) -> Iterator[tuple[list[int], list[int], int]]:
    """Of every golden case what a request can ask for: source or none, what was fed, and the best token after it."""
    folder = models / family
    folder = folder if (folder / artifact.MANIFEST).exists() else folder / "cpu"
    manifest = artifact.read_manifest(folder)
    for case in golden.load(folder / artifact.GOLDEN, manifest.config):
        feeds = [feed for step in case.steps for feed in step]
        for feed, logits in zip(feeds, case.logits, strict=True):
            fed = case.sequences[feed.row][: feed.start + feed.count].tolist()
            source = case.sources[feed.row].tolist() if case.sources else []
            # Of an output only its first token can be asked for by ids, and no request goes on past the context.
            if len(fed) < manifest.config.context and (not source or len(fed) == 1):
                yield source, fed, int(logits.argmax())


@pytest.mark.skipif(kernels.library() is None, reason="the kernels are not built: python -m model.kernels")
def test_a_server_without_kernels_answers_by_standard_operators(models: Path, served: Served, tmp_path: Path) -> None:
    with (
        (tmp_path / "log").open("w", encoding="utf-8") as log,
        serving(models, "--kernels", "standard", log=log) as plain,
        grpc.insecure_channel(plain.target) as channel,
    ):
        assert (has_kernels(served), has_kernels(plain)) == (True, False)
        stub = GenerationServiceStub(channel)
        for family in FAMILIES:
            expected = list(golden_tokens(models, family))
            assert len(expected) > 5
            for source, fed, token in expected:
                given = pb.TokenIds(ids=source or fed)
                stopping = pb.StoppingParams(max_tokens=1, ignore_eos=True)
                (output,) = stub.Generate(request(family, text=None, token_ids=given, stopping=stopping)).outputs
                assert list(output.token_ids) == [token]
    said = (tmp_path / "log").read_text(encoding="utf-8")
    assert said.count("our own operators are computed by standard ones, as --kernels says") == 1
    assert "kernels compute" not in said


def refused(models: Path) -> list[str]:
    """The problems with which a start is refused."""
    ended = subprocess.run([*COMMAND, "--models", models], capture_output=True, text=True, check=False)
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == ""
    return [line.removeprefix("onward: ") for line in ended.stderr.splitlines()]


def test_every_problem_of_every_artifact_stops_the_start(tmp_path: Path) -> None:
    for name in ("flipped", "incomplete"):
        shutil.copytree(tiny_artifact("encoder-decoder"), tmp_path / name)
    (tmp_path / "healthy").symlink_to(tiny_artifact("decoder-only"), target_is_directory=True)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "model.onnx").write_bytes(b"not ours")
    weights = tmp_path / "flipped" / "decoder.onnx.data"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    (tmp_path / "flipped" / "golden.npz").write_bytes(b"short")
    (tmp_path / "incomplete" / "encoder.onnx").unlink()
    (tmp_path / "incomplete" / "tokenizer.json").unlink()

    problems = refused(tmp_path)
    expected = {
        "flipped: decoder.onnx.data does not match its sha256",
        "flipped: golden.npz has 5 bytes, the manifest says",
        "foreign: manifest.json is missing: not an artifact",
        "incomplete: encoder.onnx is missing",
        "incomplete: tokenizer.json is missing",
    }
    assert len(problems) == len(expected)
    for words in expected:
        assert any(f"{tmp_path}/{words}" in problem for problem in problems), words
