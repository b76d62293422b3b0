"""OpenVINO GenAI's continuous batching pipeline, to which requests are added as they arrive. The
model is exported by `openvino_genai.py`."""

from __future__ import annotations

import time
from typing import Any

from peers.openvino_genai import cpu_properties
from peers.serving_peer import ServingPeer, ServingSizes, TimedRequest

SMALLEST_BLOCK = 16  # tokens; the plug-in chooses 16 or 32


class OpenVINOServing(ServingPeer):
    """KV cache and arithmetic in `dtype`. The other settings of the scheduler are its defaults:
    parts of prompts are prefilled together with decoding (`dynamic_split_fuse`), 256 tokens in a
    step, and prefix caching is off."""

    is_exact = True

    def __init__(self, model: str, dtype: str, sizes: ServingSizes) -> None:
        import openvino_genai

        self.genai = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        num_blocks = sizes.cache_tokens // SMALLEST_BLOCK + sizes.num_requests
        scheduler.num_kv_blocks = num_blocks
        scheduler.enable_prefix_caching = False
        if sizes.batch_tokens is not None:
            scheduler.max_num_batched_tokens = sizes.batch_tokens
        if sizes.max_running is not None:
            scheduler.max_num_seqs = sizes.max_running
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            model, scheduler, "CPU", cpu_properties(dtype, sizes.threads, self.is_exact)
        )
        self.handles: dict[int, Any] = {}

    def version(self) -> str:
        return f"openvino-genai {self.genai.__version__}"

    def submit(self, request_id: int, request: TimedRequest) -> None:
        import numpy as np
        import openvino

        config = self.genai.GenerationConfig()
        config.max_new_tokens = request.output_len
        config.do_sample = False
        config.ignore_eos = True
        prompt = openvino.Tensor(np.array([request.prompt], dtype=np.int64))
        self.handles[request_id] = self.pipeline.add_request(request_id, prompt, config)

    def advance(self, most_s: float | None) -> None:
        self.pipeline.step()

    def read(self) -> list[tuple[int, list[int], list[float]]]:
        now_s = time.perf_counter()
        emitted = []
        for request_id, handle in self.handles.items():
            token_ids: list[int] = []
            while handle.can_read():
                for output in handle.read().values():
                    token_ids += output.generated_ids
            if token_ids:
                emitted.append((request_id, token_ids, [now_s] * len(token_ids)))
        running = self.genai.GenerationStatus.RUNNING
        self.handles = {i: h for i, h in self.handles.items() if h.get_status() == running}
        return emitted


class OpenVINOServing8Bit(OpenVINOServing):
    """With the plug-in's default KV cache of 8 bits, which changes the emitted tokens."""

    is_exact = False
