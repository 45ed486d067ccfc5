# The application as an image, for the nodes of a cluster or for one machine.
#
#   docker build --target cpu -t vitray:cpu .      no GPU: vLLM for the CPU and the small checkpoint
#   docker build --target gpu -t vitray:gpu .      NVIDIA GPUs; the host brings the driver and the container toolkit
#   docker run --shm-size=4g --network=host vitray:cpu
#
# serve_config.yaml listens on 127.0.0.1, in a container too: `--network=host` reaches it from the host. To listen on every
# address, say so in a file of your own (`http_options: {host: 0.0.0.0}`, and `ingress.auth.api_keys_file` with the keys
# that are let in) and put it in the place of the shipped one:
#   docker run --shm-size=4g -p 8000:8000 -v ./my_config.yaml:/app/serve_config.yaml:ro vitray:cpu
FROM python:3.12-slim AS base
# triton and vLLM compile small kernels when they start, vLLM for the CPU loads libnuma; KubeRay probes with wget. Without
# versions: Debian keeps one of each, the newest.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 wget \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /app
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# Serve's HTTP proxy gets bounds of its own, see SECURITY.md.
ENV RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=deployments.http_proxy.limits.bounded
COPY pyproject.toml README.md LICENSE ./
COPY locks locks
COPY configs configs
COPY encoder encoder
COPY deployments deployments
COPY planner planner
COPY training training
COPY benchmarks benchmarks
COPY models models
EXPOSE 8000
# At SIGTERM Ray aborts without shutting down.
STOPSIGNAL SIGINT
CMD ["vitray", "serve"]

FROM base AS gpu
RUN pip install --no-deps --require-hashes --requirement locks/gpu.txt \
    && pip install --no-deps --editable '.[gpu]'
COPY serve_config.yaml ./

FROM base AS cpu
# torch alone from PyTorch's own index: the +cpu builds are not on PyPI, and nothing else is to come from there.
RUN pip install --no-deps --index-url https://download.pytorch.org/whl/cpu 'torch==2.13.0+cpu' \
    && pip install --no-deps --require-hashes --requirement locks/cpu.txt \
    && pip install --no-deps --editable '.[cpu]'
COPY serve_config.yaml ./
