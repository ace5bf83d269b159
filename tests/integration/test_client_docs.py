"""What docs/serve/clients.md shows: its Python runs on a server, its grpcurl and its Go are held to the contract."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import sys
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from google.protobuf import descriptor_pool, json_format, message_factory
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2

from onward.v1 import generation_pb2 as pb
from onward.v1 import model_pb2
from tests.environment import ROOT, environment
from tests.fakes import BOS, EOS, expected_tokens, spell
from tests.identities import HOST, Identities
from tests.servers import letter_tokenizer, running, served_model

PAGE = (ROOT / "docs" / "serve" / "clients.md").read_text(encoding="utf-8")
IN_THE_CLEAR, OVER_TLS = "127.0.0.1:8001", "onward.example:8443"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
GRPCURL = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
GRPCURL = [line for line in GRPCURL if line.startswith("grpcurl ")]
MODULES = (pb, model_pb2, health_pb2)
LIMIT_SECONDS = 60


def block_with(words: str) -> str:
    """The only block that holds some words."""
    (found,) = [block for block in BLOCKS if words in block]
    return str(found)


async def run(program: str, folder: Path) -> str:
    """Runs a block in a process of its own, as a reader would; returns what it prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        cwd=folder,
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), LIMIT_SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, err.decode()) == (0, ""), program
    return out.decode()


def greedy(text: str, count: int, *, encoder_decoder: bool) -> str:
    """What the fake model writes after a text, of which it reads what is no lower-case letter as "z"."""
    read = spell("".join(letter if letter in ascii_lowercase else "z" for letter in text))
    if encoder_decoder:
        return letter_tokenizer().decode(expected_tokens((*read, EOS), count, encoder_decoder=True))
    return letter_tokenizer().decode(expected_tokens((BOS, *read), count))


async def test_python_of_the_page_runs_and_prints_what_the_server_says(tmp_path: Path) -> None:
    who = Identities.issue(tmp_path)
    models = [
        served_model("dates", encoder_decoder=True),
        served_model("stdlib"),
        served_model("assistant", chat="{% for message in messages %}{{ message.content }}{% endfor %}"),
    ]
    async with running(models) as plain, running(models[:1], **who.server(is_mutual=True)) as secured:
        addresses = {
            IN_THE_CLEAR: f"127.0.0.1:{plain.endpoint.port}",
            OVER_TLS: f"{HOST}:{secured.endpoint.port}",
        }
        printed = {}
        for block in BLOCKS:
            program = block
            for shown, real in addresses.items():
                program = program.replace(shown, real)
            assert program != block, "a block without a server's address"
            printed[block] = await run(program, tmp_path)
    whole = printed[block_with("print(answer.text)")]
    day = greedy("3 May 1977", 64, encoder_decoder=True)
    assert whole.strip() == day[: len(whole.strip())]
    assert len(whole) > 10
    assert printed[block_with("chat(")].split()[1:] == ["length", "29"]
    streamed = printed[block_with("cost=True")].splitlines()
    assert streamed[0] == greedy("def main(", 40, encoder_decoder=False)
    assert re.fullmatch(r"40 tokens, [1-9]\d* pairs attended to", streamed[1])
    asynchronous = printed[block_with("AsyncClient")].splitlines()
    assert asynchronous[1] == greedy("import ", 10, encoder_decoder=False)
    assert day[:10] in asynchronous[0]
    listed, limit, tokens, *numbers = printed[block_with("client.models()")].splitlines()
    assert listed == "['assistant', 'dates', 'stdlib']"
    assert (int(limit), tokens) == (63, "import")
    assert float(numbers[0]) < 0 < float(numbers[1])
    errors = printed[block_with("NotFound")].splitlines()
    assert errors[0] == "['sampling.top_p']"
    assert errors[1].startswith("NOT_FOUND: model: 'missing' is not served")
    assert printed[block_with("Tls(")].strip()[:10] == day[:10]


def methods() -> dict[str, MethodDescriptor]:
    """Every method of ours and of health, as grpcurl names it."""
    services = [service for module in MODULES for service in module.DESCRIPTOR.services_by_name.values()]
    return {f"{service.full_name}/{method.name}": method for service in services for method in service.methods}


def methods_of_generation() -> set[str]:
    return {method.name for method in pb.DESCRIPTOR.services_by_name["GenerationService"].methods}


async def test_grpcurl_names_methods_and_requests_of_the_contract() -> None:
    for line in GRPCURL:
        words = shlex.split(line)
        assert words[:2] == ["grpcurl", "-plaintext"]
        body = json.loads(words[3]) if words[2] == "-d" else {}
        address, *rest = words[4:] if words[2] == "-d" else words[2:]
        assert address == IN_THE_CLEAR
        if rest[0] == "list":
            assert rest == ["list"]
        elif rest[0] == "describe":
            assert descriptor_pool.Default().FindMessageTypeByName(rest[1]) is pb.GenerateRequest.DESCRIPTOR
        else:
            (name,) = rest
            request = message_factory.GetMessageClass(methods()[name].input_type)()
            # Raises for an unknown field and for a value out of the field's range.
            json_format.ParseDict(body, request)
            assert bool(body) == bool(request.ListFields())
    shown = {line.rpartition("/")[2] for line in GRPCURL if "GenerationService/" in line}
    assert shown == methods_of_generation()


GO = (ROOT / "examples" / "clients" / "go" / "main.go").read_text(encoding="utf-8")


def go_names(*messages: Any) -> set[str]:
    """The fields of messages as protoc-gen-go spells them, and the oneofs that literals name in their place."""
    fields = [name for message in messages for name in message.DESCRIPTOR.fields_by_name]
    oneofs = [name for message in messages for name in message.DESCRIPTOR.oneofs_by_name]
    return {"".join(part.capitalize() for part in name.split("_")) for name in fields + oneofs}


async def test_go_names_messages_fields_and_methods_of_the_contract() -> None:
    for name in re.findall(r"&onwardv1\.(\w+)\{", GO):
        message, _, member = name.partition("_")
        assert message in pb.DESCRIPTOR.message_types_by_name
        assert not member or member in go_names(getattr(pb, message))
    literal = GO.split("&onwardv1.GenerateStreamRequest{")[1].split("\n\t})")[0]
    given = set(re.findall(r"\b([A-Z]\w+):", literal))
    assert given >= {"Model", "Prompt", "Text", "Temperature", "MaxTokens"}
    assert given <= go_names(pb.GenerateStreamRequest, pb.SamplingParams, pb.StoppingParams)
    event = pb.GenerateStreamResponse
    read = set(re.findall(r"\.Get(\w+)\(\)", GO)) - {"RetryDelay"}
    assert read >= {"Delta", "Text", "Summary", "GeneratedTokens"}
    assert read <= go_names(event, event.Delta, event.Summary, pb.Usage)
    called = set(re.findall(r"client\.(\w+)\(", GO))
    assert called == {"GenerateStream"} & methods_of_generation()


# In place of Go's plug-ins: writes what buf requests instead of stubs.
PLUGIN = """#!{python}
import sys
from google.protobuf.compiler import plugin_pb2

asked = plugin_pb2.CodeGeneratorRequest.FromString(sys.stdin.buffer.read())
made = plugin_pb2.CodeGeneratorResponse(supported_features=1)
for file in asked.proto_file:
    if file.name in asked.file_to_generate:
        made.file.add(name=file.name + ".{name}", content=asked.parameter + " " + file.options.go_package)
sys.stdout.buffer.write(made.SerializeToString())
"""


async def test_stubs_for_go_land_where_the_program_looks_for_them(tmp_path: Path) -> None:
    programs, here = tmp_path / "bin", tmp_path / "here"
    programs.mkdir()
    here.mkdir()
    for name in ("protoc-gen-go", "protoc-gen-go-grpc"):
        (programs / name).write_text(PLUGIN.format(python=sys.executable, name=name))
        (programs / name).chmod(0o755)
    (shown,) = re.findall(r"^buf generate .*$", PAGE, re.MULTILINE)
    words = [
        str(ROOT / "proto" / word.removeprefix("../../../proto")[1:]) if "../" in word else word
        for word in shown.split()[1:]
    ]
    words[words.index("buf.gen.yaml")] = str(ROOT / "examples" / "clients" / "go" / "buf.gen.yaml")
    made = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("buf"),
        *words,
        cwd=here,
        env={**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)},
    )
    assert await asyncio.wait_for(made.wait(), LIMIT_SECONDS) == 0
    (package,) = re.findall(r'onwardv1 "(\S+)"', GO)
    stubs = {path.relative_to(here).as_posix(): path.read_text() for path in here.rglob("*") if path.is_file()}
    assert stubs == {
        f"gen/onward/v1/{contract}.proto.{plugin}": f"paths=source_relative {package};onwardv1"
        for contract in ("generation", "model")
        for plugin in ("protoc-gen-go", "protoc-gen-go-grpc")
    }


async def test_commands_for_node_and_go_are_files_that_are_there() -> None:
    for path in re.findall(r"examples/clients/[\w/.]+", PAGE):
        assert (ROOT / path).exists(), path
