#!/usr/bin/env bash
# Speedups over autoregressive decoding on 8 A100 (MagicDec project page): a run at full size, `--demo`, `--predict` or `--dry_run`.
cd "$(dirname "${BASH_SOURCE[0]}")/../.." && exec "${PYTHON:-python}" -m magicdec reproduce magicdec_speedups_a100 "$@"
