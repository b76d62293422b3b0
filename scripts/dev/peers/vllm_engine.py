"""vLLM's engine for CPUs, in this process and step by step, with and without its prompt lookup."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from peers.peer import CHUNK, Peer


class VLLM(Peer):
    """KV cache and arithmetic in `dtype`, chunks of prompts as for the other peers, no prefix
    caching. The engine computes with the threads of OpenMP. It cannot verify, because its interface
    has no forward of several given tokens."""

    can_score = True
    speculation: ClassVar[dict[str, Any] | None] = None

    def __init__(self, model: str, dtype: str, threads: int, max_tokens: int, batch: int) -> None:
        os.environ |= {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that a step is a call
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        import torch
        from vllm import LLM

        torch.set_num_threads(threads)
        self.engine = LLM(
            str(Path(model).resolve()),  # what is compiled is kept by this path
            dtype=dtype,
            skip_tokenizer_init=True,
            max_model_len=max_tokens,
            max_num_seqs=batch,
            max_num_batched_tokens=CHUNK * batch,
            enable_prefix_caching=False,
            speculative_config=self.speculation,
            disable_log_stats=True,
        ).llm_engine
        self.room = max_tokens
        self.count = 0  # requests so far, which name the next ones
        self.emitted: dict[str, list[int]] = {}

    @staticmethod
    def export(model: Path, directory: Path) -> None:
        """vLLM reads transformers' checkpoints."""
        directory.symlink_to(model)

    def version(self) -> str:
        import torch
        import vllm

        return f"vllm {vllm.__version__} (torch {torch.__version__})"

    def prefill(self, prompts: list[list[int]]) -> None:
        from vllm import SamplingParams

        self.engine.abort_request(list(self.emitted))
        names = [str(self.count + row) for row in range(len(prompts))]
        self.count += len(prompts)
        self.emitted = {name: [] for name in names}
        for name, prompt in zip(names, prompts, strict=True):
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=self.room - len(prompt),
                ignore_eos=True,
                detokenize=False,
            )
            self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while not all(self.emitted.values()):
            self.step()

    def score(self, texts: list[list[int]]) -> list[list[float]]:
        from vllm import SamplingParams

        self.engine.abort_request(list(self.emitted))
        names = [str(self.count + row) for row in range(len(texts))]
        self.count += len(texts)
        self.emitted = {}
        sampling = SamplingParams(
            temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, prompt_logprobs=0
        )
        for name, text in zip(names, texts, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": text}, sampling)
        found: dict[str, list[Any]] = {}  # by request: for each token a table of log-probabilities
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                found[output.request_id] = output.prompt_logprobs
        return [
            [
                float(table[token].logprob)
                for table, token in zip(found[name], text, strict=True)
                if table is not None
            ]  # there is none of the first
            for name, text in zip(names, texts, strict=True)
        ]

    def step(self) -> None:
        for output in self.engine.step():
            self.emitted[output.request_id] = list(output.outputs[0].token_ids)

    def tokens(self) -> list[list[int]]:
        return list(self.emitted.values())


class VLLMLookup(VLLM):
    """With prompt lookup: the 4 tokens after the newest earlier place of the last 2 to 4 tokens."""

    can_score = False  # prompts have the probabilities of VLLM
    speculation: ClassVar[dict[str, Any] | None] = {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }
