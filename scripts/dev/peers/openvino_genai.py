"""OpenVINO GenAI's continuous batching pipeline, with a model exported by optimum-intel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peers.peer import CHUNK, Peer

TOKENIZER = Path(__file__).parents[3] / "magicdec" / "demo" / "target" / "tokenizer.model"


def cpu_properties(dtype: str, threads: int, is_exact: bool) -> dict[str, str]:
    """Properties of the CPU plug-in: arithmetic in `dtype`, and the KV cache in `dtype` too if
    `is_exact`; otherwise the plug-in's default, 8 bits."""
    short = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    cache = {"KV_CACHE_PRECISION": short} if is_exact else {}
    return {
        "INFERENCE_PRECISION_HINT": short,
        "INFERENCE_NUM_THREADS": str(threads),
        **cache,
    }


class OpenVINO(Peer):
    """KV cache and arithmetic in `dtype`. It cannot verify or score, because its interface has no
    forward of several given tokens."""

    is_exact = True

    def __init__(self, model: str, dtype: str, threads: int, max_tokens: int, batch: int) -> None:
        import openvino_genai

        self.genai = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = CHUNK * batch
        scheduler.max_num_seqs = batch
        scheduler.num_kv_blocks = 2 * batch * (max_tokens // 16)  # for blocks of 16 or 32
        scheduler.enable_prefix_caching = False
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            model, scheduler, "CPU", cpu_properties(dtype, threads, self.is_exact)
        )
        self.room = max_tokens
        self.handles = list[Any]()
        self.emitted: list[list[int]] = []

    @staticmethod
    def export(model: Path, directory: Path) -> None:
        """Export without compression, and with the demo's tokenizer, as the pipeline needs one."""
        import openvino
        from openvino_tokenizers import convert_tokenizer
        from optimum.intel import OVModelForCausalLM
        from transformers import LlamaTokenizerFast

        exported = OVModelForCausalLM.from_pretrained(
            model, export=True, load_in_8bit=False, compile=False
        )
        exported.save_pretrained(directory)
        tokenizer = LlamaTokenizerFast(vocab_file=str(TOKENIZER))
        both = convert_tokenizer(tokenizer, with_detokenizer=True)
        for name, part in zip(("tokenizer", "detokenizer"), both, strict=True):
            openvino.save_model(part, directory / f"openvino_{name}.xml")

    def version(self) -> str:
        return f"openvino-genai {self.genai.__version__}"

    def prefill(self, prompts: list[list[int]]) -> None:
        import numpy as np
        import openvino

        for handle in self.handles:
            handle.stop()
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        config = self.genai.GenerationConfig()
        config.max_new_tokens = self.room - max(map(len, prompts))
        config.do_sample = False
        config.ignore_eos = True
        self.emitted = [[] for _ in prompts]
        self.handles = [
            self.pipeline.add_request(i, openvino.Tensor(np.array([p], dtype=np.int64)), config)
            for i, p in enumerate(prompts)
        ]
        while not all(self.emitted):
            self.step()

    def step(self) -> None:
        self.pipeline.step()
        for emitted, handle in zip(self.emitted, self.handles, strict=True):
            while handle.can_read():
                for output in handle.read().values():
                    emitted.extend(output.generated_ids)

    def tokens(self) -> list[list[int]]:
        return self.emitted


class OpenVINO8Bit(OpenVINO):
    """With the plug-in's default KV cache of 8 bits, which changes the emitted tokens."""

    is_exact = False
