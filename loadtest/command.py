"""Shared by `bench` and `capacity`: the server's options, the connection, the warm-up, and error messages."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Self

import grpc

from loadtest.core.clients import Client, WireProtocol, connect
from loadtest.core.drive import Driver
from loadtest.core.options import LoadOptions, read_options

DEFAULT_TARGET = "127.0.0.1:8001"
BAD_OPTIONS = 2
_WARMUP_STREAM = 1


def add_server(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the server and the connection."""
    parser.add_argument("--target", default=DEFAULT_TARGET, help="host:port of the server")
    parser.add_argument(
        "--protocol",
        type=WireProtocol,
        choices=list(WireProtocol),
        default=WireProtocol.ONWARD,
        help="onward.v1, or the Open Inference Protocol (version 2) with a text model",
    )
    parser.add_argument("--connections", type=int, default=1, help="connections, used round-robin")
    parser.add_argument("--unary", action="store_true", help="unary calls, for servers without streaming")
    parser.add_argument("--num-warmups", type=int, default=1, help="warm-up requests, excluded from the report")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Server, load and connection; `warmups` requests precede the measurement and are in no report."""

    target: str
    protocol: WireProtocol
    load: LoadOptions
    connections: int = 1
    is_streamed: bool = True
    warmups: int = 1

    @classmethod
    def read(cls, options: argparse.Namespace, problems: Sequence[str], **own: Any) -> Self:
        """Validates the options of `add_server` and `add_options`; `own` are the command's fields.

        Raises:
            ValueError: with the given problems and all others, joined by "; ".
        """
        found = list(problems)
        if options.connections < 1:
            found.append(f"--connections: {options.connections} is below 1")
        if options.num_warmups < 0:
            found.append(f"--num-warmups: {options.num_warmups} is below 0")
        if options.protocol is WireProtocol.OIP and not options.model:
            found.append("--model: the Open Inference Protocol has no model by default")
        try:
            load = read_options(options)
        except ValueError as error:
            raise ValueError("; ".join([str(error), *found])) from None
        if found:
            raise ValueError("; ".join(found))
        return cls(
            target=options.target,
            protocol=options.protocol,
            load=load,
            connections=options.connections,
            is_streamed=not options.unary,
            warmups=options.num_warmups,
            **own,
        )

    def connect(self) -> AbstractAsyncContextManager[Client]:
        """Connects to the server. Entering raises as `loadtest.core.clients.connect` does."""
        return connect(
            self.protocol,
            self.target,
            self.load.model,
            self.load.sampling,
            self.load.access,
            connections=self.connections,
            is_streamed=self.is_streamed,
        )

    async def warm_up(self, client: Client) -> None:
        """Sends the warm-up requests one after another.

        Raises:
            RuntimeError: if one does not finish: a measurement would mean nothing.
        """
        if not self.warmups:
            return
        # Other prompts than the run's, which must not hit the cache.
        driver = new_driver(client, self.load, _WARMUP_STREAM, cancel_share=0.0)
        run = await driver.closed_loop(1, count=self.warmups)
        for record in run.records:
            if record.code != "OK":
                raise RuntimeError(f"a request of the warm-up ended with {record.code}: {record.detail}")


def new_driver(client: Client, load: LoadOptions, stream: int = 0, **changes: Any) -> Driver:
    """A driver of this load, with changes to its workload; different streams have different prompts."""
    return Driver(
        client,
        load.workload(client.facts.vocab_size, stream, **changes),
        timeout_seconds=load.timeout_seconds,
        drain_seconds=load.drain_seconds,
    )


def say_bad_options(error: ValueError) -> int:
    """Prints each problem on a line of stderr; returns the exit status."""
    sys.stderr.write("".join(f"{each}\n" for each in str(error).split("; ")))
    return BAD_OPTIONS


def say_failure(target: str, error: grpc.aio.AioRpcError | RuntimeError | ValueError) -> int:
    """Prints why the measurement failed; returns the exit status."""
    if isinstance(error, grpc.aio.AioRpcError):
        sys.stderr.write(f"{target}: {error.code().name}: {error.details()}\n")
    else:
        sys.stderr.write(f"{target}: {error}\n")
    return 1
