#!/usr/bin/env bash
# Speedups by batch size and prefix length at KV budget 512 (MagicDec's plot): a run at full size, `--demo`, `--predict` or `--dry_run`.
cd "$(dirname "${BASH_SOURCE[0]}")/../.." && exec "${PYTHON:-python}" -m magicdec reproduce magicdec_speedups_budget512 "$@"
