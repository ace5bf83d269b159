"""`python -m deploy.ray --models DIR [--replicas 2] [--port 8001] [-- FLAGS]`: the server on Ray, on this machine.

Calls go through the HAProxy that Ray brings (its Python proxy leaves cancelled streams running), to the replica with
the fewest, or with `--by-key` to the one that `onward-routing-key` leads to. FLAGS are those of `python -m service
serve`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from service.routing import ROUTING_KEY

_ADDERS = tuple(
    f"proto.{module}_pb2_grpc.add_{service}Servicer_to_server"
    for module, service in (
        ("onward.v1.generation", "GenerationService"),
        ("onward.v1.model", "ModelService"),
        ("inference.open_inference", "GRPCInferenceService"),
    )
)
_HOST = "127.0.0.1"
_MAX_REQUESTS = 1024


def main(arguments: Sequence[str]) -> int:
    """Starts Ray and the replicas, and stops them at SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m deploy.ray", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", required=True, help="folder whose subfolders are the models to serve")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--cores", type=float, default=1.0, help="of each replica")
    parser.add_argument("--port", type=int, default=8001, help="for gRPC")
    parser.add_argument("--http-port", type=int, default=8000, help="of Ray's own status pages")
    parser.add_argument("--by-key", action="store_true", help=f"choose replicas by {ROUTING_KEY}")
    parser.add_argument("flags", nargs="*", help="of each replica's server")
    given = parser.parse_args(arguments)
    # Ray reads them when it is imported, and hands them on to its workers.
    os.environ |= {"RAY_SERVE_ENABLE_HA_PROXY": "1"}  # noqa: TID251 (Ray's, not the server's)
    if given.by_key:
        balance = f"hdr({ROUTING_KEY})\n    hash-type consistent"
        os.environ |= {"RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": balance}  # noqa: TID251
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions, gRPCOptions

    from deploy.ray.deployment import Onward

    ray.init(include_dashboard=False, _node_ip_address=_HOST)
    serve.start(
        http_options=HTTPOptions(host=_HOST, port=given.http_port),
        grpc_options=gRPCOptions(port=given.port, grpc_servicer_functions=list(_ADDERS)),
    )
    flags = ["--models", given.models, "--no-metrics", *given.flags]
    replica = Onward.options(
        num_replicas=given.replicas,
        max_ongoing_requests=_MAX_REQUESTS,
        max_queued_requests=_MAX_REQUESTS,
        ray_actor_options={"num_cpus": given.cores},
    )
    serve.run(replica.bind(flags), name="onward")
    print(f"onward: {given.replicas} replicas listening on {_HOST}:{given.port}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    serve.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
