#!/usr/bin/env bash
# 32 requests in flight with Poisson arrivals (Flover): a run at full size, `--demo`, `--predict` or `--commands`.
cd "$(dirname "${BASH_SOURCE[0]}")/../.." && exec "${PYTHON:-python}" -m magicdec reproduce flover_poisson "$@"
