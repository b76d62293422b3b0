"""transformers' continuous batching: a manager with a paged KV cache, which runs steps in a thread.

On a CPU, its attention is PyTorch's `scaled_dot_product_attention` of all tokens of a step with all
cached tokens of their requests, under a mask; flash attention and its fast path for decoding need
CUDA. The work of a step grows with the square of the requests in it, so fewer requests at a time
can be faster.
"""

from __future__ import annotations

from typing import Any

from peers.serving_peer import ServingPeer, ServingSizes, TimedRequest

PAGE = 256  # tokens; the library's default
NO_END = -1  # in place of an end token
POLL_S = 1.0


class TransformersServing(ServingPeer):
    """Blocks are not shared between requests. The pool has twice the blocks that the requests need,
    because the scheduler admits none while less than 15 % are free."""

    def __init__(self, model: str, dtype: str, sizes: ServingSizes) -> None:
        import torch
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

        torch.set_num_threads(sizes.threads)
        loaded = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        config = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=2 * (sizes.cache_tokens // PAGE + sizes.num_requests),
            max_batch_tokens=sizes.batch_tokens,
            max_requests_per_batch=sizes.max_running or sizes.num_requests,
            allow_block_sharing=False,
        )
        self.manager: Any = loaded.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=NO_END),
            continuous_batching_config=config,
        )
        self.manager.start()
        self.results: list[Any] = []

    def version(self) -> str:
        import torch
        import transformers

        return f"transformers {transformers.__version__} (torch {torch.__version__})"

    def submit(self, request_id: int, request: TimedRequest) -> None:
        self.manager.add_request(
            request.prompt,
            str(request_id),
            max_new_tokens=request.output_len,
            record_timestamps=True,
            eos_token_id=NO_END,
        )

    def advance(self, most_s: float | None) -> None:
        result = self.manager.get_result(timeout=POLL_S if most_s is None else max(most_s, 1e-3))
        if result is not None:
            if result.error is not None:
                raise RuntimeError(f"request {result.request_id} failed: {result.error}")
            self.results.append(result)
        elif not self.manager.is_running():
            raise RuntimeError("the generation thread has ended")

    def read(self) -> list[tuple[int, list[int], list[float]]]:
        results = self.results
        self.results = []
        return [(int(r.request_id), r.generated_tokens, r.timestamps) for r in results]

    def close(self) -> None:
        self.manager.stop(block=True, timeout=5)
