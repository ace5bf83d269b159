"""The rules as a resource of the Prometheus operator.

    python -m deploy.prometheus.operator            writes deploy/kubernetes/components/monitoring/rules.yaml
    python -m deploy.prometheus.operator --check    exits with 1 if that file is out of date

The file is committed, as Kustomize reads files and has no way to put one into a field of another.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

RULES = Path(__file__).parent / "rules"
FILE = Path(__file__).parents[1] / "kubernetes" / "components" / "monitoring" / "rules.yaml"

_HEAD = """# Written by `python -m deploy.prometheus.operator` from deploy/prometheus/rules.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: onward
  labels:
    app.kubernetes.io/name: onward
    # CHANGE: what your Prometheus selects rules by; kube-prometheus-stack's by its release.
    release: kube-prometheus-stack
spec:
  groups:
"""
_GROUPS = "groups:\n"


def render() -> str:
    """The resource as YAML: the groups of all rule files, their comments included, by the files' names."""
    groups = "".join(path.read_text(encoding="utf-8").partition(_GROUPS)[2] for path in sorted(RULES.glob("*.yml")))
    return _HEAD + "".join(f"  {line}" if line.strip() else line for line in groups.splitlines(keepends=True))


def main(arguments: Sequence[str]) -> int:
    """Writes or checks the file; returns the exit status."""
    wanted = render()
    if list(arguments) == ["--check"]:
        if FILE.exists() and FILE.read_text(encoding="utf-8") == wanted:
            return 0
        print(f"{FILE} is out of date: python -m deploy.prometheus.operator", file=sys.stderr)
        return 1
    if arguments:
        print("python -m deploy.prometheus.operator [--check]", file=sys.stderr)
        return 2
    FILE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
