# The server's image: no compiler, no torch, no root. What is compiled is compiled in a stage of its own.
#
#   docker build -t onward:cpu .                            EXTRA=cpu is the default; with --build-arg EXTRA=gpu: CUDA
#   docker run --rm -p 8001:8001 -p 8002:8002 -v ./build/models:/models:ro onward:cpu   --gpus all hands it the GPU
#
# Everything that pip installs is named with its version and its hashes, for Python 3.11 and 3.12, in deploy/container;
# deploy/container/pin.sh names it anew. The probe asks 127.0.0.1:8001 in the clear: where the server listens elsewhere or
# over TLS, the probe is told by ONWARD_TARGET, ONWARD_CA_CERTIFICATE and ONWARD_SERVER_NAME.
# An index of all platforms. A newer one, for its fixes, is `docker buildx imagetools inspect python:3.12-slim-bookworm`.
ARG BASE_IMAGE=python:3.12-slim-bookworm@sha256:54c85f3c47607a77f32adec749d3c81d1348bf25833671f512b26a9b6d778cb3

FROM ${BASE_IMAGE} AS build
ARG EXTRA=cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
# Whatever compiler the base's own release has: older versions are not kept for anyone to ask for.
# hadolint ignore=DL3008
RUN apt-get update -q && apt-get install -y -q --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY deploy/container/requirements-build.txt deploy/container/requirements-${EXTRA}.txt deploy/container/
RUN python3 -m venv /build && python3 -m venv --without-pip /opt/onward \
 && /build/bin/pip install --quiet --require-hashes --requirement deploy/container/requirements-build.txt \
 && /build/bin/pip --python /opt/onward/bin/python install --quiet --no-deps --only-binary=:all: --require-hashes \
      --requirement "deploy/container/requirements-${EXTRA}.txt"
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY onward onward
COPY model model
COPY service service
# The root is read-only where the image runs: kernels and bytecode are made here. -I: of what is installed, not of /src.
RUN /build/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /wheels ./onward . \
 && /build/bin/pip --python /opt/onward/bin/python install --quiet --no-deps --no-index /wheels/*.whl \
 && find /opt/onward -type d -name tests -prune -exec rm -rf {} + \
 && /opt/onward/bin/python -I -m model.kernels \
 && /opt/onward/bin/python -I -c "import service.app, service.telemetry.otel, service.transport.http.server" \
 && /opt/onward/bin/python -m compileall -q -j 0 /opt/onward/lib

FROM ${BASE_IMAGE}
ARG EXTRA=cpu
ARG VERSION=0.2.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="onward" \
      org.opencontainers.image.description="Transformers served from ONNX Runtime over gRPC" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      onward.extra="${EXTRA}"
RUN groupadd --gid 10001 onward && useradd --uid 10001 --gid onward --no-create-home --shell /usr/sbin/nologin onward \
 && mkdir /models
COPY --from=build /opt/onward /opt/onward
# Huge pages are asked for here, so that the server need not start itself anew; see service/process/huge_pages.py.
ENV PATH=/opt/onward/bin:${PATH} PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 \
    ONWARD_MODELS=/models ONWARD_HOST=0.0.0.0
USER 10001:10001
WORKDIR /
EXPOSE 8001 8002
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=6s --start-period=300s CMD ["python3", "-m", "service", "health"]
ENTRYPOINT ["python3", "-m", "service"]
CMD ["serve"]
