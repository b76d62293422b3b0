#!/usr/bin/env bash
# Acceptance of Llama-3.1-8B by prefix length at KV budget 512 (MagicDec project page), compared with predictions and runs in
# results/paper/magicdec_acceptance.csv.
#   (no flag)    runs at full size, on GPUs like those of the paper
#   --demo       runs the same at the size of the packaged models, on this machine
#   --predict    only predicts; needs no GPU
#   --commands   prints the full-size commands
exec "${PYTHON:-python}" "$(dirname "${BASH_SOURCE[0]}")/table.py" magicdec_acceptance "$@"
