"""The Python client of `onward.v1`: blocking and asyncio, with deadlines, retries and typed errors.

    with Client("127.0.0.1:8001") as client:
        print(client.generate("3 May 1977", model="dates").text)

Knows the wire contract and gRPC, and none of the server's code. Answers with several shapes or enums become frozen
dataclasses (`Generation`, `Output`, `Chunk`); every other answer is the contract's own typed message.

The names are those of `onward.client`, which is imported when one of them is first used: `import onward.v1` loads only
the stubs.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onward.client import *  # noqa: F403 (the names are listed once, there)


def __getattr__(name: str) -> Any:
    exports = importlib.import_module("onward.client")
    if name not in exports.__all__:
        raise AttributeError(f"module 'onward' has no attribute {name!r}")
    return getattr(exports, name)


def __dir__() -> list[str]:
    return [*globals(), *importlib.import_module("onward.client").__all__]
