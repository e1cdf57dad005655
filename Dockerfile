# The service with everything that is pinned in requirements/, for a machine with GPUs or without:
#
#     docker build -t rollout-service:gpu .
#     docker build -t rollout-service:cpu --build-arg STACK=cpu .
#     docker run --rm --gpus all --shm-size=16g -p 8000:8000 -v "$PWD/service.yaml:/service.yaml:ro" \
#         -v rollout-weights:/weights -v rollout-hub:/hub rollout-service:gpu serve run /service.yaml
#
# service.yaml listens on 0.0.0.0 and keeps its log below /weights: docs/deploy.md. CUDA comes with the pinned
# packages, the driver from the machine. The gpu stack was resolved for Python 3.12, the cpu stack for 3.11.
ARG STACK=gpu

FROM python:3.11-slim-bookworm AS cpu
FROM python:3.12-slim-bookworm AS gpu

FROM ${STACK}
ARG STACK
# Triton compiles a launcher for each kernel with gcc; KubeRay's probes call wget
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libnuma1 wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 ray \
    && install --directory --owner ray /opt/rollout-service /weights /hub

USER ray
WORKDIR /opt/rollout-service
COPY --chown=ray pyproject.toml README.md LICENSE ./
COPY --chown=ray scripts/setup.sh scripts/
COPY --chown=ray requirements/*.txt requirements/
COPY --chown=ray deployments deployments
COPY --chown=ray rollout_service rollout_service
RUN --mount=type=cache,target=/home/ray/.cache/pip,uid=1000 STACK=${STACK} scripts/setup.sh

# KubeRay starts Ray from a login shell, which has a PATH of its own
USER root
RUN ln -s /opt/rollout-service/.venv/bin/ray /opt/rollout-service/.venv/bin/serve \
    /opt/rollout-service/.venv/bin/rollout-service /usr/local/bin/
USER ray
ENV PATH=/opt/rollout-service/.venv/bin:$PATH \
    HF_HOME=/hub \
    RAY_USAGE_STATS_ENABLED=0 \
    VLLM_NO_USAGE_STATS=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["rollout-service", "--help"]
