#!/usr/bin/env bash
# The image, with the pack's patches.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
echo "building the image of the pack"
docker build --tag "pack-vllm:latest" --file docker/Dockerfile .
