"""All errors for clients and operators, as one tree.

    OnwardError ── RequestError   a request ends without success: below it one class per reason
                └─ StartupError   the server cannot start

Knows nothing of gRPC: `transport.status` maps each leaf to a status code, and a test proves the map total.
"""

from __future__ import annotations

import logging
import reprlib
import secrets
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any, ClassVar

_MAX_SHOWN = 80
"""Characters of a value in an error's text."""
_MAX_PROBLEMS = 4000
"""Characters of all problems of a model in an error's text: clients accept 8 KiB of a status."""
_MAX_PATH = 200
"""Characters of a field's path, which may end with a client's own name."""

_LOGGER = logging.getLogger(__name__)


class OnwardError(Exception):
    """Root of all errors raised on purpose."""


class RequestError(OnwardError):
    """A request that ends without success; `label` is stable and bounded, for metrics and logs."""

    label: ClassVar[str] = "request_error"


class InvalidRequest(RequestError):
    """A field's value breaks a limit. `field` is the full path, as in `sampling.top_p`."""

    label = "invalid_request"

    def __init__(self, field: str, value: object, limit: str) -> None:
        self.field = _cut(field, _MAX_PATH)
        self.value = value
        self.limit = limit
        super().__init__(f"{self.field}: {limit}, got {_shorten(value)}")


class PromptTooLong(InvalidRequest):
    """The prompt, the target prefix or a text to score has too many tokens."""

    label = "prompt_too_long"


class RequestTooLarge(InvalidRequest):
    """The request's K/V would not fit into an empty server's memory."""

    label = "request_too_large"


class UnknownModel(RequestError):
    """The request names a model that is not served, or none of several."""

    label = "unknown_model"

    def __init__(self, model: str, served: Sequence[str]) -> None:
        asked = f"model: {_shorten(model)} is not served" if model else "model: must be named, several are served"
        super().__init__(f"{asked}; served: {', '.join(served) or 'none'}")


class ModelUnfit(RequestError):
    """A model cannot be loaded. `problems` names everything wrong with its artifact; the text is cut for clients."""

    label = "model_unfit"

    def __init__(self, model: str, problems: Sequence[str]) -> None:
        super().__init__(f"{_shorten(model)} cannot be served: {_cut('; '.join(problems), _MAX_PROBLEMS)}")


class UnsupportedFeature(RequestError):
    """The request uses a feature that is advertised as off. `field` is a field's path or a method's name."""

    label = "unsupported_feature"

    def __init__(self, field: str, why: str = "is not offered by this server") -> None:
        self.field = _cut(field, _MAX_PATH)
        self.why = why
        super().__init__(f"{self.field}: {why}")


class AnswerTooLarge(RequestError):
    """The answer exceeds the largest message."""

    label = "answer_too_large"

    def __init__(self, num_bytes: int, limit: int, advice: str = "ask for less or stream it") -> None:
        super().__init__(f"the answer has {num_bytes} bytes, a message has at most {limit}; {advice}")


class Overloaded(RequestError):
    """A model's queue is full. `retry_after_seconds` predicts when it has a place."""

    label = "overloaded"

    def __init__(self, model: str, num_requests: int, limit: int, retry_after_seconds: float) -> None:
        self.num_requests = num_requests
        self.limit = limit
        self.retry_after_seconds = retry_after_seconds
        super().__init__(f"{num_requests} requests of {model} run or wait, the limit is {limit}; retry later")


@dataclass(eq=False, kw_only=True)
class DeadlineUnreachable(RequestError):
    """The answer is predicted to miss its deadline; each time is a prediction.

    Args:
        queue_seconds: wait in the queue.
        prefill_seconds: time of the prompt.
        decode_seconds: time of the tokens after the first; 0 with `partial_on_deadline`.
        left_seconds: time until the answer must be sent.
        retry_after_seconds: when such a request should fit; None if it would not fit an idle server.
    """

    label = "deadline_unreachable"

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    left_seconds: float
    retry_after_seconds: float | None

    def __str__(self) -> str:
        retry = (
            "not even an idle server could answer in time"
            if self.retry_after_seconds is None
            else f"retry in {self.retry_after_seconds:.3f} s"
        )
        return (
            f"the answer is predicted to take {self.queue_seconds + self.prefill_seconds + self.decode_seconds:.3f} s "
            f"(queue {self.queue_seconds:.3f}, prefill {self.prefill_seconds:.3f}, decode {self.decode_seconds:.3f}), "
            f"{self.left_seconds:.3f} s are left until the deadline; {retry}"
        )


class Unauthenticated(RequestError):
    """The call has no API key, or an unknown one. The text reveals nothing of the key."""

    label = "unauthenticated"


class PermissionDenied(RequestError):
    """The caller may not use this method."""

    label = "permission_denied"

    def __init__(self, method: str, permission: str, advice: str = "") -> None:
        super().__init__(f"{method}: needs the permission {permission!r}{advice and f': {advice}'}")


class RateLimited(RequestError):
    """A caller has reached a limit; `retry_after_seconds` is None if a retry cannot succeed."""

    label = "rate_limited"

    def __init__(self, limit: str, retry_after_seconds: float | None) -> None:
        self.retry_after_seconds = retry_after_seconds
        super().__init__(limit if retry_after_seconds is None else f"{limit}; retry later")


class ClientStalled(RequestError):
    """The client did not read its answer, or send its request.

    Args:
        seconds: for how long.
        what: what happened in that time.
    """

    label = "client_stalled"

    def __init__(self, seconds: float, what: str = "nothing was read") -> None:
        self.seconds = seconds
        super().__init__(f"{what} for {seconds:.3g} s")


class NotServing(RequestError):
    """The server is starting, draining or stopped, or a model stayed too busy for a call that needs it idle."""

    label = "not_serving"


class DeadlineExceeded(RequestError):
    """The deadline passed, or could no longer be met, while the request was queued or running."""

    label = "deadline_exceeded"


class RequestCancelled(RequestError):
    """The client cancelled or disconnected."""

    label = "cancelled"


class EngineFailed(RequestError):
    """The engine could not finish the request. Clients see `error_id` alone; the log has the details."""

    label = "engine_failed"

    def __init__(self, error_id: str) -> None:
        self.error_id = error_id
        super().__init__(f"internal error {error_id}")


def error_labels() -> tuple[str, ...]:
    """The label of every request error, sorted."""
    kinds, labels = [*RequestError.__subclasses__()], set()
    while kinds:
        kind = kinds.pop()
        labels.add(kind.label)
        kinds += kind.__subclasses__()
    return tuple(sorted(labels))


class StartupError(OnwardError):
    """The server refuses to start; `problems` names everything that is wrong."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))


class _Renderer(reprlib.Repr):
    """Renders the beginning of a value, and reads no more of it."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxlong = self.maxdict = _MAX_SHOWN
        self.maxlevel = 2

    def repr_str(self, value: str | bytes, level: int) -> str:  # noqa: ARG002
        return repr(value[: _MAX_SHOWN + 1])

    repr_bytes = repr_str

    def repr_instance(self, value: object, level: int) -> str:  # noqa: ARG002
        many = isinstance(value, Sized) and len(value) > _MAX_SHOWN
        return f"{len(value)} entries" if many else repr(value)  # type: ignore[arg-type]

    repr_set = repr_frozenset = repr_instance  # type: ignore[assignment]

    def repr_dict(self, value: dict[Any, Any], level: int) -> str:
        return f"{len(value)} entries" if len(value) > _MAX_SHOWN else super().repr_dict(value, level)


_RENDERER = _Renderer()


def _shorten(value: object) -> str:
    """Renders a client's value within `_MAX_SHOWN` characters, at a bounded cost."""
    return _cut(_RENDERER.repr(value), _MAX_SHOWN)


def _cut(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else f"{text[: max_length - 1]}…"


def report_failure(what: str, cause: BaseException | None = None) -> EngineFailed:
    """Logs `what` and `cause`'s traceback under a fresh id; the returned error carries only the id."""
    error_id = secrets.token_hex(8)
    _LOGGER.error("%s: %s", error_id, what, exc_info=cause)
    return EngineFailed(error_id)
