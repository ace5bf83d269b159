"""`python -m service ask` and `health`: call a server once, without retries, and print its answer."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import TextIO

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from onward import NO_RETRIES, CallError, Client, GenerateOptions, IncompleteStream, Prompt, Stream, chat
from service.commands.connection import connection
from service.commands.terminal import write_text
from service.config import AskConfig, GenerationConfig, HealthConfig, options

_FAILED = 1
# The shells' exit status of a command that SIGINT ended.
_INTERRUPTED = 130


def ask(config: AskConfig, out: TextIO = sys.stdout, err: TextIO = sys.stderr) -> int:
    """Prints the answer's text to `out` or an error to `err`; returns the exit status."""
    given = generate_options(config)
    # Beam search excludes `n`.
    if config.beam_size:
        given["num_hypotheses"] = given.pop("n")
    if config.json_schema is not None:
        given["json_schema"] = config.json_schema.read_text(encoding="utf-8")
    prompt: Prompt = config.text
    if config.chat or config.system is not None:
        prompt = conversation(config, ("user", config.text))
    is_numbered = (config.n or 1) > 1
    try:
        with Client(connection(config), retries=NO_RETRIES) as client:
            if config.stream:
                with client.stream(prompt, **given) as stream:
                    _print_stream(stream, out, is_numbered=is_numbered)
            else:
                for output in client.generate(prompt, **given).outputs:
                    _print_answer(out, output.index, output.text, is_numbered=is_numbered)
    except (CallError, IncompleteStream) as error:
        err.write(f"{error}\n")
        return _FAILED
    except KeyboardInterrupt:
        err.write("\n")
        return _INTERRUPTED
    return 0


def generate_options(config: GenerationConfig) -> GenerateOptions:
    """The fields of a request that flags set; None leaves them out."""
    given: GenerateOptions = {"model": config.model}
    for name in GenerateOptions.__optional_keys__ & options(type(config)).keys():
        given[name] = getattr(config, name)  # type: ignore[literal-required]
    return given


def conversation(config: GenerationConfig, *turns: tuple[str, str]) -> Prompt:
    """Turns (role, content), after the system message if there is one."""
    return chat(*(() if config.system is None else (("system", config.system),)), *turns)


def health(config: HealthConfig, out: TextIO = sys.stdout, err: TextIO = sys.stderr) -> int:
    """Prints the health service's status; returns 0 if it is SERVING. For a container's probe."""
    at = connection(config)
    try:
        with at.channel() as channel:
            question = health_pb2.HealthCheckRequest(service=config.service)
            check = HealthStub(channel).Check
            status = check(question, timeout=config.timeout_seconds, metadata=at.metadata).status
    except grpc.RpcError as error:
        err.write(f"{error.code().name}: {error.details()}\n")
        return _FAILED
    out.write(f"{health_pb2.HealthCheckResponse.ServingStatus.Name(status)}\n")
    return 0 if status == health_pb2.HealthCheckResponse.SERVING else _FAILED


def _print_stream(stream: Stream, out: TextIO, *, is_numbered: bool) -> None:
    """Prints a stream chunk by chunk; of several outputs, each one when it is complete.

    Raises:
        IncompleteStream: the stream ended early; its chunks are printed.
    """
    texts: defaultdict[int, str] = defaultdict(str)
    try:
        for chunk in stream:
            if not is_numbered:
                write_text(chunk.text, out)
            else:
                texts[chunk.output_index] += chunk.text
                if chunk.finish_reason is not None:
                    _print_answer(out, chunk.output_index, texts.pop(chunk.output_index), is_numbered=True)
            out.flush()
    except IncompleteStream:
        _end_line(out, is_numbered=is_numbered)
        raise
    _end_line(out, is_numbered=is_numbered)


def _end_line(out: TextIO, *, is_numbered: bool) -> None:
    if not is_numbered:
        out.write("\n")


def _print_answer(out: TextIO, index: int, text: str, *, is_numbered: bool) -> None:
    write_text(f"[{index}] {text}\n" if is_numbered else f"{text}\n", out)
