"""Pairs from files: what is read, what is left out and counted, what is refused by name, and who is on which side."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.data import pairs
from model.data.config import DataConfig
from model.data.corpus import Corpus, Side, TextPair, digest, fold, share_of, side_of
from model.data.files import DataError
from model.data.markup import strip

LINES = [f"source number {index}\ttarget number {index}" for index in range(400)]


def write(path: Path, content: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def load(*paths: str, source: str = "tsv", **fields: Any) -> Corpus[TextPair]:
    return pairs.load(DataConfig.from_dict({"source": source, "paths": list(paths), **fields}))


def refusal(*paths: str, source: str = "tsv", **fields: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(*paths, source=source, **fields)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def tsv(tmp_path: Path) -> str:
    return write(tmp_path / "train.tsv", "\n".join(LINES) + "\n")


def test_every_line_is_a_pair_of_one_side(tsv: str) -> None:
    corpus = load(tsv)
    every = [*corpus.training, *corpus.validation, *corpus.test]
    assert sorted(every) == sorted(TextPair(*line.split("\t")) for line in LINES)
    assert min(len(corpus.validation), len(corpus.test)) >= 1
    assert len(corpus.training) > 0.9 * len(LINES)


@given(st.text(), st.floats(0, 0.5), st.floats(0, 0.49))
def test_a_side_is_where_a_sources_hash_falls(text: str, validation: float, test: float) -> None:
    share = share_of(text)
    assert 0.0 <= share < 1.0
    wanted = Side.TEST if share < test else Side.VALIDATION if share < test + validation else Side.TRAINING
    assert side_of(text, validation, test) is wanted


@given(st.lists(st.lists(st.text(max_size=3), max_size=3), max_size=3), st.lists(st.text(max_size=3), max_size=6))
def test_hashes_are_equal_where_texts_and_their_order_are(groups: list[list[str]], texts: list[str]) -> None:
    flat = [text for group in groups for text in group]
    assert (digest(groups) == digest([texts])) == (flat == texts)


def test_no_source_is_on_two_sides_whatever_its_translations_capitals_and_blanks(tmp_path: Path) -> None:
    lines = [
        f"{word} {index}\t{word} {index} x" for index in range(200) for word in ("Open", "open", "OPEN ", "open  ")
    ]
    corpus = load(write(tmp_path / "a.tsv", "\n".join(lines)), validation_fraction=0.3, test_fraction=0.3)
    sides = [{fold(pair.source) for pair in side} for side in (corpus.training, corpus.validation, corpus.test)]
    assert all(sides)
    assert sum(map(len, sides)) == len(sides[0] | sides[1] | sides[2])


def test_a_pairs_side_does_not_depend_on_what_else_is_there(tmp_path: Path, tsv: str) -> None:
    half = write(tmp_path / "half.tsv", "\n".join(LINES[::2]))
    whole, part = load(tsv), load(half)
    assert set(part.test) <= set(whole.test)
    assert set(part.validation) <= set(whole.validation)


def test_copies_empty_and_short_pairs_are_left_out_and_counted(tmp_path: Path) -> None:
    extra = [LINES[0], LINES[0], "\tempty source", "empty target\t ", "two words\tone", *LINES[1:]]
    facts = load(write(tmp_path / "a.tsv", "\n".join(extra)), min_words=2).facts
    assert facts["left_out"] == {"duplicate": 1, "empty": 2, "fewer than min_words": 1}
    assert facts["num_read"] == len(extra)
    assert sum(facts[side]["num_examples"] for side in ("training", "validation", "test")) == len(LINES)


def test_training_takes_at_most_so_many_from_everywhere_in_the_file_and_always_the_same(tsv: str) -> None:
    corpus, every = load(tsv, max_examples=50), load(tsv)
    assert len(corpus.training) == 50
    assert set(corpus.training) <= set(every.training)
    assert (corpus.validation, corpus.test) == (every.validation, every.test)
    assert corpus.training == load(tsv, max_examples=50).training
    assert corpus.facts["left_out"] == {"training: more than max_examples": len(every.training) - 50}
    numbers = [int(pair.source.split()[-1]) for pair in corpus.training]
    assert numbers == sorted(numbers)
    assert numbers[-1] > 300


def test_paths_of_their_own_replace_fractions_and_never_share_a_source_with_training(tmp_path: Path, tsv: str) -> None:
    validation = write(tmp_path / "dev.tsv", "\n".join([*LINES[:20], "only here\tx"]))
    test = write(tmp_path / "eval.tsv", "\n".join([*LINES[10:40], "source NUMBER 50\tanother"]))
    corpus = load(tsv, validation_paths=[validation], test_paths=[test])
    assert len(corpus.test) == 31
    assert [pair.source for pair in corpus.validation] == [f"source number {n}" for n in range(10)] + ["only here"]
    assert corpus.training == tuple(TextPair(*line.split("\t")) for line in [*LINES[40:50], *LINES[51:]])
    assert corpus.facts["left_out"] == {"training: also in validation or test": 41, "validation: also in test": 10}
    assert corpus.facts["split_by"] == "paths"
    assert load(tsv, test_paths=[test]).facts["split_by"] == "hash"


def test_the_hash_follows_every_side(tmp_path: Path, tsv: str) -> None:
    test = write(tmp_path / "eval.tsv", "only here\tx")
    hashes = {load(tsv).facts["sha256"], load(tsv, max_examples=9).facts["sha256"]}
    for content in ("only here\tx", "only here\ty"):
        write(Path(test), content)
        hashes.add(load(tsv, test_paths=[test]).facts["sha256"])
    assert len(hashes) == 4
    assert load(tsv).facts["sha256"] in hashes


def test_a_folder_is_read_recursively_and_once_without_hidden_and_other_files(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    write(folder / "a.tsv", "\n".join(LINES[:200]))
    deep = write(folder / "deep" / "b.tsv", "\n".join(LINES[200:]))
    write(folder / "empty.tsv", "")
    for name in (".hidden.tsv", ".git/c.tsv", "notes.txt"):
        write(folder / name, "one column")
    facts = load(deep, str(folder)).facts
    assert (facts["num_files"], facts["num_read"]) == (3, 400)


def test_only_line_feeds_end_a_line_and_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    lines = ["a\N{LINE SEPARATOR}b\x85c\td", *LINES]
    corpus = load(write(tmp_path / "a.tsv", b"\xef\xbb\xbf" + "\r\n".join(lines).encode()))
    found = [*corpus.training, *corpus.validation, *corpus.test]
    assert sorted(found) == sorted(TextPair(*line.split("\t")) for line in lines)


@pytest.mark.parametrize(
    ("line", "found"), [("one column", 1), ("a\tb\tc", 3), ("", 1)], ids=["one", "three", "blank line"]
)
def test_another_number_of_columns_is_refused_by_line(tmp_path: Path, line: str, found: int) -> None:
    path = write(tmp_path / "a.tsv", "\n".join([*LINES[:6], line, *LINES[6:]]))
    assert refusal(path) == f"{path}:7: columns are {found}, must be 2 (source, tab, target)"


@pytest.mark.parametrize("source", ["tsv", "jsonl", "gettext"])
def test_damaged_empty_and_missing_files_are_refused_by_name_and_line(tmp_path: Path, source: str) -> None:
    path = tmp_path / "a.po"
    for content, problem in (
        (b"# \n\na\tb\xff\n", ":3: byte 0xff at offset 7 is not valid UTF-8"),
        (b"\n\n" + "a\tb\n".encode("utf-16-le"), ":3: NUL at offset 3: not a text in UTF-8"),
        (b"", ": no pair in this file"),
    ):
        assert refusal(write(path, content), source=source) == f"{path}{problem}"
    (tmp_path / "folder").mkdir()
    assert refusal(str(tmp_path / "folder"), source=source).startswith(f"{tmp_path}/folder: no .")
    assert refusal(str(tmp_path / "none"), source=source) == f"{tmp_path}/none: no such file or folder"


def test_a_file_of_blanks_alone_is_refused_by_name_and_in_a_folder_passed_over(tmp_path: Path, tsv: str) -> None:
    blank = write(tmp_path / "blank.tsv", "a\t\n \t \n")
    assert refusal(tsv, blank) == f"{blank}: no pair in this file"
    assert load(str(tmp_path)).facts["left_out"] == {"empty": 2}


def test_files_whose_names_are_no_utf8_are_read(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff.tsv")
    write(tmp_path / name, "\n".join(LINES))
    facts = load(str(tmp_path)).facts
    assert facts["num_read"] == 400
    assert json.loads(json.dumps(facts["files"])) == [str(tmp_path / name)]


def test_a_folder_that_cannot_be_read_is_refused_and_not_passed_over(
    tmp_path: Path, tsv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan, closed = os.scandir, tmp_path / "closed"
    closed.mkdir()

    def refuse(folder: str | Path) -> Any:
        if Path(folder) == closed:
            # Permissions alone would not do: root may read everything.
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    assert refusal(str(tmp_path)) == f"{closed}: Permission denied"


def test_a_side_without_a_pair_is_refused_with_what_to_change(tmp_path: Path, tsv: str) -> None:
    folder = tmp_path / "folder"
    write(folder / "a.tsv", "")
    assert refusal(str(folder)) == f"no usable pairs in {folder}: left out were nothing"
    write(folder / "b.tsv", "a\t\n")
    assert refusal(str(folder)) == f"no usable pairs in {folder}: left out were 1 empty"
    message = refusal(write(tmp_path / "few.tsv", "\n".join(LINES[:3])))
    assert message.startswith("too few pairs (3, ")
    assert "validation_fraction 0.02" in message
    assert refusal(tsv, test_fraction=0.0) == (
        "test_fraction is 0 and test_paths is empty: there is nothing to score by"
    )
    known, other = write(tmp_path / "known.tsv", LINES[0]), write(tmp_path / "other.tsv", "else\twhere")
    assert refusal(tsv, validation_paths=[known], test_paths=[known]) == (
        f"validation_paths: nothing to score by in {known}"
    )
    assert refusal(tsv, validation_paths=[other], test_paths=[tsv]) == (
        f"no pair is left to train on in {tsv}: all 401 are for validation and test"
    )


def test_json_lines_give_their_configured_fields(tmp_path: Path) -> None:
    lines = [json.dumps({"en": f"e{n}", "de": f"d{n}", "id": n}) for n in range(200)]
    path = write(tmp_path / "a.jsonl", "\n\n".join(lines))
    corpus = load(path, source="jsonl", source_field="en", target_field="de")
    assert TextPair("e7", "d7") in {*corpus.training, *corpus.validation, *corpus.test}
    assert corpus.facts["num_read"] == 200


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{'a'}", "not JSON: Expecting property name enclosed in double quotes at column 2"),
        ("[" * 100_000, "not JSON: "),
        ('["a", "b"]', "list, must be an object"),
        ('{"source": "a"}', "no field 'target', there are 'source'"),
        ("{}", "no field 'source', there are none"),
        ('{"source": "a", "target": 3}', "field 'target' is int, must be a string"),
        ('{"source": "a", "target": null}', "field 'target' is NoneType, must be a string"),
        ('{"source": "\\ud800", "target": "b"}', "field 'source' holds U+D800, half a character"),
    ],
)
def test_json_that_is_no_pair_is_refused_by_line(tmp_path: Path, line: str, problem: str) -> None:
    path = write(tmp_path / "a.jsonl", '{"source": "a", "target": "b"}\n\n' + line)
    assert refusal(path, source="jsonl").startswith(f"{path}:3: {problem}")


@pytest.mark.parametrize(
    ("text", "bare", "num_tags"),
    [
        ("<emph>x</emph> y", "x y", 2),
        ('Go to <link href="text/a.xhp" name="A &gt; B">here</link>.', "Go to here.", 2),
        ("\\<bookmark_value\\>old\\</bookmark_value\\>", "old", 2),
        ("a < b and c > d", "a < b and c > d", 0),
        ("one<br/> two <!-- no --> three", "one two three", 2),
        ("Q&amp;A &lt;b&gt; &#8222;x&#8220;", "Q&A <b> „x“", 0),
    ],
)
def test_markup_is_taken_out_and_entities_are_read(text: str, bare: str, num_tags: int) -> None:
    assert strip(text) == (bare, num_tags)


def test_pairs_whose_tags_differ_are_left_out(tmp_path: Path) -> None:
    extra = ["<b>x</b>\t<b>y</b>", "<b>p</b>\tq", "<br/>\t<br/>"]
    corpus = load(write(tmp_path / "a.tsv", "\n".join([*extra, *LINES])), strip_markup=True)
    assert TextPair("x", "y") in {*corpus.training, *corpus.validation, *corpus.test}
    assert corpus.facts["left_out"] == {"empty": 1, "tags differ": 1}
