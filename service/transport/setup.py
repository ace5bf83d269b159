"""From the configuration to who may call, TLS, and the limits of the transport."""

from __future__ import annotations

import ipaddress

import grpc

from service.access import Access, KeyAccess, OpenAccess
from service.config import ServeConfig
from service.transport.permissions import MANAGING, PERMISSIONS
from service.transport.server import TransportLimits
from service.transport.tls import TlsFiles, server_credentials


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_access(config: ServeConfig) -> Access:
    """API keys if there are any; else open, managing models only for this machine or certified clients."""
    if config.api_keys is not None:
        return KeyAccess(config.api_keys, PERMISSIONS)
    is_open = config.tls_client_ca is not None or is_loopback(config.host)
    return OpenAccess(closed=() if is_open else MANAGING)


def make_credentials(config: ServeConfig) -> grpc.ServerCredentials | None:
    """TLS, None where it is off."""
    if config.tls_certificate is None or config.tls_key is None:
        return None
    return server_credentials(TlsFiles(config.tls_certificate, config.tls_key, config.tls_client_ca))


def transport_limits(config: ServeConfig) -> TransportLimits:
    """The operator's limits of messages, calls and connections."""
    return TransportLimits(
        max_message_bytes=config.max_message_bytes,
        max_metadata_bytes=config.max_metadata_bytes,
        max_concurrent_rpcs=config.max_concurrent_rpcs,
        max_stall_seconds=config.max_stall_seconds,
        max_connections=config.max_connections,
        keepalive_seconds=config.keepalive_seconds,
    )
