"""Converts Marian's SentencePiece pair to two tokenizers: pieces of each side's model, with the ids of the vocabulary.

    source.spm + vocab.json                             → tokenizer.json
    target.spm + vocab.json or target_vocab.json        → target_tokenizer.json

SentencePiece's unigram model (Kudo, 2018) is also implemented by the `tokenizers` library. Converted are the pieces'
scores, the normalization, and Marian's ids. An id without a piece on this side gets a name that no text matches, but
decodes to its word, since a model may generate the other side's words. Single characters are the exception: Marian
encodes them even where this side has no piece. Pieces without an id are left out, so that their text is spelled with
shorter ones.

SentencePiece's file is one protobuf message; the fields needed are declared here. Source: `sentencepiece_model.proto`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import tokenizers
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from tokenizers import decoders, models, normalizers, processors

from model.hf.folder import TOKENIZER_CONFIG, HfFolder, read_json
from model.spec.artifact import TARGET_TOKENIZER, TOKENIZER
from model.spec.tokenizer import CONTROL_MARK

SOURCE_MODEL, TARGET_MODEL = "source.spm", "target.spm"
VOCABULARY, TARGET_VOCABULARY = "vocab.json", "target_vocab.json"

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_EOS, _UNKNOWN, _PAD = "</s>", "<unk>", "<pad>"
_UNIGRAM = 1
_NORMAL, _USER_DEFINED, _BYTE = 1, 4, 6
_MAX_MODEL_BYTES = 64 * 2**20


def convert(folder: HfFolder, problems: list[str], notes: list[str]) -> dict[str, str]:
    """The texts of both tokenizers by name; empty if something is missing or cannot be converted."""
    apart = folder.tokenizer_config.get("separate_vocabs") is True
    vocabularies = {SOURCE_MODEL: VOCABULARY, TARGET_MODEL: TARGET_VOCABULARY if apart else VOCABULARY}
    made = {}
    for file, name in ((SOURCE_MODEL, TOKENIZER), (TARGET_MODEL, TARGET_TOKENIZER)):
        vocabulary = _read_vocabulary(folder, vocabularies[file], problems)
        model = _read_model(folder, file, problems)
        if vocabulary is not None and model is not None:
            made[name] = _convert(model, vocabulary, file, notes)
    return made if len(made) == len(vocabularies) else {}


def _read_vocabulary(folder: HfFolder, name: str, problems: list[str]) -> dict[str, int] | None:
    if folder.file(name) is None:
        missing = f"{name} is missing" + (f", as {TOKENIZER_CONFIG} says separate_vocabs" if name != VOCABULARY else "")
        problems.append(missing)
        return None
    num_problems = len(problems)
    values = read_json(folder.path, name, problems)
    if len(problems) > num_problems:
        return None
    if not all(isinstance(index, int) and 0 <= index < 2 * len(values) for index in values.values()):
        problems.append(f"{name} must number its pieces from 0 on")
        return None
    lacking = [piece for piece in (_EOS, _UNKNOWN, _PAD) if piece not in values]
    if lacking or len(set(values.values())) < len(values):
        problems.append(f"{name} must number each piece once, {_EOS}, {_UNKNOWN} and {_PAD} among them")
        return None
    return values


def _read_model(folder: HfFolder, name: str, problems: list[str]) -> Any:
    """The parsed file; None if it cannot be converted."""
    path = folder.file(name)
    if path is None:
        problems.append(f"{name} is missing")
        return None
    model = _message_class()()
    try:
        if path.stat().st_size > _MAX_MODEL_BYTES:
            problems.append(f"{name} has more than {_MAX_MODEL_BYTES} bytes")
            return None
        model.ParseFromString(path.read_bytes())
    except (OSError, DecodeError) as error:
        problems.append(f"{name}: not a SentencePiece model: {error}")
        return None
    num_problems = len(problems)
    if model.trainer_spec.model_type != _UNIGRAM:
        problems.append(f"{name} is no unigram model")
    if model.trainer_spec.treat_whitespace_as_suffix or not model.normalizer_spec.escape_whitespaces:
        problems.append(f"{name} does not put spaces before words")
    if any(piece.type in (_USER_DEFINED, _BYTE) for piece in model.pieces):
        problems.append(f"{name} has pieces for bytes, or defined by hand, which are not supported")
    if not any(piece.type == _NORMAL for piece in model.pieces):
        problems.append(f"{name} has no pieces")
    return model if len(problems) == num_problems else None


def _convert(model: Any, vocabulary: Mapping[str, int], file: str, notes: list[str]) -> str:
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == _NORMAL}
    unnumbered = scores.keys() - vocabulary.keys()
    if unnumbered:
        notes.append(f"{len(unnumbered)} pieces of {file} have no number and are spelled with shorter ones")
    control, languages = (_EOS, _UNKNOWN, _PAD), _language_codes(vocabulary)
    pieces = [(f"{CONTROL_MARK}{index}", 0.0) for index in range(1 + max(vocabulary.values()))]
    least = min(scores.values())
    for piece, index in vocabulary.items():
        if piece in scores or len(piece) == 1:
            pieces[index] = (piece, scores.get(piece, least))
        else:
            is_whole = piece in control or piece in languages
            pieces[index] = (piece if is_whole else CONTROL_MARK + piece, 0.0)
    inner = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=vocabulary[_UNKNOWN], byte_fallback=False))
    inner.normalizer = normalizers.Sequence([*_normalizers(model.normalizer_spec)])
    inner.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in control])
    # A code names the target language. It is not special: texts may contain it.
    inner.add_tokens([tokenizers.AddedToken(code, special=False, normalized=False) for code in languages])
    inner.post_processor = processors.TemplateProcessing(single=f"$A {_EOS}", special_tokens=[(_EOS, vocabulary[_EOS])])
    inner.decoder = decoders.Sequence(
        [decoders.Replace(CONTROL_MARK, ""), decoders.Replace(_SPACE, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    text: str = inner.to_str()
    return text


def _language_codes(vocabulary: Iterable[str]) -> list[str]:
    """Tokens such as `>>fra<<`, which select the target language of a multilingual model."""
    return sorted(piece for piece in vocabulary if piece.startswith(">>") and piece.endswith("<<"))


def _normalizers(spec: Any) -> Iterable[Any]:
    """SentencePiece's normalization and its spaces: no duplicates, each a character of a piece."""
    if spec.precompiled_charsmap:
        yield normalizers.Precompiled(spec.precompiled_charsmap)
    if spec.remove_extra_whitespaces:
        yield normalizers.Replace(tokenizers.Regex("^ +| +$"), "")
        yield normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
    yield normalizers.Replace(" ", _SPACE)
    if spec.add_dummy_prefix:
        yield normalizers.Prepend(_SPACE)


@cache
def _message_class() -> Any:
    """The message class of a SentencePiece file, with the fields needed."""
    kinds = descriptor_pb2.FieldDescriptorProto
    fields = {
        "Piece": [
            ("piece", 1, kinds.TYPE_STRING, ""),
            ("score", 2, kinds.TYPE_FLOAT, ""),
            ("type", 3, kinds.TYPE_INT32, "1"),
        ],
        "Trainer": [
            ("model_type", 3, kinds.TYPE_INT32, "1"),
            ("treat_whitespace_as_suffix", 24, kinds.TYPE_BOOL, "false"),
        ],
        "Normalizer": [
            ("precompiled_charsmap", 2, kinds.TYPE_BYTES, ""),
            ("add_dummy_prefix", 3, kinds.TYPE_BOOL, "true"),
            ("remove_extra_whitespaces", 4, kinds.TYPE_BOOL, "true"),
            ("escape_whitespaces", 5, kinds.TYPE_BOOL, "true"),
        ],
    }
    file = descriptor_pb2.FileDescriptorProto(name="pieces.proto", package="pieces", syntax="proto2")
    for message, described in fields.items():
        made = file.message_type.add(name=message)
        for name, number, kind, default in described:
            field = made.field.add(name=name, number=number, type=kind, label=kinds.LABEL_OPTIONAL)
            if default:
                field.default_value = default
    whole = file.message_type.add(name="Model")
    parts = (("pieces", 1, "Piece"), ("trainer_spec", 2, "Trainer"), ("normalizer_spec", 3, "Normalizer"))
    for name, number, message in parts:
        label = kinds.LABEL_REPEATED if name == "pieces" else kinds.LABEL_OPTIONAL
        kind = kinds.TYPE_MESSAGE
        whole.field.add(name=name, number=number, type=kind, type_name=f".pieces.{message}", label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("pieces.Model"))
