#!/bin/sh
# Pins the image's packages with versions and hashes, for Python 3.11 and later; versions come from constraints.txt
# where it has them. Needs uv (from PyPI) on the path, or its path in UV.
#
#   sh deploy/container/pin.sh
set -eu
cd "$(dirname "$0")/../.."
pin() {
  "${UV:-uv}" pip compile --quiet --universal --python-version 3.11 --constraint constraints.txt \
    --generate-hashes --no-header --no-annotate --no-emit-index-url "$@"
}
# The downloader of `tokenizers` and its dependencies: the server reads local files.
downloading="anyio filelock fsspec hf-xet httpcore2 httpx2 httpx2-jsfetch huggingface-hub idna pyyaml \
  tqdm truststore"
left_out=$(for name in $downloading; do printf -- '--no-emit-package %s ' "$name"; done)
for extra in cpu gpu; do
  # shellcheck disable=SC2086 (several words)
  pin pyproject.toml --extra "$extra" --extra http --extra otel $left_out --output-file "deploy/container/requirements-$extra.txt"
done
echo hatchling | pin - --output-file deploy/container/requirements-build.txt
printf '%s\n' grpcio locust numpy protobuf | pin - --output-file deploy/container/requirements-load.txt
