"""The published tables that `magicdec reproduce` knows, by the names of their files.

A new table is a line here and a file in `results/paper/`. A new system is a subclass of `Setting`
beside this file, too.
"""

from __future__ import annotations

MAGICDEC = "magicdec.reproduce.magicdec_setting:MagicDecSetting"
FLOVER = "magicdec.reproduce.flover_setting:FloverSetting"
MDI_LLM = "magicdec.reproduce.mdi_llm_setting:MDILLMSetting"
PIPEINFER = "magicdec.reproduce.pipeinfer_setting:PipeInferSetting"
# (what the table shows, the class of its lines, which is imported only then)
TABLES = {
    "magicdec_acceptance": (
        "acceptance of Llama-3.1-8B by prefix length",
        MAGICDEC,
    ),
    "magicdec_speedups_a100": ("speedups on 8 A100", MAGICDEC),
    "magicdec_speedups_h100": ("speedups on 8 H100", MAGICDEC),
    "magicdec_speedups_h100_early": ("speedups on H100, from an early draft", MAGICDEC),
    "magicdec_speedups_budget512": ("speedups by batch size at KV budget 512", MAGICDEC),
    "magicdec_throughput_latency": ("throughput against time per token on 8 A100", MAGICDEC),
    "flover_constant": ("Flover: requests in flight, one every 500 ms", FLOVER),
    "flover_poisson": ("Flover: 32 requests in flight, Poisson arrivals", FLOVER),
    "mdi_llm_generation_time": ("MDI-LLM: samples that circulate through 1 to 3 boards", MDI_LLM),
    "pipeinfer_speedups": ("PipeInfer: asynchronous over synchronous speculation", PIPEINFER),
}
