"""Asks a served model and streams the answer.

python examples/clients/python/ask.py dates "3 May 1977" [HOST:PORT]
"""

import sys

from onward import CallError, Client

model, text, *rest = sys.argv[1:]
with Client(*rest or ["127.0.0.1:8001"], timeout_seconds=30) as client:
    try:
        with client.stream(text, model=model, max_tokens=100) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
    except CallError as error:
        sys.exit(str(error))
    print(f"\n{stream.usage.generated_tokens} tokens in {stream.timings.total:.2f} s")
