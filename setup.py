"""Packaging.  vLLM itself is the user's own install: which build fits the machine is not ours to choose."""

from setuptools import find_packages, setup

setup(
    name="vllm-disagg",
    version="0.1.0",
    description="Prefill/decode disaggregation for stock vLLM: a KV connector, a proxy, and one command to start",
    long_description=open("README.md").read() if __import__("os").path.exists("README.md") else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["vllm_disagg*", "kv_connectors*"]),
    install_requires=[
        "httptools>=0.6",
        "msgspec>=0.19",
        "numpy>=1.26",
        "packaging>=23",
        "prometheus-client>=0.20",
        "pyyaml>=6",
        "pyzmq>=26",
        "uvloop>=0.20",
        "xxhash>=3.4",
    ],
    extras_require={
        "nixl": ["nixl>=1.3"],
        "plot": ["matplotlib>=3.8"],
        "kubernetes": ["kubernetes>=29"],
        "otel": ["opentelemetry-exporter-otlp-proto-http>=1.25", "opentelemetry-sdk>=1.25"],
        "dev": [
            "hypothesis>=6.100",
            "import-linter>=2.0",
            "kubernetes>=29",
            "matplotlib>=3.8",
            "mypy>=1.15",
            "pytest>=8",
            "ruff>=0.9",
            "trustme>=1.1",
            "types-PyYAML",
            "websockets>=13",
        ],
    },
    entry_points={
        "vllm.general_plugins": ["vllm_disagg = kv_connectors:register"],
        "console_scripts": ["vllm-disagg = vllm_disagg.cli:main"],
    },
)
