"""This project's Python interface, on one rank, with the native kernels and native steps."""

from __future__ import annotations

import time

from peers.serving_peer import ServingPeer, ServingSizes, TimedRequest


class MagicdecServing(ServingPeer):
    """Autoregressive decoding in flight by `magicdec.llm.LLM`. All requests may run together,
    unless `max_running` is less. `batch_tokens` bounds the tokens that a step prefills."""

    def __init__(self, model: str, dtype: str, sizes: ServingSizes) -> None:
        from magicdec.llm import LLM, Stream
        from magicdec.runner.step_plan import PREFILL_TOKENS

        self.llm = LLM(
            model,
            dtype=dtype,
            max_tokens=sizes.max_tokens,
            max_concurrency=sizes.max_running or sizes.num_requests,
            cache_tokens=sizes.cache_tokens,
            prefill_tokens=sizes.batch_tokens or PREFILL_TOKENS,
            threads=sizes.threads,
        )
        self.streams: dict[int, Stream] = {}

    def version(self) -> str:
        from importlib.metadata import version

        return f"magicdec {version('magicdec')}"

    def submit(self, request_id: int, request: TimedRequest) -> None:
        stream = self.llm.submit(request.prompt, request.output_len, ignore_eos=True)
        self.streams[request_id] = stream

    def advance(self, most_s: float | None) -> None:
        self.llm.step()

    def read(self) -> list[tuple[int, list[int], list[float]]]:
        now_s = time.perf_counter()
        new = {i: stream.read() for i, stream in self.streams.items()}
        self.streams = {i: s for i, s in self.streams.items() if not s.is_done}
        return [(i, ids, [now_s] * len(ids)) for i, ids in new.items() if ids]
