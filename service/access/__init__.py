"""Access control: whether a call may run, by its method and the API key that it shows.

    key ──> known? ──> allowed this method? ──> a place free? ──> rate left? ──> the call runs

A changed key file is read within a second; an unusable one leaves the keys as they were. Each request of a call with
many is checked and counted as a call would be. Runs on the event loop. Knows nothing of gRPC: method names are plain
text.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from service.access.caller import RETRY_SECONDS, Caller, Use, current_caller, serving
from service.access.keys import ApiKey, Permission, read_keys
from service.errors import PermissionDenied, RateLimited, StartupError, Unauthenticated

__all__ = ["Access", "Allowance", "ApiKey", "Caller", "KeyAccess", "OpenAccess", "Permission", "current_caller"]

_LOGGER = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_HOW_TO_OPEN = (
    "this server is reached beyond loopback and knows no callers; start it with --api-keys and show a key that has the "
    "permission, start it with --tls-client-ca, or have it listen on loopback"
)


@dataclass(slots=True, kw_only=True)
class Allowance:
    """What an admitted call may ask; this one counts nothing.

    `owner` is the name of the call's key, None without keys.
    """

    owner: str | None = None

    def refund(self) -> None:
        """Returns the call's token to its key: it was refused before anything of it was read."""

    @contextmanager
    def request(self) -> Iterator[None]:
        """A context for one of a call's many requests. The call counts as its first, and has one place.

        Raises:
            Unauthenticated: when the key was removed.
            PermissionDenied: when the key lost the method's permission.
            RateLimited: when the key is used too often, or by too many requests at once.
        """
        yield


@dataclass(frozen=True, slots=True)
class OpenAccess:
    """No API keys: every caller may use every method, except `closed` ones."""

    closed: Collection[str] = ()

    @contextmanager
    def admitted(self, method: str, key: str | None) -> Iterator[Allowance]:  # noqa: ARG002 (as `KeyAccess` has it)
        """A context for a call.

        Raises:
            PermissionDenied: for a closed method.
        """
        if method in self.closed:
            raise PermissionDenied(method, Permission.MANAGE, _HOW_TO_OPEN)
        yield Allowance()


@dataclass(slots=True)
class KeyAccess:
    """Calls need an API key of a file.

    Args:
        path: of the file.
        permissions: needed by each method; an unlisted one needs `MANAGE`.
        clock: monotonic seconds.

    Raises:
        StartupError: listing everything wrong with the file.
    """

    path: Path
    permissions: Mapping[str, Permission]
    clock: Callable[[], float] = time.monotonic
    _keys: tuple[ApiKey, ...] = ()
    _uses: dict[str, Use] = field(default_factory=dict)
    _version: tuple[int, ...] = ()
    _checked: float = -math.inf

    def __post_init__(self) -> None:
        self._version = _version(self.path)
        self._keys = read_keys(self.path)
        self._checked = self.clock()

    @contextmanager
    def admitted(self, method: str, key: str | None) -> Iterator[Allowance]:
        """A context for a call.

        Args:
            method: its bare name, as in `Generate`.
            key: the caller's.

        Raises:
            Unauthenticated: without a key, or with an unknown one.
            PermissionDenied: when the key lacks the method's permission.
            RateLimited: when the key is used too often, or by too many calls at once.
        """
        now = self.clock()
        owner = self.permitted(method, key, now)
        use = self._uses.setdefault(owner.name, Use(owner.capacity, now))
        _require_place(owner, use)
        _take_token(owner, use, now)
        use.num_running += 1
        try:
            with serving(Caller(owner, use)):
                yield _KeyAllowance(owner=owner.name, access=self, method=method, key=key, use=use)
        finally:
            use.num_running -= 1

    def permitted(self, method: str, key: str | None, now: float) -> ApiKey:
        """The API key that is shown, if it may use the method; counts nothing. Raises as `admitted` does."""
        self._reload(now)
        owner = self._owner(key)
        needed = self.permissions.get(method, Permission.MANAGE)
        if needed not in owner.permissions:
            raise PermissionDenied(method, needed)
        return owner

    def _owner(self, key: str | None) -> ApiKey:
        if not key:
            raise Unauthenticated("no API key: send one as metadata, authorization: Bearer KEY")
        digest = hashlib.sha256(key.encode(errors="surrogateescape")).digest()
        # Compares all of them: the time that this takes must reveal nothing.
        found = [each for each in self._keys if hmac.compare_digest(each.digest, digest)]
        if not found:
            raise Unauthenticated("the API key is not known")
        return found[0]

    def _reload(self, now: float) -> None:
        if now - self._checked < _LOOK_SECONDS:
            return
        self._checked = now
        version = _version(self.path)
        if version == self._version:
            return
        self._version = version
        try:
            self._keys = read_keys(self.path)
        except StartupError as error:
            _LOGGER.error("the API keys stay as they were: %s", "; ".join(error.problems))
            return
        names = {key.name for key in self._keys}
        self._uses = {name: use for name, use in self._uses.items() if name in names or use.num_running}
        _LOGGER.info("%d API keys read", len(self._keys))


@dataclass(slots=True, kw_only=True)
class _KeyAllowance(Allowance):
    """What a call with an API key may ask."""

    access: KeyAccess
    method: str
    key: str | None
    use: Use
    num_running: int = 0
    has_begun: bool = False

    def refund(self) -> None:
        self.use.tokens += 1

    @contextmanager
    def request(self) -> Iterator[None]:
        now = self.access.clock()
        owner = self.access.permitted(self.method, self.key, now)
        if self.num_running:
            _require_place(owner, self.use)
        if self.has_begun:
            _take_token(owner, self.use, now)
        self.has_begun = True
        # One of those that run has the place of the call itself, whichever it is.
        self.use.num_running += self.num_running > 0
        self.num_running += 1
        try:
            with serving(Caller(owner, self.use)):
                yield
        finally:
            self.num_running -= 1
            self.use.num_running -= self.num_running > 0


Access = OpenAccess | KeyAccess


def _require_place(key: ApiKey, use: Use) -> None:
    if key.max_concurrent_requests is not None and use.num_running >= key.max_concurrent_requests:
        raise RateLimited(f"{key.max_concurrent_requests} requests of this API key run already", RETRY_SECONDS)


def _take_token(key: ApiKey, use: Use, now: float) -> None:
    """Takes one request from a key's token bucket; a refused one costs nothing."""
    if key.requests_per_second is None:
        return
    use.tokens = min(key.capacity, use.tokens + (now - use.refilled) * key.requests_per_second)
    use.refilled = now
    if use.tokens < 1:
        seconds = (1 - use.tokens) / key.requests_per_second
        raise RateLimited(f"this API key is good for {key.requests_per_second:g} requests a second", seconds)
    use.tokens -= 1


def _version(path: Path) -> tuple[int, ...]:
    """Changes whenever the file does, rewritten or replaced; empty without one."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino
