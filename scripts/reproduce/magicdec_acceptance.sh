#!/usr/bin/env bash
# Acceptance of Llama-3.1-8B by prefix length at KV budget 512 (MagicDec project page): a run at full size, `--demo`, `--predict` or `--dry_run`.
cd "$(dirname "${BASH_SOURCE[0]}")/../.." && exec "${PYTHON:-python}" -m magicdec reproduce magicdec_acceptance "$@"
