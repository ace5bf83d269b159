"""Ray Serve and its HAProxy in front of the replicas. Knows nothing of models or servers.

Ray reads its variables when it is imported, and passes them on to its processes. They must be set before `ray start`,
or here before `import ray`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from service.routing import ROUTING_KEY

MAX_STREAMS = 1024
"""Concurrent calls on one connection, as of a server by itself; others wait in the client."""
NOTICE_SECONDS = 5
"""How long a stopping replica still takes calls: until every HAProxy has removed it."""
BUSIEST = 150
"""Percent of the average load beyond which a replica gets no more calls by key, as with Envoy."""
METHODS = "deploy.ray.handlers.add_methods"
APPLICATION = "onward"


def environment(max_message_bytes: int, *, by_key: bool) -> Mapping[str, str]:
    """Ray's variables.

    Calls go to the replica with the fewest connections and calls; with `by_key`, by their `onward-routing-key`, and in
    turns without one.
    """
    by_load = "leastconn"
    keyed = f"hdr({ROUTING_KEY})\n    hash-type consistent\n    hash-balance-factor {BUSIEST}"
    return {
        # Ray's own proxy does not cancel streams whose clients have.
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # On a loop of their own handlers would not notice a client that stops reading: Ray buffers the answers.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(max_message_bytes),
        "RAY_SERVE_HAPROXY_H2_FE_MAX_CONCURRENT_STREAMS": str(MAX_STREAMS),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(NOTICE_SECONDS),
        # Copied into HAProxy's configuration.
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": keyed if by_key else by_load,
        # No usage statistics to Ray's makers.
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def start(host: str, port: int, http_port: int, *, has_reflection: bool, address: str | None = None) -> None:
    """Starts Ray Serve, which listens from then on; `environment` must be set before.

    Joins the Ray at `address`; None starts one on this machine alone.
    """
    import ray  # late: only once its variables are set
    from ray import serve
    from ray.serve.config import HTTPOptions, gRPCOptions

    if address is None:
        # Else Ray joins the one that a file in /tmp names, and waits forever if that was killed.
        ray.init(address="local", include_dashboard=False, _node_ip_address="127.0.0.1")
    else:
        ray.init(address=address)
    serve.start(
        http_options=HTTPOptions(host=host, port=http_port),
        grpc_options=gRPCOptions(port=port, grpc_servicer_functions=[METHODS], enable_reflection=has_reflection),
    )


def run(application: Any) -> None:
    """Starts replicas of an application in place of the running ones; returns once they serve.

    Raises:
        RuntimeError: when they do not; the former ones go on.
    """
    from ray import serve

    serve.run(application, name=APPLICATION)


def stop() -> None:
    """Lets calls in flight end, and stops."""
    from ray import serve

    serve.shutdown()
