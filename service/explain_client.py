"""`python -m service explain`: asks a server where a model looked, and writes that down for people.

Uses the wire contract alone. Apart from the other commands' client: those that only ask need no NumPy.
"""

from __future__ import annotations

import sys
from typing import TextIO

import grpc

from proto.onward.v1 import generation_pb2 as pb
from proto.onward.v1.generation_pb2_grpc import GenerationServiceStub
from service.attention_page import page, picture
from service.config import ExplainConfig
from service.connection import connect

_FAILED = 1
# As shells report a command that SIGINT ended.
_INTERRUPTED = 130
# Whatever the server was willing to send.
_ANY_SIZE = -1


def explain(config: ExplainConfig, out: TextIO = sys.stdout, err: TextIO = sys.stderr) -> int:
    """Writes the page and the picture and prints their paths to `out`, or the status to `err`; the exit status."""
    request = pb.ExplainRequest(
        model=config.model, text=config.text, layers=config.layers, heads=config.heads, max_tokens=config.max_tokens
    )
    if config.target_text is not None:
        request.target_text = config.target_text
    try:
        with connect(config, max_answer_bytes=_ANY_SIZE) as channel:
            response = GenerationServiceStub(channel).Explain(request, timeout=config.timeout_seconds)
        if config.html is not None:
            config.html.write_text(page(response, config.model, config.text), encoding="utf-8")
        if config.svg is not None:
            config.svg.write_text(picture(response, config.model, config.text), encoding="utf-8")
    except grpc.RpcError as error:
        err.write(f"{error.code().name}: {error.details()}\n")
        return _FAILED
    except OSError as error:
        err.write(f"{error.filename}: {error.strerror}\n")
        return _FAILED
    except KeyboardInterrupt:
        err.write("\n")
        return _INTERRUPTED
    for path in filter(None, (config.html, config.svg)):
        out.write(f"{path}\n")
    return 0
