"""Name tables: the values of flags, and where their code lives. Imports nothing of ours and no
torch. A new strategy, policy, drafter or backend is a line here and a file, imported when chosen.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any

ATTENTION_BACKENDS = {
    "sdpa": "magicdec.attention.sdpa:SDPABackend",
    "grouped": "magicdec.attention.grouped:GroupedBackend",
    "native": "magicdec.attention.native:NativeBackend",
    "triton": "magicdec.attention.triton:TritonBackend",
    "flash_attn": "magicdec.attention.flash_attn:FlashAttnBackend",
}
# What `--attention auto` takes on each device: the first of these that can serve the run. The last
# one serves every run.
AUTO_BACKENDS = {
    "cpu": ("native", "grouped", "sdpa"),
    "cuda": ("triton", "flash_attn", "sdpa"),
}
PORTABLE_BACKEND = "grouped"  # the fastest that needs neither a compiler nor a library
REFERENCE_BACKEND = "sdpa"  # the plainest; checks and measurements compare with it
KV_POLICIES = {
    "full": "magicdec.speculation.policies.policy:FullKV",
    "streaming_llm": "magicdec.speculation.policies.streaming_llm:StreamingLLM",
    "snapkv": "magicdec.speculation.policies.snapkv:SnapKV",
    "verified": "magicdec.speculation.policies.verified:VerifiedKV",
    "retrieval": "magicdec.speculation.policies.retrieval:Retrieval",
    "quantised": "magicdec.speculation.policies.quantised:Quantised",
}
DEFAULT_KV_POLICY = "streaming_llm"
FULL_KV_POLICY = "full"  # what a budget of -1 means
WITHOUT_BUDGET = (FULL_KV_POLICY, "quantised")  # policies whose drafts read every token
EVERY_TOKEN = -1  # the budget that they have
SPECULATIVE = "speculative"
BASELINE = "autoregressive"  # the strategy that every other one is compared with
STRATEGIES = {
    "autoregressive": "magicdec.speculation.steps.speculative:autoregressive",
    SPECULATIVE: "magicdec.speculation.steps.speculative:speculative",
}
DRAFTERS = {
    "self": "magicdec.speculation.model_drafter:SelfDrafter",
    "model": "magicdec.speculation.model_drafter:ModelDrafter",
    "eagle": "magicdec.speculation.head_drafter:HeadDrafter",
    "mtp": "magicdec.speculation.head_drafter:HeadDrafter",
    "ngram": "magicdec.speculation.ngram:NgramDrafter",
    "ngram+self": "magicdec.speculation.mixed:MixedDrafter",
    "ngram+model": "magicdec.speculation.mixed:MixedDrafter",
    "ngram+eagle": "magicdec.speculation.mixed:MixedDrafter",
    "ngram+mtp": "magicdec.speculation.mixed:MixedDrafter",
}
EAGLE = "eagle"
MTP = "mtp"
HEADS = (EAGLE, MTP)  # drafters that take hidden states of their target
NGRAM_AND = "ngram+"  # a drafter that looks up first, and after which the other one is named
# When the requests of a serving workload arrive.
ARRIVALS = {
    "burst": "magicdec.workload.request_shapes:burst",
    "constant": "magicdec.workload.request_shapes:constant",
    "uniform": "magicdec.workload.request_shapes:uniform",
    "poisson": "magicdec.workload.request_shapes:poisson",
}
# Forms of traces of sessions, each with the function that reads a file.
TRACES = {
    "weka": "magicdec.workload.traces.weka:read",
    "mooncake": "magicdec.workload.traces.mooncake:read",
    "mlperf": "magicdec.workload.traces.mlperf:read",
    "aiperf": "magicdec.workload.traces.aiperf:read",
}
# The systems that serve requests, each with modes of its own.
SYSTEMS = {
    "flover": "magicdec.systems.flover.declaration:FLOVER",
    "mdi_llm": "magicdec.systems.mdi_llm.declaration:MDI_LLM",
    "pipeinfer": "magicdec.systems.pipeinfer.declaration:PIPEINFER",
    "servers": "magicdec.systems.servers.declaration:SERVERS",
}
# Programs whose servers say what they drafted: the form in which each does.
SERVER_FORMATS = {
    "vllm": "magicdec.systems.servers.vllm:VLLM",
    "sglang": "magicdec.systems.servers.sglang:SGLANG",
    "llama.cpp": "magicdec.systems.servers.llama_cpp:LLAMA_CPP",
}
# What `--endpoint_api` can name: the interface by which a server is asked.
OPENAI_API = "openai"
SERVER_APIS = {
    OPENAI_API: "magicdec.systems.servers.openai:OPENAI",
    "sglang": "magicdec.systems.servers.sglang:GENERATE",
    "llama.cpp": "magicdec.systems.servers.llama_cpp:COMPLETION",
}
# What `magicdec audit` checks of a server, in this order, and what it measures of arms of one.
AUDIT_CHECKS = {
    "greedy": "magicdec.bench.audit.greedy:check",
    "counters": "magicdec.bench.audit.counters:check",
    "state": "magicdec.bench.audit.states:check",
    "preemption": "magicdec.bench.audit.preemption:check",
    "sampling": "magicdec.bench.audit.sampling:check",
}
PREEMPTION_CHECK = "preemption"
PAYS_CHECK = "pays"
# The kinds of records, which all commands append to one file, by their key `kind`.
RECORDS = {
    "pass": "magicdec.records.pass_record:PassRecord",
    "latency": "magicdec.bench.latency.record:LatencyRecord",
    "acceptance": "magicdec.bench.acceptance.record:AcceptanceRecord",
    "audit": "magicdec.bench.audit.record:AuditRecord",
    "plan": "magicdec.predict.plan:PlanRecord",
    "simulation": "magicdec.predict.simulator.run:SimulationRecord",
}
# What makes the type of a record's `details`: those of all systems.
DETAILS = "magicdec.systems.details:details_type"
# The formats of `magicdec export`.
EXPORTS = {
    "table": "magicdec.bench.export.table:TABLE",
    "vllm": "magicdec.bench.export.vllm:VLLM",
    "pytorch": "magicdec.bench.export.pytorch:PYTORCH",
    "llama-bench": "magicdec.bench.export.llama_bench:LLAMA_BENCH",
    "golden": "magicdec.bench.export.golden:GOLDEN",
}
EVERY_KIND = "table"  # the format that holds records of every kind
# What computes norms, rotation and gates, and linear attention.
ELEMENTWISE = {
    "torch": "magicdec.model.elementwise.operators:Elementwise",
    "native": "magicdec.model.elementwise.native:NativeElementwise",
    "triton": "magicdec.model.elementwise.triton:TritonElementwise",
}
# What `--elementwise auto` takes: on CUDA, on a CPU beside packed linear layers, and elsewhere.
ELEMENTWISE_ON_CUDA = "triton"
ELEMENTWISE_BESIDE_PACKED = "native"
PORTABLE_ELEMENTWISE = "torch"
# What config.json calls a model: the family that reads it.
ARCHITECTURES = {
    "LlamaForCausalLM": "magicdec.model.families.llama:LLAMA",
    "MistralForCausalLM": "magicdec.model.families.llama:MISTRAL",
    "MinistralForCausalLM": "magicdec.model.families.llama:MINISTRAL",
    "MixtralForCausalLM": "magicdec.model.families.mixtures:MIXTRAL",
    "Qwen2MoeForCausalLM": "magicdec.model.families.mixtures:QWEN2_MOE",
    "Qwen3MoeForCausalLM": "magicdec.model.families.mixtures:QWEN3_MOE",
    "GptOssForCausalLM": "magicdec.model.families.gpt_oss:GPT_OSS",
    "Gemma3ForCausalLM": "magicdec.model.families.gemma:GEMMA3",
    "Qwen2ForCausalLM": "magicdec.model.families.llama:QWEN2",
    "Qwen3ForCausalLM": "magicdec.model.families.llama:QWEN3",
    "MiMoForCausalLM": "magicdec.model.families.mimo:MIMO",
    "Qwen3_5ForCausalLM": "magicdec.model.families.hybrids:QWEN3_5",
    "Qwen3_5ForConditionalGeneration": "magicdec.model.families.hybrids:QWEN3_5",
    "Qwen3_5MoeForCausalLM": "magicdec.model.families.hybrids:QWEN3_5_MOE",
    "Qwen3_5MoeForConditionalGeneration": "magicdec.model.families.hybrids:QWEN3_5_MOE",
    "Qwen3NextForCausalLM": "magicdec.model.families.hybrids:QWEN3_NEXT",
    "BaiChuanForCausalLM": "magicdec.model.families.llama:BAICHUAN",
    "BaichuanForCausalLM": "magicdec.model.families.llama:BAICHUAN",
    "GPT2LMHeadModel": "magicdec.model.families.gpt:GPT2",
    "GPTBigCodeForCausalLM": "magicdec.model.families.gpt:BIGCODE",
    "GPTJForCausalLM": "magicdec.model.families.gpt:GPTJ",
    "FalconForCausalLM": "magicdec.model.families.gpt:FALCON",
    "BloomForCausalLM": "magicdec.model.families.gpt:BLOOM",
}
# Of models that nothing here computes: the families whose costs `magicdec plan` counts.
PLANNED = {
    "DeepseekV3ForCausalLM": "magicdec.model.families.planned:DEEPSEEK_V3",
    "DeepseekV4ForCausalLM": "magicdec.model.families.planned:DEEPSEEK_V4",
    "KimiLinearForCausalLM": "magicdec.model.families.planned:KIMI_LINEAR",
    "NemotronHForCausalLM": "magicdec.model.families.mamba_hybrids:NEMOTRON_H",
    "GraniteMoeHybridForCausalLM": "magicdec.model.families.mamba_hybrids:GRANITE_HYBRID",
    "Gemma4ForCausalLM": "magicdec.model.families.planned:GEMMA4",
    "Gemma4ForConditionalGeneration": "magicdec.model.families.planned:GEMMA4",
}
# A draft head, whatever its config.json calls it, and the family that names its tensors.
EAGLE_HEAD = "Eagle3Speculator"
DRAFT_HEADS = {EAGLE_HEAD: "magicdec.model.families.eagle:EAGLE3"}
# What `quantization_config` calls the program that quantised a checkpoint: its format.
QUANTIZATIONS = {
    "gptq": "magicdec.model.checkpoint.quantized.gptq:Gptq",
    "awq": "magicdec.model.checkpoint.quantized.awq:Awq",
    "compressed-tensors": "magicdec.model.checkpoint.quantized.compressed:CompressedTensors",
    "fp8": "magicdec.model.checkpoint.quantized.fp8:Fp8",
    "mxfp4": "magicdec.model.checkpoint.quantized.mxfp4:Mxfp4",
}
# Formats to which weights are quantised.
QUANTIZERS = {
    "int8": "magicdec.model.linear.quantizers:INT8",
    "int4": "magicdec.model.linear.quantizers:INT4",
    "int4_g128": "magicdec.model.linear.quantizers:INT4_G128",
    "q8_0": "magicdec.model.linear.quantizers:Q8_0",
    "q4_0": "magicdec.model.linear.quantizers:Q4_0",
    "q4_1": "magicdec.model.linear.quantizers:Q4_1",
}
DTYPES = ("float32", "bfloat16")
STORED = "stored"  # matrices as the checkpoint stores them: numbers in groups
WEIGHT_DTYPES = (*DTYPES, "int8", STORED)
# Of a cache with fewer bits than a run has, with the bits of a number beside its scale.
KV_DTYPES = {"fp8": 8, "int8": 8, "int4": 4}
LOW_BIT = ("int8", "int4")  # QUANTIZERS of drafts that `advise` and the gate try
FP8 = "fp8"  # matrices, and the activations that they are multiplied with, in e4m3
DRAFT_WEIGHTS = (*LOW_BIT, "int4_g128", FP8)
SAME = "same"  # a draft's matrices: those that it has without a choice
NARROW = (*DRAFT_WEIGHTS, STORED)  # matrices that are no numbers of the dtype of activations
DEVICES = ("cpu", "cuda")
LINEARS = ("torch", "packed", "packed_a8")
PACKED = LINEARS[1:]
COLLECTIVES = ("gloo", "shared_memory", "nccl")


def load_named(table: dict[str, str], name: str) -> Any:
    """The object behind a name of a table above. Raises ValueError for other names."""
    if name not in table:
        raise ValueError(f"{name} is not known; choose from {', '.join(table)}")
    return load_object(table[name])


def most_like(word: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(names), n=1)
    return f"did you mean {close[0]}?" if close else f"choose from {', '.join(names)}"


def load_object(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)
