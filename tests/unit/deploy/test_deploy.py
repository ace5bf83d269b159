"""The files of deploy/ agree with the project and with their schemas."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.infra.envoy import CONFIG as ENVOY
from model.training.presets import PRESETS
from service.config import RequestLimits, ServeConfig, options, parse, variable
from tests.contracts import MANAGING, METHODS
from tests.environment import ROOT

CONTAINER = ROOT / "deploy" / "container"
LOAD_DOCKERFILE = CONTAINER / "load.Dockerfile"
REQUIREMENTS = sorted(CONTAINER.glob("requirements-*.txt"))
MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").rglob("*.yaml"))


def pins(text: str) -> dict[str, tuple[str, int]]:
    """Version and number of hashes of each package of a requirements file."""
    found = {}
    for block in re.split(r"\n(?=\S)", text.strip()):
        first, *hashes = block.replace("\\\n", "\n").splitlines()
        requirement = Requirement(first.strip())
        (specifier,) = requirement.specifier
        assert specifier.operator == "=="
        assert all(re.fullmatch(r"\s+--hash=sha256:[0-9a-f]{64}\s*", line) for line in hashes)
        found[canonicalize_name(requirement.name)] = specifier.version, len(hashes)
    return found


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.stem)
def test_image_installs_the_pinned_versions_by_their_hashes(path: Path) -> None:
    constraints = {
        canonicalize_name(requirement.name): str(requirement.specifier).removeprefix("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
        for requirement in [Requirement(line)]
    }
    installed = pins(path.read_text())
    assert installed
    for name, (version, num_hashes) in installed.items():
        assert num_hashes > 0, name
        assert constraints.get(name, version) == version, name


def requirements_of(extra: str, project: dict[str, Any]) -> list[Requirement]:
    """What an extra installs, with what it takes from other extras of ours."""
    found = []
    for requirement in map(Requirement, project["optional-dependencies"][extra]):
        if requirement.name == project["name"]:
            found += [each for other in sorted(requirement.extras) for each in requirements_of(other, project)]
        else:
            found.append(requirement)
    return found


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_image_installs_whatever_the_server_needs(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = pins((CONTAINER / f"requirements-{extra}.txt").read_text())
    client = tomllib.loads((ROOT / "onward" / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == [f"{client['name']}=={client['version']}"]
    needed = [Requirement(line) for line in client["dependencies"]]
    needed += [each for name in (extra, "http", "otel") for each in requirements_of(name, project)]
    assert "numpy" in {requirement.name for requirement in needed}
    for requirement in needed:
        assert requirement.specifier.contains(installed[canonicalize_name(requirement.name)][0]), requirement
    # Nor what `tokenizers` would download with.
    assert not {"torch", "huggingface-hub", "httpx2", "requests"} & set(installed)


@pytest.mark.parametrize("path", [ROOT / "Dockerfile", LOAD_DOCKERFILE], ids=lambda path: path.name)
def test_dockerfile_is_as_hadolint_wants_it(path: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_dockerfile_sets_variables_that_the_server_reads() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    given = dict(re.findall(r"\b(ONWARD_[A-Z_]+)=(\S+)", dockerfile))
    known = {variable(name) for config in (ServeConfig, RequestLimits) for name in options(config)}
    assert set(given) == {"ONWARD_MODELS", "ONWARD_HOST"}
    assert set(given) <= known
    config = parse(["serve"], given)
    assert isinstance(config, ServeConfig)
    assert (str(config.models), config.host) == ("/models", "0.0.0.0")


def test_image_has_compiled_kernels_and_no_compiler() -> None:
    build, final = re.split(r"^FROM .*$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    assert "g++" in build
    # Built for the installed package: a library in /src would not be found.
    assert build.index("/wheels/*.whl") < build.index("/opt/onward/bin/python -I -m model.kernels")
    assert "apt-get" not in final
    assert re.findall(r"^COPY .*$", final, re.MULTILINE) == ["COPY --from=build /opt/onward /opt/onward"]


def test_image_has_the_projects_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"ARG VERSION={version}\n" in (ROOT / "Dockerfile").read_text()
    # By the tags of `make image` that no later version takes over.
    manifests = "".join(path.read_text() for path in MANIFESTS)
    deployed = set(re.findall(r"^ +(?:- )?(?:image: onward:|newTag: )(\S+)$", manifests, re.MULTILINE))
    assert deployed == {f"{version}-cpu", f"{version}-gpu"}
    pages = "".join((ROOT / "docs" / "operate" / name).read_text() for name in ("deploy.md", "kubernetes.md"))
    assert set(re.findall(r"onward:(\d\S+?-[cg]pu)", pages)) == {f"{version}-cpu"}


@pytest.mark.parametrize(
    ("dockerfile", "ignore"),
    [
        (ROOT / "Dockerfile", ROOT / ".dockerignore"),
        (LOAD_DOCKERFILE, LOAD_DOCKERFILE.with_name("load.Dockerfile.dockerignore")),
    ],
    ids=["server", "load"],
)
def test_image_is_built_from_its_own_files_only(dockerfile: Path, ignore: Path) -> None:
    ignored, *kept = [line for line in ignore.read_text().splitlines() if line and not line.startswith("#")]
    assert ignored == "*"
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile.read_text(), re.MULTILINE)
    named = {name.partition("requirements-")[0].rstrip("/") for names in copied for name in names.split()}
    assert named == {line[1:] for line in kept if line.startswith("!")}


def drain_seconds(config: ServeConfig) -> float:
    """How long a server may take to stop: the grace, and the bounds of all that it waits for then."""
    app = (ROOT / "service" / "app.py").read_text()
    seconds = dict(re.findall(r"^(_\w+_SECONDS) = (.+)$", app, re.MULTILINE))
    waits = re.findall(r"await (?:_within|self\._tracer\.close)\((?:(\d+) \* )?(_\w+_SECONDS)(.*)", app)
    assert len(waits) == 6
    if config.http_port is None:
        waits = [each for each in waits if "._http." not in each[2]]
    return config.drain_grace_seconds + sum(int(times or 1) * float(seconds[name]) for times, name, _ in waits)


def test_containers_are_given_the_time_to_drain() -> None:
    # Those of deploy/ suffice with HTTP, too, which their page says how to add.
    needed = {"deploy": drain_seconds(replace(CONFIG, http_port=8000)), "others": drain_seconds(CONFIG)}
    files = {"deploy": ROOT / "deploy" / "compose.yaml", "others": ROOT / "examples" / "own-model" / "compose.yaml"}
    for name, path in files.items():
        given = yaml.safe_load(path.read_text())["services"]["onward"]["stop_grace_period"]
        assert float(given.rstrip("s")) >= needed[name], path
    pages = {"deploy": ROOT / "docs" / "operate" / "deploy.md", "others": ROOT / "README.md"}
    for name, path in pages.items():
        (given,) = re.findall(r"docker run [^`]*?--stop-timeout (\d+)", path.read_text())
        assert float(given) >= needed[name], path


def test_published_ports_are_the_servers_and_of_loopback() -> None:
    published = COMPOSE["onward"]["ports"]
    assert published[:2] == [f"127.0.0.1:{port}:{port}" for port in (CONFIG.port, CONFIG.metrics_port)]
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_containers_of_compose_come_back_when_they_end() -> None:
    assert {service["restart"] for service in COMPOSE.values()} == {"unless-stopped"}


def test_compose_mounts_existing_folders() -> None:
    mounted = [volume.split(":")[0] for service in COMPOSE.values() for volume in service.get("volumes", ())]
    folders = [ROOT / "deploy" / folder for folder in mounted if folder.startswith("./")]
    assert folders
    assert [folder for folder in folders if not folder.is_dir()] == []


def test_compose_asks_one_of_the_models_that_the_demo_leaves() -> None:
    command = COMPOSE["load"]["command"]
    default = re.fullmatch(r"\$\{\w+:-(\w+)\}", command[command.index("--model") + 1])
    assert default
    assert default[1] in PRESETS


def test_load_image_has_all_that_the_locustfile_imports(tmp_path: Path) -> None:
    text = LOAD_DOCKERFILE.read_text()
    for names, folder in re.findall(r"^COPY (.+) (\S+)$", text, re.MULTILINE):
        for name in names.split():
            source, target = ROOT / name, tmp_path / folder
            if source.is_dir():
                shutil.copytree(source, target)
            else:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
    packages = {name.replace("-", "_") for name in pins((CONTAINER / "requirements-load.txt").read_text())}
    # gRPC imports its companions where they are; gevent and the interpreter do likewise.
    optional = {"grpc_health", "grpc_reflection", "grpc_tools", "zope", "_distutils_hack"}
    code = f"""
import sys, importlib.metadata
sys.argv = ["locust"]
import loadtest.locustfile
of = importlib.metadata.packages_distributions()
files = {{name.partition(".")[0]: str(getattr(module, "__file__", "")) for name, module in sys.modules.items()}}
foreign = {{name for name, file in files.items() if "site-packages" in file}} - {optional!r}
names = {{name: {{each.lower().replace("-", "_") for each in of.get(name, [])}} for name in foreign}}
print(sorted(name for name, made_by in names.items() if not made_by & {packages!r}))
"""
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr + done.stdout


def test_image_and_its_makers_agree_on_the_processor_by_default() -> None:
    assert set(re.findall(r"^ARG EXTRA=(\w+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)) == {"cpu"}
    assert set(re.findall(r"or \$\(EXTRA\),(\w+)", (ROOT / "Makefile").read_text())) == {"cpu"}
    assert COMPOSE["onward"]["build"]["args"]["EXTRA"] == "${ONWARD_EXTRA:-cpu}"


COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
CONFIG = ServeConfig(models=Path("m"))


def compose_check(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What the Compose Specification's own schema has against a file."""
    file = folder / "compose.yaml"
    file.write_text(text, encoding="utf-8")
    command = [Path(sys.executable).with_name("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", file]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_compose_file_passes_the_specification(tmp_path: Path) -> None:
    done = compose_check((ROOT / "deploy" / "compose.yaml").read_text(), tmp_path)
    assert done.returncode == 0, done.stdout


def test_compose_specification_is_strict(tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "compose.yaml").read_text()
    assert "    read_only: true\n" in text
    done = compose_check(text.replace("    read_only: true\n", "    readonly: true\n"), tmp_path)
    assert done.returncode == 1, done.stdout


# Envoy.


def validated(config: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What Envoy itself says of a configuration."""
    path = folder / "envoy.yaml"
    path.write_text(config, encoding="utf-8")
    envoy = Path(sys.executable).with_name("envoy")
    command = [envoy, "--mode", "validate", "--disable-hot-restart", "--config-path", path]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def envoy_route_config() -> dict[str, Any]:
    (listener,) = yaml.safe_load(ENVOY.read_text())["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    assert isinstance(manager, dict)
    return manager


def envoy_clusters() -> list[dict[str, Any]]:
    found = yaml.safe_load(ENVOY.read_text())["static_resources"]["clusters"]
    assert isinstance(found, list)
    return found


def test_envoy_takes_its_configuration_and_finds_nothing_old_in_it(tmp_path: Path) -> None:
    done = validated(ENVOY.read_text(), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr.lower()


def test_envoys_validation_is_strict(tmp_path: Path) -> None:
    text = ENVOY.read_text()
    assert text.count("num_retries: 3") == 1
    done = validated(text.replace("num_retries: 3", "number_of_retries: 3"), tmp_path)
    assert done.returncode != 0
    assert "number_of_retries" in done.stderr + done.stdout


def test_envoy_routes_no_call_for_one_server() -> None:
    (host,) = envoy_route_config()["route_config"]["virtual_hosts"]
    kept_back, passed_on = host["routes"][:2], host["routes"][2:]
    assert [route["direct_response"]["status"] for route in kept_back] == [403, 403]
    assert all(route["match"]["prefix"] == "/" for route in passed_on)
    patterns = [re.compile(route["match"]["safe_regex"]["regex"]) for route in kept_back]
    refused = {path for path in METHODS if any(pattern.fullmatch(f"/{path}") for pattern in patterns)}
    assert refused == MANAGING


def test_envoys_two_ways_to_choose_a_server_differ_in_nothing_else() -> None:
    one, other = envoy_clusters()
    assert one["name"] != other["name"]
    assert one.pop("load_balancing_policy") != other.pop("load_balancing_policy")
    for cluster in (one, other):
        assert cluster.pop("name") == cluster["load_assignment"].pop("cluster_name")
    assert one == other


def test_envoy_has_the_servers_limits() -> None:
    manager = envoy_route_config()
    (host,) = manager["route_config"]["virtual_hosts"]
    frame_head = 5
    assert host["request_body_buffer_limit"] >= CONFIG.max_message_bytes + frame_head
    assert manager["http2_protocol_options"]["max_concurrent_streams"] == CONFIG.max_concurrent_rpcs
    assert [route["route"]["timeout"] for route in host["routes"][2:]] == ["0s", "0s"]
    assert manager["stream_idle_timeout"] == "0s"


def test_envoy_listens_where_clients_look_and_finds_the_servers_that_it_has_started() -> None:
    text = ENVOY.read_text()
    (listener,) = yaml.safe_load(text)["static_resources"]["listeners"]
    at = listener["address"]["socket_address"]
    assert (at["address"], at["port_value"]) == ("127.0.0.1", CONFIG.port)
    started = [int(port) for port in re.findall(r"^#   python -m service serve .*--port (\d+)", text, re.MULTILINE)]
    (endpoints,) = envoy_clusters()[0]["load_assignment"]["endpoints"]
    addresses = [each["endpoint"]["address"]["socket_address"] for each in endpoints["lb_endpoints"]]
    assert [(each["address"], each["port_value"]) for each in addresses] == [("127.0.0.1", port) for port in started]
    admin = yaml.safe_load(text)["admin"]["address"]["socket_address"]
    assert admin["address"] == "127.0.0.1"


# The images that run.


def test_whatever_others_made_is_pinned_by_its_digest() -> None:
    files = [*MANIFESTS, ROOT / "deploy" / "compose.yaml", ROOT / "Dockerfile", LOAD_DOCKERFILE]
    images = [
        image
        for path in files
        for image in re.findall(r"^(?: +image: |ARG BASE_IMAGE=)(\S+)$", path.read_text(), re.MULTILINE)
        if image.partition(":")[0] not in {"onward", "onward-load"}
    ]
    assert len(images) == 6
    assert [image for image in images if not re.fullmatch(r"\S+:\S+@sha256:[0-9a-f]{64}", image)] == []
    workflows = "".join(path.read_text() for path in (ROOT / ".github" / "workflows").iterdir())
    actions = re.findall(r"uses: (.+)", workflows)
    assert len(actions) == 2
    assert [action for action in actions if not re.fullmatch(r"\S+@[0-9a-f]{40} # v[\d.]+", action)] == []
