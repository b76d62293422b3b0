#!/usr/bin/env bash
# Throughput against latency of Llama-2-7B-32K on 8 A100 (MagicDec's chart): a run at full size, `--demo`, `--predict` or `--dry_run`.
cd "$(dirname "${BASH_SOURCE[0]}")/../.." && exec "${PYTHON:-python}" -m magicdec reproduce magicdec_throughput_latency "$@"
