"""The options of `serve`, grouped as `--help` shows them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

from service.config.options import (
    Option,
    Shares,
    any_path,
    boolean,
    choice,
    file,
    flag,
    integer,
    nonempty,
    num_bytes,
    number,
    objectives,
    otlp_endpoint,
    shares,
    variable,
)
from service.engine.types import Device, PrefillProvider

_network = partial(Option, "network")
_limits = partial(Option, "limits")
_engine = partial(Option, "engine")
_memory = partial(Option, "memory")
_access = partial(Option, "access")
_observe = partial(Option, "observability")

# On a CPU every stream waits while a chunk is computed. A GPU takes as long for about this many tokens as for a few.
CHUNK_ON_CPU = 128
_CHUNK_ON_CUDA = 2048


def _prefill_provider(text: str) -> PrefillProvider:
    if text.lower() == "openvino":
        raise ValueError("which is not supported, use cpu or auto")
    return choice(PrefillProvider)(text)


class LogLevel(StrEnum):
    """Least severe message that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class MetricsCompat(StrEnum):
    """Another server whose metric names are exposed besides our own."""

    NONE = "none"
    VLLM = "vllm"


class Telemetry(StrEnum):
    """What OpenTelemetry exports."""

    OFF = "off"
    TRACES = "traces"
    ALL = "all"


class Admission(StrEnum):
    """Whether a request that is predicted to miss its deadline is refused or admitted."""

    DEADLINE = "deadline"
    OFF = "off"


class Defaults(StrEnum):
    """Which values a request's absent fields have: the model's own, or those of the wire contract alone."""

    MODEL = "model"
    NONE = "none"


class Kernels(StrEnum):
    """Which implementation computes our own operators: compiled kernels where possible, or standard operators."""

    AUTO = "auto"
    STANDARD = "standard"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What one request may ask; `GetModel` reports it to clients. Lengths of text are in characters."""

    max_generated_tokens: Annotated[int, _limits("largest stopping.max_tokens", integer(1, 2**31 - 1))] = 65536
    max_stop_strings: Annotated[int, _limits("most stop strings of a request", integer(0, 1024))] = 16
    max_stop_string_length: Annotated[int, _limits("longest stop string in characters", integer(1, 65536))] = 256
    max_stop_token_ids: Annotated[int, _limits("most stop token ids of a request", integer(0, 65536))] = 64
    max_logit_bias: Annotated[int, _limits("most entries of sampling.logit_bias", integer(0, 65536))] = 300
    max_outputs: Annotated[int, _limits("largest sampling.n, at most max_batch_size", integer(1, 1024))] = 16
    max_beam_size: Annotated[
        int, _limits("largest beam_search.beam_size, at most max_batch_size", integer(1, 1024))
    ] = 16
    max_logprobs: Annotated[int, _limits("most alternatives per token in response.logprobs", integer(0, 1000))] = 20
    max_request_id_length: Annotated[int, _limits("longest request_id in characters", integer(32, 4096))] = 128
    max_structured_output_bytes: Annotated[int, _limits("longest structured_output in bytes", integer(1, 1 << 20))] = (
        64 << 10
    )
    max_tokenize_bytes: Annotated[int, _limits("longest text of Tokenize in bytes", integer(1, 1 << 30))] = 256 << 10
    max_detokenize_tokens: Annotated[int, _limits("most token ids of Detokenize", integer(1, 2**31 - 1))] = 64 << 10
    max_explain_tokens: Annotated[
        int, _limits("most source tokens, and most decoder tokens, of Explain", integer(2, 8192))
    ] = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The options of `serve`. Times are in seconds, sizes in bytes."""

    host: Annotated[str, _network("address to listen on, for calls and metrics", nonempty)] = "127.0.0.1"
    port: Annotated[int, _network("port for gRPC calls; 0: the system chooses one", integer(0, 65535))] = 8001
    http_port: Annotated[
        int | None,
        _network(
            "port for HTTP in OpenAI's shape (extra `http`); 0: the system chooses one; default: off", integer(0, 65535)
        ),
    ] = None
    max_connections: Annotated[
        int, _network("most gRPC connections, and as many HTTP ones; more are closed", integer(1, 1_000_000))
    ] = 4096
    max_stall_seconds: Annotated[float, _network("longest wait for a client to read or send", number(0.1, 86400))] = (
        30.0
    )
    keepalive_seconds: Annotated[float, _network("quiet time before a client is pinged", number(0.1, 86400))] = 30.0
    # Closing may take seconds more: the sum stays below the 30 s after which Kubernetes kills.
    drain_grace_seconds: Annotated[
        float, _network("time for requests in flight to finish; closing takes up to 9 s more", number(0, 3600))
    ] = 20.0
    drain_pause_seconds: Annotated[
        float, _network("least time to refuse new requests before a stopping server closes", number(0, 60))
    ] = 0.0

    max_batch_size: Annotated[int, _limits("sequences that run at once, per model", integer(1, 1024))] = 32
    max_queue_size: Annotated[int, _limits("requests that may wait, per model", integer(0, 1_000_000))] = 256
    max_message_bytes: Annotated[int, _limits("largest message in bytes, each way", integer(1024, 1 << 30))] = 4 << 20
    max_metadata_bytes: Annotated[int, _limits("largest metadata of a call in bytes", integer(1024, 1 << 20))] = (
        16 << 10
    )
    max_concurrent_rpcs: Annotated[
        int,
        _limits(
            "most calls at once, half of them one caller's; Check, Watch and reflection each have as many of their own",
            integer(1, 1_000_000),
        ),
    ] = 1024

    models: Annotated[Path, _engine("folder whose subfolders are the models to serve", any_path)]
    # Requests without a deadline are not affected.
    admission: Annotated[
        Admission,
        _engine(
            "deadline: refuse requests predicted to miss their deadline, run early deadlines first; "
            "off: first come, first served",
            choice(Admission),
        ),
    ] = Admission.DEADLINE
    generation_defaults: Annotated[
        Defaults,
        _engine(
            "values of fields that a request leaves out: model, the model's own, as in generation_config.json, and "
            "greedy for an encoder-decoder; none, those of the wire contract (temperature 1)",
            choice(Defaults),
        ),
    ] = Defaults.MODEL
    prefill_chunk: Annotated[
        int | None,
        _engine(f"prompt tokens per step; default: {CHUNK_ON_CPU}, on a GPU {_CHUNK_ON_CUDA}", integer(1, 65536)),
    ] = None
    device: Annotated[
        Device,
        _engine("cpu; cuda (extra `gpu`); or auto: cuda if it works and all models support it", choice(Device)),
    ] = Device.AUTO
    prefill_provider: Annotated[
        PrefillProvider,
        _engine(
            "what computes prompts: cpu; or auto, the fastest provider that this release supports, which is cpu",
            _prefill_provider,
        ),
    ] = PrefillProvider.AUTO
    kernels: Annotated[
        Kernels,
        _engine(
            "our operators on a CPU: auto, built kernels (python -m model.kernels); or standard operators, slower",
            choice(Kernels),
        ),
    ] = Kernels.AUTO
    look_up: Annotated[
        int,
        _engine(
            "draft tokens of prompt-lookup speculative decoding, for decoder-only requests on our kernels, as far as "
            "few decode together; 0: off; same output bits",
            integer(0, 16),
        ),
    ] = 0
    time_shares: Annotated[
        Shares, _engine("weights of models that compete for cores, as in dates=1,stdlib=3; default: 1", shares)
    ] = ()
    threads: Annotated[int | None, _engine("threads per graph; default: one per physical core", integer(1, 1024))] = (
        None
    )
    spin: Annotated[bool, _engine("spin graph threads between operators: faster on an idle machine", boolean)] = True
    calibrate: Annotated[
        bool, _engine("measure steps for up to 0.5 s per model before serving, to predict times", boolean)
    ] = True

    memory: Annotated[
        int | None,
        _memory(
            "bytes for the server, as in 4GiB, K/V and all else; on a CPU; default: those available in its control "
            "group and machine",
            num_bytes,
        ),
    ] = None
    kv_memory: Annotated[
        int | None,
        _memory(
            "bytes of K/V of all models, as in 2GiB; default: all sequences at full length, or what fits into memory",
            num_bytes,
        ),
    ] = None
    kv_shares: Annotated[
        Shares,
        _memory(
            "weights of models in kv_memory, as in dates=1,stdlib=3, reserved for named models that are not loaded, "
            "1 for others; default: in proportion to all sequences at full length",
            shares,
        ),
    ] = ()
    huge_pages: Annotated[bool, _memory("use huge pages where Linux grants them: faster reads", boolean)] = True

    tls_certificate: Annotated[Path | None, _access("PEM file of the server's certificates; turns TLS on", file)] = None
    tls_key: Annotated[Path | None, _access("PEM file of the certificate's key", file)] = None
    tls_client_ca: Annotated[Path | None, _access("PEM file of the clients' CA; requires certificates", file)] = None
    api_keys: Annotated[Path | None, _access("TOML file of API keys, which calls then require", file)] = None
    reflection: Annotated[bool, _access("serve gRPC reflection, without a key", boolean)] = True

    metrics: Annotated[bool, _observe("serve Prometheus metrics over HTTP", boolean)] = True
    metrics_port: Annotated[int, _observe("port for metrics; 0: the system chooses one", integer(0, 65535))] = 8002
    metrics_compat: Annotated[
        MetricsCompat,
        _observe("add metrics under another server's names: none or vllm", choice(MetricsCompat)),
    ] = MetricsCompat.NONE
    slo_time_to_first_token: Annotated[
        tuple[float, ...],
        _observe("objectives of the first token in seconds, as in 0.2,1: exact shares", objectives),
    ] = ()
    slo_inter_token_latency: Annotated[
        tuple[float, ...],
        _observe("objectives between tokens in seconds", objectives),
    ] = ()
    slo_e2e_latency: Annotated[tuple[float, ...], _observe("objectives of whole requests in seconds", objectives)] = ()
    log_level: Annotated[LogLevel, _observe("least severe message logged", choice(LogLevel))] = LogLevel.INFO
    # 80 s of 10 ms steps, 8 s of 1 ms steps; below 3 MB per model.
    recorder_steps: Annotated[
        int,
        _observe("steps and requests that the flight recorder keeps, per model; 0: off", integer(0, 1 << 20)),
    ] = 8192
    otel: Annotated[
        Telemetry | None,
        _observe(
            "OpenTelemetry export (extra `otel`): off, traces, or all (metrics too); default: all with --otel-endpoint",
            choice(Telemetry),
        ),
    ] = None
    otel_endpoint: Annotated[
        str | None,
        _observe("OTLP/gRPC endpoint, as in http://127.0.0.1:4317; default: from the OTEL_… variables", otlp_endpoint),
    ] = None

    limits: RequestLimits = field(default_factory=RequestLimits)

    @property
    def chunk_tokens(self) -> int:
        """`prefill_chunk`, or the device's best."""
        if self.prefill_chunk is not None:
            return self.prefill_chunk
        return _CHUNK_ON_CUDA if self.device is Device.CUDA else CHUNK_ON_CPU

    @property
    def telemetry(self) -> Telemetry:
        """`otel`; by default `ALL` with an `otel_endpoint`."""
        if self.otel is not None:
            return self.otel
        return Telemetry.OFF if self.otel_endpoint is None else Telemetry.ALL

    @property
    def request_limits(self) -> RequestLimits:
        """`limits`, with outputs and beams at most `max_batch_size`: those of one request run together."""
        most = self.max_batch_size
        outputs, beams = min(self.limits.max_outputs, most), min(self.limits.max_beam_size, most)
        return dataclasses.replace(self.limits, max_outputs=outputs, max_beam_size=beams)


# Fields and the fields that they need.
_NEEDS = (
    ("tls_certificate", "tls_key"),
    ("tls_key", "tls_certificate"),
    ("tls_client_ca", "tls_certificate"),
    ("kv_shares", "kv_memory"),
)


def serve_problems(given: Collection[str]) -> Iterator[str]:
    """Problems of `serve`'s fields together, by the names of those that are given."""
    if "models" not in given:
        yield f"{flag('models')} (or {variable('models')}) must name a folder"
    for name, needed in _NEEDS:
        if name in given and needed not in given:
            yield f"{flag(name)} means nothing without {flag(needed)}"
