# The proxy alone, with neither vLLM nor torch; no shell, not root. From the root of this tree:
#   docker build -f deploy/docker/proxy.Dockerfile -t vllm-disagg-proxy:0.1.0 .
ARG BUILD=python:3.11-slim-bookworm
ARG BASE=gcr.io/distroless/python3-debian12:nonroot

FROM ${BUILD} AS build
COPY pyproject.toml README.md LICENSE MANIFEST.in /src/
COPY vllm_disagg /src/vllm_disagg
COPY kv_connectors /src/kv_connectors
# Neither the proxy nor `doctor --proxy` uses numpy or ZMQ, nor the asyncio client of Kubernetes:
# 100 MB. Commands that need them say so.
RUN pip install --no-cache-dir --no-compile --target /app "/src[kubernetes]" \
    && rm -rf /app/bin /app/kv_connectors /app/numpy /app/numpy.libs /app/zmq /app/pyzmq.libs \
       /app/aiohttp /app/kubernetes/aio

FROM ${BASE}
COPY --from=build /app /app
ENV PYTHONPATH=/app PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
EXPOSE 8000
ENTRYPOINT ["python3", "-m", "vllm_disagg"]
CMD ["proxy", "--help"]
