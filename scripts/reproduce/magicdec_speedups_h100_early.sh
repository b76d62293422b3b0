#!/usr/bin/env bash
# Speedups on H100, from an early draft of the MagicDec project page: a run at full size, `--demo`, `--predict` or `--dry_run`.
cd "$(dirname "${BASH_SOURCE[0]}")/../.." && exec "${PYTHON:-python}" -m magicdec reproduce magicdec_speedups_h100_early "$@"
