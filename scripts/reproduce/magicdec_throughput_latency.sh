#!/usr/bin/env bash
# Throughput against latency of Llama-2-7B-32K on 8 A100 (MagicDec's chart), compared with predictions and runs in
# results/paper/magicdec_throughput_latency.csv.
#   (no flag)    runs at full size, on GPUs like those of the paper
#   --demo       runs the same at the size of the packaged models, on this machine
#   --predict    only predicts; needs no GPU
#   --commands   prints the full-size commands
exec "${PYTHON:-python}" "$(dirname "${BASH_SOURCE[0]}")/table.py" magicdec_throughput_latency "$@"
