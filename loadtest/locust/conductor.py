"""Conducts a run under Locust: distributes shares to processes, drains at the end, and accounts for every request.

Locust kills requests in flight when a run ends and gives workers half a second for their last report. Here every end of
a run (all sent, time over, shape over, Ctrl-C, the web page's button) first stops sending, then waits for the requests
in flight, then cancels the rest, and only then lets Locust stop. So the report has every offered request, in one
process, with `--processes`, and with workers on other machines.

Each process has one conductor, stored on Locust's environment and driven by Locust's events.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gevent
import grpc
from gevent.event import Event
from gevent.hub import Hub
from locust import runners
from locust.env import Environment
from locust.exception import StopTest
from locust.runners import STATE_MISSING, MasterRunner, WorkerRunner

from loadtest.core import wire
from loadtest.core.figures import Run, render, summarize
from loadtest.core.records import Outcome, Record
from loadtest.core.wire import Facts
from loadtest.core.workload import Prompt
from loadtest.locust.options import MODEL_VARIABLE, RunOptions, option_names, read_run_options
from loadtest.locust.session import Flight, Ledger, Session, Share
from loadtest.locust.stages import Stage
from onward.v1 import model_pb2 as models
from onward.v1.model_pb2_grpc import ModelServiceStub

BEGIN, STAGE, DRAIN, REPORT = "onward-begin", "onward-stage", "onward-drain", "onward-report"
"""Messages between the leading process and its workers."""
_REPORT_SECONDS = 1.0
_FACTS_TIMEOUT_SECONDS = 10.0
_CANCEL_SECONDS = 10.0
_BAD_RUN = 2
# From the start message to the begin of a run: time for the users to spawn.
_LEAD_SECONDS = 0.2
_LEAD_SECONDS_OF_MASTER = 1.5
# Locust's master drops a worker after three seconds without a heartbeat; on a busy machine a starting worker is silent
# for longer.
_MISSED_HEARTBEATS = 30

# Locust logs why a run stops; gevent would print a traceback besides.
Hub.NOT_ERROR = (*Hub.NOT_ERROR, StopTest)

log = logging.getLogger(__name__)


class StreamError(Exception):
    """A request that did not finish; its text is the code alone, because Locust counts errors by text."""


def conductor_of(environment: Environment) -> Conductor:
    """The conductor of a process."""
    conductor: Conductor = environment.conductor  # type: ignore[attr-defined]
    return conductor


def target_of(environment: Environment) -> str:
    """The host:port of Locust's `--host`, with or without a scheme."""
    host = environment.host or ""
    return (host.partition("://")[2] or host).rstrip("/")


class Conductor:
    """One process's conductor.

    Raises:
        ValueError: if the options are invalid.
    """

    def __init__(self, environment: Environment) -> None:
        environment.conductor = self  # type: ignore[attr-defined]
        self.closing = Event()
        """Set while sending is stopped."""
        self.session: Session | None = None
        """This process's share; a master has none."""
        self.ledger = Ledger()
        self._environment = environment
        self._runner = environment.runner
        self._clients: dict[int, str] = {}
        self._stage: Stage | None = None
        self._begins_at: float | None = None
        self._reporter: gevent.Greenlet | None = None
        self._drainer: gevent.Greenlet | None = None
        self._closed_at: float | None = None
        self.options = read_run_options(environment.parsed_options)
        """The options of the current run; the web form may change them between runs."""
        events = environment.events
        events.test_stopping.add_listener(lambda **_: self._drain())
        if isinstance(self._runner, WorkerRunner):
            self._runner.register_message(BEGIN, lambda msg, **_: self._join(**msg.data))
            self._runner.register_message(STAGE, lambda msg, **_: self._enter(**msg.data))
            self._runner.register_message(DRAIN, lambda **_: self._close())
        else:
            events.test_start.add_listener(lambda **_: self._lead())
            events.test_stop.add_listener(lambda **_: self._report())
            if isinstance(self._runner, MasterRunner):
                runners.HEARTBEAT_LIVENESS = _MISSED_HEARTBEATS
                self._runner.register_message(REPORT, lambda msg, **_: self.ledger.add(msg.data))

    # Requests.

    def ask(self, number: int, due: float | None, send: Callable[[Prompt, str], Any]) -> None:
        """Runs one request to its end in the caller's greenlet.

        Args:
            number: the request's number in the run.
            due: when it is due, in seconds since the run began; None for now.
            send: starts an `onward.v1` stream for a prompt and a request id.
        """
        session = self.session
        if session is None:
            raise RuntimeError("no run is active")
        flight, prompt = session.offer(number, due)
        patience = None
        if prompt.patience_seconds is not None:
            patience = gevent.spawn_later(prompt.patience_seconds, flight.cancel)
        # The result if Locust kills this greenlet.
        code, detail = "CANCELLED", ""
        try:
            code, detail = _read(flight, send(prompt, flight.watch.request_id), session.now)
        except gevent.GreenletExit:
            flight.cancel()
            raise
        finally:
            if patience is not None:
                patience.kill(block=False)
            self._fire(session.ended(flight, code, detail))

    def _fire(self, record: Record) -> None:
        """Reports to Locust. A request's entries all come at its end, so every statistic covers the same requests."""

        def fire(name: str, seconds: float, tokens: int, exception: Exception | None = None) -> None:
            self._environment.events.request.fire(
                request_type="grpc",
                name=f"{name} {record.stage}".rstrip(),
                response_time=1e3 * seconds,
                response_length=tokens,
                exception=exception,
                context={},
            )

        if record.outcome is not Outcome.FINISHED:
            error = StreamError(record.code)
            fire(record.outcome.value, record.end_to_end_seconds, record.generated_tokens, error)
            return
        if record.first_token_seconds is not None:
            fire("TTFT", record.first_token_seconds, 1)
        for gap in record.gaps:
            fire("ITL", gap, 1)
        fire("E2E", record.end_to_end_seconds, record.generated_tokens)

    # The course of a run.

    def plan(self, kind: str) -> Stage | None:
        """The current stage of a shape (empty: the one in the options); None ends the run."""
        if self._stage is None:
            self._read_options()
        living = self._living()
        # Locust's own clock of a run starts before any user exists.
        at = 0.0 if self._begins_at is None else max(0.0, time.monotonic() - self._begins_at)
        stage = self.options.stage(kind, at, len(self._clients) or len(self._processes()))
        if living and self.ledger.is_exhausted(living):
            stage = None
        if stage is None and self._stage is not None:
            # While Locust stops it reads no streams for a good part of a second: drain first.
            self._close()
            return None if self._is_drained else self._stage
        if stage is not None and stage != self._stage:
            entered = {"name": stage.name, "prompt_tokens": stage.prompt_tokens}
            if self._stage is not None:
                self._send_stage(entered)
            self._stage = stage
        return stage

    def _read_options(self) -> None:
        """Reads the current options.

        Raises:
            StopTest: if they are invalid.
        """
        try:
            self.options = read_run_options(self._environment.parsed_options)
        except ValueError as error:
            raise self._cannot_run(str(error)) from None

    def _cannot_run(self, why: str) -> StopTest:
        self._environment.process_exit_code = _BAD_RUN
        return StopTest(why)

    def _send_stage(self, entered: dict[str, Any]) -> None:
        if isinstance(self._runner, MasterRunner):
            self._runner.send_message(STAGE, entered)
        else:
            self._enter(**entered)

    def check(self) -> Facts:
        """Asks the server for the model and checks the options against it, before any process has a share.

        Raises:
            ValueError: if the server does not answer, or no run is possible; in one line.
        """
        options, target = self.options, target_of(self._environment)
        options.check(len(self._processes()))
        try:
            facts = self._facts(options, target)
        except grpc.RpcError as error:
            raise ValueError(f"{target}: {error.code().name}: {error.details()}") from None
        options.load.workload(facts.vocab_size)
        return facts

    def _lead(self) -> None:
        """Begins a run: gives each process its share.

        Raises:
            StopTest: if the options are invalid or the server does not answer.
        """
        self._read_options()
        options = self.options
        try:
            facts = self.check()
        except ValueError as error:
            raise self._cannot_run(str(error)) from None
        processes = self._processes()
        self.ledger = Ledger(uuid.uuid4().hex[:8], len(processes), is_open=options.load.arrivals is not None)
        self._clients = dict(enumerate(processes))
        lead = _LEAD_SECONDS_OF_MASTER if isinstance(self._runner, MasterRunner) else _LEAD_SECONDS
        begin = time.time() + lead
        self._begins_at = time.monotonic() + lead
        for index, client in self._clients.items():
            part = Share(
                run=self.ledger.run,
                index=index,
                count=len(processes),
                begin=begin,
                vocab_size=facts.vocab_size,
                model=facts.model,
                seconds=options.seconds,
            )
            if isinstance(self._runner, MasterRunner):
                values = vars(self._environment.parsed_options)
                shared = {name: values[name] for name in option_names()}
                self._runner.send_message(BEGIN, {"part": asdict(part), "options": shared}, client_id=client)
            else:
                self._begin(part)
        if self._stage is not None:
            self._send_stage({"name": self._stage.name, "prompt_tokens": self._stage.prompt_tokens})

    def _facts(self, options: RunOptions, target: str) -> Facts:
        if options.load.vocab_size:
            return Facts(options.load.model, options.load.vocab_size)
        access = options.load.access
        with access.open(target) as channel:
            request = models.GetModelRequest(model=options.load.model)
            stub = ModelServiceStub(channel)
            timeout, metadata = _FACTS_TIMEOUT_SECONDS, access.metadata
            try:
                return wire.onward_facts(stub.GetModel(request, timeout=timeout, metadata=metadata))
            except grpc.RpcError as error:
                if options.load.model or error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
                listed = stub.ListModels(models.ListModelsRequest(), timeout=timeout, metadata=metadata)
                served = [each.name for each in listed.models]
            if not served:
                raise ValueError(f"{target} serves no model")
            named = ", ".join(served)
            raise ValueError(f"{target} serves several models, name one with --model or {MODEL_VARIABLE}: {named}")

    def _join(self, part: dict[str, Any], options: dict[str, Any]) -> None:
        """Takes a share from the master, whose options override this worker's command line."""
        vars(self._environment.parsed_options).update(options)
        try:
            self._begin(Share(**part))
        except (StopTest, ValueError) as error:
            # For example a missing file. The master must not wait for this worker; the report counts it as silent.
            log.error("this process leaves the run: %s", error)
            if isinstance(self._runner, WorkerRunner):
                gevent.spawn(self._runner.quit)

    def _begin(self, part: Share) -> None:
        self._read_options()
        self.session = Session(part, self.options.load)
        self._drainer = self._closed_at = None
        self.closing.clear()
        if self._reporter is not None:
            self._reporter.kill()
        self._reporter = gevent.spawn(self._keep_reporting)

    def _enter(self, name: str, prompt_tokens: int | None) -> None:
        if self.session is not None:
            self.session.enter(name, prompt_tokens)

    def _keep_reporting(self) -> None:
        while True:
            self._send_report()
            gevent.sleep(_REPORT_SECONDS)

    def _send_report(self) -> None:
        if self.session is not None:
            message = self.session.report()
            if isinstance(self._runner, WorkerRunner):
                self._runner.send_message(REPORT, message)
            else:
                self.ledger.add(message)

    # The end of a run.

    def _close(self) -> None:
        """Stops sending here, or from a master in every worker; returns at once."""
        if self._closed_at is not None:
            return
        self._closed_at = time.monotonic()
        if isinstance(self._runner, MasterRunner):
            self._runner.send_message(DRAIN)
        elif self.session is not None:
            self._drainer = gevent.spawn(self._drain_session, self.session)

    def _drain_session(self, session: Session) -> None:
        """Waits for this process's requests in flight, cancels the rest, and reports."""
        session.is_closed = True
        self.closing.set()
        self._wait_for_flights(session, session.load.drain_seconds)
        session.cancel()
        self._wait_for_flights(session, _CANCEL_SECONDS)
        session.is_drained = True
        self._send_report()

    @property
    def _is_drained(self) -> bool:
        """Whether no request is in flight, or the time to wait for them is over."""
        if self._closed_at is None:
            return False
        if self._drainer is not None:
            return bool(self._drainer.ready())
        limit = self._closed_at + self.options.load.drain_seconds + 2 * _CANCEL_SECONDS
        return self.ledger.is_drained(self._living()) or time.monotonic() > limit

    def _drain(self) -> None:
        """Delays Locust's stop until no request is in flight."""
        self._close()
        while not self._is_drained:
            gevent.sleep(0.02)
        if self._reporter is not None:
            self._reporter.kill()
        self._reporter = self._drainer = self._stage = self._begins_at = self._closed_at = None
        self._clients = {}

    def _wait_for_flights(self, session: Session, seconds: float) -> None:
        limit = time.monotonic() + seconds
        while session.in_flight and time.monotonic() < limit:
            gevent.sleep(0.01)

    def report(self) -> dict[str, Any]:
        """The report so far; requests in flight count as missing."""
        wanted = self.options.load.wanted
        run = self.ledger.to_run()
        report = summarize(run, wanted)
        stages = list(dict.fromkeys(record.stage for record in sorted(run.records, key=lambda record: record.sent)))
        if stages != [""]:
            report["stages"] = {stage: summarize(_part_of(run, stage), wanted) for stage in stages}
        return report

    def _report(self) -> None:
        """Prints the report, and writes it to the file in the options."""
        if not self.ledger.run:
            return
        report, options = self.report(), self.options
        print(f"\n{render(report, options.load.wanted)}\n", flush=True)  # noqa: T201 (as Locust prints its tables)
        if report["missing"] or report["silent"]:
            self._environment.process_exit_code = 1
        if options.report is not None:
            self._write(options.report, report, is_detailed=options.is_report_detailed)

    def _write(self, path: Path, report: dict[str, Any], *, is_detailed: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_detailed:
            records = [record.to_dict() for record in sorted(self.ledger.records, key=lambda record: record.number)]
            report |= {"began_monotonic": self.ledger.began, "requests": records}
        # Write and rename, so that readers never see half a file.
        draft = path.with_name(f"{path.name}.draft")
        draft.write_text(json.dumps(report, allow_nan=False) + "\n", encoding="utf-8")
        draft.replace(path)
        log.info("report in %s", path)

    # Processes.

    def _processes(self) -> list[str]:
        """Ids of the sending processes, in the order of their shares."""
        if isinstance(self._runner, MasterRunner):
            clients = self._runner.clients
            return [client.id for client in (*clients.ready, *clients.running, *clients.spawning)]
        return [""]

    def _living(self) -> list[int]:
        """Shares whose process is alive."""
        if not isinstance(self._runner, MasterRunner):
            return list(self._clients)
        clients = self._runner.clients
        alive = {client.id for client in clients.all if client.state != STATE_MISSING}
        return [index for index, client in self._clients.items() if client in alive]


def _read(flight: Flight, call: Any, now: Callable[[], float]) -> tuple[str, str]:
    """Records every message; returns the final code and detail."""
    watch = flight.watch
    flight.sent(call.cancel)
    try:
        for event in call:
            watch.saw(wire.onward_piece(event), now())
    except grpc.RpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


def _part_of(run: Run, stage: str) -> Run:
    """The requests of one stage, from the first due time to the last end."""
    records = [record for record in run.records if record.stage == stage]
    seconds = max(record.ended for record in records) - min(record.intended for record in records)
    return replace(run, records=records, offered=len(records), seconds=seconds, clients=())
