"""`python -m service explain`: fetches attention weights and writes them as an HTML page and an SVG picture.

A module of its own, as `ask` needs no NumPy.
"""

from __future__ import annotations

import sys
from typing import TextIO

from onward import NO_RETRIES, CallError, Client
from service.commands.connection import connection
from service.config import ExplainConfig
from service.explain.attention_page import page, picture

_FAILED = 1
# The shells' exit status of a command that SIGINT ended.
_INTERRUPTED = 130
_NO_LIMIT = -1


def explain(config: ExplainConfig, out: TextIO = sys.stdout, err: TextIO = sys.stderr) -> int:
    """Writes the files and prints their paths to `out`, or an error to `err`; returns the exit status."""
    try:
        with Client(connection(config, max_answer_bytes=_NO_LIMIT), retries=NO_RETRIES) as client:
            response = client.explain(
                config.text,
                config.target_text,
                model=config.model,
                layers=config.layers or (),
                heads=config.heads or (),
                max_tokens=config.max_tokens,
                timeout_seconds=config.timeout_seconds,
            )
        if config.html is not None:
            config.html.write_text(page(response, config.model, config.text), encoding="utf-8")
        if config.svg is not None:
            config.svg.write_text(picture(response, config.model, config.text), encoding="utf-8")
    except CallError as error:
        err.write(f"{error}\n")
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
