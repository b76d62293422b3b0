#!/usr/bin/env bash
# Generation time on 1 to 3 boards (MDI-LLM's README): `--demo`, `--predict` or `--commands`; the full size needs 3 hosts.
cd "$(dirname "${BASH_SOURCE[0]}")/../.." && exec "${PYTHON:-python}" -m magicdec reproduce mdi_llm_generation_time "$@"
