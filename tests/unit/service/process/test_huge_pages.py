"""When the server starts itself anew for the sake of huge pages."""

from __future__ import annotations

import pytest

from service.process.huge_pages import environment_for_huge_pages

_GLIBC = "glibc 2.36"
_ON_REQUEST = "always [madvise] never"


def test_the_tunable_is_added_to_others() -> None:
    assert environment_for_huge_pages({"HOME": "/"}, _GLIBC, _ON_REQUEST) == {
        "HOME": "/",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }
    other = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}
    assert environment_for_huge_pages(other, _GLIBC, _ON_REQUEST) == {
        "GLIBC_TUNABLES": "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"
    }


def test_a_process_is_started_anew_only_once() -> None:
    environment = environment_for_huge_pages({}, _GLIBC, _ON_REQUEST)
    assert environment is not None
    assert environment_for_huge_pages(environment, _GLIBC, _ON_REQUEST) is None


def test_a_choice_already_made_stands() -> None:
    environ = {"GLIBC_TUNABLES": "glibc.malloc.check=0:glibc.malloc.hugetlb=0"}
    assert environment_for_huge_pages(environ, _GLIBC, _ON_REQUEST) is None


@pytest.mark.parametrize(("c_library", "setting"), [("musl", _ON_REQUEST), (_GLIBC, "always madvise [never]")])
def test_nothing_is_done_where_it_would_bring_nothing(c_library: str, setting: str) -> None:
    assert environment_for_huge_pages({}, c_library, setting) is None
