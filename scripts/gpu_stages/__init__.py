"""The stages of `scripts/gpu_suite.sh`, a file each with a `run(suite)`. `results` is what they
write into, `scale` what they measure, `device_clock` how they time.
"""
