"""The command line and its environment twins, turned into frozen configurations.

Every flag `--some-name` may be given as `ONWARD_SOME_NAME` instead; the flag wins. All problems are reported at once.
This is the only module that touches the environment. Knows nothing of what the values do.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints
from urllib.parse import urlsplit

from service.engine.types import Device, PrefillProvider
from service.errors import StartupError

_Choice = TypeVar("_Choice", bound=StrEnum)


class LogLevel(StrEnum):
    """Least severe message that reaches the log."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class MetricsCompat(StrEnum):
    """Under whose names metrics are shown besides our own."""

    NONE = "none"
    VLLM = "vllm"


class Telemetry(StrEnum):
    """What is exported by OpenTelemetry."""

    OFF = "off"
    TRACES = "traces"
    ALL = "all"


class Admission(StrEnum):
    """What becomes of a request that is predicted to miss its deadline: refused at once, or let in all the same."""

    DEADLINE = "deadline"
    OFF = "off"


class Kernels(StrEnum):
    """What computes our own operators: the kernels that are built and that the processor can run, or standard ones."""

    AUTO = "auto"
    STANDARD = "standard"


@dataclass(frozen=True, slots=True)
class Option:
    """One flag: what it means, and how its text becomes a value. `parse` raises ValueError saying what is wanted."""

    help: str
    parse: Callable[[str], Any]

    @property
    def is_switch(self) -> bool:
        """Whether the flag stands alone, as `--name` or `--no-name`."""
        return self.parse is _boolean


def _text(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    if not _is_unicode(text):
        raise ValueError("must be UTF-8")
    return text


def _folder(text: str) -> Path:
    return Path(_text(text))


def _file(text: str) -> Path:
    path = _folder(text)
    if not path.is_file():
        raise ValueError("must be a file")
    return path


_MAX_OBJECTIVES = 8
_MAX_OBJECTIVE_SECONDS = 3600.0


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) < 1 << 31 for part in parts):
        raise ValueError("must be whole numbers from 0, as in 0,2")
    return tuple(map(int, parts))


Shares = tuple[tuple[str, float], ...]
"""Weights by model name, in the order in which they were given."""

_MAX_WEIGHT = 1e6


def _shares(text: str) -> Shares:
    shares: dict[str, float] = {}
    parts = text.split(",")
    for part in parts:
        name, _, number = part.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if name and _is_unicode(name) and 0 < weight <= _MAX_WEIGHT:
            shares[name] = weight
    if len(shares) < len(parts):
        limits = f"each once and with a weight above 0 and at most {_MAX_WEIGHT:g}"
        raise ValueError(f"must be names of models, {limits}, as in dates=1,stdlib=3")
    return tuple(shares.items())


def _boolean(text: str) -> bool:
    values = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    try:
        return values[text.lower()]
    except KeyError:
        raise ValueError("must be true or false") from None


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"must be a whole number from {low} to {high}") from None
        if not low <= value <= high:
            raise ValueError(f"must be from {low} to {high}")
        return value

    return parse


_UNITS = {"": 1, **{f"{prefix}iB": 1 << (10 * power) for power, prefix in enumerate("KMGT", start=1)}}


def _num_bytes(text: str) -> int:
    number = text.rstrip("BKMGTi")
    unit = _UNITS.get(text[len(number) :])
    if unit is None or not number.isascii() or not number.isdigit() or not 0 < int(number) * unit < 1 << 63:
        raise ValueError("must be a number of bytes above 0, plain or with KiB, MiB, GiB or TiB, as in 2GiB")
    return int(number) * unit


def _number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise ValueError(f"must be a number from {low:g} to {high:g}")
        return value

    return parse


def _objectives(text: str) -> tuple[float, ...]:
    """Seconds, in order and each once; every one costs a series of each model."""
    try:
        values = sorted({float(part) for part in text.split(",")})
    except ValueError:
        values = []
    if not 1 <= len(values) <= _MAX_OBJECTIVES or not all(0 < value <= _MAX_OBJECTIVE_SECONDS for value in values):
        limits = f"1 to {_MAX_OBJECTIVES} numbers above 0 and at most {_MAX_OBJECTIVE_SECONDS:g}"
        raise ValueError(f"must be {limits}, with commas between them, as in 0.2,1")
    return tuple(values)


def _choice(kind: type[_Choice]) -> Callable[[str], _Choice]:
    def parse(text: str) -> _Choice:
        try:
            return kind(text.lower())
        except ValueError:
            raise ValueError(f"must be one of {', '.join(kind)}") from None

    return parse


def _prefill_provider(text: str) -> PrefillProvider:
    if text.lower() == "openvino":
        raise ValueError("which is not supported, use cpu or auto")
    return _choice(PrefillProvider)(text)


def _otlp_endpoint(text: str) -> str:
    try:
        url = urlsplit(text)
        is_good = url.scheme in ("http", "https") and url.hostname and url.port != 0 and not url.path.strip("/")
    except ValueError:
        is_good = False
    if not is_good:
        raise ValueError("must be http:// or https:// with a host and a port, as in http://127.0.0.1:4317")
    return text


def _address(text: str) -> str:
    try:
        address = urlsplit(f"//{text}")
        is_good = address.netloc == text and address.hostname and address.port
    except ValueError:
        is_good = False
    if not is_good:
        raise ValueError("must be a host and a port, as in 127.0.0.1:8002")
    return text


# On a CPU a chunk is how long every stream waits; a GPU is as quick with many tokens as with few, up to about so many.
_CHUNK_ON_CPU = 128
_CHUNK_ON_CUDA = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What one request may ask; `GetModel` reports it to clients. Lengths of text are in characters."""

    max_generated_tokens: Annotated[int, Option("largest stopping.max_tokens", _integer(1, 2**31 - 1))] = 65536
    max_stop_strings: Annotated[int, Option("most stop texts per request", _integer(0, 1024))] = 16
    max_stop_string_length: Annotated[int, Option("longest stop text in characters", _integer(1, 65536))] = 256
    max_stop_token_ids: Annotated[int, Option("most stop token ids per request", _integer(0, 65536))] = 64
    max_logit_bias: Annotated[int, Option("most entries of sampling.logit_bias", _integer(0, 65536))] = 300
    max_outputs: Annotated[
        int, Option("most outputs per request, in sampling.n; cut to max_batch_size", _integer(1, 1024))
    ] = 16
    max_beam_size: Annotated[int, Option("largest beam_search.beam_size; cut to max_batch_size", _integer(1, 1024))] = (
        16
    )
    max_logprobs: Annotated[int, Option("most alternatives per token in response.logprobs", _integer(0, 1000))] = 20
    max_request_id_length: Annotated[int, Option("longest request_id in characters", _integer(32, 4096))] = 128
    max_tokenize_bytes: Annotated[int, Option("longest text of Tokenize in bytes", _integer(1, 1 << 30))] = 256 << 10
    max_detokenize_tokens: Annotated[int, Option("most token ids of Detokenize", _integer(1, 2**31 - 1))] = 64 << 10
    max_explain_tokens: Annotated[
        int, Option("most tokens of a source, and most that a decoder reads, in Explain", _integer(2, 8192))
    ] = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The options of `serve`. Times are in seconds, sizes in bytes; port 0 lets the system choose one."""

    models: Annotated[Path, Option("folder whose subfolders are the models to serve", _folder)]
    host: Annotated[str, Option("address to listen on, for calls and metrics", _text)] = "127.0.0.1"
    port: Annotated[int, Option("port for gRPC calls; 0 lets the system choose", _integer(0, 65535))] = 8001
    metrics: Annotated[bool, Option("serve Prometheus metrics over HTTP", _boolean)] = True
    metrics_port: Annotated[int, Option("port for metrics; 0 lets the system choose", _integer(0, 65535))] = 8002
    metrics_compat: Annotated[
        MetricsCompat, Option("show metrics under another server's names too: none or vllm", _choice(MetricsCompat))
    ] = MetricsCompat.NONE
    slo_time_to_first_token: Annotated[
        tuple[float, ...], Option("objectives for the first token in seconds, as in 0.2,1: exact shares", _objectives)
    ] = ()
    slo_inter_token_latency: Annotated[
        tuple[float, ...], Option("objectives between tokens in seconds, single and on average", _objectives)
    ] = ()
    slo_e2e_latency: Annotated[tuple[float, ...], Option("objectives for whole requests in seconds", _objectives)] = ()
    max_batch_size: Annotated[int, Option("sequences that run at once, per model", _integer(1, 1024))] = 32
    max_queue_size: Annotated[int, Option("requests that may wait besides, per model", _integer(0, 1_000_000))] = 256
    # On, as it changes nothing for who sends no deadline, and who does is not answered any sooner by being let in.
    admission: Annotated[
        Admission,
        Option(
            "deadline: refuse at once what is predicted to miss its deadline, and let early deadlines go first; "
            "off: first come, first served, and a deadline only cancels",
            _choice(Admission),
        ),
    ] = Admission.DEADLINE
    prefill_chunk: Annotated[
        int | None,
        Option(
            f"prompt tokens computed per step; default: {_CHUNK_ON_CPU}, on a GPU {_CHUNK_ON_CUDA}", _integer(1, 65536)
        ),
    ] = None
    device: Annotated[
        Device,
        Option(
            "what computes: cpu; cuda, which needs the extra `gpu` and models exported for it; or auto, cuda where all "
            "models are exported for it and it works",
            _choice(Device),
        ),
    ] = Device.AUTO
    prefill_provider: Annotated[
        PrefillProvider,
        Option(
            "what computes prompts: cpu; or auto, the fastest provider that this release supports, which is cpu",
            _prefill_provider,
        ),
    ] = PrefillProvider.AUTO
    kernels: Annotated[
        Kernels,
        Option(
            "what computes our own operators on a CPU: auto, the kernels that are built (python -m model.kernels) and "
            "that the processor can run; or standard, the standard operators that they stand for, slower",
            _choice(Kernels),
        ),
    ] = Kernels.AUTO
    look_up: Annotated[
        int,
        Option(
            "tokens of a request that runs alone to guess from its own text and check at once, for decoder-only models "
            "computed by our kernels; 0: none; answers are the same bits",
            _integer(0, 16),
        ),
    ] = 0
    kv_memory: Annotated[
        int | None,
        Option(
            "bytes of keys and values of all models together, as in 2GiB; default: all their sequences at full length, "
            "or on a GPU what it has left",
            _num_bytes,
        ),
    ] = None
    kv_shares: Annotated[
        Shares,
        Option(
            "how models share kv_memory, as in dates=1,stdlib=3; who is named has a part kept for it, served or not, "
            "others count 1; default: in proportion to what all their sequences take at full length",
            _shares,
        ),
    ] = ()
    time_shares: Annotated[
        Shares,
        Option(
            "how models share the cores while several have work, as in dates=1,stdlib=3; others count 1",
            _shares,
        ),
    ] = ()
    threads: Annotated[int | None, Option("threads per graph; default: one per physical core", _integer(1, 1024))] = (
        None
    )
    spin: Annotated[
        bool, Option("let graph threads spin between operators: faster on a machine of one's own", _boolean)
    ] = True
    huge_pages: Annotated[
        bool, Option("ask for memory in huge pages, where Linux gives them on request: faster reads", _boolean)
    ] = True
    calibrate: Annotated[
        bool,
        Option(
            "before serving, run steps of a few sizes for up to 0.5 s per model, to predict times from the start",
            _boolean,
        ),
    ] = True
    # With the few seconds that closing may take besides, the default stays below the 30 s after which Kubernetes kills.
    drain_grace_seconds: Annotated[
        float, Option("time for requests in flight to end; closing takes up to 9 s more", _number(0, 3600))
    ] = 20.0
    drain_pause_seconds: Annotated[
        float,
        Option(
            "how long a server that is stopping refuses new requests before it is gone, at the least",
            _number(0, 60),
        ),
    ] = 0.0
    max_message_bytes: Annotated[int, Option("largest message in bytes, either way", _integer(1024, 1 << 30))] = 4 << 20
    max_metadata_bytes: Annotated[int, Option("most metadata of a call in bytes", _integer(1024, 1 << 20))] = 16 << 10
    max_concurrent_rpcs: Annotated[
        int,
        Option(
            "most calls at once, of which one caller has half; health checks, health watchers and reflection have "
            "as many places of their own each",
            _integer(1, 1_000_000),
        ),
    ] = 1024
    max_connections: Annotated[
        int, Option("most connections of gRPC at once; more are closed as they come", _integer(1, 1_000_000))
    ] = 4096
    max_stall_seconds: Annotated[
        float,
        Option(
            "how long a call waits for its client to read, or to send its request; then it ends", _number(0.1, 86400)
        ),
    ] = 30.0
    keepalive_seconds: Annotated[
        float,
        Option("how long a connection is quiet before its client is asked whether it is there", _number(0.1, 86400)),
    ] = 30.0
    tls_certificate: Annotated[Path | None, Option("PEM file of the server's certificates; turns TLS on", _file)] = None
    tls_key: Annotated[Path | None, Option("PEM file of the certificate's key", _file)] = None
    tls_client_ca: Annotated[
        Path | None, Option("PEM file of who signs clients' certificates, which they must show then", _file)
    ] = None
    api_keys: Annotated[Path | None, Option("TOML file of the API keys; calls need one then", _file)] = None
    reflection: Annotated[bool, Option("let clients ask for the wire contract, without a key", _boolean)] = True
    log_level: Annotated[LogLevel, Option("least severe message logged", _choice(LogLevel))] = LogLevel.INFO
    # 80 s of steps that take 10 ms, 8 s of a small model's that take 1 ms; with as many requests below 3 MB per model,
    # where ids have 40 characters at most.
    recorder_steps: Annotated[
        int, Option("last steps and requests that the flight recorder keeps, per model; 0: none", _integer(0, 1 << 20))
    ] = 8192
    otel: Annotated[
        Telemetry | None,
        Option(
            "what OpenTelemetry exports (extra `otel`): off, traces, or all, which is traces and metrics; default: all "
            "with --otel-endpoint, else off",
            _choice(Telemetry),
        ),
    ] = None
    otel_endpoint: Annotated[
        str | None,
        Option("OTLP/gRPC endpoint, as in http://127.0.0.1:4317; default: the OTEL_… variables'", _otlp_endpoint),
    ] = None
    limits: RequestLimits = field(default_factory=RequestLimits)

    @property
    def chunk_tokens(self) -> int:
        """`prefill_chunk`, or what is best on the device where nothing is said."""
        if self.prefill_chunk is not None:
            return self.prefill_chunk
        return _CHUNK_ON_CUDA if self.device is Device.CUDA else _CHUNK_ON_CPU

    @property
    def telemetry(self) -> Telemetry:
        """`otel`, or what follows from `otel_endpoint` where nothing is said."""
        if self.otel is not None:
            return self.otel
        return Telemetry.OFF if self.otel_endpoint is None else Telemetry.ALL

    @property
    def request_limits(self) -> RequestLimits:
        """`limits`, with the outputs and beams of one request cut to what runs at once: they run together."""
        most = self.max_batch_size
        outputs, beams = min(self.limits.max_outputs, most), min(self.limits.max_beam_size, most)
        return dataclasses.replace(self.limits, max_outputs=outputs, max_beam_size=beams)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionConfig:
    """Where a client finds its server, and how each knows the other. Without `ca_certificate` nothing is encrypted."""

    target: Annotated[str, Option("address of the server", _text)] = "127.0.0.1:8001"
    api_key_file: Annotated[Path | None, Option("file that holds the API key, and nothing else", _file)] = None
    ca_certificate: Annotated[
        Path | None, Option("PEM file of who signs the server's certificate; turns TLS on", _file)
    ] = None
    client_certificate: Annotated[Path | None, Option("PEM file of the client's own certificate", _file)] = None
    client_key: Annotated[Path | None, Option("PEM file of that certificate's key", _file)] = None
    server_name: Annotated[str | None, Option("name in the server's certificate; default: the target's", _text)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AskConfig(ConnectionConfig):
    """The options of `ask`. None leaves the choice to the server."""

    model: str
    text: str
    stream: Annotated[bool, Option("print the text as it is generated", _boolean)] = False
    max_tokens: Annotated[int | None, Option("tokens to generate at most", _integer(1, 2**31 - 1))] = None
    temperature: Annotated[float | None, Option("0 is greedy", _number(0, 1000))] = None
    seed: Annotated[int | None, Option("same seed, same answer", _integer(0, 2**64 - 1))] = None
    n: Annotated[int | None, Option("answers to print", _integer(1, 1024))] = None
    beam_size: Annotated[int | None, Option("search with so many beams instead of drawing", _integer(1, 1024))] = None
    timeout_seconds: Annotated[float | None, Option("give up after this long", _number(0.001, 86400))] = None
    partial_on_deadline: Annotated[
        bool, Option("print what there is shortly before the time is up, in place of nothing", _boolean)
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainConfig(ConnectionConfig):
    """The options of `explain`. None leaves the choice to the server; layers and heads count from 0.

    Raises:
        StartupError: when there is no file to write.
    """

    model: str
    text: str
    target_text: Annotated[str | None, Option("output to explain; default: what the model writes", _text)] = None
    max_tokens: Annotated[
        int | None, Option("tokens to write at most, where none are given", _integer(1, 2**31 - 1))
    ] = None
    html: Annotated[Path | None, Option("page to write, with a heat map for each layer and head", _folder)] = None
    svg: Annotated[Path | None, Option("picture to write: the page's first", _folder)] = None
    layers: Annotated[tuple[int, ...] | None, Option("layers to show, as in 0,2; default: all", _numbers)] = None
    heads: Annotated[tuple[int, ...] | None, Option("heads to show, as in 0,2; default: all", _numbers)] = None
    timeout_seconds: Annotated[float | None, Option("give up after this long", _number(0.001, 86400))] = None

    def __post_init__(self) -> None:
        if self.html is None and self.svg is None:
            raise StartupError([f"{flag('html')} or {flag('svg')} must name a file to write"])


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig(ConnectionConfig):
    """The options of `health`."""

    service: Annotated[str, Option("service or model to ask after; default: the whole server", str)] = ""
    timeout_seconds: Annotated[float, Option("how long the server may take to answer", _number(0.001, 3600))] = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """The options of `trace`."""

    metrics_target: Annotated[str, Option("address of the server's metrics", _address)] = "127.0.0.1:8002"
    out: Annotated[Path, Option("file to write", _folder)] = Path("trace.json")


Config = ServeConfig | AskConfig | ExplainConfig | HealthConfig | TraceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    """One verb: what its flags become, and its positional arguments with their meanings."""

    config: type[Any]
    help: str
    positionals: Mapping[str, str] = field(default_factory=dict)


_SERVE = "serve"
_COMMANDS: Mapping[str, _Command] = {
    _SERVE: _Command(config=ServeConfig, help="serve every model of a folder"),
    "ask": _Command(
        config=AskConfig,
        help="ask a served model",
        positionals={"model": "the model's name", "text": "the prompt or source text"},
    ),
    "explain": _Command(
        config=ExplainConfig,
        help="draw where a served model looked",
        positionals={"model": "the model's name", "text": "the prompt or source text"},
    ),
    "health": _Command(config=HealthConfig, help="exit with 0 if a server answers requests, with 1 if not"),
    "trace": _Command(config=TraceConfig, help="write what a server's flight recorder keeps to a file for Perfetto"),
}


_TOGETHER = (
    ("tls_certificate", "tls_key"),
    ("tls_key", "tls_certificate"),
    ("tls_client_ca", "tls_certificate"),
    ("kv_shares", "kv_memory"),
)


def keep_tokenizers_on_their_threads() -> None:
    """Makes the tokenizers library work on the thread that calls it, unless the operator says otherwise.

    A pool of its own would take as many cores as there are, at the engine's priority.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def parse_command_line(argv: Sequence[str]) -> Config:
    """Reads the process's command line and environment.

    Raises:
        StartupError: listing every flag and variable whose value is unusable.
        SystemExit: from argparse, on an unknown flag or command and on `--help`.
    """
    return parse(argv, os.environ)


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Config:
    """As `parse_command_line`, for the given environment."""
    arguments = vars(_parser().parse_args(argv))
    name = arguments.pop("command")
    if name == _SERVE:
        return _serve_config(arguments, environ)
    command = _COMMANDS[name]
    positional = {name: arguments[name] for name in command.positionals}
    # A terminal's bytes that are no UTF-8 arrive as lone surrogates, which no message can carry.
    problems = [f"{name} is {text!r}, must be UTF-8" for name, text in positional.items() if not _is_unicode(text)]
    values = _collect(command.config, arguments, environ, problems)
    if problems:
        raise StartupError(problems)
    config: Config = command.config(**positional, **values)
    return config


def _serve_config(arguments: Mapping[str, str | None], environ: Mapping[str, str]) -> ServeConfig:
    problems: list[str] = []
    limits = _collect(RequestLimits, arguments, environ, problems)
    serve = _collect(ServeConfig, arguments, environ, problems)
    if "models" not in serve and not problems:
        problems.append(f"--models (or {variable('models')}) must name a folder")
    problems += [
        f"{flag(name)} means nothing without {flag(other)}"
        for name, other in _TOGETHER
        if name in serve and other not in serve
    ]
    if problems:
        raise StartupError(problems)
    return ServeConfig(limits=RequestLimits(**limits), **serve)


def options(config: type[Any]) -> dict[str, Option]:
    """The options of a configuration class, by field name."""
    hints = get_type_hints(config, include_extras=True)
    return {name: note for name, hint in hints.items() for note in get_args(hint)[1:] if isinstance(note, Option)}


def flag(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of a field."""
    return "ONWARD_" + name.upper()


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _collect(
    config: type[Any], arguments: Mapping[str, str | None], environ: Mapping[str, str], problems: list[str]
) -> dict[str, Any]:
    """Values that were given for a class's fields; what cannot be used goes to `problems`."""
    values = {}
    for name, option in options(config).items():
        given, source = arguments.get(name), flag(name)
        if given is None:
            given, source = environ.get(variable(name)), variable(name)
        if given is None:
            continue
        try:
            values[name] = option.parse(given)
        except ValueError as error:
            problems.append(f"{source} is {given!r}, {error}")
    return values


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m service", description="Serve transformers over gRPC, or ask one.")
    commands = parser.add_subparsers(dest="command", required=True)
    twins = "Each flag may be given as the environment variable in brackets instead; the flag wins."
    for name, command in _COMMANDS.items():
        # Abbreviated flags would change their meaning when a longer one is added.
        verb = commands.add_parser(name, help=command.help, epilog=twins, allow_abbrev=False)
        for positional, meaning in command.positionals.items():
            verb.add_argument(positional, help=meaning)
        _add_options(verb, command.config)
        if name == _SERVE:
            _add_options(verb, RequestLimits)
    return parser


def _add_options(parser: argparse.ArgumentParser, config: type[Any]) -> None:
    """Adds a flag for each option; values stay text here, so that all of them can be judged together."""
    defaults = {each.name: each.default for each in dataclasses.fields(config)}
    for name, option in options(config).items():
        default = defaults[name]
        shown = "" if default in (None, (), dataclasses.MISSING) else f" (default: {default})"
        text = f"{option.help}{shown} [{variable(name)}]"
        if option.is_switch:
            negated = "--no-" + name.replace("_", "-")
            parser.add_argument(flag(name), dest=name, action="store_const", const="true", help=text)
            parser.add_argument(negated, dest=name, action="store_const", const="false", help=argparse.SUPPRESS)
        else:
            parser.add_argument(flag(name), dest=name, metavar=name.upper(), help=text)
