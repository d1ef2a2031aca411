"""The clock of the day, which can step by hours, decides nothing in the product."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Where it is read, and for what. All else goes by the monotonic clock.
USES = {
    "vllm_disagg/planner/commands/documents.py": "the date of a plan",
    "vllm_disagg/workloads/traces.py": "the arrivals of a recorded trace",
    "vllm_disagg/proxy/serving.py": "moments on the status page",
    "vllm_disagg/proxy/requests/api.py": "moments in /disagg/instances",
    "vllm_disagg/proxy/routing/instance_report.py": "the same moments as text",
    "vllm_disagg/proxy/telemetry/logs.py": "the time of a log line",
    "vllm_disagg/proxy/telemetry/record.py": "the time of a line of the access log",
    "vllm_disagg/transports/local_socket.py": "the age of a killed worker's folder",
    "kv_connectors/scheduler.py": "a request's time in vLLM's API server, and when its KV landed: of at most one step",
    "kv_connectors/worker.py": "when KV landed, for a scheduler that may be on another machine",
}
NAMES = {"time.time", "time.time_ns", "time.CLOCK_REALTIME"}
METHODS = {"now", "utcnow", "today", "fromtimestamp", "fromisoformat"}  # of datetime's classes


def reads_clock(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "time"
    if not isinstance(node, ast.Attribute):
        return False
    name = ast.unparse(node)
    return name in NAMES or (node.attr in METHODS and "date" in name)


def test_the_clock_of_the_day_is_read_for_people_only() -> None:
    found = {
        str(path.relative_to(ROOT))
        for room in ("vllm_disagg", "kv_connectors")
        for path in (ROOT / room).rglob("*.py")
        if any(map(reads_clock, ast.walk(ast.parse(path.read_text()))))
    }
    assert found == USES.keys()
