# vLLM's own image with this plugin. From the root of this tree:
#   docker build -f deploy/docker/engine.Dockerfile -t vllm-disagg-engine:0.1.0 .
ARG BASE=vllm/vllm-openai:v0.32.0
FROM ${BASE}
COPY pyproject.toml README.md LICENSE MANIFEST.in /src/
COPY vllm_disagg /src/vllm_disagg
COPY kv_connectors /src/kv_connectors
# vLLM's image has all dependencies but these; its own versions must stay as they are.
RUN pip install --no-cache-dir --no-deps /src httptools==0.7.1 uvloop==0.22.1 xxhash==3.6.0 \
    && rm -rf /src \
    && python3 -c "import vllm_disagg.cli, vllm_disagg.driver, importlib.metadata as m; m.version('vllm-disagg')"
ENTRYPOINT ["vllm", "serve"]
