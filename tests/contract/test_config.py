"""The command line: flags, environment twins, defaults, and problems reported all at once."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from service.config import (
    Admission,
    AskConfig,
    ChatConfig,
    Defaults,
    ExplainConfig,
    HealthConfig,
    Kernels,
    LogLevel,
    MetricsCompat,
    RequestLimits,
    ServeConfig,
    Telemetry,
    TraceConfig,
    flag,
    options,
    parse,
    variable,
)
from service.engine.types import Device, PrefillProvider
from service.errors import StartupError

SERVE = ("serve", "--models", "folder")


def serve(*flags: str, **environ: str) -> ServeConfig:
    config = parse((*SERVE, *flags), environ)
    assert isinstance(config, ServeConfig)
    return config


def test_serve_needs_only_a_folder_and_listens_on_loopback() -> None:
    config = serve()
    assert config == ServeConfig(models=Path("folder"))
    assert (config.host, config.port, config.metrics_port, config.max_batch_size) == ("127.0.0.1", 8001, 8002, 32)


# For each flag of `serve` a text other than its default's, and what it means.
THIS_FILE = Path(__file__)
GIVEN: dict[str, tuple[str, object]] = {
    "models": ("elsewhere", Path("elsewhere")),
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("0", 0),
    "http_port": ("18", 18),
    "metrics": ("off", False),
    "metrics_port": ("9", 9),
    "metrics_compat": ("vLLM", MetricsCompat.VLLM),
    "slo_time_to_first_token": ("1,0.2", (0.2, 1.0)),
    "slo_inter_token_latency": ("0.03", (0.03,)),
    "slo_e2e_latency": ("5,5.0", (5.0,)),
    "max_batch_size": ("4", 4),
    "max_queue_size": ("0", 0),
    "generation_defaults": ("None", Defaults.NONE),
    "admission": ("Off", Admission.OFF),
    "prefill_chunk": ("16", 16),
    "device": ("CUDA", Device.CUDA),
    "prefill_provider": ("CPU", PrefillProvider.CPU),
    "kernels": ("Standard", Kernels.STANDARD),
    "look_up": ("8", 8),
    "memory": ("4GiB", 4 << 30),
    "kv_memory": ("2GiB", 2 << 30),
    "kv_shares": ("stdlib=3,dates=0.5", (("stdlib", 3.0), ("dates", 0.5))),
    "time_shares": ("a=b=2", (("a=b", 2.0),)),
    "threads": ("3", 3),
    "spin": ("no", False),
    "huge_pages": ("false", False),
    "calibrate": ("0", False),
    "drain_grace_seconds": ("1.5", 1.5),
    "drain_pause_seconds": ("2.5", 2.5),
    "max_message_bytes": ("2048", 2048),
    "max_metadata_bytes": ("4096", 4096),
    "max_concurrent_rpcs": ("7", 7),
    "max_connections": ("9", 9),
    "max_stall_seconds": ("2.5", 2.5),
    "keepalive_seconds": ("60", 60.0),
    "tls_certificate": (str(THIS_FILE), THIS_FILE),
    "tls_key": (str(THIS_FILE), THIS_FILE),
    "tls_client_ca": (str(THIS_FILE), THIS_FILE),
    "api_keys": (str(THIS_FILE), THIS_FILE),
    "reflection": ("0", False),
    "log_level": ("DEBUG", LogLevel.DEBUG),
    "recorder_steps": ("16", 16),
    "otel": ("Traces", Telemetry.TRACES),
    "otel_endpoint": ("https://collector:4317", "https://collector:4317"),
    "max_generated_tokens": ("5", 5),
    "max_stop_strings": ("6", 6),
    "max_stop_string_length": ("7", 7),
    "max_stop_token_ids": ("8", 8),
    "max_logprobs": ("9", 9),
    "max_request_id_length": ("64", 64),
    "max_tokenize_bytes": ("10", 10),
    "max_detokenize_tokens": ("11", 11),
    "max_logit_bias": ("12", 12),
    "max_outputs": ("13", 13),
    "max_beam_size": ("14", 14),
    "max_explain_tokens": ("15", 15),
    "max_structured_output_bytes": ("16", 16),
}


CONNECTION = ("target", "api_key_file", "ca_certificate", "client_certificate", "client_key", "server_name")
GENERATION = (
    "system", "timeout_seconds", "partial_on_deadline", "priority", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "logit_bias", "allowed_token_ids",
    "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_in_output",
)  # fmt: skip
CLIENT_FLAGS: dict[type, tuple[str, ...]] = {
    AskConfig: (
        *CONNECTION, *GENERATION, "chat", "target_prefix", "json_schema", "regex", "choice", "stream", "n", "beam_size",
        "length_penalty", "patience", "no_repeat_ngram_size",
    ),
    ChatConfig: (*CONNECTION, *GENERATION),
    ExplainConfig: (
        *CONNECTION, "target_text", "max_tokens", "html", "svg", "layers", "heads", "timeout_seconds",
    ),
    HealthConfig: (*CONNECTION, "service", "timeout_seconds"),
    TraceConfig: ("metrics_target", "out"),
}  # fmt: skip


def test_the_commands_that_ask_a_server_have_these_flags() -> None:
    assert {config: tuple(options(config)) for config in CLIENT_FLAGS} == CLIENT_FLAGS


def test_every_flag_has_an_environment_twin() -> None:
    known = options(ServeConfig) | options(RequestLimits)
    assert set(GIVEN) == set(known)
    flags = [
        part
        for name, (text, _) in GIVEN.items()
        for part in ([f"--no-{name.replace('_', '-')}"] if known[name].is_switch else [flag(name), text])
    ]
    by_flag = parse(["serve", *flags], {})
    by_environment = parse(["serve"], {variable(name): text for name, (text, _) in GIVEN.items()})
    assert by_flag == by_environment
    assert isinstance(by_flag, ServeConfig)
    default = ServeConfig(models=Path("folder"))
    for name, (_, value) in GIVEN.items():
        holder, before = (by_flag, default) if hasattr(by_flag, name) else (by_flag.limits, default.limits)
        assert getattr(holder, name) == value, name
        assert getattr(before, name) != value, name


def test_a_certificate_without_its_key_is_refused() -> None:
    for given in ("--tls-certificate", "--tls-key", "--tls-client-ca"):
        with pytest.raises(StartupError) as caught:
            serve(given, str(THIS_FILE))
        assert caught.value.problems[0].startswith(f"{given} means nothing without ")


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("65536", 65536), ("3KiB", 3072), ("512MiB", 512 << 20), ("1TiB", 1 << 40)]
)
def test_memory_is_given_in_bytes_or_binary_units(text: str, num_bytes: int) -> None:
    assert serve("--kv-memory", text).kv_memory == num_bytes


AMOUNT = "must be a number of bytes above 0, plain or with KiB, MiB, GiB or TiB, as in 2GiB"
WEIGHTS = "must be names of models, each once and with a weight above 0 and at most 1e+06, as in dates=1,stdlib=3"
SECONDS = "must be 1 to 8 numbers above 0 and at most 3600, with commas between them, as in 0.2,1"
COLLECTOR = "must be http:// or https:// with a host and a port, as in http://127.0.0.1:4317"
ADDRESS = "must be a host and a port, as in 127.0.0.1:8002"
INDICES = "must be whole numbers from 0, as in 0,2"
REFUSED = [
    ("kv_memory", ["-1", "0GiB", "2GB", "2gib", "2 GiB", "GiB", "1.5GiB", "²MiB", "10000000TiB", "2GiBGiB"], AMOUNT),
    ("time_shares", ["a", "a=", "=1", "a=0", "a=nan", "a=inf", "a=1e7", "a=1,a=2", "a=1,"], WEIGHTS),
    ("slo_e2e_latency", ["", "0", "-1", "0.2,", "nan", "inf", "3601", "0.2;1", "1,2,3,4,5,6,7,8,9"], SECONDS),
    (
        "otel_endpoint",
        ["127.0.0.1:4317", "grpc://h:1", "http://", "http://h:0", "http://h:x", "http://h:1/v1"],
        COLLECTOR,
    ),
    ("prefill_provider", ["gpu"], "must be one of auto, cpu"),
    ("prefill_provider", ["openvino"], "which is not supported, use cpu or auto"),
    ("device", ["gpu"], "must be one of auto, cpu, cuda"),
    ("metrics_compat", ["tgi"], "must be one of none, vllm"),
    ("api_keys", ["missing.toml"], "must be a file"),
    ("max_batch_size", ["many", "1.5", "0", "1025"], "must be a whole number from 1 to 1024"),
    ("drain_grace_seconds", ["nan", "-1", "3601", "soon"], "must be a number from 0 to 3600"),
    ("spin", ["perhaps", ""], "must be true or false"),
    ("host", [""], "must not be empty"),
    ("host", ["caf\udce9"], "must be UTF-8"),
    ("metrics_target", ["8002", "host:", ":8002", "host:port", "http://host:1", "host:1/path"], ADDRESS),
    ("heads", ["", "a", "1,", "-1", "1;2", "1.0", "²", "99999999999"], INDICES),
]
OTHER_COMMANDS = {"metrics_target": ("trace",), "heads": ("explain", "m", "hello", "--html", "a")}


@pytest.mark.parametrize(("name", "text", "limit"), [(n, t, limit) for n, texts, limit in REFUSED for t in texts])
def test_an_unusable_value_is_refused_with_its_flag_and_what_is_wanted(name: str, text: str, limit: str) -> None:
    with pytest.raises(StartupError) as refusal:
        parse(OTHER_COMMANDS.get(name, SERVE), {variable(name): text})
    assert refusal.value.problems == (f"{variable(name)} is {text!r}, {limit}",)


def test_shares_of_memory_mean_nothing_without_a_budget() -> None:
    with pytest.raises(StartupError) as refusal:
        serve("--kv-shares", "dates=1")
    assert refusal.value.problems == ("--kv-shares means nothing without --kv-memory",)


def test_outputs_and_beams_of_a_request_are_cut_to_what_runs_at_once() -> None:
    small, large = serve("--max-batch-size", "4"), serve("--max-outputs", "20", "--max-beam-size", "2")
    assert (small.request_limits.max_outputs, small.request_limits.max_beam_size) == (4, 4)
    assert (large.request_limits.max_outputs, large.request_limits.max_beam_size) == (20, 2)
    assert small.request_limits.max_logprobs == small.limits.max_logprobs


def test_a_switch_is_turned_on_by_these_words() -> None:
    assert all(serve("--no-spin", ONWARD_METRICS=text).metrics for text in ("1", "true", "Yes", "ON"))
    assert not serve("--no-spin").spin


def test_flag_wins_over_its_twin() -> None:
    assert serve("--port", "1", ONWARD_PORT="2").port == 1
    assert serve("--metrics", ONWARD_METRICS="false").metrics


def test_all_problems_are_reported_at_once_by_the_name_they_came_under() -> None:
    with pytest.raises(StartupError) as refusal:
        parse(["serve", "--port", "70000", "--max-outputs", "0", "--tls-key", "missing"], {"ONWARD_SPIN": "perhaps"})
    assert set(refusal.value.problems) == {
        "--port is '70000', must be a whole number from 0 to 65535",
        "--max-outputs is '0', must be a whole number from 1 to 1024",
        "ONWARD_SPIN is 'perhaps', must be true or false",
        "--tls-key is 'missing', must be a file",
        "--tls-key means nothing without --tls-certificate",
        "--models (or ONWARD_MODELS) must name a folder",
    }


def test_unknown_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        parse([*SERVE, "--prot", "1"], {})
    assert refusal.value.code == 2
    assert "--prot" in capsys.readouterr().err


def test_help_of_serve_has_every_flag_with_default_and_variable_under_its_heading(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse(["serve", "--help"], {})
    text = capsys.readouterr().out
    assert "may be given as the environment variable in brackets" in " ".join(text.split())
    headings = ("network", "limits", "engine", "memory", "access", "observability")
    parts = re.split(r"^(\w+):\n", text, flags=re.MULTILINE)
    assert [part for part in parts[1::2] if part != "options"] == list(headings)
    sections = dict(zip(parts[1::2], (" ".join(part.split()) for part in parts[2::2]), strict=True))
    for name, option in (options(ServeConfig) | options(RequestLimits)).items():
        assert f" {flag(name)} " in f" {sections[option.group]}"
        assert f"[{variable(name)}]" in sections[option.group]
    assert "(default: 127.0.0.1)" in sections["network"]


def test_telemetry_is_off_unless_asked_for_or_given_an_endpoint() -> None:
    endpoint = ("--otel-endpoint", "http://127.0.0.1:4317")
    assert serve().telemetry is Telemetry.OFF
    assert serve(*endpoint).telemetry is Telemetry.ALL
    assert serve("--otel", "traces").telemetry is Telemetry.TRACES
    assert serve("--otel", "off", *endpoint).telemetry is Telemetry.OFF


def test_trace_asks_the_metrics_of_this_machine_by_default() -> None:
    assert parse(["trace"], {}) == TraceConfig(metrics_target="127.0.0.1:8002", out=Path("trace.json"))
    given = parse(["trace", "--out", "t.json"], {"ONWARD_METRICS_TARGET": "[::1]:9"})
    assert given == TraceConfig(metrics_target="[::1]:9", out=Path("t.json"))


def test_ask_leaves_to_the_server_what_is_not_said() -> None:
    assert parse(["ask", "m", "hello"], {}) == AskConfig(model="m", text="hello")
    flags = ("--stream", "--seed", "0", "--temperature", "0", "--n", "3", "--beam-size", "4")
    asked = parse(["ask", "m", "hello", *flags], {"ONWARD_TARGET": "h:1"})
    assert asked == AskConfig(
        model="m", text="hello", target="h:1", stream=True, seed=0, temperature=0.0, n=3, beam_size=4
    )


def test_explain_reads_layers_and_heads_and_needs_a_file_to_write() -> None:
    flags = ("--html", "out.html", "--layers", "0,2", "--heads", "1", "--target-text", "é", "--max-tokens", "9")
    explained = parse(["explain", "m", "hello", *flags], {"ONWARD_TARGET": "h:1", "ONWARD_SVG": "a.svg"})
    assert explained == ExplainConfig(
        model="m",
        text="hello",
        target="h:1",
        target_text="é",
        html=Path("out.html"),
        svg=Path("a.svg"),
        layers=(0, 2),
        heads=(1,),
        max_tokens=9,
    )
    with pytest.raises(StartupError, match="--html or --svg must name a file to write"):
        parse(["explain", "m", "hello"], {})


def test_explain_refuses_texts_that_no_message_can_carry() -> None:
    with pytest.raises(StartupError) as refusal:
        parse(["explain", "m", "caf\udce9", "--html", "a", "--target-text", "\udce9"], {})
    assert refusal.value.problems == (
        "text is 'caf\\udce9', must be UTF-8",
        "--target-text is '\\udce9', must be UTF-8",
    )


def test_prompts_are_cut_as_is_best_on_the_device_unless_the_operator_says_how() -> None:
    on_cpu = ServeConfig(models=Path("m"), device=Device.CPU)
    on_cuda = ServeConfig(models=Path("m"), device=Device.CUDA)
    assert (on_cpu.chunk_tokens, on_cuda.chunk_tokens) == (128, 2048)
    assert replace(on_cuda, prefill_chunk=128).chunk_tokens == 128
    assert replace(on_cpu, prefill_chunk=2048).chunk_tokens == 2048
