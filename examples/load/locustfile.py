"""A Locust scenario of your own: people who translate dates, and others who read long continuations.

    locust -f examples/load/locustfile.py --host 127.0.0.1:8001 --headless -u 8 -t 30s

It sees requests as their users do and no more. `loadtest/locustfile.py` keeps an account of every token, open loop.
"""

import random
import time

import grpc.experimental.gevent
from locust import User, between, events, task
from locust.env import Environment

from onward import CallError, Client

MONTHS = ("January", "March", "May", "July", "August", "October", "December")


@events.init.add_listener
def set_up(**_: object) -> None:
    """Starts gRPC's support of gevent: before any channel, after Locust's fork."""
    grpc.experimental.gevent.init_gevent()


class OnwardUser(User):
    abstract = True

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.client = Client(environment.host or "127.0.0.1:8001", timeout_seconds=10)

    def on_stop(self) -> None:
        self.client.close()

    def measure(self, name: str, prompt: str, model: str, max_tokens: int) -> None:
        """One stream; Locust gets its whole time, and the time to its first token as a request of its own."""
        began, first, failure, length = time.perf_counter(), None, None, 0
        try:
            with self.client.stream(prompt, model=model, max_tokens=max_tokens) as stream:
                for chunk in stream:
                    first = first or time.perf_counter()
                    length += len(chunk.text)
        except CallError as error:
            failure = error
        fire = self.environment.events.request.fire
        if first is not None:
            fire(request_type="first token", name=name, response_time=1e3 * (first - began), response_length=0)
        took = 1e3 * (time.perf_counter() - began)
        fire(request_type="stream", name=name, response_time=took, response_length=length, exception=failure)


class Translator(OnwardUser):
    weight = 3
    wait_time = between(0.1, 1)

    @task
    def translate(self) -> None:
        day = f"{random.randint(1, 28)} {random.choice(MONTHS)} {random.randint(1900, 2099)}"
        self.measure("dates", day, "dates", 20)


class Reader(OnwardUser):
    wait_time = between(1, 3)

    @task
    def read(self) -> None:
        self.measure("stdlib", "def read_lines(path", "stdlib", 60)
