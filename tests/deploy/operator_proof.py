"""Proves what operators deploy, part by part; the last line is JSON: `make operator-proof`.

    python tests/deploy/operator_proof.py [PART ...]

Each part is a command whose own output is read: no result is stored here. Tools come from
`operator_tools.py`. A part whose tool cannot be had is not in the JSON line; `absent` has its
reason. Exit status 1: a part has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml

import chart_values
import observability
import operator_tools as tools

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OVERLAYS = DEPLOY / "kubernetes" / "overlays"
CHART = DEPLOY / "helm" / "vllm-disagg"
COMPOSE_FILES = [DEPLOY / "docker" / "compose.yaml", DEPLOY / "observability" / "compose.yaml"]
DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
INSTALLED = "/opt/vllm-disagg/bin/"  # the folder of commands in the units
NAMESPACE = "vllm-disagg"
CHROMIUM = Path("/usr/bin/chromium")
AXE = ROOT / ".cache" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
AXE_PACKAGE = "axe-core@4.14.1"
MIN_FAULTS = 20  # that the doctor names
MAX_DOCTOR_SECONDS = 10.0  # for two P and two D
MAX_VIEWER_RATIO = 1.03  # of the proxy's CPU per request with one viewer of the status page
VIEWER_ROUNDS = 15
ENVIRONMENT = {
    # The pods' commands are found by their names.
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'proxy'}",
}
BROWSER = {"STATUS_BROWSER": "required"}  # a test that is skipped proves nothing
RULES_FOUND = re.compile(r"SUCCESS: (\d+) rules found")

Fields = dict[str, Any]


class FailedError(Exception):
    """A part has failed; the text is the reason."""


def run(*command: str | Path, text: str = "", folder: Path = ROOT) -> str:
    """Runs a command, prints it, and returns its output; FailedError unless it succeeds."""
    words = [str(word) for word in command]
    print("+", *words, flush=True)
    done = subprocess.run(
        words,
        cwd=folder,
        input=text,
        env={**os.environ, **ENVIRONMENT, **BROWSER},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stdout[-4000:])
        raise FailedError(f"{Path(words[0]).name} {words[1] if len(words) > 1 else ''}: failed")
    return done.stdout


def prove_rules() -> Fields:
    """Checks the alert rules, and a firing and a silent case of each."""
    promtool = tools.path_of("promtool")
    checked = RULES_FOUND.search(run(promtool, "check", "rules", observability.RULES))
    run(promtool, "test", "rules", observability.RULE_TESTS)
    run(promtool, "check", "config", observability.OBSERVABILITY / "prometheus.yml")
    cases = yaml.safe_load(observability.RULE_TESTS.read_text())["tests"]
    firing: list[str] = []
    silent: list[str] = []
    for case in cases:
        asked = case["alert_rule_test"][0]
        (firing if asked["exp_alerts"] else silent).append(asked["alertname"])
    rules = int(checked[1]) if checked else 0
    names = set(observability.alerts())
    if rules != len(names) or set(firing) != names or set(silent) != names:
        raise FailedError(f"{rules} rules; an alert lacks a firing or a silent case")
    return {"alerts": rules, "firing": len(firing), "silent": len(silent)}


def prove_metrics() -> Fields:
    """Checks the recorded scrape of the proxy, and parses each query against the scrapes."""
    promtool = tools.path_of("promtool")
    page = (observability.SCRAPES / "proxy.txt").read_text()
    run(promtool, "check", "metrics", text=page)
    unknown = observability.unknown_metrics()
    if unknown:
        raise FailedError(f"no recorded scrape has {', '.join(unknown)}")
    queries = observability.expressions()
    # As a rule, since promtool checks no query alone.
    expressions = [query.replace("$__rate_interval", "5m") for query in queries]
    rules = [{"record": f"query:{index}", "expr": text} for index, text in enumerate(expressions)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "queries.yml"
        path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
        run(promtool, "check", "rules", path)
    return {"queries": len(queries), "unknown": len(unknown)}


def prove_prometheus() -> Fields:
    """Has Prometheus scrape a proxy, evaluate each rule and query, and fire an alert."""
    program = tools.path_of("prometheus")
    output = run(sys.executable, "tests/deploy/real_prometheus.py", program)
    return dict(json.loads(output.strip().splitlines()[-1]))


def prove_nginx() -> Fields:
    """Runs the guide's nginx in front of two proxies: streams, paths, a client that leaves."""
    output = run(sys.executable, "tests/deploy/nginx_front.py", tools.path_of("nginx"))
    return dict(json.loads(output.strip().splitlines()[-1]))


def rendered(folder: Path) -> dict[str, Path]:
    """Renders each overlay and the chart into files; returns them by name."""
    kubectl = tools.path_of("kubectl")
    texts = {path.name: run(kubectl, "kustomize", path) for path in sorted(OVERLAYS.iterdir())}
    helm = tools.path_of("helm")
    run(helm, "lint", "--strict", CHART)
    texts["helm"] = run(helm, "template", "release", CHART, "--namespace", NAMESPACE)
    files = {name: folder / f"{name}.yaml" for name in texts}
    for name, path in files.items():
        path.write_text(texts[name])
    return files


def prove_manifests() -> Fields:
    """Renders overlays and chart, compares the two, and validates all objects strictly."""
    with tempfile.TemporaryDirectory() as name:
        files = rendered(Path(name))
        different = differences(objects(files["gpu"]), objects(files["helm"]))
        if different:
            raise FailedError(f"chart and overlay differ: {', '.join(different)}")
        script = ROOT / "tests" / "deploy" / "check_manifests.py"
        output = run(tools.python(), script, *files.values())
        run(tools.python(), script, example_of_chart(Path(name)))
        images = overridden_images(Path(name))
    counts = json.loads(output.strip().splitlines()[-1])
    run(sys.executable, "scripts/chart.py", "--check")
    run(sys.executable, "scripts/dashboard.py", "--check")
    return {"overlays": len(files) - 1, "chart": "equal", "images": images, **counts}


def example_of_chart(folder: Path) -> Path:
    """Renders the chart with the guide's values; raises FailedError if a pod lacks one of them."""
    values = folder / "example-values.yaml"
    values.write_text(chart_values.example_text())
    helm = tools.path_of("helm")
    run(helm, "lint", "--strict", CHART, "--values", values)
    path = folder / "example.yaml"
    path.write_text(run(helm, "template", "release", CHART, "--values", values))
    example = chart_values.example()
    for role in ("prefill", "decode", "proxy"):
        pod = objects(path)[f"Deployment {role}"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        sizes = [volume.get("emptyDir", {}).get("sizeLimit") for volume in pod["volumes"]]
        there = {**pod, **container, "sharedMemory": sizes}
        wanted = {"imagePullSecrets": example["imagePullSecrets"], **example[role]}
        for name, value in wanted.items():
            parts = value if isinstance(value, list) else [value]
            found = there.get(name)
            # The chart has items of its own in lists.
            if not all(part == found or part in (found or []) for part in parts):
                raise FailedError(f"{role} has not the {name} of the example")
    return path


def overridden_images(folder: Path) -> int:
    """Names other images in the one place of each overlay and of the chart; returns their number.

    Raises FailedError for a container that has another image.
    """
    source = folder / "kubernetes"
    shutil.copytree(DEPLOY / "kubernetes", source)
    for path in source.glob("overlays/*/kustomization.yaml"):
        text = path.read_text()
        path.write_text(
            text.replace("newName: ", "newName: r.example/").replace("newTag: 0.1.0", "newTag: v9")
        )
    kubectl = tools.path_of("kubectl")
    texts = [run(kubectl, "kustomize", path) for path in sorted(source.glob("overlays/*"))]
    values = [f"images.{name}=r.example/vllm-disagg-{name}:v9" for name in ("engine", "proxy")]
    texts.append(run(tools.path_of("helm"), "template", "r", CHART, "--set", ",".join(values)))
    found = [
        image for text in texts for image in re.findall(r"^ *image: (.*)$", text, re.MULTILINE)
    ]
    if other := [image for image in found if not re.fullmatch(r"r\.example/[\w-]+:v9", image)]:
        raise FailedError(f"an image that is named elsewhere: {other[0]}")
    return len(found)


def objects(path: Path) -> dict[str, Any]:
    """Returns the objects of a rendered file by kind and name, without their namespace."""
    found = {}
    for each in yaml.safe_load_all(path.read_text()):
        if each:
            each["metadata"].pop("namespace", None)
            found[f"{each['kind']} {each['metadata']['name']}"] = each
    return found


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Returns the names of objects that are not in both, or not equal."""
    return [name for name in sorted({*left, *right}) if left.get(name) != right.get(name)]


def prove_compose() -> Fields:
    """Has Compose read its files, and a linter the Dockerfiles."""
    for path in COMPOSE_FILES:
        run(tools.path_of("docker-compose"), "--file", path, "config", "--quiet")
    hadolint = tools.path_of("hadolint")
    run(hadolint, "--failure-threshold", "warning", *DOCKERFILES)
    return {"compose": len(COMPOSE_FILES), "dockerfiles": len(DOCKERFILES)}


def prove_image() -> Fields:
    """Builds the proxy's image as its Dockerfile does, measures it, and runs it."""
    if os.geteuid():
        raise tools.MissingToolError("a container's root folder needs root")
    output = run(sys.executable, "tests/deploy/proxy_image.py")
    return dict(json.loads(output.strip().splitlines()[-1]))


def prove_systemd() -> Fields:
    """Has systemd verify the units, with this environment's commands in place of the installed."""
    analyze = "/usr/bin/systemd-analyze"
    if not Path(analyze).exists():
        raise tools.MissingToolError("there is no systemd-analyze here")
    commands = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for unit in UNITS:
            path = Path(folder) / unit.name.replace("@.", "@prefill.")
            path.write_text(unit.read_text().replace(INSTALLED, f"{commands}/"))
            paths.append(path)
        output = run(analyze, "verify", "--man=no", *paths)
    complaints = [line for line in output.splitlines() if "vllm-disagg" in line]
    if complaints:
        raise FailedError(f"systemd: {complaints[0]}")
    return {"units": len(UNITS)}


def prove_replace() -> Fields:
    """Runs the pods' commands with tiny engines and replaces them one by one under load."""
    return replaced()


def prove_sigterm() -> Fields:
    """Replaces them by SIGTERM alone, without their preStop hooks, a P and a D at a time."""
    return replaced("--sigterm")


def replaced(*flags: str) -> Fields:
    """Returns what `replace_pods.py` has counted."""
    run(sys.executable, "scripts/tiny_model.py", "dense", ".cache/models/dense")
    kubectl = tools.path_of("kubectl")
    with tempfile.TemporaryDirectory() as folder:
        manifests = Path(folder) / "cpu.yaml"
        manifests.write_text(run(kubectl, "kustomize", OVERLAYS / "cpu"))
        output = run(sys.executable, "tests/deploy/replace_pods.py", manifests, *flags)
    print(output)
    return dict(json.loads(output.strip().splitlines()[-1]))


def prove_doctor() -> Fields:
    """Plants faults into scripted fleets and machines, which the doctor must name."""
    passed = tested("tests/doctor")
    faults = [name for name in passed if name.startswith("test_each_fault_is_named[")]
    healthy = [name for name in passed if name.startswith("test_a_healthy_")]
    seconds = max(passed[name] for name in healthy)
    if len(faults) < MIN_FAULTS or seconds > MAX_DOCTOR_SECONDS:
        raise FailedError(f"{len(faults)} faults, {seconds:.0f} s for a healthy fleet")
    return {"faults": len(faults), "healthy": len(healthy), "healthy_seconds": round(seconds, 1)}


def prove_page() -> Fields:
    """Opens the status page in Chromium, with axe-core, in front of scripted engines."""
    need_browser()
    if not AXE.exists():
        npm = shutil.which("npm")
        if not npm:
            raise tools.MissingToolError("there is no npm for axe-core")
        run(npm, "install", "--silent", "--prefix", AXE.parents[2], AXE_PACKAGE)
    return {"tests": len(tested("tests/proxy/status/test_browser.py"))}


def prove_viewer() -> Fields:
    """Measures the proxy's CPU per request with a viewer of the status page, and without."""
    # As root in real time: load of other processes does not count then.
    priority = [] if os.geteuid() else ["chrt", "-r", "10"]
    benchmark = [sys.executable, "benchmarks/proxy_cost.py", "--viewer"]
    output = run(*priority, *benchmark, "--rounds", str(VIEWER_ROUNDS))
    found = json.loads(output.strip().splitlines()[-1])
    if found["ratio"] > MAX_VIEWER_RATIO:
        raise FailedError(f"a viewer costs {found['ratio']} times the CPU: {found['each']}")
    return {name: found[name] for name in ("rounds", "cpu_us_alone", "cpu_us_viewer", "ratio")}


def prove_engines() -> Fields:
    """Kills a real decode engine: the page shows it, and one grep finds each request's id."""
    need_browser()
    return {"tests": len(tested("tests/engine/test_operators.py"))}


def prove_troubleshooting() -> Fields:
    """Produces each line that the troubleshooting page quotes."""
    return {"tests": len(tested("tests/unit/test_troubleshooting.py"))}


def need_browser() -> None:
    """Raises MissingToolError on a machine without Debian's chromium."""
    if not CHROMIUM.exists():
        raise tools.MissingToolError(f"no {CHROMIUM}: apt-get install chromium")


def tested(*paths: str) -> dict[str, float]:
    """Runs tests of which none may be skipped; returns the seconds of each by its name."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        run(sys.executable, "-m", "pytest", *paths, f"--junit-xml={report}")
        cases = ElementTree.parse(report).getroot().iter("testcase")
        found = {case.attrib["name"]: case for case in cases}
    skipped = [name for name, case in found.items() if len(case)]
    if skipped:
        raise FailedError(f"not run: {', '.join(skipped)}")
    return {name: float(case.attrib["time"]) for name, case in found.items()}


def prove_ray() -> Fields:
    """Runs the fleet of deploy/ray with tiny engines, scales D, and kills one under load."""
    run(sys.executable, "scripts/tiny_model.py", "dense", ".cache/models/dense")
    output = run(sys.executable, "tests/deploy/ray_fleet.py", tools.ray_python())
    print(output)
    return dict(json.loads(output.strip().splitlines()[-1]))


# In the order of their time: engines come last.
PARTS: dict[str, Callable[[], Fields]] = {
    "rules": prove_rules,
    "metrics": prove_metrics,
    "manifests": prove_manifests,
    "compose": prove_compose,
    "systemd": prove_systemd,
    "nginx": prove_nginx,
    "doctor": prove_doctor,
    "troubleshooting": prove_troubleshooting,
    "prometheus": prove_prometheus,
    "page": prove_page,
    "viewer": prove_viewer,
    "image": prove_image,
    "engines": prove_engines,
    "replace": prove_replace,
    "sigterm": prove_sigterm,
    "ray": prove_ray,
}


def prove(names: Iterable[str]) -> tuple[Fields, bool]:
    """Runs these parts; returns what each has found, and whether none has failed."""
    found: Fields = {}
    absent: dict[str, str] = {}
    is_good = True
    for name in names:
        began = time.monotonic()
        try:
            found[name] = PARTS[name]()
        except tools.MissingToolError as reason:
            absent[name] = str(reason)
        except FailedError as reason:
            found[name] = {"failed": str(reason)}
            is_good = False
        print(f"operator-proof: {name} took {time.monotonic() - began:.0f} s", flush=True)
    return {**found, "absent": absent} if absent else found, is_good


def main() -> None:
    """Runs the parts that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    names = parser.parse_args().parts or list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"unknown: {' '.join(unknown)}; parts are {', '.join(PARTS)}")
    found, is_good = prove(names)
    print(json.dumps(found))
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
