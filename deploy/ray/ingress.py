"""What stands in front of the replicas: Ray Serve with the HAProxy that it brings. Knows nothing of models or servers.

Ray reads its variables when it is imported, and who starts it hands them on to all of its processes. So whoever starts
Ray by itself (`ray start`) must have set them before, and here they are set before `import ray`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from service.routing import ROUTING_KEY

MAX_STREAMS = 1024
"""Calls at once on one connection; others wait in the client, as they do where a server by itself has as many."""
NOTICE_SECONDS = 5
"""How long a replica that is to stop goes on taking calls: until then every HAProxy knows that it must not be asked."""
BUSIEST = 150
"""Percent of the average load from where on a replica gets no more calls for their keys' sake, as with Envoy."""
METHODS = "deploy.ray.handlers.add_methods"
APPLICATION = "onward"


def environment(max_message_bytes: int, *, by_key: bool) -> Mapping[str, str]:
    """Ray's variables.

    Args:
        max_message_bytes: largest message, either way.
        by_key: whether calls go where their `onward-routing-key` leads, and in turns without one, or to the replica
            with the fewest connections and calls.
    """
    by_load = "leastconn"
    keyed = f"hdr({ROUTING_KEY})\n    hash-type consistent\n    hash-balance-factor {BUSIEST}"
    return {
        # Ray's own proxy leaves streams running that their clients have cancelled.
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # On a loop of their own handlers would never hear of a client that stops reading: Ray keeps what comes then.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(max_message_bytes),
        "RAY_SERVE_HAPROXY_H2_FE_MAX_CONCURRENT_STREAMS": str(MAX_STREAMS),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(NOTICE_SECONDS),
        # HAProxy's own words; Ray writes them into its configuration as they are.
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": keyed if by_key else by_load,
        # What would be told to others of who uses Ray and for what.
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def start(host: str, port: int, http_port: int, *, has_reflection: bool, address: str | None = None) -> None:
    """Starts Ray Serve, which listens from then on; needs `environment` to be in force.

    Args:
        host: where callers come in.
        port: for gRPC.
        http_port: of Ray's own status pages.
        has_reflection: whether clients may ask for the wire contract.
        address: of a Ray that runs; None starts one on this machine alone.
    """
    import ray  # late: only once its variables are set
    from ray import serve
    from ray.serve.config import HTTPOptions, gRPCOptions

    if address is None:
        # Else it joins whatever a file in /tmp tells of, and waits without end where that is a Ray that was killed.
        ray.init(address="local", include_dashboard=False, _node_ip_address="127.0.0.1")
    else:
        ray.init(address=address)
    serve.start(
        http_options=HTTPOptions(host=host, port=http_port),
        grpc_options=gRPCOptions(port=port, grpc_servicer_functions=[METHODS], enable_reflection=has_reflection),
    )


def run(application: Any) -> None:
    """Has replicas of an application serve, in the place of those there are; returns once they do.

    Raises:
        RuntimeError: when they do not; those that ran before go on.
    """
    from ray import serve

    serve.run(application, name=APPLICATION)


def stop() -> None:
    """Lets calls in flight end, and stops."""
    from ray import serve

    serve.shutdown()
