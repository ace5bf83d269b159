"""Imports every module of the installed client and fails if anything of the server or the trainer came along.

Run by `make client-check` in an environment that holds the project's own dependencies and no extra; not a pytest
module, because that environment holds no pytest either.
"""

import importlib
import importlib.util
import pkgutil
import sys
from importlib import metadata

import onward

NEEDED = {"googleapis-common-protos", "grpcio", "grpcio-status", "onward", "protobuf", "typing-extensions"}
# What every environment begins with.
TOOLS = {"pip", "setuptools"}

installed = {distribution.metadata["Name"].lower().replace("_", "-") for distribution in metadata.distributions()}
surplus = installed - NEEDED - TOOLS
assert not surplus, f"the client brought {sorted(surplus)}"
# A folder of its own in whatever environment a user has: nothing beside `onward`, and no `proto`.
files = metadata.files("onward") or []
assert {file.parts[0].partition("-")[0] for file in files} == {"onward"}, "the wheel has folders of other names"
importlib.import_module("onward.v1.generation_pb2_grpc")
assert "onward.client" not in sys.modules, "the stubs loaded the client"
names = [module.name for module in pkgutil.walk_packages(onward.__path__, "onward.")]
for name in names:
    importlib.import_module(name)
assert len(names) > 5, f"only {names} were found: is the package whole?"
others = sorted(
    {name.partition(".")[0] for name in sys.modules} & {"service", "model", "export", "loadtest", "lessons"}
)
assert not others, f"importing the client loaded {others}"
with onward.Client("127.0.0.1:1", retries=onward.NO_RETRIES, timeout_seconds=5) as client:
    try:
        client.generate("a")
    except onward.Unavailable:
        print(f"imported {len(names)} client modules from {onward.__path__[0]}, with {', '.join(sorted(installed))}")
    else:
        sys.exit("somebody answered on port 1")
