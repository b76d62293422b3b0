"""One decoder in a process of its own, driven by JSON lines: what `bench_peers.py` compares.

    python scripts/peer_worker.py PEER MODEL_DIR DTYPE THREADS MAX_TOKENS BATCH

Commands: {"do": "prefill", "prompts": [[ids]]}, {"do": "step", "count": n}, {"do": "generate",
"prompts": [[ids]], "num_new": n} (prefill and decoding in one) and {"do": "quit"}. Each is answered
by one line, {"seconds": [..], "tokens": [[ids emitted so far] a prompt]}. A peer is one class here,
named in PEERS; each imports its library only when started, so that a peer can live in a virtual
environment that has none of the others.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Protocol

CHUNK = 512


class Peer(Protocol):
    def prefill(self, prompts: list[list[int]]) -> None:
        """Take the prompts and emit the first token of each."""
        ...

    def step(self) -> None:
        """One more greedy token for every prompt."""
        ...

    def tokens(self) -> list[list[int]]: ...


def generate(peer: Peer, prompts: list[list[int]], num_new: int) -> None:
    """By the library's own call where it has one."""
    if isinstance(peer, TransformersGenerate):
        peer.generate(prompts, num_new)
        return
    peer.prefill(prompts)
    while min(map(len, peer.tokens())) < num_new:
        peer.step()


class Magicdec:
    """Autoregressive decoding as the drivers run it, on one rank."""

    def __init__(self, model: str, dtype: str, threads: int, max_tokens: int, batch: int) -> None:
        import torch

        from magicdec.decoding.strategy import Setup, make_strategy
        from magicdec.distributed.groups import Group
        from magicdec.distributed.tensor_parallel import Shard
        from magicdec.engine import Engine
        from magicdec.model.checkpoint import find_model, load_transformer
        from magicdec.names import ATTENTION_BACKENDS, load_named
        from magicdec.runner import ModelRunner
        from magicdec.sections import DecodingSection, KVSection

        torch.set_num_threads(threads)
        source, cpu = find_model("--model", model), torch.device("cpu")
        loaded = load_transformer(
            source.config, source.weights, Shard(), None, getattr(torch, dtype), cpu
        )
        if dtype == "bfloat16":
            loaded.pack()
        backend = load_named(ATTENTION_BACKENDS, "native")()
        self.runner = ModelRunner(loaded, backend, Group((0,), 0), batch, max_tokens)
        self.engine = Engine(self.runner, CHUNK)
        setup = Setup(self.runner, DecodingSection(), KVSection("full"))
        self.strategy = make_strategy("autoregressive", setup)

    def prefill(self, prompts: list[list[int]]) -> None:
        from magicdec.request import Request, SamplingParams

        room = self.runner.max_tokens - max(map(len, prompts))
        self.engine = type(self.engine)(self.runner, CHUNK)
        requests = [Request(i, tuple(p), SamplingParams(room, ())) for i, p in enumerate(prompts)]
        self.engine.prefill(requests)
        self.engine.begin(self.strategy)

    def step(self) -> None:
        batch = self.engine.scheduler.schedule()
        assert batch is not None and not batch.is_prefill
        self.engine.scheduler.commit(batch, self.strategy.step(batch), time.perf_counter())

    def tokens(self) -> list[list[int]]:
        return [list(request.output_ids) for request in self.engine.scheduler.requests]


class MagicdecSelfSpeculation(Magicdec):
    """Self-speculation, 3 draft tokens from 257 cached ones."""

    def __init__(self, model: str, dtype: str, threads: int, max_tokens: int, batch: int) -> None:
        from magicdec.decoding.strategy import Setup, make_strategy
        from magicdec.sections import DecodingSection, KVSection

        super().__init__(model, dtype, threads, max_tokens, batch)
        decoding = DecodingSection("speculative", "self", 3)
        kv = KVSection("streaming_llm", 257)
        self.strategy = make_strategy("speculative", Setup(self.runner, decoding, kv))


class Transformers:
    """The library's own forward with its cache in a plain loop: `generate` less overhead."""

    def __init__(self, model: str, dtype: str, threads: int, max_tokens: int, batch: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()

    def prefill(self, prompts: list[list[int]]) -> None:
        import torch
        from transformers import DynamicCache

        self.cache = DynamicCache()
        for part in torch.tensor(prompts).split(CHUNK, dim=1):
            self._forward(part)
        self.emitted = [self.last]

    def step(self) -> None:
        self._forward(self.last)
        self.emitted.append(self.last)

    def tokens(self) -> list[list[int]]:
        import torch

        rows: list[list[int]] = torch.cat(self.emitted, dim=1).tolist()
        return rows

    def _forward(self, ids: Any) -> None:
        import torch

        with torch.inference_mode():
            out = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.last = out.logits[:, -1:].argmax(-1)


class TransformersGenerate(Transformers):
    """`generate`, all prompts in one call."""

    assistant: Any = None

    def generate(self, prompts: list[list[int]], num_new: int) -> None:
        import torch

        ids = torch.tensor(prompts)
        together = [ids] if self.assistant is None else ids.split(1)  # assisted: one row a call
        rows = [
            self.model.generate(
                part, attention_mask=torch.ones_like(part), do_sample=False,
                max_new_tokens=num_new, eos_token_id=None, pad_token_id=0,
                assistant_model=self.assistant,
            )
            for part in together
        ]  # fmt: skip
        self.emitted = [torch.cat(rows)[:, ids.shape[1] :]]


class TransformersAssisted(TransformersGenerate):
    """Assisted generation with the small model that stands beside the target as `draft/`."""

    def __init__(self, model: str, dtype: str, threads: int, max_tokens: int, batch: int) -> None:
        from pathlib import Path

        super().__init__(model, dtype, threads, max_tokens, batch)
        draft = str(Path(model).with_name("draft"))
        self.assistant = Transformers(draft, dtype, threads, max_tokens, batch).model


class OpenVINO:
    """OpenVINO GenAI's continuous batching on a model exported by optimum-intel, KV cache and
    arithmetic in the dtype asked for."""

    def __init__(self, model: str, dtype: str, threads: int, max_tokens: int, batch: int) -> None:
        import openvino_genai

        self.genai = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = CHUNK * batch
        scheduler.max_num_seqs = batch
        scheduler.num_kv_blocks = 2 * batch * (max_tokens // 16)  # blocks are of 16 or 32 tokens
        scheduler.enable_prefix_caching = False
        short = {"float32": "f32", "bfloat16": "bf16"}[dtype]
        properties = {"INFERENCE_PRECISION_HINT": short, "KV_CACHE_PRECISION": short}
        properties["INFERENCE_NUM_THREADS"] = str(threads)
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            model, scheduler, "CPU", properties
        )
        self.room, self.handles = max_tokens, list[Any]()
        self.emitted: list[list[int]] = []

    def prefill(self, prompts: list[list[int]]) -> None:
        import numpy as np
        import openvino

        for handle in self.handles:
            handle.stop()
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        config = self.genai.GenerationConfig()
        config.max_new_tokens = self.room - max(map(len, prompts))
        config.do_sample, config.ignore_eos = False, True
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


PEERS: dict[str, type[Peer]] = {
    "magicdec": Magicdec,
    "magicdec_selfspec": MagicdecSelfSpeculation,
    "transformers": Transformers,
    "transformers_generate": TransformersGenerate,
    "transformers_assisted": TransformersAssisted,
    "openvino": OpenVINO,
}


def main() -> None:
    name, model, dtype, threads, max_tokens, batch = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    build: Any = PEERS[name]
    peer: Peer = build(model, dtype, int(threads), int(max_tokens), int(batch))
    print(json.dumps({"ready": name}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "quit":
            break
        seconds = []
        for _ in range(command.get("count", 1)):
            started = time.perf_counter()
            if command["do"] == "prefill":
                peer.prefill(command["prompts"])
            elif command["do"] == "generate":
                generate(peer, command["prompts"], command["num_new"])
            else:
                peer.step()
            seconds.append(time.perf_counter() - started)
        answer = {"seconds": seconds, "tokens": peer.tokens()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
