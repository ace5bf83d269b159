"""Every error that a client or an operator can meet, as one tree.

    OnwardError
    ├── RequestError                     the request's fault or fate; `label` is its name in metrics
    │   ├── InvalidRequest               a field has a value outside its limit
    │   │   ├── PromptTooLong            the prompt or target prefix leaves no room in the context
    │   │   └── RequestTooLarge          its keys and values would not fit into memory, had it the server to itself
    │   ├── UnknownModel                 no such model is served
    │   ├── ModelUnfit                   an artifact that cannot be served; lists every problem
    │   ├── UnsupportedFeature           a field asks for what this model or version does not offer
    │   ├── AnswerTooLarge               the answer is there, but no message can hold it
    │   ├── Unauthenticated              no API key, or an unknown one
    │   ├── PermissionDenied             the API key, or the server, is not for this method
    │   ├── RateLimited                  the API key is used too much; carries when to come again
    │   ├── ClientStalled                the client has not read for too long
    │   ├── Overloaded                   the queue is full; carries when to come again
    │   ├── DeadlineUnreachable          the deadline would pass before the answer; carries what was predicted
    │   ├── NotServing                   starting, draining, stopped, or too busy for what needs an idle model
    │   ├── DeadlineExceeded             the request's deadline passed
    │   ├── RequestCancelled             the client went away
    │   └── EngineFailed                 our fault; details only in the log
    └── StartupError                     the server cannot start; lists every problem

Knows nothing of gRPC: `transport.status` maps each leaf to a status code, and a test proves the map total.
"""

from __future__ import annotations

import logging
import reprlib
import secrets
from collections.abc import Sequence, Sized
from typing import ClassVar

_MAX_SHOWN = 80
"""Characters of a value in an error's text."""
_MAX_PROBLEMS = 4000
"""Characters of all problems of a model in an error's text: clients take 8 KiB of a status."""
_MAX_PATH = 200
"""Characters of a field's path, which may end with a name that the client chose."""

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
        self.field = field if len(field) <= _MAX_PATH else f"{field[: _MAX_PATH - 1]}…"
        self.value = value
        self.limit = limit
        super().__init__(f"{self.field}: {limit}, got {_shorten(value)}")


class PromptTooLong(InvalidRequest):
    """The prompt, the target prefix or a text to score has more tokens than there is room for."""

    label = "prompt_too_long"


class RequestTooLarge(InvalidRequest):
    """The request would not fit into the memory for keys and values, had it the server to itself."""

    label = "request_too_large"


class UnknownModel(RequestError):
    """The request names a model that is not served, or names none where several are."""

    label = "unknown_model"

    def __init__(self, model: str, served: Sequence[str]) -> None:
        self.model = model
        self.served = tuple(served)
        asked = f"model: {_shorten(model)} is not served" if model else "model: must be named, several are served"
        super().__init__(f"{asked}; served: {', '.join(served) or 'none'}")


class ModelUnfit(RequestError):
    """A model that was to be loaded cannot be served. `problems` names everything that is wrong with its artifact.

    The text has as much of them as a client takes.
    """

    label = "model_unfit"

    def __init__(self, model: str, problems: Sequence[str]) -> None:
        self.model = model
        self.problems = tuple(problems)
        text = "; ".join(problems)
        text = text if len(text) <= _MAX_PROBLEMS else f"{text[: _MAX_PROBLEMS - 1]}…"
        super().__init__(f"{_shorten(model)} cannot be served: {text}")


class UnsupportedFeature(RequestError):
    """The request asks for something this server advertises as off. `field` is a field's path or a method's name."""

    label = "unsupported_feature"

    def __init__(self, field: str, why: str = "is not offered by this server") -> None:
        self.field = field
        super().__init__(f"{field}: {why}")


class AnswerTooLarge(RequestError):
    """The answer is larger than a message may be."""

    label = "answer_too_large"

    def __init__(self, num_bytes: int, limit: int, advice: str = "ask for less or stream it") -> None:
        self.num_bytes = num_bytes
        self.limit = limit
        super().__init__(f"the answer has {num_bytes} bytes, a message has at most {limit}; {advice}")


class Overloaded(RequestError):
    """All of a model's places are taken. `retry_after_seconds` is an estimate of when one will be free."""

    label = "overloaded"

    def __init__(self, model: str, num_requests: int, limit: int, retry_after_seconds: float) -> None:
        self.model = model
        self.num_requests = num_requests
        self.limit = limit
        self.retry_after_seconds = retry_after_seconds
        super().__init__(f"{num_requests} requests of {model} run or wait, the limit is {limit}; retry later")


class DeadlineUnreachable(RequestError):
    """The request is predicted to be over only after its deadline.

    Args:
        queue_seconds: predicted wait for a place.
        prefill_seconds: predicted time of the prompt.
        decode_seconds: predicted time of the tokens after the first; 0 for a request that takes what there is.
        left_seconds: what is left until the answer must be on its way.
        retry_after_seconds: when such a request should fit; None when it would not, had it the server to itself.
    """

    label = "deadline_unreachable"

    def __init__(
        self,
        *,
        queue_seconds: float,
        prefill_seconds: float,
        decode_seconds: float,
        left_seconds: float,
        retry_after_seconds: float | None,
    ) -> None:
        self.queue_seconds = queue_seconds
        self.prefill_seconds = prefill_seconds
        self.decode_seconds = decode_seconds
        self.left_seconds = left_seconds
        self.retry_after_seconds = retry_after_seconds
        retry = (
            "not even an idle server could answer in time"
            if retry_after_seconds is None
            else f"retry in {retry_after_seconds:.3f} s"
        )
        super().__init__(
            f"the answer is predicted to take {queue_seconds + prefill_seconds + decode_seconds:.3f} s "
            f"(queue {queue_seconds:.3f}, prefill {prefill_seconds:.3f}, decode {decode_seconds:.3f}), "
            f"{left_seconds:.3f} s are left until the deadline; {retry}"
        )


class Unauthenticated(RequestError):
    """The call shows no API key, or one that is not known. The text says which, and nothing of the key."""

    label = "unauthenticated"


class PermissionDenied(RequestError):
    """The caller may not use this method."""

    label = "permission_denied"

    def __init__(self, method: str, permission: str, advice: str = "") -> None:
        self.method = method
        self.permission = permission
        super().__init__(f"{method}: needs the permission {permission!r}{advice and f': {advice}'}")


class RateLimited(RequestError):
    """An API key has used up its allowance for now; `retry_after_seconds` says when there is more, None for never."""

    label = "rate_limited"

    def __init__(self, limit: str, retry_after_seconds: float | None) -> None:
        self.retry_after_seconds = retry_after_seconds
        super().__init__(limit if retry_after_seconds is None else f"{limit}; retry later")


class ClientStalled(RequestError):
    """The client holds a place without reading what it asked for, or without sending what it asks.

    Args:
        seconds: for how long.
        what: what happened in that time.
    """

    label = "client_stalled"

    def __init__(self, seconds: float, what: str = "nothing was read") -> None:
        self.seconds = seconds
        super().__init__(f"{what} for {seconds:.3g} s")


class NotServing(RequestError):
    """The server is starting, draining or stopped, or a model was too busy for what needs it idle."""

    label = "not_serving"


class DeadlineExceeded(RequestError):
    """The deadline passed while the request was queued or running, or could not be met any more in the queue."""

    label = "deadline_exceeded"


class RequestCancelled(RequestError):
    """The client cancelled or disconnected."""

    label = "cancelled"


class EngineFailed(RequestError):
    """The engine could not finish the request. Clients see `error_id` and nothing else; the log has the rest."""

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
    """The server refuses to start; `problems` names everything that is wrong, not just the first."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))


class _Renderer(reprlib.Repr):
    """Renders the beginning of a value, and looks at no more of it, however large it is."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxlong = _MAX_SHOWN
        self.maxlevel = 2

    def repr_str(self, value: str | bytes, level: int) -> str:  # noqa: ARG002
        return repr(value[: _MAX_SHOWN + 1])

    repr_bytes = repr_str

    def repr_instance(self, value: object, level: int) -> str:  # noqa: ARG002
        many = isinstance(value, Sized) and len(value) > _MAX_SHOWN
        return f"{len(value)} entries" if many else repr(value)  # type: ignore[arg-type]

    repr_set = repr_frozenset = repr_dict = repr_instance  # type: ignore[assignment]


_RENDERER = _Renderer()


def _shorten(value: object) -> str:
    """Bounded rendering of a client's value: an error never echoes a megabyte, nor costs what one does."""
    text = _RENDERER.repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"


def report_failure(what: str, cause: BaseException | None = None) -> EngineFailed:
    """Logs `what` and `cause`'s traceback under a fresh id; the error to end the request with carries only the id."""
    error_id = secrets.token_hex(8)
    _LOGGER.error("%s: %s", error_id, what, exc_info=cause)
    return EngineFailed(error_id)
