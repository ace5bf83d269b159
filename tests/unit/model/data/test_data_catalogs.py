"""Gettext catalogs: confirmed translations only, both file formats, and damage refused by name."""

from __future__ import annotations

import io
import struct
from collections import Counter
from pathlib import Path

import pytest
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po
from hypothesis import given
from hypothesis import strategies as st

from model.data import catalogs
from model.data.corpus import TextPair
from model.data.files import DataError

HEADER = r"""# A title
#, fuzzy
msgid ""
msgstr ""
"Project-Id-Version: x\n"
"PO-Revision-Date: some day in May\n"
"Language: German (de)\n"
"Content-Type: text/plain; charset=UTF-8\n"
"Plural-Forms: nplurals=INTEGER; plural=EXPRESSION;\n"
"""
MESSAGES = """
#. for translators
#: main.c:1 file\N{FIRST STRONG ISOLATE}odd
#, c-format
msgid "Open"
msgstr "Öffnen"

msgctxt "menu"
msgid "Open %s"
msgstr ""
"Öffne "
"\\"%s\\"\\n"

msgid "left"
msgstr ""

#, fuzzy
#| msgid "old"
msgid "guess"
msgstr "Vermutung"

msgid "file"
msgid_plural "files"
msgstr[0] "Datei"
msgstr[1] "Dateien"

msgid "cat"
msgid_plural "cats"
msgstr[0] "kot"
msgstr[1] "koty"
msgstr[2] "kotów"

msgid "dog"
msgid_plural "dogs"
msgstr[0] ""
msgstr[1] ""

#~| msgid "older"
#~ msgid "gone"
#~ msgstr "weg"
"""
PAIRS = [
    TextPair("Open", "Öffnen"),
    TextPair("Open %s", 'Öffne "%s"\n'),
    TextPair("file", "Datei"),
    TextPair("files", "Dateien"),
    TextPair("cat", "kot"),
]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def mo(entries: dict[bytes, bytes], order: str = "<") -> bytes:
    """A .mo file written by hand, sorted by message as the format asks."""
    ids, strings = sorted(entries), [entries[key] for key in sorted(entries)]
    tables, body = b"", b""
    for text in (*ids, *strings):
        tables += struct.pack(order + "2I", len(text), 28 + 16 * len(ids) + len(body))
        body += text + b"\0"
    return struct.pack(order + "7I", 0x950412DE, 0, len(ids), 28, 28 + 8 * len(ids), 0, 0) + tables + body


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        catalogs.read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("header", [HEADER, ""], ids=["with a header", "without"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_confirmed_translations_are_read_and_the_rest_is_counted(tmp_path: Path, header: str, line_end: str) -> None:
    path = write(tmp_path / "de.po", (header + MESSAGES).replace("\n", line_end))
    assert catalogs.read(path) == (PAIRS, Counter({"untranslated": 2, "obsolete": 1, "fuzzy": 1}))


def test_a_header_on_one_line_is_no_message(tmp_path: Path) -> None:
    path = write(tmp_path / "de.po", 'msgid ""\nmsgstr "Language: xx (?)\\n"\n\nmsgid "a"\nmsgstr "b"\n')
    assert catalogs.read(path).examples == [TextPair("a", "b")]


def test_a_compiled_catalog_gives_the_pairs_of_its_source(tmp_path: Path) -> None:
    header = 'msgid ""\nmsgstr "Plural-Forms: nplurals=2; plural=0;\\n"\n'
    unusual = ("#~| ", "#: ", "msgstr[2]")
    source = header + "\n".join(line for line in MESSAGES.split("\n") if not line.startswith(unusual))
    buffer = io.BytesIO()
    write_mo(buffer, read_po(io.StringIO(source)))
    reading = catalogs.read(write(tmp_path / "de.mo", buffer.getvalue()))
    # Babel writes an untranslated plural as its own translation.
    extra = [TextPair("cats", "koty"), TextPair("dog", "dog"), TextPair("dogs", "dogs")]
    assert sorted(reading.examples) == sorted([*PAIRS, *extra])


@given(st.dictionaries(st.text(min_size=1), st.text(min_size=1), min_size=1), st.sampled_from("<>"))
def test_any_text_survives_a_compiled_catalog_of_either_byte_order(messages: dict[str, str], order: str) -> None:
    messages = {
        key.replace("\0", "").replace("\4", "") or "x": value.replace("\0", "") or "y"
        for key, value in messages.items()
    }
    data = mo({key.encode(): value.encode() for key, value in messages.items()}, order)
    reading = catalogs._read_mo(Path("x.mo"), data)
    assert dict(reading.examples) == {**messages}


def test_a_header_may_name_another_charset(tmp_path: Path) -> None:
    po = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=ISO-8859-1\\n"\n\nmsgid "a"\nmsgstr "ä"\n'
    assert catalogs.read(write(tmp_path / "a.po", po.encode("latin-1"))).examples == [TextPair("a", "ä")]
    compiled = mo({b"": b"Content-Type: text/plain; charset=ISO-8859-1\n", b"a": b"\xe4"})
    assert catalogs.read(write(tmp_path / "a.mo", compiled)).examples == [TextPair("a", "ä")]
    path = write(tmp_path / "b.po", po.replace("ISO-8859-1", "no-such"))
    assert refusal(path) == f"{path}: 'no-such' is no known encoding of texts"


def test_a_charset_that_a_message_speaks_of_is_not_the_catalogs(tmp_path: Path) -> None:
    po = 'msgid "A charset=us-ascii"\nmsgstr "ä"\n'
    assert catalogs.read(write(tmp_path / "a.po", po)).examples == [TextPair("A charset=us-ascii", "ä")]
    compiled = mo({b"": b"Content-Type: text/plain; charset=UTF-8\n", b"A charset=us-ascii": "ä".encode()})
    assert catalogs.read(write(tmp_path / "a.mo", compiled)).examples == [TextPair("A charset=us-ascii", "ä")]


@pytest.mark.parametrize("codec", ["rot13", "punycode"])
def test_a_codec_that_is_none_of_texts_is_refused(tmp_path: Path, codec: str) -> None:
    header = f"Content-Type: text/plain; charset={codec}\n"
    path = write(tmp_path / "a.mo", mo({b"": header.encode(), b"\xff": b"\xff"}))
    assert refusal(path) == f"{path}: {codec!r} is no known encoding of texts"


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ('msgid "a"\nmsgstr "b', """2: not a line of a gettext catalog: 'msgstr "b'"""),
        ('msgid "a"\nmsgstr "b""', "2: not a line of a gettext catalog"),
        ("hello", "1: not a line of a gettext catalog: 'hello'"),
        ('msgid "a"\n\nmsgid "b"\nmsgstr "c"', "1: missing msgstr for msgid 'a'"),
        ('"a"', '1: Got line starting with " but not in msgid, msgstr or msgctxt'),
    ],
)
def test_a_damaged_catalog_is_refused_by_line_and_nothing_is_printed(
    tmp_path: Path, lines: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.po", lines)
    assert refusal(path).startswith(f"{path}:{problem}")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("length", [0, 3, 4, 19, 30, 60, -1])
def test_a_compiled_catalog_cut_short_is_refused(tmp_path: Path, length: int) -> None:
    data = mo({b"one": b"eins", b"two": b"zwei"})
    # What a writer may omit is the byte after the last string, hence two for -1.
    path = write(tmp_path / "a.mo", data[: length - 1 if length < 0 else length])
    assert refusal(path).startswith(f"{path}: ")


def test_a_compiled_catalog_that_is_none_or_not_utf8_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mo", b"PK\3\4 something else altogether")
    assert refusal(path) == f"{path}: not a .mo catalog: its first bytes are others"
    data = mo({b"one": b"\xff"})
    path = write(path, data)
    assert refusal(path) == f"{path}: byte at offset {data.index(0xFF)} is not valid UTF-8"
