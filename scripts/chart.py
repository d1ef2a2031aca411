"""Writes the templates of the Helm chart from the manifests that kustomize uses.

    python scripts/chart.py            write the templates, and the PrometheusRule
    python scripts/chart.py --check    exit status 1 if a file differs

Both have the same objects, so these stand once: in deploy/kubernetes. A template is a manifest in
which texts are replaced by expressions of the chart. The PrometheusRule has the alerts of
deploy/observability/alerts.yml.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MANIFESTS = ROOT / "deploy" / "kubernetes"
TEMPLATES = ROOT / "deploy" / "helm" / "vllm-disagg" / "templates"
NOTE = "{{- /* Written by scripts/chart.py from deploy/kubernetes; do not edit. */ -}}\n"
ROLES = ("prefill", "decode")
# Values of each role that go into the spec of its pods as they are.
PROXY_POD_FIELDS = ("nodeSelector", "affinity", "tolerations")
ENGINE_POD_FIELDS = (*PROXY_POD_FIELDS, "runtimeClassName")
ALERTS = ROOT / "deploy" / "observability" / "alerts.yml"
RULE = "components/monitoring/prometheus-rule.yaml"
# A series that is missing has no namespace: without one here, the proxies of another namespace
# would hide that those of this one are gone.
ABSENT = "absent(vllm_disagg_build_info)"
ABSENT_HERE = 'absent(vllm_disagg_build_info{namespace="vllm-disagg"})'
RULE_HEAD = """\
# Written by scripts/chart.py from deploy/observability/alerts.yml; do not edit.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: vllm-disagg
spec:
  groups:
"""

# By template: its manifest, and the value without which it is left out.
SOURCES = {
    "prefill.yaml": ("base/prefill.yaml", ""),
    "decode.yaml": ("base/decode.yaml", ""),
    "proxy.yaml": ("base/proxy.yaml", ""),
    "network.yaml": ("base/network.yaml", "networkPolicy.enabled"),
    "pod-monitors.yaml": ("components/monitoring/pod-monitors.yaml", "monitoring.enabled"),
    "prometheus-rule.yaml": ("components/monitoring/prometheus-rule.yaml", "monitoring.enabled"),
    "scaled-objects.yaml": (
        "components/autoscaling/scaled-objects.yaml",
        "autoscaling.enabled",
    ),
}
# By template: texts of the manifest, and the texts of the template; each must be there.
QUERIED = [('namespace="vllm-disagg"', 'namespace="{{ .Release.Namespace }}"')]
SCALERS = [
    *QUERIED,
    ("http://prometheus-operated.monitoring:9090", "{{ .Values.autoscaling.prometheus }}"),
    ('threshold: "2"', "threshold: {{ .Values.autoscaling.prefillBacklogSeconds | quote }}"),
    ('threshold: "0.7"', "threshold: {{ .Values.autoscaling.decodeKvCacheUsage | quote }}"),
    ('threshold: "4"', "threshold: {{ .Values.autoscaling.decodeWaiting | quote }}"),
    ("minReplicaCount: 2", "minReplicaCount: {{ .Values.autoscaling.min }}"),
    ("maxReplicaCount: 8", "maxReplicaCount: {{ .Values.autoscaling.max }}"),
]


def inserted(value: str, indent: int, field: str = "") -> str:
    """Returns lines that insert a value, unless it is empty: as a field, or behind other items."""
    space = " " * indent
    if not field:
        return f"{space}{{{{- with {value} }}}}{{{{ toYaml . | nindent {indent} }}}}{{{{ end }}}}\n"
    return (
        f"{space}{{{{- with {value} }}}}\n"
        f"{space}{field}: {{{{- toYaml . | nindent {indent + 2} }}}}\n"
        f"{space}{{{{- end }}}}\n"
    )


def pod_fields(role: str, fields: tuple[str, ...]) -> str:
    """Returns the fields that a role's values add to the spec of its pods."""
    added = [inserted(f".Values.{role}.{field}", 6, field) for field in fields]
    return inserted(".Values.imagePullSecrets", 6, "imagePullSecrets") + "".join(added)


NETWORK = [("name: monitoring}", "name: {{ .Values.networkPolicy.prometheusNamespace }}}")]
PROXY = [
    ("image: vllm-disagg-proxy:0.1.0", "image: {{ .Values.images.proxy }}"),
    ("  replicas: 2", "  replicas: {{ .Values.proxy.replicas }}"),
    ("secretName: vllm-disagg-keys", "secretName: {{ .Values.keysSecret }}"),
    (
        "            - --log-format=json\n",
        "            - --log-format=json\n" + inserted(".Values.proxy.args", 12),
    ),
    (
        "      serviceAccountName: proxy\n",
        "      serviceAccountName: proxy\n" + pod_fields("proxy", PROXY_POD_FIELDS),
    ),
    (
        "          ports: [{name: http, containerPort",
        inserted(".Values.proxy.env", 12) + "          ports: [{name: http, containerPort",
    ),
    (
        "mountPath: /etc/vllm-disagg, readOnly: true}\n",
        "mountPath: /etc/vllm-disagg, readOnly: true}\n"
        + inserted(".Values.proxy.volumeMounts", 12),
    ),
    ("defaultMode: 0400}\n", "defaultMode: 0400}\n" + inserted(".Values.proxy.volumes", 8)),
    ("name: proxy}]", "name: proxy, namespace: {{ .Release.Namespace | quote }}}]"),
]


def engine(role: str) -> list[tuple[str, str]]:
    """Returns the replacements in the manifest of one role."""
    values = f".Values.{role}"
    return [
        ("image: vllm-disagg-engine:0.1.0", "image: {{ .Values.images.engine }}"),
        (
            "  replicas: 2\n",
            "  {{- if not .Values.autoscaling.enabled }}\n"
            f"  replicas: {{{{ {values}.replicas }}}}\n"
            "  {{- end }}\n",
        ),
        ("value: Qwen/Qwen3-8B", "value: {{ .Values.model | quote }}"),
        ("vllm-disagg-keys", "{{ .Values.keysSecret }}"),
        (
            '            requests: {cpu: "4", memory: 32Gi}\n            limits: {memory: 64Gi}\n',
            f"            {{{{- toYaml {values}.resources | nindent 12 }}}}\n",
        ),
        (
            "          env:\n",
            inserted(f"{values}.args", 12) + "          env:\n",
        ),
        (
            "    spec:\n      automountServiceAccountToken: false\n",
            inserted(f"{values}.annotations", 6, "annotations")
            + "    spec:\n      automountServiceAccountToken: false\n"
            + pod_fields(role, ENGINE_POD_FIELDS),
        ),
        (
            "          ports: [{name: http, containerPort",
            inserted(f"{values}.env", 12)
            + inserted(f"{values}.securityContext", 10, "securityContext")
            + "          ports: [{name: http, containerPort",
        ),
        (
            "mountPath: /dev/shm}\n",
            "mountPath: /dev/shm}\n" + inserted(f"{values}.volumeMounts", 12),
        ),
        (
            "sizeLimit: 16Gi}\n",
            f"sizeLimit: {{{{ {values}.sharedMemory | quote }}}}}}\n"
            + inserted(f"{values}.volumes", 8),
        ),
    ]


def replacements(template: str) -> list[tuple[str, str]]:
    """Returns the replacements of one template."""
    name = template.removesuffix(".yaml")
    if name in ROLES:
        return engine(name)
    found = {
        "proxy": PROXY,
        "network": NETWORK,
        "prometheus-rule": QUERIED,
        "scaled-objects": SCALERS,
    }
    return found.get(name, [])


def prometheus_rule() -> str:
    """Returns the alerts as an object of the Prometheus operator."""
    _, _, groups = ALERTS.read_text().partition("\ngroups:\n")
    if ABSENT not in groups:
        raise SystemExit(f"{ALERTS} has no text {ABSENT!r}: bring scripts/chart.py up to date")
    return RULE_HEAD + textwrap.indent(groups.replace(ABSENT, ABSENT_HERE), "  ")


def render(template: str) -> str:
    """Returns the text of one template."""
    source, condition = SOURCES[template]
    text = prometheus_rule() if source == RULE else (MANIFESTS / source).read_text()
    text = text.replace("{{", '{{ "{{" }}')  # of Prometheus, not of Helm
    for old, new in replacements(template):
        if old not in text:
            raise SystemExit(f"{source} has no text {old!r}: bring scripts/chart.py up to date")
        text = text.replace(old, new)
    if condition:
        text = f"{{{{- if .Values.{condition} }}}}\n{text}{{{{- end }}}}\n"
    return NOTE + text


def main() -> int:
    """Writes the templates, or compares them with the manifests."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if one differs")
    check = parser.parse_args().check
    texts = {TEMPLATES / template: render(template) for template in SOURCES}
    texts[MANIFESTS / RULE] = prometheus_rule()
    different = []
    for path, text in texts.items():
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            different.append(f"{path.relative_to(ROOT)} differs: run python scripts/chart.py")
    print("\n".join(different), end="\n" if different else "")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
