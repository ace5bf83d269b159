# The load generator of compose's profile `load`: Locust, pinned by hashes, and nothing of the server.
#
#   docker build --file deploy/container/load.Dockerfile --tag onward-load .
#   docker run --rm --network host onward-load --host 127.0.0.1:8001 --users 8 --model stdlib
ARG BASE_IMAGE=python:3.12-slim-bookworm@sha256:54c85f3c47607a77f32adec749d3c81d1348bf25833671f512b26a9b6d778cb3

FROM ${BASE_IMAGE}
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/src
WORKDIR /src
COPY deploy/container/requirements-load.txt deploy/container/
RUN pip install --quiet --no-deps --only-binary=:all: --require-hashes --requirement deploy/container/requirements-load.txt
COPY model/__init__.py model/
COPY model/spec model/spec
COPY onward onward
COPY loadtest loadtest
USER 10001:10001
ENTRYPOINT ["python3", "-m", "locust", "-f", "loadtest/locustfile.py", "--headless"]
CMD ["--host", "127.0.0.1:8001", "--users", "8"]
