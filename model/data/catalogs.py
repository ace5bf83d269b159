"""Gettext catalogs, .po and .mo: pairs of message and translation.

Left out: untranslated, fuzzy (unconfirmed) and obsolete entries, and the header. The context of a message is ignored.
If message and translation both have two plural forms, both are taken, otherwise the first alone. Texts are decoded
strictly in the header's charset, by default UTF-8.

Source of both formats: the GNU gettext manual, chapters "The Format of PO Files" and "The Format of GNU MO Files".
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from babel.messages.pofile import PoFileError, read_po

from model.data.corpus import Reading, TextPair
from model.data.files import DataError, decode, read_bytes

SUFFIXES = frozenset({".po", ".mo"})

_MAGIC = 0x950412DE
_CHARSET = re.compile(r"charset=([\w.:-]+)", re.ASCII)
_PLACEHOLDER = "charset"  # The charset of an unfilled template.
_LINE = re.compile(r'(?:msgid|msgid_plural|msgctxt|msgstr(?:\[\d+\])?)?\s*"(?:[^"\\]|\\.)*"')
# Babel rejects catalogs over odd dates or languages in the header, about every thirtieth. This header replaces theirs:
# it allows as many plural forms as any language has; the comment ends the message.
_HEADER = ('msgid ""', 'msgstr "Plural-Forms: nplurals=6; plural=0;\\n"', "#")


def read(path: Path) -> Reading[TextPair]:
    """The pairs of one catalog: .mo by its suffix, otherwise .po.

    Raises:
        DataError: naming the file, and the line or entry that is damaged.
    """
    data = read_bytes(path)
    return _read_mo(path, data) if path.suffix == ".mo" else _read_po(path, data)


def _read_po(path: Path, data: bytes) -> Reading[TextPair]:
    # Latin-1 decodes any bytes, and the header names its charset in ASCII.
    draft = data.decode("latin-1").split("\n")
    header = _header_lines(draft)
    lines = decode(path, data, _charset("".join(draft[header.start : header.stop]))).split("\n")
    num_obsolete = sum(line.startswith("#~ msgid ") for line in lines)
    entries = list(_checked(path, lines))
    try:
        catalog = read_po([*_HEADER, *entries], abort_invalid=True)
    except PoFileError as error:
        problem = str(error.args[0]).rpartition(" on ")[0]
        raise DataError(f"{path}:{error.lineno + 1 - len(_HEADER)}: {problem}") from error
    except Exception as error:  # Babel's parser raises various exceptions for some orders of lines.
        raise DataError(f"{path}: not a gettext catalog: {error}") from error
    left_out = Counter({"obsolete": num_obsolete})
    pairs = []
    for message in catalog:
        if not message.id:
            continue
        if message.fuzzy:
            left_out["fuzzy"] += 1
            continue
        new = _pairs(_forms(message.id), _forms(message.string))
        left_out["untranslated"] += not new
        pairs += new
    return Reading(pairs, +left_out)


def _checked(path: Path, lines: Sequence[str]) -> Iterator[str]:
    """The lines of messages; all others become blank, which keeps line numbers.

    Babel silently drops the last character of an unterminated string, hence the check.
    """
    header = _header_lines(lines)
    for number, line in enumerate(map(str.strip, lines)):
        if number in header or not line or (line.startswith("#") and not line.startswith("#,")):
            yield ""
        elif line.startswith("#,") or _LINE.fullmatch(line):
            yield line
        else:
            raise DataError(f"{path}:{number + 1}: not a line of a gettext catalog: {line[:60]!r}")


def _header_lines(lines: Sequence[str]) -> range:
    """The lines of the header: the message with an empty id, and its comments."""
    stripped = [line.strip() for line in lines]
    for number, (line, after) in enumerate(pairwise(stripped)):
        if line == 'msgid ""' and after.startswith("msgstr "):
            # With a context it is an ordinary message with an empty text.
            if number and stripped[number - 1].startswith("msgctxt"):
                continue
            end = number + 2
            while end < len(lines) and stripped[end].startswith('"'):
                end += 1
            start = number
            while start and stripped[start - 1].startswith("#"):
                start -= 1
            return range(start, end)
    return range(0)


def _read_mo(path: Path, data: bytes) -> Reading[TextPair]:
    orders = {struct.pack(order + "I", _MAGIC): order for order in "<>"}
    order = orders.get(data[:4])
    if order is None:
        raise DataError(f"{path}: not a .mo catalog: {'empty' if not data else 'its first bytes are others'}")
    _, num_messages, ids_at, strings_at = _unpack(path, data, order + "4I", 4)
    spans = [
        [_mo_span(path, data, order, table + 8 * entry, entry) for table in (ids_at, strings_at)]
        for entry in range(num_messages)
    ]
    header = next((data[string] for message, string in spans if not data[message]), b"")
    charset = _charset(header.decode("latin-1"))
    left_out: Counter[str] = Counter()
    pairs = []
    for entry in spans:
        source, target = (_mo_text(path, data, span, charset) for span in entry)
        if not source:
            continue
        new = _pairs(source.rpartition("\4")[2].split("\0"), target.split("\0"))
        left_out["untranslated"] += not new
        pairs += new
    return Reading(pairs, +left_out)


def _mo_span(path: Path, data: bytes, order: str, at: int, entry: int) -> slice:
    length, start = _unpack(path, data, order + "2I", at)
    if start + length > len(data):
        raise DataError(f"{path}: entry {entry} reaches to byte {start + length}, the file has {len(data)}: cut short?")
    return slice(start, start + length)


def _mo_text(path: Path, data: bytes, span: slice, charset: str) -> str:
    try:
        return data[span].decode(charset)
    except UnicodeDecodeError as error:
        offset = span.start + error.start
        raise DataError(f"{path}: byte at offset {offset} is not valid {charset.upper()}") from error
    except (LookupError, UnicodeError) as error:
        raise DataError(f"{path}: {charset!r} is no known encoding of texts") from error


def _unpack(path: Path, data: bytes, layout: str, at: int) -> tuple[int, ...]:
    try:
        return struct.unpack_from(layout, data, at)
    except struct.error as error:
        raise DataError(f"{path}: its tables reach past the end at byte {len(data)}: cut short?") from error


def _charset(header: str) -> str:
    match = _CHARSET.search(header)
    name = match[1].lower() if match else "utf-8"
    return "utf-8" if name in (_PLACEHOLDER, "utf8") else name


def _forms(text: str | Sequence[str | None] | None) -> list[str]:
    """Babel's one or several texts as a list."""
    return [text or ""] if isinstance(text, str | None) else [form or "" for form in text]


def _pairs(ids: Sequence[str], strings: Sequence[str]) -> list[TextPair]:
    forms = [text for text in strings if text]
    if not forms or not strings[0]:
        return []
    if len(ids) == len(forms) == 2:
        return [TextPair(*texts) for texts in zip(ids, forms, strict=True)]
    return [TextPair(ids[0], forms[0])]
