"""Seconds on a device, which works on while the host has gone on. Needs torch."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def synchronize(device: str) -> None:
    """Waits until a device has done all that it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def wall_seconds(call: Callable[[], object], device: str) -> float:
    """From an idle device to an idle device, by the host's clock: what a caller waits."""
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - began


def device_seconds(call: Callable[[], object], device: str) -> float:
    """By the device's own clock where it has one, between an event before the call's work and one after it."""
    if device != "cuda":
        return wall_seconds(call, device)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    before.record()
    call()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / 1e3


def best_seconds(call: Callable[[], object], device: str, tries: int, warm_ups: int = 3) -> float:
    """The least of several: for limits, which are no medians."""
    for _ in range(warm_ups):
        call()
    return min(device_seconds(call, device) for _ in range(tries))
