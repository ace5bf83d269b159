"""What the commands that ask a server have in common: whom they ask and for what, a warm-up, how they say what failed.

Knows options, clients and drivers; what is measured is each command's own affair.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Self

import grpc

from loadtest.core.clients import Client, WireProtocol, connect
from loadtest.core.drive import Driver
from loadtest.core.options import LoadOptions, read_options

DEFAULT_TARGET = "127.0.0.1:8001"
BAD_OPTIONS = 2
_WARMUP_STREAM = 1


def add_server(parser: argparse.ArgumentParser) -> None:
    """Options that say who is asked."""
    parser.add_argument("--target", default=DEFAULT_TARGET, help="host:port of the server")
    parser.add_argument(
        "--protocol",
        type=WireProtocol,
        choices=list(WireProtocol),
        default=WireProtocol.ONWARD,
        help="onward.v1, or the Open Inference Protocol (version 2) with a text model",
    )
    parser.add_argument("--connections", type=int, default=1, help="connections that requests take turns on")
    parser.add_argument("--unary", action="store_true", help="ask for whole answers, of servers that stream none")
    parser.add_argument("--num-warmups", type=int, default=1, help="requests before, in no report")


@dataclass(frozen=True, slots=True, kw_only=True)
class AskSettings:
    """Whom to ask and for what; so many requests, the `warmups`, are asked before and are in no report."""

    target: str
    protocol: WireProtocol
    load: LoadOptions
    connections: int = 1
    is_streamed: bool = True
    warmups: int = 1

    @classmethod
    def read(cls, options: argparse.Namespace, problems: Sequence[str], **own: Any) -> Self:
        """From the options of `add_server` and `add_options`; the fields of the command itself are `own`.

        Raises:
            ValueError: with the problems that the command has found and all others, "; " between them.
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
        """A client of the server, once that has told what the model is.

        Raises, when it is entered:
            grpc.aio.AioRpcError: when the server cannot be reached or does not know the model.
            ValueError: when the model is not one for text.
        """
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
        """Sends the warm-up's requests one after another: the first ones pay for what later ones find.

        Raises:
            RuntimeError: when one does not come to its end, as nothing measured after that would mean anything.
        """
        if not self.warmups:
            return
        # Prompts of their own: those of the run must find nothing cached.
        driver = new_driver(client, replace(self.load, cancel_share=0.0), _WARMUP_STREAM)
        run = await driver.closed_loop(1, count=self.warmups)
        for record in run.records:
            if record.code != "OK":
                raise RuntimeError(f"a request of the warm-up ended with {record.code}: {record.detail}")


def new_driver(client: Client, load: LoadOptions, stream: int = 0) -> Driver:
    """A driver for what the options say; another stream has other prompts."""
    return Driver(
        client,
        load.workload(client.facts.vocab_size, stream),
        timeout_seconds=load.timeout_seconds,
        drain_seconds=load.drain_seconds,
    )


def say_bad_options(error: ValueError) -> int:
    """Says on stderr what does not fit, a line for each problem; the exit status."""
    sys.stderr.write("".join(f"{each}\n" for each in str(error).split("; ")))
    return BAD_OPTIONS


def say_failure(target: str, error: grpc.aio.AioRpcError | RuntimeError | ValueError) -> int:
    """Says on stderr why the server could not be measured; the exit status."""
    if isinstance(error, grpc.aio.AioRpcError):
        sys.stderr.write(f"{target}: {error.code().name}: {error.details()}\n")
    else:
        sys.stderr.write(f"{target}: {error}\n")
    return 1
