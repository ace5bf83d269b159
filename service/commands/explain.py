"""`python -m service explain`: asks a server where a model looked, and writes that down for people.

Asks through `client`, the library. Apart from the other commands' client: those that only ask need no NumPy.
"""

from __future__ import annotations

import sys
from typing import TextIO

from onward import NO_RETRIES, CallError, Client
from service.commands.connection import connection
from service.config import ExplainConfig
from service.explain.attention_page import page, picture

_FAILED = 1
# As shells report a command that SIGINT ended.
_INTERRUPTED = 130
# Whatever the server was willing to send.
_ANY_SIZE = -1


def explain(config: ExplainConfig, out: TextIO = sys.stdout, err: TextIO = sys.stderr) -> int:
    """Writes the page and the picture and prints their paths to `out`, or the status to `err`; the exit status."""
    try:
        with Client(connection(config, max_answer_bytes=_ANY_SIZE), retries=NO_RETRIES) as client:
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
