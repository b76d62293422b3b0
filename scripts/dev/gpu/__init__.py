"""The stages of `scripts/gpu_suite.sh`. Each has a file with a function `run(suite)`. `results`
writes the files, `scale` lists what is measured, `device_clock` measures times.
"""
