#!/usr/bin/env bash
# Asynchronous over synchronous speculation for six pairs of models (PipeInfer): `--demo`, `--predict` or `--commands`; the full size needs 8 hosts.
cd "$(dirname "${BASH_SOURCE[0]}")/../.." && exec "${PYTHON:-python}" -m magicdec reproduce pipeinfer_speedups "$@"
