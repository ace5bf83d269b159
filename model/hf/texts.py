"""Tokenizers and chat templates: imported unchanged, except that every control token is declared special.

`tokenizer.json` is the format of transformers' fast tokenizers. Marian's SentencePiece models are converted
(`model.hf.marian_pieces`). Needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import tokenizers

from model.hf.folder import TOKENIZER_CONFIG, HfFolder, read_json, read_text
from model.hf.values import shorten
from model.spec.artifact import CHAT, TARGET_TOKENIZER, TOKENIZER
from model.spec.chat import VARIABLES, Chat, ChatSettings, ChatTemplateError, ConversationError, Message
from model.spec.config import ModelConfig
from model.spec.tokenizer import Tokenizer, TokenizerError

CHAT_TEMPLATE = "chat_template.jinja"
SPECIAL_TOKENS = "special_tokens_map.json"
_LISTS = ("additional_special_tokens", "extra_special_tokens")


def read_tokenizers(
    folder: HfFolder, config: ModelConfig | None, eos_ids: Collection[int], problems: list[str], notes: list[str]
) -> dict[str, str]:
    """Texts of our files by name: tokenizer.json, and target_tokenizer.json for a pair.

    Without a configuration, the tokenizers are checked for everything but their vocabulary sizes.
    """
    names = _special_spellings(folder, problems)
    text = read_text(folder.path, TOKENIZER, problems)
    if text is not None:
        made = {TOKENIZER: text}
    elif folder.config.get("model_type") == "marian":
        # Imports protobuf, which only this needs.
        from model.hf.marian_pieces import convert

        made = convert(folder, problems, notes)
    else:
        problems.append(
            f"{TOKENIZER} is missing; transformers writes one: AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        )
        return {}
    limits: dict[str, int] = {}
    if config is not None:
        limits = {TOKENIZER: config.source_vocab_size or config.vocab_size, TARGET_TOKENIZER: config.vocab_size}
    result = {}
    for name, each in made.items():
        try:
            tokenizer = Tokenizer(_declare(tokenizers.Tokenizer.from_str(each), names, eos_ids))
        except Exception as error:  # the library raises plain exceptions
            problems.append(f"{name}: {error}")
            continue
        if name in limits and tokenizer.vocab_size > limits[name]:
            problems.append(f"{name} has ids up to {tokenizer.vocab_size - 1}, the model embeds {limits[name]}")
        result[name] = tokenizer.to_json()
    return result


def read_chat(folder: HfFolder, tokenizer_json: str | None, problems: list[str], notes: list[str]) -> dict[str, str]:
    """The text of chat.json by its name, if the folder has a template.

    Without a tokenizer, a template is still compiled to report problems.
    """
    source = read_text(folder.path, CHAT_TEMPLATE, problems)
    if source is None:
        source = _default_template(folder.tokenizer_config.get("chat_template"), problems, notes)
    if source is None:
        return {}
    values = _special_values(folder, problems)
    variables = {name: spelling for name in VARIABLES if (spelling := _spelling(values.get(name))) is not None}
    settings = ChatSettings(source, variables)
    empty = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({}, unk_token="")))
    try:
        chat = Chat(settings, empty if tokenizer_json is None else Tokenizer.from_json(tokenizer_json))
    except (ChatTemplateError, TokenizerError) as error:
        problems.append(f"chat template: {error}; --no-chat leaves it out")
        return {}
    if tokenizer_json is None:
        return {}
    try:
        chat.encode([Message("user", "Hello")])
    except ConversationError as error:
        notes.append(f"chat template: a lone greeting cannot be rendered: {error}")
    return {CHAT: settings.to_json()}


def _default_template(value: Any, problems: list[str], notes: list[str]) -> str | None:
    """A template, or the one named default among several."""
    if isinstance(value, list):
        named = [(each.get("name"), each.get("template")) for each in value if isinstance(each, dict)]
        value = next((template for name, template in named if name == "default"), None)
        if named and value is None:
            notes.append(f"no chat template: of {shorten([name for name, _ in named])} none is called default")
    if value is not None and not isinstance(value, str):
        problems.append(f"{TOKENIZER_CONFIG}: chat_template must be a string or a list of named ones")
        return None
    return value


def _special_values(folder: HfFolder, problems: list[str]) -> dict[str, Any]:
    """Control tokens by name; tokenizer_config.json overrides the older file."""
    return {**read_json(folder.path, SPECIAL_TOKENS, problems), **folder.tokenizer_config}


def _special_spellings(folder: HfFolder, problems: list[str]) -> set[str]:
    """The spellings of the folder's control tokens, from all of its files."""
    values = _special_values(folder, problems)
    given = [values.get(name) for name in VARIABLES]
    for name in _LISTS:
        several = values.get(name)
        given += several if isinstance(several, list) else list(several.values()) if isinstance(several, dict) else []
    decoder = values.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        given += [each for each in decoder.values() if isinstance(each, dict) and each.get("special") is True]
    return {spelling for each in given if (spelling := _spelling(each)) is not None}


def _spelling(value: Any) -> str | None:
    """The spelling of a token: a string, or the `content` of an object."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) and content else None


def _declare(inner: tokenizers.Tokenizer, names: Collection[str], eos_ids: Collection[int]) -> tokenizers.Tokenizer:
    """Declares every control token special, which a file may omit; ids stay.

    Args:
        inner: the file's tokenizer.
        names: spellings of control tokens.
        eos_ids: tokens that end outputs; an ordinary word among them stays ordinary.
    """
    described = json.loads(inner.to_str())
    listed = {token["content"]: token for token in described["added_tokens"]}
    spellings = {name for name in names if inner.token_to_id(name) is not None}
    spellings |= listed.keys() & {inner.id_to_token(token) for token in eos_ids}
    for spelling in spellings & listed.keys():
        listed[spelling]["special"] = True
    declared = tokenizers.Tokenizer.from_str(json.dumps(described))
    missing = sorted(spellings - listed.keys(), key=lambda spelling: declared.token_to_id(spelling) or 0)
    declared.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in missing])
    return declared
