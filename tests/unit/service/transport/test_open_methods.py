"""Callers of methods that need no key."""

from __future__ import annotations

import pytest

from service.transport.open_methods import address_of


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.1:5000", "10.0.0.1"),
        ("ipv6:%5B2001:db8:1:2:3::4%5D:5000", "2001:db8:1:2::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:5000", "fe80::/64"),
    ],
)
def test_an_address_of_ipv6_is_its_network(peer: str, address: str) -> None:
    assert address_of(peer) == address
