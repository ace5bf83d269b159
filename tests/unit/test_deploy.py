"""What the container and the cluster are told agrees with the project, and with the schemas of those who read it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from model.presets import PRESETS
from service.config import RequestLimits, ServeConfig, options, parse, variable

ROOT = Path(__file__).parents[2]
CONTAINER = ROOT / "deploy" / "container"
REQUIREMENTS = sorted(CONTAINER.glob("requirements-*.txt"))
MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
RESOURCES = [
    pytest.param(resource, id=f"{path.name}-{resource['kind']}")
    for path in MANIFESTS
    for resource in yaml.safe_load_all(path.read_text())
]


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
    needed = [Requirement(line) for line in project["dependencies"]]
    needed += requirements_of(extra, project) + requirements_of("otel", project)
    assert "numpy" in {requirement.name for requirement in needed}
    for requirement in needed:
        assert requirement.specifier.contains(installed[canonicalize_name(requirement.name)][0]), requirement
    # Nor what `tokenizers` would download with.
    assert not {"torch", "huggingface-hub", "httpx2", "requests"} & set(installed)


def test_dockerfile_is_as_hadolint_wants_it() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
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


def test_image_has_the_projects_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"ARG VERSION={project['version']}\n" in (ROOT / "Dockerfile").read_text()


def test_image_is_built_from_what_the_server_is_and_nothing_else() -> None:
    ignored, *kept = [
        line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")
    ]
    assert ignored == "*"
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    named = {name.partition("requirements-")[0].rstrip("/") for names in copied for name in names.split()}
    assert named == {line[1:] for line in kept if line.startswith("!")}


@pytest.mark.parametrize("resource", RESOURCES)
def test_manifest_passes_the_schema(resource: dict[str, Any]) -> None:
    kubernetes_validate.validate(resource, "1.33", strict=True)


def test_schema_is_strict() -> None:
    resource = dict(RESOURCES[0].values[0], surplus=1)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(resource, "1.33", strict=True)


def test_pod_gives_the_server_time_to_drain() -> None:
    pod = resource("Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    config = parse(["serve", "--models", "m"], {entry["name"]: entry["value"] for entry in container["env"]})
    assert isinstance(config, ServeConfig)
    pause = int(re.findall(r"sleep\((\d+)\)", container["lifecycle"]["preStop"]["exec"]["command"][-1])[0])
    closing = 8.0  # what the flag's help says that closing takes besides
    assert pod["terminationGracePeriodSeconds"] >= pause + config.drain_grace_seconds + closing


def test_pod_has_no_rights_and_a_read_only_root() -> None:
    pod = resource("Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    rights = container["securityContext"]
    assert rights["readOnlyRootFilesystem"]
    assert not rights["allowPrivilegeEscalation"]
    assert rights["capabilities"] == {"drop": ["ALL"]}


def test_kubernetes_own_variables_do_not_configure_the_server() -> None:
    # A Service called `onward` would put ONWARD_PORT=tcp://… into every container of its namespace.
    assert resource("Deployment")["spec"]["template"]["spec"]["enableServiceLinks"] is False
    assert resource("Service")["metadata"]["name"] != "onward"


def test_ports_are_the_servers() -> None:
    config = ServeConfig(models=Path("m"))
    container = resource("Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {
        "grpc": config.port,
        "metrics": config.metrics_port,
    }
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    published = services["onward"]["ports"]
    assert published[:2] == [f"127.0.0.1:{port}:{port}" for port in (config.port, config.metrics_port)]
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_compose_mounts_what_is_there() -> None:
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    mounted = [volume.split(":")[0] for service in services.values() for volume in service.get("volumes", ())]
    folders = [ROOT / "deploy" / folder for folder in mounted if folder.startswith("./")]
    assert folders
    assert [folder for folder in folders if not folder.is_dir()] == []


def test_compose_asks_one_of_the_models_that_the_demo_leaves() -> None:
    load = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]["load"]
    default = re.fullmatch(r"\$\{\w+:-(\w+)\}", load["environment"]["MODEL"])
    assert default
    assert default[1] in PRESETS
    (command,) = (part for part in load["command"] if "locustfile" in part)
    # Compose reads two dollars as one, which is the shell's.
    assert '--model "$${MODEL}"' in command


def resource(kind: str) -> dict[str, Any]:
    """The only resource of a kind."""
    (found,) = (parameter.values[0] for parameter in RESOURCES if parameter.values[0]["kind"] == kind)
    assert isinstance(found, dict)
    return found
