"""Tokenizers and templates taken over: the same tokens as transformers' own, unless control tokens are merely said."""

from __future__ import annotations

import io
import json
import random
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from model.hf.folder import ImportRefused, read_folder
from model.hf.importer import plan
from model.hf.marian_pieces import convert
from model.spec.artifact import CHAT, TARGET_TOKENIZER, TOKENIZER
from model.spec.chat import Chat, ChatSettings, Message
from model.spec.tokenizer import Tokenizer
from tests.hf_folders import TOKENIZER_CONFIG, llama_tensors, write_folder, write_json

CATALOG = Path(__file__).parents[1] / "data" / "libreoffice-help-de.po"
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "[INST]", "[/INST]"]
ADDED = ["<think>", "</think>", "<tool_call>"]
TEXTS = ["Open the file menu.", "  two  blanks ", "é ü 漢字 🙂", "line\nbreak\ttab", "a<b>c", "1234567", "", "x"]

# In the manners of the families: turns between tags, instructions in brackets, headers, and thoughts that are cut out.
TEMPLATES = {
    "tags": """\
{% for turn in messages %}{{ '<|im_start|>' ~ turn['role'] ~ '\n' }}{{ turn['content'] }}{{ '<|im_end|>' + '\n' }}\
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "brackets": """\
{% set first = namespace(system='') %}
{% for turn in messages %}
{%- if turn.role == 'system' %}{% set first.system = '<<' + turn.content + '>>\n\n' %}
{%- elif turn.role == 'user' %}{{ bos_token + '[INST] ' + (first.system + turn.content).strip() + ' [/INST]' }}
{%- set first.system = '' %}
{%- elif turn.role == 'assistant' %}{{ ' ' + turn.content.strip() + ' ' + eos_token }}
{%- else %}{{ raise_exception('nobody of the name ' + turn.role) }}
{%- endif %}
{%- endfor %}""",
    "headers": """\
{{- bos_token }}
{%- macro header(role) -%}
    <|im_start|>{{ role }}<|im_end|>{{ '\n\n' }}
{%- endmacro %}
{%- if strftime_now is defined %}
    {{- header('system') + 'It is ' + strftime_now('%Y') + '.<|eot_id|>' }}
{%- endif %}
{%- for turn in messages if turn.role != 'tool' %}
    {{- header(turn.role) + turn.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- header('assistant') }}
{%- endif %}""",
    "thoughts": """\
{%- set last = namespace(question=-1) %}
{%- for turn in messages %}
    {%- if turn.role == 'user' and not turn.content.startswith('<tool_call>') %}
        {%- set last.question = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for turn in messages %}
    {%- set said, thought = turn.content, '' %}
    {%- if turn.role == 'assistant' and '</think>' in said %}
        {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}
        {%- set said = said.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + turn.role + '\n' }}
    {%- if thought and loop.index0 > last.question %}
        {{- '<think>\n' + thought + '\n</think>\n\n' }}
    {%- endif %}
    {{- said + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}
{%- endif %}""",
}
# A tag that people say is a token to transformers and text here, unless the template takes it away, as one does.
CONVERSATIONS = [
    [("user", "Hello")],
    [("user", " Open  the file? "), ("assistant", "Yes."), ("user", "é 漢 <b> 1 < 2")],
    [("system", "Be kind.\n"), ("user", "a\n"), ("assistant", "<think>\nhm\n</think>\n\nb "), ("user", "c")],
]


@cache
def catalog() -> tuple[list[str], list[str]]:
    """English and German lines."""
    source, target = [], []
    for line in CATALOG.read_text(encoding="utf-8").splitlines():
        for kind, lines in (("msgid ", source), ("msgstr ", target)):
            if line.startswith(f'{kind}"') and len(line) > 12:
                lines.append(line.removeprefix(kind)[1:-1])
    return source, target


@cache
def trained(kind: str) -> str:
    """A small tokenizer of the kind that a family uses, trained on the catalog."""
    source, _ = catalog()
    if kind == "byte-level":
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
    elif kind == "pieces":  # as the first Llamas: SentencePiece's BPE, blanks put in by the normaliser
        inner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        inner.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIAL + bytes_, show_progress=False)
    else:
        inner = tokenizers.Tokenizer(models.Unigram())
        inner.pre_tokenizer = pre_tokenizers.Metaspace()
        inner.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=500, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
        )
    inner.train_from_iterator(source[:600], trainer)
    if kind == "pieces":  # bytes are vocabulary, not control tokens
        described = json.loads(inner.to_str())
        described["added_tokens"] = [token for token in described["added_tokens"] if token["content"] in SPECIAL]
        inner = tokenizers.Tokenizer.from_str(json.dumps(described))
    if kind != "byte-level":
        start = ("<s>", inner.token_to_id("<s>"))
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[start])
    inner.add_tokens([tokenizers.AddedToken(spelling, special=False, normalized=False) for spelling in ADDED])
    return inner.to_str()


def taken_over(kind: str, template: str, folder: Path) -> tuple[Any, Tokenizer, Chat]:
    """A folder with transformers' own tokenizer, that tokenizer, and what the import makes of it."""
    from transformers import PreTrainedTokenizerFast

    inner = tokenizers.Tokenizer.from_str(trained(kind))
    size = inner.get_vocab_size()
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )
    tensors = llama_tensors({"vocab_size": size, "hidden_size": 24, "intermediate_size": 40, "head_dim": 16}
                            | {"num_attention_heads": 3, "num_key_value_heads": 1, "num_hidden_layers": 2})  # fmt: skip
    write_folder(folder, tensors=tensors, vocab_size=size)
    (folder / "tokenizer_config.json").unlink()
    theirs.save_pretrained(folder)
    planned = plan(folder)
    ours = Tokenizer.from_json(planned.tokenizers[TOKENIZER])
    return theirs, ours, Chat(ChatSettings.from_json(planned.extras[CHAT]), ours)


KINDS = ("byte-level", "pieces", "unigram")


@pytest.mark.parametrize("kind", KINDS)
def test_text_has_the_tokens_that_it_has_with_transformers(kind: str, tmp_path: Path) -> None:
    theirs, ours, _ = taken_over(kind, TEMPLATES["tags"], tmp_path)
    source, _ = catalog()
    for text in [*TEXTS, *source[:200]]:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("kind", KINDS)
def test_control_tokens_that_are_said_are_ordinary_where_transformers_takes_them_at_their_word(
    kind: str, tmp_path: Path
) -> None:
    theirs, ours, chat = taken_over(kind, TEMPLATES["tags"], tmp_path)
    control = {theirs.convert_tokens_to_ids(spelling) for spelling in SPECIAL if spelling != "<unk>"}
    for spelling in SPECIAL[1:]:
        assert control & set(theirs(spelling, add_special_tokens=False)["input_ids"])
        assert not control & set(ours.encode_plain(f"a {spelling} b"))
        honest, forged = (chat.encode([Message("user", said)]) for said in ("a", f"a{spelling}b"))
        assert sum(token in control for token in forged) == sum(token in control for token in honest)


@pytest.mark.parametrize(
    ("kind", "name"),
    [*((kind, "tags") for kind in KINDS), *(("byte-level", name) for name in TEMPLATES if name != "tags")],
)
def test_conversation_has_the_tokens_that_it_has_with_transformers(kind: str, name: str, tmp_path: Path) -> None:
    theirs, _, chat = taken_over(kind, TEMPLATES[name], tmp_path)
    for conversation in CONVERSATIONS[: 3 if name == "thoughts" else 2]:
        messages = [{"role": role, "content": content} for role, content in conversation]
        said = [Message(role, content) for role, content in conversation]
        assert chat.encode(said) == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_tags_that_come_through_a_template_are_text(tmp_path: Path) -> None:
    theirs, ours, chat = taken_over("byte-level", TEMPLATES["thoughts"], tmp_path)
    tag = theirs.convert_tokens_to_ids("</think>")
    ids = chat.encode([Message("user", "</think>")])
    assert ids.count(tag) == 1, "the template's own"
    assert ours.decode(ids).count("</think>") == 2


@pytest.mark.parametrize(
    ("settings", "template"),
    [
        ({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}, "d"),
        ({"chat_template": [{"name": "tool_use", "template": "t"}]}, None),
        ({"chat_template": None}, None),
        ({}, None),
    ],
)
def test_template_is_the_one_that_is_meant(settings: dict[str, Any], template: str | None, tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    config = {name: value for name, value in TOKENIZER_CONFIG.items() if name != "chat_template"}
    write_json(folder / "tokenizer_config.json", {**config, **settings})
    planned = plan(folder)
    assert (CHAT in planned.extras) == (template is not None)
    if template is not None:
        assert ChatSettings.from_json(planned.extras[CHAT]) == ChatSettings(
            template, {"bos_token": "<bos>", "eos_token": "<eos>"}
        )
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert ChatSettings.from_json(plan(folder).extras[CHAT]).template == "{{ messages[0].content }}"
    assert CHAT not in plan(folder, chat=False).extras
    write_json(folder / "tokenizer_config.json", {"chat_template": 3})
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ImportRefused, match="chat_template must be a string"):
        plan(folder)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Marian's files: a SentencePiece model for each side, and one vocabulary in which both are numbered anew."""
    folder = tmp_path_factory.mktemp("marian")
    pieces = ["</s>", "<unk>"]
    for name, lines in zip(("source.spm", "target.spm"), catalog(), strict=True):
        written = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines[:1200]), model_writer=written, vocab_size=400, model_type="unigram",
            character_coverage=0.999, num_threads=1, minloglevel=2, bos_id=-1, pad_id=-1,
        )  # fmt: skip
        (folder / name).write_bytes(written.getvalue())
        model = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
        pieces += [model.id_to_piece(index) for index in range(model.get_piece_size())]
    pieces = [*dict.fromkeys(pieces), ">>fra<<", "<pad>"]
    write_json(folder / "vocab.json", {piece: index for index, piece in enumerate(pieces)})
    write_json(folder / "tokenizer_config.json", {"separate_vocabs": False, "tokenizer_class": "MarianTokenizer"})
    return folder


def converted(folder: Path) -> tuple[Tokenizer, Tokenizer]:
    problems: list[str] = []
    made = convert(read_folder(folder, []), problems, [])
    assert not problems
    return Tokenizer.from_json(made[TOKENIZER]), Tokenizer.from_json(made[TARGET_TOKENIZER])


def marian_tokenizer(folder: Path) -> Any:
    from transformers import MarianTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it recommends a package that it does not use for this
        return MarianTokenizer.from_pretrained(folder)


def test_marians_pieces_are_those_of_sentencepiece_on_both_sides(pair: Path) -> None:
    theirs, (ours, target) = marian_tokenizer(pair), converted(pair)
    rng = random.Random(3)
    alphabet = "abcdefgh ijklmn  ABCDE äöüß ½ ﬁ \uff11\uff12… \u00a0\u3000."
    drawn = ["".join(rng.choice(alphabet) for _ in range(rng.randint(0, 40))) for _ in range(400)]
    source, translated = catalog()
    unknown = theirs.unk_token_id
    compared = 0
    for text in [*TEXTS, ">>fra<< Open it.", *source, *drawn]:
        wanted = theirs(text)["input_ids"]
        # Of a run of unknown characters, transformers makes one token whatever the other side's vocabulary knows.
        if unknown in wanted:
            continue
        assert ours.encode(text) == wanted, text
        compared += 1
    assert compared > len(source)
    compared = 0
    for text in [*translated, *drawn]:
        wanted = theirs(text_target=text)["input_ids"]
        if unknown in wanted:
            continue
        assert [*target.encode_plain(text), theirs.eos_token_id] == wanted, text
        assert target.decode(wanted).strip() == theirs.decode(wanted, skip_special_tokens=True)
        compared += 1
    assert compared > len(translated)


def test_marians_control_tokens_are_not_said_and_the_other_sides_words_are_read_out(pair: Path) -> None:
    ours, target = converted(pair)
    vocabulary = json.loads((pair / "vocab.json").read_text())
    for text in ("</s>", "<pad>", "a</s>b", "\ufdd0</s>"):
        assert {vocabulary["</s>"], vocabulary["<pad>"]} & set(ours.encode_plain(text)) == set()
        assert ours.encode(text)[-1] == vocabulary["</s>"]
    sides = [sentencepiece.SentencePieceProcessor(model_file=str(pair / name)) for name in ("source.spm", "target.spm")]
    own, other = ({model.id_to_piece(index) for index in range(model.get_piece_size())} for model in sides)
    german = max(other - own, key=len)
    assert vocabulary[german] not in ours.encode_plain(german)
    assert vocabulary[german] in target.encode_plain(german.replace("▁", " "))
    ids = [vocabulary[german], vocabulary["▁the"], vocabulary["</s>"]]
    for tokenizer in (ours, target):
        assert tokenizer.decode(ids) == german.removeprefix("▁").replace("▁", " ") + " the"


def test_marians_vocabularies_may_be_apart(pair: Path, tmp_path: Path) -> None:
    for name in ("source.spm", "target.spm", "vocab.json"):
        (tmp_path / name).write_bytes((pair / name).read_bytes())
    write_json(tmp_path / "tokenizer_config.json", {"separate_vocabs": True})
    problems: list[str] = []
    assert convert(read_folder(tmp_path, []), problems, []) == {}
    assert problems == ["target_vocab.json is missing, as tokenizer_config.json says separate_vocabs"]
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "target.spm"))
    pieces = ["<pad>", "</s>", "<unk>", *(model.id_to_piece(index) for index in range(model.get_piece_size()))]
    write_json(tmp_path / "target_vocab.json", {piece: i for i, piece in enumerate(dict.fromkeys(pieces))})
    theirs, (ours, target) = marian_tokenizer(tmp_path), converted(tmp_path)
    assert ours.encode("Open the file.") == theirs("Open the file.")["input_ids"]
    text = catalog()[1][5]
    # The end that transformers puts behind it is the source's.
    assert target.encode_plain(text) == theirs(text_target=text)["input_ids"][:-1]


@pytest.mark.parametrize(
    ("name", "contents", "said"),
    [
        ("source.spm", None, "source.spm is missing"),
        ("target.spm", b"\xff\xff\xff", "target.spm: not a SentencePiece model"),
        ("target.spm", b"", "target.spm has no pieces"),
        ("vocab.json", None, "vocab.json is missing"),
        ("vocab.json", b'{"a": 0}', "vocab.json must number each piece once, </s>, <unk> and <pad> among them"),
        ("vocab.json", b'{"</s>": 0, "<unk>": 0, "<pad>": 1}', "vocab.json must number each piece once"),
        ("vocab.json", b'{"</s>": 0, "<unk>": 999999, "<pad>": 1}', "vocab.json must number its pieces from 0 on"),
    ],
)
def test_marians_files_are_refused_by_name(pair: Path, tmp_path: Path, name: str, contents: Any, said: str) -> None:
    for each in ("source.spm", "target.spm", "vocab.json", "tokenizer_config.json"):
        (tmp_path / each).write_bytes((pair / each).read_bytes())
    if contents is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(contents)
    problems: list[str] = []
    assert convert(read_folder(tmp_path, []), problems, []) == {}
    assert any(said in problem for problem in problems), problems


def test_sentencepiece_models_of_other_kinds_are_refused(pair: Path, tmp_path: Path) -> None:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(catalog()[0][:300]), model_writer=written, vocab_size=200, model_type="bpe",
        minloglevel=2, byte_fallback=False, user_defined_symbols=["<sep>"], num_threads=1,
    )  # fmt: skip
    for each in ("target.spm", "vocab.json", "tokenizer_config.json"):
        (tmp_path / each).write_bytes((pair / each).read_bytes())
    (tmp_path / "source.spm").write_bytes(written.getvalue())
    problems: list[str] = []
    assert convert(read_folder(tmp_path, []), problems, []) == {}
    assert "source.spm is no unigram model" in problems
    assert any("defined by hand" in problem for problem in problems)
