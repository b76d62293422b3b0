#!/usr/bin/env bash
# Requests in flight, one every 500 ms (Flover's main figure): a run at full size, `--demo`, `--predict` or `--commands`.
cd "$(dirname "${BASH_SOURCE[0]}")/../.." && exec "${PYTHON:-python}" -m magicdec reproduce flover_constant "$@"
