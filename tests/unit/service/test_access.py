"""API keys: which calls are admitted, how often, and what a changed file changes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.access import KeyAccess, Permission, current_caller
from service.access.keys import read_keys
from service.errors import InvalidRequest, PermissionDenied, RateLimited, StartupError, Unauthenticated
from tests.identities import key_table

PERMISSIONS: Mapping[str, Permission] = {"Generate": Permission.GENERATE, "LoadModel": Permission.MANAGE}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def access(path: Path, content: str, clock: Clock | None = None) -> KeyAccess:
    path.write_text(content)
    return KeyAccess(path, PERMISSIONS, clock or Clock())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def use(keys: KeyAccess, key: str | None, method: str = "Generate") -> None:
    with keys.admitted(method, key):
        pass


def test_a_known_key_is_admitted_and_no_other(path: Path) -> None:
    keys = access(path, key_table("alice", "secret") + key_table("bob", "other"))
    use(keys, "secret")
    use(keys, "other")
    for wrong in ("Secret", "secret ", digest("secret"), "", None, "\udc80"):
        with pytest.raises(Unauthenticated) as caught:
            use(keys, wrong)
        assert not wrong or wrong not in str(caught.value)


def test_a_method_that_is_not_listed_is_for_those_who_manage(path: Path) -> None:
    keys = access(path, key_table("alice", "a") + key_table("op", "o", '["manage"]'))
    use(keys, "o", "UnlistedMethod")
    with pytest.raises(PermissionDenied, match="UnlistedMethod"):
        use(keys, "a", "UnlistedMethod")


def test_a_rate_admits_a_burst_and_then_gives_a_retry_delay(path: Path) -> None:
    clock = Clock()
    keys = access(
        path, key_table("alice", "a", rest="requests_per_second = 2.0\nburst = 3") + key_table("bob", "b"), clock
    )
    for _ in range(3):
        use(keys, "a")
    with pytest.raises(RateLimited) as caught:
        use(keys, "a")
    assert caught.value.retry_after_seconds == pytest.approx(0.5)
    use(keys, "b")
    clock.now += 0.49
    with pytest.raises(RateLimited):
        use(keys, "a")
    clock.now += 0.02
    use(keys, "a")


@given(
    st.floats(0.1, 50),
    st.integers(1, 20),
    st.lists(st.floats(0, 3), min_size=1, max_size=60),
)
def test_no_pattern_of_calls_gets_more_than_the_rate(rate: float, burst: int, gaps: list[float]) -> None:
    clock = Clock()
    content = key_table("alice", "a", rest=f"requests_per_second = {rate!r}\nburst = {burst}")
    with TemporaryDirectory() as folder:
        keys = access(Path(folder) / "keys.toml", content, clock)
        began, passed, waits = clock.now, 0, []
        for gap in gaps:
            clock.now += gap
            for _ in range(4):
                try:
                    use(keys, "a")
                    passed += 1
                except RateLimited as error:
                    waits.append(error.retry_after_seconds)
    assert passed <= burst + rate * (clock.now - began) + 1e-6
    assert all(0 < wait <= 1 / rate + 1e-6 for wait in waits)


def test_so_many_calls_run_at_once_and_a_refused_one_costs_nothing(path: Path) -> None:
    keys = access(path, key_table("alice", "a", rest="max_concurrent_requests = 2\nrequests_per_second = 3.0"))
    with ExitStack() as running:
        running.enter_context(keys.admitted("Generate", "a"))
        running.enter_context(keys.admitted("Generate", "a"))
        for _ in range(5):
            with pytest.raises(RateLimited):
                use(keys, "a")
    use(keys, "a")


@pytest.mark.parametrize("content", ["", "nonsense", None], ids=["empty", "garbled", "removed"])
def test_a_file_that_cannot_be_read_leaves_the_keys_as_they_were(path: Path, content: str | None) -> None:
    clock = Clock()
    keys = access(path, key_table("alice", "a"), clock)
    path.unlink()
    if content is not None:
        path.write_text(content)
    clock.now += 1.0
    use(keys, "a")
    path.write_text(key_table("alice", "mended"))
    clock.now += 1.0
    use(keys, "mended")


def test_a_new_file_does_not_renew_an_allowance(path: Path) -> None:
    clock = Clock()
    content = key_table("alice", "a", rest="requests_per_second = 0.1\nburst = 1")
    keys = access(path, content, clock)
    use(keys, "a")
    path.write_text(content + "\n# changed\n")
    clock.now += 1.0
    with pytest.raises(RateLimited):
        use(keys, "a")


def test_everything_wrong_with_a_file_is_reported_at_once_without_digests(path: Path) -> None:
    path.write_text(
        'title = "x"\n'
        '[keys.a]\nsha256 = "12"\npermissions = ["all"]\n'
        f'[keys.b]\nsha256 = "{digest("b")}"\nrate = 1\n'
        f'[keys.c]\nsha256 = "{digest("c")}"\npermissions = ["generate"]\nrequests_per_second = inf\nburst = 0\n'
        f'[keys.d]\nsha256 = "{digest("d")}"\npermissions = ["generate"]\nburst = 1\nmax_concurrent_requests = true\n'
        "weight = true\nmax_priority = 2147483648\nmax_tokens_in_flight = 1.0\n"
        f'[keys.e]\nsha256 = "{digest("e")}"\npermissions = []\n[keys.f]\nsha256 = "{digest("e")}"\npermissions = []\n'
    )
    with pytest.raises(StartupError) as caught:
        read_keys(path)
    listed = "\n".join(caught.value.problems)
    for each in (
        "title", "keys.a.sha256", "keys.a.permissions", "keys.b.rate", "keys.b.permissions",
        "keys.c.requests_per_second", "keys.c.burst", "keys.d.burst", "keys.d.max_concurrent_requests",
        "keys.d.weight", "keys.d.max_priority", "keys.d.max_tokens_in_flight", "keys.e.sha256", "keys.f.sha256",
    ):  # fmt: skip
        assert f": {each}: " in listed
    assert len(caught.value.problems) == 14
    assert digest("b") not in listed


@pytest.mark.parametrize("content", ["", "[keys]\n", "keys = 3\n"])
def test_a_file_without_keys_is_refused(path: Path, content: str) -> None:
    path.write_text(content)
    with pytest.raises(StartupError):
        read_keys(path)


def test_each_request_of_a_call_counts_as_a_call_would(path: Path) -> None:
    clock = Clock()
    keys = access(path, key_table("alice", "a", rest="requests_per_second = 1.0\nburst = 3"), clock)
    with keys.admitted("Generate", "a") as allowance:
        for _ in range(3):
            with allowance.request():
                pass
        with pytest.raises(RateLimited) as caught, allowance.request():
            pass
        assert caught.value.retry_after_seconds == pytest.approx(1.0)
        with pytest.raises(RateLimited):
            use(keys, "a")
        clock.now += 1.0
        with allowance.request():
            pass


def test_requests_of_a_call_have_no_more_places_than_calls(path: Path) -> None:
    keys = access(path, key_table("alice", "a", rest="max_concurrent_requests = 2"))
    with keys.admitted("Generate", "a") as allowance:
        # One at a time has the call's own place, another call the other.
        for _ in range(3):
            with allowance.request(), keys.admitted("Generate", "a"), pytest.raises(RateLimited), allowance.request():
                pass
        # The call keeps its place when a request of it ends.
        with keys.admitted("Generate", "a"), pytest.raises(RateLimited):
            use(keys, "a")
        first, second = ExitStack(), ExitStack()
        first.enter_context(allowance.request())
        second.enter_context(allowance.request())
        with pytest.raises(RateLimited), allowance.request():
            pass
        with pytest.raises(RateLimited):
            use(keys, "a")
        # Whichever ends first, the call's own place is the one that stays.
        first.close()
        use(keys, "a")
        with allowance.request(), pytest.raises(RateLimited):
            use(keys, "a")
        second.close()
    with keys.admitted("Generate", "a"), keys.admitted("Generate", "a"):
        pass


def test_a_key_that_is_gone_asks_nothing_more_in_a_call_that_is_open(path: Path) -> None:
    clock = Clock()
    keys = access(path, key_table("alice", "a") + key_table("bob", "b"), clock)
    with keys.admitted("Generate", "a") as allowance:
        with allowance.request():
            pass
        path.write_text(key_table("bob", "b"))
        clock.now += 1.0
        with pytest.raises(Unauthenticated), allowance.request():
            pass
        path.write_text(key_table("alice", "a", '["manage"]'))
        clock.now += 1.0
        with pytest.raises(PermissionDenied), allowance.request():
            pass


def test_a_caller_is_known_while_its_call_runs_and_none_after(path: Path) -> None:
    keys = access(path, key_table("alice", "a", rest="weight = 2.5") + key_table("bob", "b"))
    with keys.admitted("Generate", "a") as allowance:
        assert (current_caller().tenant, current_caller().weight) == ("alice", 2.5)
        with allowance.request():
            assert current_caller().tenant == "alice"
        with keys.admitted("Generate", "b"):
            assert (current_caller().tenant, current_caller().weight) == ("bob", 1.0)
        assert current_caller().tenant == "alice"
    assert (current_caller().tenant, current_caller().weight) == ("", 1.0)
    current_caller().check(2**31 - 1, 10**9, 10**9)
    current_caller().hold(10**9, 10**9)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40), st.booleans()), max_size=40))
def test_what_a_keys_requests_hold_together_is_never_more_than_its_limits(asked: list[tuple[int, int, bool]]) -> None:
    with TemporaryDirectory() as folder:
        content = key_table("alice", "a", rest="max_sequences = 6\nmax_tokens_in_flight = 60")
        keys = access(Path(folder) / "keys.toml", content)
        held: list[tuple[int, int]] = []
        with keys.admitted("Generate", "a"), keys.admitted("Generate", "a"):
            for rows, tokens, ends in asked:
                totals = [sum(each) for each in zip((rows, tokens), *held, strict=True)]
                if totals[0] > 6 or totals[1] > 60:
                    with pytest.raises(RateLimited, match=r"would be in flight, the limit is 60?; retry later"):
                        current_caller().hold(rows, tokens)
                else:
                    current_caller().hold(rows, tokens)
                    held.append((rows, tokens))
                if ends and held:
                    current_caller().release(*held.pop())


def test_a_request_beyond_what_a_key_may_ever_ask_is_refused_for_good(path: Path) -> None:
    keys = access(path, key_table("alice", "a", rest="max_sequences = 6\nmax_tokens_in_flight = 60\nmax_priority = 2"))
    with keys.admitted("Generate", "a"):
        current_caller().check(2, 6, 60)
        for rows, tokens in ((7, 1), (1, 61)):
            with pytest.raises(RateLimited) as caught:
                current_caller().check(0, rows, tokens)
            assert caught.value.retry_after_seconds is None
        with pytest.raises(InvalidRequest, match="priority: must be at most 2 with this API key, got 3"):
            current_caller().check(3, 1, 1)
