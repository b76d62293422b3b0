#!/usr/bin/env bash
# Speedups over autoregressive decoding on 8 A100 (MagicDec project page), compared with predictions and runs in
# results/paper/magicdec_speedups_a100.csv.
#   (no flag)    runs at full size, on GPUs like those of the paper
#   --demo       runs the same at the size of the packaged models, on this machine
#   --predict    only predicts; needs no GPU
#   --commands   prints the full-size commands
exec "${PYTHON:-python}" "$(dirname "${BASH_SOURCE[0]}")/table.py" magicdec_speedups_a100 "$@"
