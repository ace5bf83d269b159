"""Translates a file line by line, many lines at once, in the order of the file.

python examples/clients/python/translate_file.py en-de SOURCE TARGET [HOST:PORT]

The server batches what is in flight; more lines than it has rows wait in its queue. A line that fails is written empty
and named on stderr.
"""

import asyncio
import sys
from pathlib import Path

from onward import AsyncClient, CallError

IN_FLIGHT = 32


async def translate(model: str, lines: list[str], target: str) -> list[str]:
    places = asyncio.Semaphore(IN_FLIGHT)

    async with AsyncClient(target, timeout_seconds=60) as client:

        async def one(number: int, line: str) -> str:
            if not line.strip():
                return ""
            async with places:
                try:
                    answer = await client.generate(line, model=model)
                    # A line stays one line, whatever the model writes.
                    return " ".join(answer.text.splitlines())
                except CallError as error:
                    print(f"line {number}: {error}", file=sys.stderr)
                    return ""

        return await asyncio.gather(*(one(number, line) for number, line in enumerate(lines, start=1)))


def main() -> None:
    model, source, target, *rest = sys.argv[1:]
    lines = Path(source).read_text(encoding="utf-8").splitlines()
    texts = asyncio.run(translate(model, lines, *rest or ["127.0.0.1:8001"]))
    Path(target).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    print(f"{len(texts)} lines")


if __name__ == "__main__":
    main()
