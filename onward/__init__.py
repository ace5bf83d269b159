"""A client of `onward.v1` for Python: blocking and asyncio, with deadlines, retries and errors that say what is wrong.

    with Client("127.0.0.1:8001") as client:
        print(client.generate("3 May 1977", model="dates").text)

Knows the wire contract and gRPC, and nothing of the server's code. Where an answer has more than one shape, or an
integer stands for a word, it is put into a frozen dataclass (`Generation`, `Output`, `Chunk`). Everything else is the
contract's own message: its stubs are typed, and tell an absent value from a zero, which a copy would have to learn anew
with every field.

The names are those of `onward.client`, imported when one is first asked for: the stubs alone, `onward.v1`, load no
client.
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
