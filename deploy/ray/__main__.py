"""`python -m deploy.ray --models DIR [--replicas 2] [--port 8001] [-- FLAGS]`: the server on Ray Serve.

Starts Ray on this machine, or joins the one at `--address`. Calls go to the replica with the fewest, or with `--by-key`
by their `onward-routing-key`. FLAGS are those of `python -m service serve`. SIGHUP replaces the replicas one by one, to
serve what the folder holds now; SIGTERM drains and stops.
"""

from __future__ import annotations

import argparse
import os
import queue
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.ray import ingress
from service.config import ServeConfig, parse_command_line
from service.errors import StartupError
from service.routing import ROUTING_KEY

TARGETS = Path("build/ray-metrics")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# A server queues no calls beyond its limit; one is the least that Ray allows.
_MAX_QUEUED = 1
_CLOSING_SECONDS = 15.0


def main(arguments: Sequence[str]) -> int:
    """Starts Ray and the replicas, and stops them at SIGTERM or SIGINT; the process's exit status."""
    given = _parser().parse_args(arguments)
    flags = ["--models", str(Path(given.models).resolve()), "--host", given.host, "--metrics-port", "0", *given.flags]
    try:
        config = parse_command_line(["serve", *flags])
        assert isinstance(config, ServeConfig)  # noqa: S101 (the verb says so)
        if config.tls_certificate is not None:
            raise StartupError(["--tls-certificate has no effect here: Ray takes calls, and speaks no TLS"])
        if config.http_port is not None:
            raise StartupError(["--http-port has no place here: each replica would open it, past Ray"])
    except StartupError as error:
        for problem in error.problems:
            print(f"onward: {problem}", file=sys.stderr)
        return 2
    if config.threads is None:
        flags += ["--threads", str(max(1, int(given.cores)))]
    variables = ingress.environment(config.max_message_bytes, by_key=given.by_key)
    if given.environment:
        for name, value in variables.items():
            print(f"export {name}={shlex.quote(value)}")
        return 0
    os.environ |= variables  # noqa: TID251 (Ray's, not the server's)
    ingress.start(given.host, given.port, given.http_port, has_reflection=config.reflection, address=given.address)
    application = _application(given, config, flags)
    ingress.run(application)
    print(f"onward: {given.replicas} replicas listening on {given.host}:{given.port}", flush=True)
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in _SIGNALS:
        signal.signal(number, lambda number, _: signals.put(number))
    while signals.get() == signal.SIGHUP:
        try:
            ingress.run(application)
        except RuntimeError as error:
            print(f"onward: the replicas were not replaced: {error}", file=sys.stderr, flush=True)
        else:
            print("onward: the replicas are new", flush=True)
    ingress.stop()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.ray", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", required=True, help="folder whose subfolders are the models to serve")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--max-replicas", type=int, help="upper bound of autoscaling; default: no autoscaling")
    parser.add_argument(
        "--upscale-seconds", type=float, default=30.0, help="how long demand must be higher before replicas are added"
    )
    parser.add_argument(
        "--downscale-seconds",
        type=float,
        default=600.0,
        help="how long demand must be lower before replicas are removed",
    )
    parser.add_argument("--cores", type=float, default=1.0, help="of each replica; also its --threads unless given")
    parser.add_argument("--gpus", type=float, default=0.0, help="of each replica")
    parser.add_argument(
        "--surge-percent",
        type=int,
        default=0,
        help="of replicas that may start before old ones stop when they are replaced; needs free cores",
    )
    parser.add_argument("--host", default="127.0.0.1", help="for calls and metrics")
    parser.add_argument("--port", type=int, default=8001, help="for gRPC")
    parser.add_argument("--http-port", type=int, default=8000, help="for Ray's own status pages")
    parser.add_argument("--by-key", action="store_true", help=f"choose replicas by {ROUTING_KEY}")
    parser.add_argument("--targets", type=Path, default=TARGETS, help="folder where Prometheus finds the replicas")
    parser.add_argument("--address", help="of a running Ray, as in 127.0.0.1:6379; default: start one")
    parser.add_argument(
        "--environment", action="store_true", help="print what must be exported before such a Ray is started, and exit"
    )
    parser.add_argument("flags", nargs="*", help="of each replica's server")
    return parser


def _application(given: argparse.Namespace, config: ServeConfig, flags: Sequence[str]) -> Any:
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy  # late: only once its variables are set

    from deploy.ray import demand
    from deploy.ray.deployment import Onward

    many: dict[str, Any] = {"num_replicas": given.replicas}
    if given.max_replicas is not None:
        many = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=given.replicas,
                max_replicas=given.max_replicas,
                upscale_delay_s=given.upscale_seconds,
                downscale_delay_s=given.downscale_seconds,
                policy=AutoscalingPolicy(policy_function=demand.replicas),
            )
        }
    return Onward.options(
        **many,
        max_ongoing_requests=config.max_concurrent_rpcs,
        max_queued_requests=_MAX_QUEUED,
        ray_actor_options={"num_cpus": given.cores, "num_gpus": given.gpus},
        max_surge_percent=given.surge_percent,
        max_constructor_retry_count=3,
        health_check_period_s=2.0,
        # Ray counts from the replica's notice on; the rest is for the calls in flight.
        graceful_shutdown_timeout_s=ingress.NOTICE_SECONDS + config.drain_grace_seconds + _CLOSING_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
    ).bind(list(flags), str(given.targets.resolve()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
