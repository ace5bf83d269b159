"""Locust users that request token streams over gRPC.

`ClosedLoopUser` sends, reads, pauses and sends again, so a slow server gets fewer requests. `OpenLoopUser`, one in each
process, sends by a schedule. The process's conductor keeps the records.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator
from typing import Any

import grpc
from gevent.pool import Group
from locust import User, task
from locust.env import Environment
from locust.exception import StopUser
from locust.user.task import LOCUST_STATE_RUNNING

from loadtest.core import wire
from loadtest.core.workload import Prompt
from loadtest.locust.conductor import conductor_of, target_of
from loadtest.locust.session import Session
from onward.v1.generation_pb2_grpc import GenerationServiceStub

_CONNECT_SECONDS = 10.0

log = logging.getLogger(__name__)


class GrpcUser(User):
    """A user with its own channels."""

    abstract = True

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.conductor = conductor_of(environment)
        self._channels: list[grpc.Channel] = []
        self._stubs: Iterator[GenerationServiceStub] = iter(())

    @property
    def session(self) -> Session:
        """This process's share of the run."""
        session = self.conductor.session
        if session is None:
            # A worker that joins during a run has no share of it.
            log.warning("this process has no share of the run")
            raise StopUser
        return session

    def on_start(self) -> None:
        """Connects, so that the first request does not include it."""
        self._connect(1)

    def on_stop(self) -> None:
        """Closes the channels."""
        for channel in self._channels:
            channel.close()

    def _connect(self, connections: int) -> None:
        target, access = target_of(self.environment), self.conductor.options.load.access
        self._channels = [access.open(target) for _ in range(connections)]
        for channel in self._channels:
            try:
                grpc.channel_ready_future(channel).result(_CONNECT_SECONDS)
            except grpc.FutureTimeoutError:
                # Every request will fail with its code.
                log.warning("no connection to %s after %g s", target, _CONNECT_SECONDS)
        self._stubs = itertools.cycle([GenerationServiceStub(channel) for channel in self._channels])

    def is_closed_before(self, due: float) -> bool:
        """Waits until `due` or until sending stops; returns whether it has stopped."""
        closing = self.conductor.closing
        # gevent may wake early, because its clock is cached: check again.
        while not closing.is_set() and (delay := due - self.session.now()) > 0.0:
            closing.wait(delay)
        return bool(closing.is_set())

    def send(self, prompt: Prompt, request_id: str) -> Any:
        """Starts a stream."""
        session, load = self.session, self.session.load
        request = wire.onward_request(prompt, request_id, session.part.model, load.sampling)
        stub, metadata = next(self._stubs), load.access.metadata
        return stub.GenerateStream(request, timeout=load.timeout_seconds, metadata=metadata)


class ClosedLoopUser(GrpcUser):
    """Sends a request, reads the answer, pauses, repeats."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._pauses = random.Random()  # noqa: S311 (not for secrets)

    def wait_time(self) -> float:
        """An exponential pause with the mean of `--think`."""
        mean = self.conductor.options.think_seconds
        return self._pauses.expovariate(1.0 / mean) if mean else 0.0

    @task
    def ask(self) -> None:
        """Sends one request, but none before the begin of the run."""
        number = None if self.is_closed_before(0.0) else self.session.take()
        if number is None:
            raise StopUser
        self.conductor.ask(number, None, self.send)

    def stop(self, force: bool = False) -> bool:  # noqa: FBT001, FBT002 (Locust's own signature)
        """Waits for the stream to end, which Locust would kill."""
        if force and self._state == LOCUST_STATE_RUNNING:
            super().stop(force=False)
            self.greenlet.join(timeout=self.session.load.drain_seconds)
        return bool(super().stop(force=force))


class OpenLoopUser(GrpcUser):
    """Sends this process's share of the schedule, each request in its own greenlet, and waits for all of them."""

    def on_start(self) -> None:
        """Opens `--connections` channels."""
        self._connect(self.conductor.options.connections)

    @task
    def dispatch(self) -> None:
        """Sends the schedule."""
        conductor, session, group = self.conductor, self.session, Group()
        # If a process leaves the run, Locust moves its users to others, which must not send their schedule twice.
        if session.is_dispatched:
            raise StopUser
        session.is_dispatched = True
        try:
            for number, due in session.schedule():
                if self.is_closed_before(due):
                    break
                group.spawn(conductor.ask, number, due, self.send)
            else:
                session.is_exhausted = True
            group.join()
        finally:
            group.kill()
        raise StopUser
