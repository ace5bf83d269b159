"""The pages: every link leads somewhere, every page is found from the index, the generated ones are up to date."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests import reference
from tests.environment import ROOT

LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
INDEX = ROOT / "docs" / "index.md"
MAX_README_WORDS = 1100


@cache
def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


@cache
def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings; a second one of the same words gets a number."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", LINK.sub("]", heading).lower()).replace(" ", "-")
        found.add(words if words not in found else f"{words}-1")
    return found


def links(page: Path) -> Iterator[tuple[str, Path, str]]:
    """Each link within the repository: as written, its file, its anchor."""
    for link in LINK.findall(prose(page)):
        if not re.match(r"[a-z]+:", link):
            path, _, anchor = link.partition("#")
            yield link, (page.parent / path).resolve() if path else page, anchor


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines()]


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    pages = tracked("*.md")
    assert len(pages) > 40
    wrong = []
    for page in pages:
        for link, target, anchor in links(page):
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                wrong.append(f"{page.relative_to(ROOT)}: {link}")
    assert not wrong


def test_every_page_is_found_from_the_index_and_every_picture_is_shown() -> None:
    found, new = set(), [INDEX]
    while new:
        page = new.pop()
        if page not in found:
            found.add(page)
            new += [target for _, target, _ in links(page) if target.suffix == ".md" and target.exists()]
    shown = {target for page in found for _, target, _ in links(page)}
    assert not set(tracked("docs/*.md", "examples/*.md")) - found
    assert not set(tracked("docs/*.svg")) - shown


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= MAX_README_WORDS


def test_every_flag_is_in_the_reference() -> None:
    page = reference.PAGE.read_text(encoding="utf-8")
    sections = {
        name.strip(): text for name, _, text in (each.partition("\n") for each in page.split("## python -m ")[1:])
    }
    flags = re.compile(r"^  (?:-\w, )?(--[\w-]+)", re.MULTILINE)
    for command, text in reference.helps().items():
        assert flags.findall(sections[command]) == flags.findall(text), f"make reference: {command}"
        assert flags.findall(text) or command == "export verify"
