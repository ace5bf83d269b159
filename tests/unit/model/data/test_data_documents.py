"""Texts from files and folders: three sides without overlap, and bad files refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.data import documents
from model.data.config import DataConfig
from model.data.corpus import Corpus, Document, Side
from model.data.files import DataError

BOOK = "".join(f"This is line {index} of the book.\n" for index in range(500))


def write(path: Path, content: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def load(*paths: str, source: str = "text", **fields: Any) -> Corpus[Document]:
    return documents.load(DataConfig.from_dict({"source": source, "paths": list(paths), **fields}))


def refusal(*paths: str, source: str = "text", **fields: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(*paths, source=source, **fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def names(side: tuple[Document, ...]) -> set[str]:
    return {document.name for document in side}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    for index in range(300):
        write(tmp_path / "texts" / f"{index % 7}" / f"{index}.txt", f"Text number {index}.\n")
    return str(tmp_path / "texts")


def test_one_file_is_split_at_line_breaks_near_its_end(tmp_path: Path) -> None:
    corpus = load(write(tmp_path / "book.txt", BOOK), validation_fraction=0.1, test_fraction=0.2)
    parts = [side[0].text for side in (corpus.training, corpus.validation, corpus.test)]
    assert "".join(parts) == BOOK
    assert all(part.endswith("\n") for part in parts)
    assert len(parts[1]) == pytest.approx(0.1 * len(BOOK), abs=40)
    assert len(parts[2]) == pytest.approx(0.2 * len(BOOK), abs=40)


@given(st.text("ab \n", min_size=1, max_size=400), st.integers(0, 8), st.integers(1, 7))
def test_the_parts_of_a_text_are_the_text_in_shares_that_no_word_lies_across(
    text: str, validation: int, test: int
) -> None:
    parts = documents._cut(text, validation / 16, test / 16)
    rest, scored = parts[Side.TEST], parts[Side.VALIDATION] + parts[Side.TEST]
    assert parts[Side.TRAINING] + scored == text
    for tail, share in ((rest, test / 16), (scored, (validation + test) / 16)):
        least = len(text) - int(len(text) * (1 - share))
        assert least <= len(tail) <= 2 * least
        before = text[len(text) - 2 * least : len(text) - least]
        end = text[: len(text) - len(tail)][-1:]
        assert end in ("\n" if "\n" in before else " " if " " in before else text) or end == ""


def test_a_folder_is_split_by_file(folder: str) -> None:
    corpus = load(folder, validation_fraction=0.1, test_fraction=0.1)
    sides = [names(side) for side in (corpus.training, corpus.validation, corpus.test)]
    assert len(sides[0] | sides[1] | sides[2]) == sum(map(len, sides)) == 300
    assert all(sides)
    assert corpus.facts["split_by"] == "hash"


def test_a_files_side_is_the_same_wherever_the_folder_is_and_whatever_else_it_holds(
    folder: str, tmp_path: Path
) -> None:
    before = load(folder, validation_fraction=0.1, test_fraction=0.1)
    moved = Path(folder).rename(tmp_path / "elsewhere")
    for index in range(0, 300, 3):
        (moved / f"{index % 7}" / f"{index}.txt").unlink()
    after = load(str(moved), validation_fraction=0.1, test_fraction=0.1)
    assert names(after.test) <= names(before.test)
    assert names(after.validation) <= names(before.validation)
    assert names(after.training) <= names(before.training)


def test_files_too_few_to_keep_some_apart_are_each_split_and_people_are_told(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.txt", BOOK.replace("book", name)) for name in ("first", "second")]
    corpus = load(*paths)
    assert len(corpus.training) == len(corpus.validation) == len(corpus.test) == 2
    assert corpus.facts["split_by"] == "end of each file"
    assert corpus.notes == ("2 files are too few for one per side: each is split near its end",)


def test_paths_of_their_own_replace_fractions_and_copies_are_not_trained_on(tmp_path: Path, folder: str) -> None:
    validation, test = write(tmp_path / "v.txt", BOOK), write(tmp_path / "t.txt", "Text number 5.\n")
    corpus = load(folder, validation_paths=[validation], test_paths=[test])
    assert [document.text for document in corpus.validation] == [BOOK]
    assert len(corpus.training) == 299
    assert corpus.facts["left_out"] == {"training: also in validation or test": 1}
    assert corpus.facts["split_by"] == "paths"


def test_copies_and_empty_files_are_left_out_and_counted(folder: str) -> None:
    write(Path(folder) / "copy.txt", "Text number 5.\n")
    write(Path(folder) / "empty.txt", " \n")
    facts = load(folder).facts
    assert facts["left_out"] == {"duplicate": 1, "empty": 1}
    assert facts["num_read"] == 302


def test_text_keeps_its_line_ends_and_loses_a_byte_order_mark(tmp_path: Path) -> None:
    corpus = load(write(tmp_path / "a.txt", b"\xef\xbb\xbf" + BOOK.replace("\n", "\r\n").encode()))
    assert "".join(side[0].text for side in (corpus.training, corpus.validation, corpus.test)) == BOOK.replace(
        "\n", "\r\n"
    )


def test_json_lines_go_by_a_hash_of_their_text(tmp_path: Path) -> None:
    lines = [json.dumps({"body": f"Text {index}"}) for index in range(300)]
    fields = {"source": "jsonl", "text_field": "body", "validation_fraction": 0.1, "test_fraction": 0.1}
    corpus = load(write(tmp_path / "a.jsonl", "\n".join(lines)), **fields)
    turned = load(write(tmp_path / "b.jsonl", "\n".join(lines[::-1])), **fields)
    for side in ("training", "validation", "test"):
        first, second = ({item.text for item in getattr(each, side)} for each in (corpus, turned))
        assert first == second
    assert len({*names(corpus.training), *names(corpus.validation), *names(corpus.test)}) == 300


@pytest.mark.parametrize("content", ["", " \n\n", b"\xef\xbb\xbf"])
def test_a_file_without_text_is_refused_by_name(tmp_path: Path, content: str | bytes) -> None:
    path = write(tmp_path / "a.txt", content)
    assert refusal(path) == f"{path}: no text in this file"


def test_an_empty_folder_and_a_missing_path_are_refused_by_name(tmp_path: Path) -> None:
    assert refusal(str(tmp_path)) == f"{tmp_path}: no file in this folder"
    assert refusal(f"{tmp_path}/no.txt") == f"{tmp_path}/no.txt: no such file or folder"


@pytest.mark.parametrize("text", ["no line break at all", "one\ntwo"])
def test_a_text_too_short_to_split_is_refused_with_its_size(tmp_path: Path, text: str) -> None:
    message = refusal(write(tmp_path / "a.txt", text))
    assert message.startswith("too few texts (")
    assert f", {len(text)} bytes) to take validation_fraction 0.02" in message
