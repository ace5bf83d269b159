"""Access control by API key: permissions, rates, places and shares.

    key ──> known? ──> allowed this method? ──> rate left? ──> place left? ──> the call runs

Keys lie in a TOML file as SHA-256 digests, so that the file gives none away:

    [keys.alice]
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    permissions = ["generate"]          # and "manage", for what changes or occupies a model
    max_concurrent_requests = 8         # optional
    requests_per_second = 5.0           # optional
    burst = 10                          # optional, how many may come at once; the rate rounded up
    weight = 2.0                        # optional, its share of a busy engine beside other keys'; 1
    max_priority = 1                    # optional, the highest `priority` that it may ask for; 0. Below 0 it is what
                                        # requests have that ask for none
    max_sequences = 16                  # optional, how many may run or wait at once: `n` or beams of each request
    max_tokens_in_flight = 50000        # optional, the sum over these of the prompt's tokens and `max_tokens`

A priority goes before any share: a key with a higher `max_priority` can take the rows of all others. docs/keys.md
describes each field to operators.

A changed file is read anew within a second; what cannot be read leaves the keys as they were. A call that brings many
requests is worth no more than as many calls: each of them is counted, and finds a key that is gone refused. Everything
runs on the event loop. Knows nothing of gRPC: method names are plain text.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import time
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from service.errors import InvalidRequest, PermissionDenied, RateLimited, StartupError, Unauthenticated

_LOGGER = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_DIGEST_LENGTH = 64
_HOW_TO_OPEN = (
    "this server is reached beyond loopback and knows no callers; start it with --api-keys and show a key that has the "
    "permission, start it with --tls-client-ca, or have it listen on loopback"
)
_PLACE_SECONDS = 1.0  # when to come again where all places are taken: when one will be free is not known


class Permission(StrEnum):
    """What a key may be good for."""

    GENERATE = "generate"
    MANAGE = "manage"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One caller. None is no limit."""

    name: str
    digest: bytes
    permissions: frozenset[Permission]
    max_concurrent_requests: int | None = None
    requests_per_second: float | None = None
    burst: int | None = None
    weight: float = 1.0
    max_priority: int = 0
    max_sequences: int | None = None
    max_tokens_in_flight: int | None = None

    @property
    def capacity(self) -> float:
        """How many requests may come at once."""
        return self.burst or math.ceil(self.requests_per_second or 1)


class Caller(Protocol):
    """The tenant of a request, and what the engine may do for it at once."""

    @property
    def tenant(self) -> str:
        """Its name; empty where calls need no key."""

    @property
    def weight(self) -> float:
        """Its share beside other callers: above 0."""

    @property
    def default_priority(self) -> int:
        """The priority of requests that ask for none, which is 0 on the wire: at most 0."""

    def check(self, priority: int, num_sequences: int, num_tokens: int) -> None:
        """Refuses a request that the caller may never make; counts nothing.

        Args:
            priority: the request's.
            num_sequences: rows that it holds.
            num_tokens: of its prompt and as many as it may generate, over all rows.

        Raises:
            InvalidRequest: when the priority is above the caller's highest.
            RateLimited: when the request alone is beyond a limit.
        """

    def hold(self, num_sequences: int, num_tokens: int) -> None:
        """Counts a request in, until `release` with the same numbers.

        Raises:
            RateLimited: when the caller's requests come to more than a limit together.
        """

    def release(self, num_sequences: int, num_tokens: int) -> None:
        """Counts a request out."""


class Keyless:
    """A caller without a key: one tenant, no limits."""

    tenant = ""
    weight = 1.0
    default_priority = 0

    def check(self, priority: int, num_sequences: int, num_tokens: int) -> None:
        """Everything may be asked."""

    def hold(self, num_sequences: int, num_tokens: int) -> None:
        """Nothing is counted."""

    def release(self, num_sequences: int, num_tokens: int) -> None:
        """As little."""


# Of the call, or the request of a call with many, that the running task serves.
_CALLER: ContextVar[Caller] = ContextVar("onward_caller")
_KEYLESS = Keyless()


def current_caller() -> Caller:
    """The caller of the call that the running task serves."""
    return _CALLER.get(_KEYLESS)


class Allowance(Protocol):
    """What a call that was let in may ask."""

    @property
    def owner(self) -> str | None:
        """The name of the call's key; None where calls need none."""

    def give_back(self) -> None:
        """Counts the call out of its key's rate: it is refused before anything of it is read."""

    def request(self) -> AbstractContextManager[None]:
        """A context to run one of a call's many requests in, which may refuse when it is entered.

        The call was counted as its first request and has a place for one at a time.

        Raises:
            Unauthenticated: when its key is not known any more.
            PermissionDenied: when it is not for this method any more.
            RateLimited: when it has been used too often, or by too many requests at once.
        """


class Access(Protocol):
    """Decides on calls."""

    def admitted(self, method: str, key: str | None) -> AbstractContextManager[Allowance]:
        """A context to run a call in, which may refuse when it is entered; yields what the call may ask.

        Args:
            method: its bare name, as in `Generate`.
            key: what the caller shows.

        Raises:
            Unauthenticated: without a key, or with an unknown one.
            PermissionDenied: when the key is not for this method.
            RateLimited: when it has been used too often, or by too many calls at once.
        """


@dataclass(frozen=True, slots=True)
class OpenAccess:
    """No keys: every caller may use every method, but for some that may be closed to all.

    Args:
        closed: methods that are refused, since the server cannot distinguish the clients that reach it.
    """

    closed: Collection[str] = ()

    owner = None

    def admitted(self, method: str, key: str | None) -> AbstractContextManager[Allowance]:  # noqa: ARG002 (the protocol's)
        """Nothing is counted.

        Raises:
            PermissionDenied: for a closed method.
        """
        if method in self.closed:
            raise PermissionDenied(method, Permission.MANAGE, _HOW_TO_OPEN)
        return nullcontext(self)

    def give_back(self) -> None:
        """Nothing was counted."""

    def request(self) -> AbstractContextManager[None]:
        """As little."""
        return nullcontext()


@dataclass(slots=True)
class _Use:
    """How much of its allowance a key has used: a token bucket, the calls that run, and what they hold."""

    tokens: float
    refilled: float
    num_running: int = 0
    num_sequences: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class KeyAccess:
    """Only who shows a key of a file.

    Args:
        path: of the file.
        permissions: what each method needs; a method that is not there needs `MANAGE`.
        clock: seconds that never go back.
    """

    path: Path
    permissions: Mapping[str, Permission]
    clock: Callable[[], float] = time.monotonic
    _keys: tuple[ApiKey, ...] = ()
    _uses: dict[str, _Use] = field(default_factory=dict)
    _seen: tuple[int, ...] = ()
    _looked: float = -math.inf

    def __post_init__(self) -> None:
        """Reads the file.

        Raises:
            StartupError: listing all that is wrong with it.
        """
        self._seen = _state(self.path)
        self._keys = read_keys(self.path)
        self._looked = self.clock()

    @contextmanager
    def admitted(self, method: str, key: str | None) -> Iterator[Allowance]:
        """As `Access` has it."""
        now = self.clock()
        owner = self.permitted(method, key, now)
        use = self._uses.setdefault(owner.name, _Use(owner.capacity, now))
        _require_place(owner, use)
        _take(owner, use, now)
        use.num_running += 1
        try:
            with _serving(_KeyCaller(owner, use)):
                yield _KeyAllowance(self, method, key, owner.name, use)
        finally:
            use.num_running -= 1

    def permitted(self, method: str, key: str | None, now: float) -> ApiKey:
        """Whose key it is, if it is good for the method; nothing is counted.

        Raises:
            Unauthenticated: without a key, or with an unknown one.
            PermissionDenied: when the key is not for this method.
        """
        self._look(now)
        owner = self._owner(key)
        needed = self.permissions.get(method, Permission.MANAGE)
        if needed not in owner.permissions:
            raise PermissionDenied(method, needed)
        return owner

    def _owner(self, key: str | None) -> ApiKey:
        if not key:
            raise Unauthenticated("no API key: send one as metadata, authorization: Bearer KEY")
        digest = hashlib.sha256(key.encode(errors="surrogateescape")).digest()
        found: ApiKey | None = None
        # All of them, whichever it is: how long this takes must tell nothing.
        for candidate in self._keys:
            if hmac.compare_digest(candidate.digest, digest):
                found = candidate
        if found is None:
            raise Unauthenticated("the API key is not known")
        return found

    def _look(self, now: float) -> None:
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        state = _state(self.path)
        if state == self._seen:
            return
        self._seen = state
        try:
            self._keys = read_keys(self.path)
        except StartupError as error:
            _LOGGER.error("the API keys stay as they were: %s", "; ".join(error.problems))
            return
        names = {key.name for key in self._keys}
        self._uses = {name: use for name, use in self._uses.items() if name in names or use.num_running}
        _LOGGER.info("%d API keys read", len(self._keys))


@dataclass(slots=True)
class _KeyAllowance:
    """One call's share of its key's allowance."""

    access: KeyAccess
    method: str
    key: str | None
    owner: str
    use: _Use
    num_running: int = 0
    is_begun: bool = False

    def give_back(self) -> None:
        """As `Allowance` has it."""
        self.use.tokens += 1

    @contextmanager
    def request(self) -> Iterator[None]:
        """As `Allowance` has it."""
        now = self.access.clock()
        owner = self.access.permitted(self.method, self.key, now)
        if self.num_running:
            _require_place(owner, self.use)
        if self.is_begun:
            _take(owner, self.use, now)
        self.is_begun = True
        # One of those that run has the place of the call itself, whichever it is.
        self.use.num_running += self.num_running > 0
        self.num_running += 1
        try:
            with _serving(_KeyCaller(owner, self.use)):
                yield
        finally:
            self.num_running -= 1
            self.use.num_running -= self.num_running > 0


@dataclass(frozen=True, slots=True)
class _KeyCaller:
    """A `Caller` by its key."""

    key: ApiKey
    use: _Use

    @property
    def tenant(self) -> str:
        return self.key.name

    @property
    def weight(self) -> float:
        return self.key.weight

    @property
    def default_priority(self) -> int:
        return min(0, self.key.max_priority)

    def check(self, priority: int, num_sequences: int, num_tokens: int) -> None:
        if priority > self.key.max_priority:
            raise InvalidRequest("priority", priority, f"must be at most {self.key.max_priority} with this API key")
        for what, limit, asked in self._limits(num_sequences, num_tokens):
            if limit is not None and asked > limit:
                raise RateLimited(
                    f"the request asks for {asked} {what}, this API key is good for {limit} at once", None
                )

    def hold(self, num_sequences: int, num_tokens: int) -> None:
        held = self.use.num_sequences + num_sequences, self.use.num_tokens + num_tokens
        for what, limit, asked in self._limits(*held):
            if limit is not None and asked > limit:
                limited = f"with this request {asked} {what} of this API key would be in flight, the limit is {limit}"
                raise RateLimited(limited, _PLACE_SECONDS)
        self.use.num_sequences, self.use.num_tokens = held

    def release(self, num_sequences: int, num_tokens: int) -> None:
        self.use.num_sequences -= num_sequences
        self.use.num_tokens -= num_tokens

    def _limits(self, num_sequences: int, num_tokens: int) -> tuple[tuple[str, int | None, int], ...]:
        return (
            ("sequences", self.key.max_sequences, num_sequences),
            ("tokens", self.key.max_tokens_in_flight, num_tokens),
        )


@contextmanager
def _serving(caller: Caller) -> Iterator[None]:
    token = _CALLER.set(caller)
    try:
        yield
    finally:
        _CALLER.reset(token)


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a file.

    Raises:
        StartupError: listing all that is wrong with it; digests are not repeated.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise StartupError([f"{path}: {error}"]) from error
    problems = [f"{path}: {name}: is not known" for name in content if name != "keys"]
    tables = content.get("keys", {})
    keys = []
    if not isinstance(tables, dict) or not tables:
        problems.append(f"{path}: keys: must have a table for each key, as in [keys.alice]")
        tables = {}
    for name, table in tables.items():
        found = [f"{path}: keys.{name}.{problem}" for problem in _problems(table)]
        problems += found
        if not found:
            keys.append(_key(name, table))
    digests = [key.digest for key in keys]
    problems += [
        f"{path}: keys.{key.name}.sha256: is another key's too" for key in keys if digests.count(key.digest) > 1
    ]
    if problems:
        raise StartupError(problems)
    return tuple(keys)


def _problems(table: Any) -> Iterator[str]:
    if not isinstance(table, dict):
        yield "must be a table"
        return
    checks: Mapping[str, tuple[Callable[[Any], bool], str]] = {
        "sha256": (_is_digest, f"must be {_DIGEST_LENGTH} hexadecimal digits"),
        "permissions": (_are_permissions, f"must be a list of {', '.join(Permission)}"),
        "max_concurrent_requests": (_is_count, "must be an integer of at least 1"),
        "requests_per_second": (_is_rate, "must be a finite number above 0"),
        "burst": (_is_count, "must be an integer of at least 1"),
        "weight": (_is_rate, "must be a finite number above 0"),
        "max_priority": (_is_priority, "must be an integer of 32 bits"),
        "max_sequences": (_is_count, "must be an integer of at least 1"),
        "max_tokens_in_flight": (_is_count, "must be an integer of at least 1"),
    }
    yield from (f"{name}: is not known" for name in table if name not in checks)
    yield from (f"{name}: is missing" for name in ("sha256", "permissions") if name not in table)
    yield from (
        f"{name}: {wanted}" for name, (fits, wanted) in checks.items() if name in table and not fits(table[name])
    )
    if "burst" in table and "requests_per_second" not in table:
        yield "burst: means nothing without requests_per_second"


def _key(name: str, table: Mapping[str, Any]) -> ApiKey:
    return ApiKey(
        name=name,
        digest=bytes.fromhex(table["sha256"]),
        permissions=frozenset(map(Permission, table["permissions"])),
        max_concurrent_requests=table.get("max_concurrent_requests"),
        requests_per_second=table.get("requests_per_second"),
        burst=table.get("burst"),
        weight=table.get("weight", 1.0),
        max_priority=table.get("max_priority", 0),
        max_sequences=table.get("max_sequences"),
        max_tokens_in_flight=table.get("max_tokens_in_flight"),
    )


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) == _DIGEST_LENGTH and set(value.lower()) <= set("0123456789abcdef")


def _are_permissions(value: Any) -> bool:
    return isinstance(value, list) and all(each in list(Permission) for each in value)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_priority(value: Any) -> bool:
    return type(value) is int and -(2**31) <= value < 2**31


def _is_rate(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def _require_place(key: ApiKey, use: _Use) -> None:
    if key.max_concurrent_requests is not None and use.num_running >= key.max_concurrent_requests:
        raise RateLimited(f"{key.max_concurrent_requests} requests of this API key run already", _PLACE_SECONDS)


def _take(key: ApiKey, use: _Use, now: float) -> None:
    """Takes one request out of a key's allowance; refused ones cost nothing."""
    if key.requests_per_second is None:
        return
    use.tokens = min(key.capacity, use.tokens + (now - use.refilled) * key.requests_per_second)
    use.refilled = now
    if use.tokens < 1:
        seconds = (1 - use.tokens) / key.requests_per_second
        raise RateLimited(f"this API key is good for {key.requests_per_second:g} requests a second", seconds)
    use.tokens -= 1


def _state(path: Path) -> tuple[int, ...]:
    """Changes whenever the file does, be it rewritten or replaced; empty while there is none."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino
