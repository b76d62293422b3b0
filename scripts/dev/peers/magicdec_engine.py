"""This project's engine, on one rank, with the native kernels and native steps."""

from __future__ import annotations

from peers.peer import CHUNK, Peer, log_probs_of


class Magicdec(Peer):
    """Autoregressive decoding, with the same engine and strategy as in the drivers."""

    can_verify = True
    can_score = True
    kv_dtype: str | None = None  # --kv_dtype; None: that of the weights

    def __init__(self, model: str, dtype: str, threads: int, max_tokens: int, batch: int) -> None:
        import torch

        from magicdec.config.sections import DecodingSection, KVSection
        from magicdec.distributed.groups import Group
        from magicdec.distributed.tensor_parallel import Shard
        from magicdec.engine.engine import Engine
        from magicdec.kv.layout import POOL_DTYPES
        from magicdec.model.checkpoint.source import find_model
        from magicdec.names import ATTENTION_BACKENDS, load_named
        from magicdec.runner.model_runner import ModelRunner
        from magicdec.setup.loading import load_kind, make_executor
        from magicdec.setup.model_plan import Kinds
        from magicdec.speculation.steps.build import build_decoder

        torch.set_num_threads(threads)
        kinds = Kinds(dtype, dtype, "packed", "native", "on")
        source = find_model("--model", model)
        group = Group((0,), 0)
        loaded = load_kind(source, Shard(), kinds, torch.device("cpu"))
        backend = load_named(ATTENTION_BACKENDS, "native")()
        executor = make_executor(kinds, loaded, group)
        pool = None if self.kv_dtype is None else POOL_DTYPES[self.kv_dtype]
        self.runner = ModelRunner(
            loaded, backend, group, batch, max_tokens, kv_dtype=pool, executor=executor
        )
        self.max_gamma = 0  # draft tokens per row cached in a step beyond the committed ones
        self.engine = Engine(self.runner, CHUNK)
        self.strategy = build_decoder(self.runner, DecodingSection(), KVSection("full"))

    def version(self) -> str:
        from importlib.metadata import version

        return f"magicdec {version('magicdec')}"

    def prefill(self, prompts: list[list[int]]) -> None:
        from magicdec.runner.request import Request, SamplingParams

        room = self.runner.max_tokens - max(map(len, prompts)) - self.max_gamma
        self.engine = type(self.engine)(self.runner, CHUNK)
        requests = [Request(i, tuple(p), SamplingParams(room, ())) for i, p in enumerate(prompts)]
        self.strategy.release(range(self.runner.num_rows))
        self.engine.prefill(requests)
        self.engine.begin(self.strategy)

    def step(self) -> None:
        plan = self.engine.scheduler.schedule()
        assert plan is not None
        self.engine.execute(plan, self.strategy)

    def tokens(self) -> list[list[int]]:
        return [list(request.output_ids) for request in self.engine.requests]

    def verify(self, drafts: list[list[int]]) -> list[list[int]]:
        import torch

        from magicdec.runner.forward_batch import ForwardBatch
        from magicdec.runner.request import Batch
        from magicdec.runner.sampling.metadata import SamplingMetadata
        from magicdec.runner.sampling.model_tokens import greedy_tokens

        batch = Batch(tuple(self.engine.scheduler.running))
        lengths = [self.runner.cache.lengths[row] for row in batch.rows]
        newest = [[r.last_token, *d] for r, d in zip(batch.requests, drafts, strict=True)]
        logits = self.runner.forward(ForwardBatch(torch.tensor(newest), batch.rows))
        ids: list[list[int]] = greedy_tokens(self.runner, logits, SamplingMetadata()).tolist()
        self.runner.truncate(batch.rows, lengths)
        return ids

    def score(self, texts: list[list[int]]) -> list[list[float]]:
        import torch

        from magicdec.runner.forward_batch import ForwardBatch

        ids = torch.tensor(texts)
        rows = range(len(ids))
        self.strategy.release(range(self.runner.num_rows))
        for row in rows:
            self.runner.allocate(row)
        self.runner.truncate(rows, [0] * len(rows))
        found = []
        for first in range(0, ids.shape[1] - 1, CHUNK):
            following = ids[:, first + 1 : first + CHUNK + 1]
            part = ids[:, first : first + following.shape[1]]
            logits = self.runner.forward(ForwardBatch(part, rows, num_outputs=part.shape[1]))
            found.append(log_probs_of(logits, following))
        values: list[list[float]] = torch.cat(found, dim=1).tolist()
        return values


class MagicdecFp8(Magicdec):
    """With a KV cache in FP8, which changes the emitted tokens."""

    kv_dtype = "fp8"


class MagicdecInt8(Magicdec):
    """With a KV cache of 8 bits, which changes the emitted tokens."""

    kv_dtype = "int8"


class MagicdecInt4(Magicdec):
    """With a KV cache of 4 bits, which changes the emitted tokens."""

    kv_dtype = "int4"


class MagicdecSelfSpeculation(Magicdec):
    """Self-speculation with 3 draft tokens and a StreamingLLM budget of 257 tokens."""

    drafts: tuple[str, int | None] = ("self", 3)  # --draft, --gamma

    def __init__(self, model: str, dtype: str, threads: int, max_tokens: int, batch: int) -> None:
        from magicdec.config.sections import DecodingSection, KVSection
        from magicdec.speculation.steps.build import build_decoder

        super().__init__(model, dtype, threads, max_tokens, batch)
        decoding = DecodingSection("speculative", *self.drafts)
        self.max_gamma = decoding.max_gamma
        kv = KVSection("streaming_llm", 257)
        self.strategy = build_decoder(self.runner, decoding, kv)


class MagicdecLookup(MagicdecSelfSpeculation):
    """Prompt lookup that drafts as much as its evidence supports, as `--draft ngram` does."""

    drafts = ("ngram", None)
