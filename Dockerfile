# Serves models/deploy: OpenAI's API and the page, as an unprivileged user. docs/sharing.md has the commands.
#
# Versions are those of requirements.lock. torch is not in it, since its build differs by machine: without the build
# argument PIP_EXTRA_INDEX_URL for an index of CPU builds, pip installs the default one, on x86 gigabytes larger.
ARG BASE=python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

FROM ${BASE} AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
COPY requirements.lock /build/
RUN python -m venv --without-pip /opt/venv \
    && pip --python /opt/venv/bin/python install --no-cache-dir --only-binary=:all: --constraint /build/requirements.lock \
        torch==2.13.0 \
        fastapi granian httpx jsonschema llguidance markdown-it-py nh3 numpy prometheus-client psutil pygments \
        ruamel.yaml safetensors tokenizers tqdm
COPY pipeline /app/pipeline
RUN python -m compileall -q /app/pipeline
WORKDIR /app/models/deploy
COPY models/deploy ./
# the formats of other programs are not served; SHA256SUMS names what is left. safetensors writes files for their owner alone
RUN rm -rf gguf onnx ollama && sed -i -E '/  (gguf|onnx|ollama)\//d' SHA256SUMS && chmod -R a+rX /app

FROM ${BASE}
RUN pip uninstall --yes pip setuptools wheel && rm -rf /usr/local/lib/python3.11/ensurepip
COPY --from=build /opt/venv /opt/venv
COPY --from=build /app /app
COPY LICENSE /app/
WORKDIR /app
ENV PATH=/opt/venv/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65534:65534
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["python", "-m", "pipeline.serve", "--host", "0.0.0.0"]
CMD ["models/deploy"]
