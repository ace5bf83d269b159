"""What a cancelled call is counted as."""

from __future__ import annotations

import grpc
import pytest

from service.transport.interceptors import _cancelled_code


@pytest.mark.parametrize(
    ("elapsed", "timeout", "code"),
    [
        (5.0, None, grpc.StatusCode.CANCELLED),
        (0.02, 0.05, grpc.StatusCode.CANCELLED),
        (20.0, 30.0, grpc.StatusCode.CANCELLED),
        (0.045, 0.05, grpc.StatusCode.DEADLINE_EXCEEDED),
        (29.7, 30.0, grpc.StatusCode.DEADLINE_EXCEEDED),
        (31.0, 30.0, grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
)
def test_client_that_hangs_up_when_its_time_is_up_was_not_impatient(
    elapsed: float, timeout: float | None, code: grpc.StatusCode
) -> None:
    assert _cancelled_code(elapsed, timeout) is code
