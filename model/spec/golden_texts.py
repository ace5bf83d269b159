"""Golden texts: what a checkpoint's tokenizers and chat template made of fixed texts, and the ids that end its outputs.

Golden cases are token ids: a wrong tokenizer, template or end token would pass them. The exporter records texts by the
checkpoint's files; `export verify` and the server make the same record of the artifact's files and compare.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from model.spec.artifact import CHAT, GOLDEN_TEXTS, MAX_CHAT_BYTES, MAX_TEXTS_BYTES, Manifest
from model.spec.chat import Chat, ChatSettings, ConversationError, Message
from model.spec.generation import GenerationRules
from model.spec.reading import read_text
from model.spec.tokenizer import Tokenizer

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "Vendredi 20 novembre 2026, à 17h05 : l\N{RIGHT SINGLE QUOTATION MARK}œuvre coûte 1 234,56 €",
    "Straße, Äpfel, Übergrößenträger; ĳsvrij, İstanbul, Þórr, Łódź",
    "Съешь ещё этих мягких французских булок",
    "نص حكيم له سر قاطع; דג סקרן שט בים; สวัสดีชาวโลก",
    "天地玄黄 宇宙洪荒。いろはにほへと 다람쥐 헌 쳇바퀴에",
    "👩🏽‍💻 🇳🇱 e\u0301 \u200d \ufeff ﬁ ½ ²",
    "    if x[0] != -1e-3:\r\n\t\treturn f'{x!r:>8}'  # ≤ 100 %\n\n",
    "0123456789 3.14159 1,000,000 0xdeadbeef 192.168.0.1",
    "<bos></s><unk>[CLS]<|im_end|> <0x0A> ▁Ġ ##ing",
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft",
    "a",
    " ",
)
CONVERSATIONS = (
    (Message("user", TEXTS[0]),),
    (Message("system", "Answer briefly."), Message("user", TEXTS[1])),
    (Message("user", TEXTS[7]), Message("assistant", TEXTS[6]), Message("user", TEXTS[9])),
)
_NOW = datetime(2026, 11, 20, 17, 5)
_MAX_SHOWN = 60
_SAMPLED, _PER_TEXT = 512, 64
"""Tokens of a vocabulary, and of a text made of them."""

Record = dict[str, Any]


def special_ids(
    pad_id: int, decoder_start_id: int, eos_ids: Iterable[int], rules: GenerationRules
) -> list[tuple[str, int]]:
    """Every special id with its field's name."""
    ids = [("pad_id", pad_id), ("decoder_start_id", decoder_start_id)]
    return [*ids, *(("eos_ids", token) for token in eos_ids), *rules.named_ids]


def texts_for(*tokenizers: Tokenizer) -> list[str]:
    """`TEXTS`, and some that are made of tokens from everywhere in the vocabularies."""
    texts = list(TEXTS)
    for tokenizer in dict.fromkeys(tokenizers):
        size = tokenizer.vocab_size
        ids = sorted({number * size // _SAMPLED for number in range(_SAMPLED)})
        spelled = [tokenizer.decode([token]) for token in ids]
        texts += [" ".join(spelled[start : start + _PER_TEXT]) for start in range(0, len(spelled), _PER_TEXT)]
    return texts


def record(
    prompts: Tokenizer,
    outputs: Tokenizer,
    chat: ChatSettings | None,
    ids: Sequence[tuple[str, int]],
    texts: Iterable[str],
    conversations: Iterable[Sequence[Message]] = CONVERSATIONS,
) -> Record:
    """What a model makes of texts, JSON-ready.

    Args:
        prompts: the tokenizer of prompts or sources.
        outputs: that of outputs.
        chat: the template, if there is one.
        ids: `special_ids`.
        texts: to tokenize as prompt and as output, and to detokenize.
        conversations: to render; without a template there are none.
    """
    made: Record = {"ids": [list(pair) for pair in ids], "texts": [], "conversations": []}
    for text in texts:
        tokens = outputs.encode_plain(text)
        entry = {"text": text, "prompt": prompts.encode(text), "output": tokens, "decoded": outputs.decode(tokens)}
        made["texts"].append(entry)
    if chat is not None:
        template = Chat(chat, prompts, now=lambda: _NOW)
        made["conversations"] = [_render(template, messages) for messages in conversations]
    return made


def _render(template: Chat, messages: Sequence[Message]) -> Record:
    """What a template makes of a conversation; None where it refuses it."""
    entry: Record = {"messages": [[message.role, message.content] for message in messages]}
    try:
        written = template.render(messages)
    except ConversationError:
        return entry | {"written": None, "prompt": None}
    return entry | {"written": written, "prompt": template.tokenize(written)}


def save(path: Path, made: Record) -> None:
    """Writes golden_texts.json."""
    path.write_text(json.dumps(made, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def check(folder: Path, manifest: Manifest, prompts: Tokenizer, outputs: Tokenizer) -> list[str]:
    """How an artifact's texts differ from those of its export: the first difference; none without golden texts.

    Raises:
        OSError: when a file cannot be read.
        ValueError: when a file is malformed.
    """
    if GOLDEN_TEXTS not in manifest.files:
        return []
    ids = special_ids(manifest.pad_id, manifest.decoder_start_id, manifest.eos_ids, manifest.generation)
    chat = None
    if CHAT in manifest.files:
        chat = ChatSettings.from_json(read_text(folder / CHAT, MAX_CHAT_BYTES))
    stored = _parse(read_text(folder / GOLDEN_TEXTS, MAX_TEXTS_BYTES))
    texts = [entry["text"] for entry in stored["texts"]]
    conversations = [[Message(*message) for message in entry["messages"]] for entry in stored["conversations"]]
    made = record(prompts, outputs, chat, ids, texts, conversations)
    for kind in ("ids", "texts", "conversations"):
        if len(stored[kind]) != len(made[kind]):
            return [f"{GOLDEN_TEXTS}: {len(made[kind])} {kind}, at export there were {len(stored[kind])}"]
        for then, now in zip(stored[kind], made[kind], strict=True):
            if then != now:
                return [f"{GOLDEN_TEXTS}: {_differ(kind, then, now)}"]
    return []


def _parse(text: str) -> Record:
    """Raises ValueError unless the text has the form of a record."""
    try:
        stored = json.loads(text)
        for entry in stored["texts"]:
            if not isinstance(entry["text"], str):
                raise TypeError("text is no string")
        for entry in stored["conversations"]:
            if not all(isinstance(part, str) for role, content in entry["messages"] for part in (role, content)):
                raise TypeError("a message is no role and content")
        stored["ids"] = list(stored["ids"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a record of texts: {error!r}") from error
    return dict(stored)


def _differ(kind: str, then: Any, now: Any) -> str:
    if kind == "ids":
        return f"{_short(now)}, at export {_short(then)}"
    subject = then["text"] if kind == "texts" else then["messages"][-1][1]
    part = next((name for name in now if then.get(name) != now[name]), "form")
    return f"{part} of {_short(subject)} is {_short(now.get(part))}, at export {_short(then.get(part))}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"
