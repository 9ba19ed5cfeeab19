# Two images from one file: `docker build .` makes `cpu`, `docker build --target cuda .` the other one. They hold a virtual
# environment on a Debian with Python, run as nobody in particular (10001:0), and write to /cache and /tmp only.
#
# BASE may be any Debian whose python3 is 3.11 or newer and has its venv module. deploy/image/build.sh bootstraps such a
# one where no registry is reached. What a build needs to know of mirrors comes as PIP_* arguments or as the secrets
# pip.conf, apt.conf and ca.crt, and stays in the stages that are thrown away.
ARG BASE=python:3.12-slim-bookworm

# ---------------------------------------------------------------------- what both images are made of
FROM ${BASE} AS packages
# hadolint ignore=DL3008
RUN --mount=type=secret,id=apt.conf,target=/etc/apt/apt.conf.d/99build \
    apt-get update && \
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends g++ && \
    rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/pointsman
ENV PATH=/opt/pointsman/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
COPY requirements.lock requirements-image.lock ./
# Every file is checked against the lock's hashes, except torch, which each index builds differently: it comes below.
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/secrets/ca.crt \
    pip install --no-deps --require-hashes --requirement requirements-image.lock

# Our own wheel. The kernels are compiled here, for every instruction set: the processor that will run the image is not known.
FROM packages AS wheel
COPY pyproject.toml setup.py README.md LICENSE ./
COPY kernels kernels
COPY engine_core engine_core
COPY server server
RUN pip wheel --no-deps --no-build-isolation --no-index --wheel-dir /wheels . && \
    python3 -m zipfile --list /wheels/*.whl > /src/wheel.txt && \
    if [ "$(uname -m)" = x86_64 ]; then grep csrc/built/libpointsman_cpu.so /src/wheel.txt; fi

# ---------------------------------------------------------------------- cpu, built
FROM packages AS cpu-build
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/secrets/ca.crt \
    pip install --no-deps "$(grep '^torch==' requirements.lock)"
COPY deploy/image/prune.py /tmp/prune.py
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-deps --no-index /wheels/*.whl && pip check && python3 /tmp/prune.py --cpu-only
# 1: the Apache-2.0 SmolLM2-135M-Instruct is in the image, and a first start needs no network.
ARG WITH_MODEL=0
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/secrets/ca.crt \
    if [ "$WITH_MODEL" = 1 ]; then pointsman fetch --cache-dir /opt/pointsman/share/pointsman; fi

# ---------------------------------------------------------------------- cuda, packages
# torch's wheels bring CUDA's libraries along, and the container runtime the driver, so the base needs neither.
FROM packages AS cuda-packages
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/secrets/ca.crt \
    pip install "$(grep '^torch==' requirements.lock)"
# 0: without FlashInfer, hence of no use on a card; to try the rest where there is no room for it.
ARG WITH_FLASHINFER=1
COPY deploy/image/requirements-cuda.lock ./
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/secrets/ca.crt \
    if [ "$WITH_FLASHINFER" = 1 ]; then \
      pip install --no-deps --require-hashes --requirement requirements-cuda.lock; fi

# ---------------------------------------------------------------------- cuda, FlashInfer's modules compiled
# Else a server would compile them when it first needs them, for minutes, with a compiler that the image has not. nvcc
# comes as wheels, too, so that no CUDA image is needed as a base. Two hours of one CPU, an estimated 10 minutes on 16:
# FLASHINFER_MODELS names the families that are wanted, FLASHINFER_CUDA_ARCH_LIST the cards ("9.0a 10.0a").
FROM cuda-packages AS cuda-modules
ARG WITH_FLASHINFER=1
ARG FLASHINFER_MODELS=all
ARG FLASHINFER_CUDA_ARCH_LIST=9.0a
COPY deploy/gpu/requirements-nvcc.lock deploy/gpu/build_flashinfer_modules.py ./
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=cache,target=/root/.cache/flashinfer \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/secrets/ca.crt \
    mkdir /modules && if [ "$WITH_FLASHINFER" = 1 ]; then \
      pip install --no-deps --require-hashes --requirement requirements-nvcc.lock && \
      python3 build_flashinfer_modules.py --models "$FLASHINFER_MODELS" --out /modules; fi

# ---------------------------------------------------------------------- cuda, built
FROM cuda-packages AS cuda-build
COPY deploy/image/prune.py /tmp/prune.py
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    --mount=type=bind,from=cuda-modules,source=/modules,target=/modules \
    pip install --no-cache-dir --no-deps --no-index /wheels/*.whl && python3 /tmp/prune.py --modules /modules

# ---------------------------------------------------------------------- what runs
FROM ${BASE} AS runtime
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Pointsman" \
      org.opencontainers.image.description="An LLM serving daemon with OpenAI's HTTP API" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# Group 0 owns what is written, so that any uid may run this, as OpenShift has it.
RUN install -d -o 10001 -g 0 -m 0775 /cache
# The host as a variable, not an argument: `docker run IMAGE serve MODEL` listens too, and so does the health check know.
ENV PATH=/opt/pointsman/bin:$PATH \
    HOME=/cache \
    USER=pointsman \
    HF_HOME=/cache/huggingface \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    POINTSMAN_CACHE_DIR=/cache \
    POINTSMAN_HOST=0.0.0.0 \
    POINTSMAN_PORT=8000
WORKDIR /cache
VOLUME ["/cache"]
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["/opt/pointsman/bin/python3", "-I", "-m", "server.healthcheck"]
ENTRYPOINT ["/opt/pointsman/bin/pointsman"]
CMD ["serve"]

FROM runtime AS cuda
# A module that was not compiled in is an error with its name, not an attempt without a compiler.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility FLASHINFER_DISABLE_JIT=1
COPY --from=cuda-build /opt/pointsman /opt/pointsman
USER 10001:0

FROM runtime AS cpu
COPY --from=cpu-build /opt/pointsman /opt/pointsman
USER 10001:0
