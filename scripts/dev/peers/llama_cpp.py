"""llama.cpp through the low-level interface of `llama-cpp-python`: batches of token ids are passed
to `llama_decode` directly, without that package's Python code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peers.gguf_file import write_gguf
from peers.peer import CHUNK, Peer

PAD = 256  # llama.cpp rounds a row's capacity up to a multiple of this


class LlamaCppPeer(Peer):
    """Each row has its own KV cache (not `kv_unified`, with which a query scores the keys of all
    rows).

    For bfloat16 the KV cache is float16, which has the same size: with a bfloat16 cache llama.cpp's
    attention took more than twice as long. Flash attention is used only if every query head has its
    own KV head: with grouped heads, a step without it took two thirds of the time, and a
    verification less than half. In float32 it is never used, because it rounds keys and values to
    float16 and so changes the emitted tokens.
    """

    can_verify = True
    can_score = True

    def __init__(self, model: str, dtype: str, threads: int, max_tokens: int, batch: int) -> None:
        import llama_cpp

        self.lib: Any = llama_cpp
        self.lib.llama_backend_init()
        self.model = self.lib.llama_model_load_from_file(
            str(Path(model) / f"{dtype}.gguf").encode(), self.lib.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self.vocab_size = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))
        self.context = self._make_context(dtype, threads, max_tokens, batch)
        self.arrays = self._make_arrays(CHUNK * batch)
        self.emitted: list[list[int]] = []
        self.length = 0  # tokens cached in each row

    @staticmethod
    def export(model: Path, directory: Path) -> None:
        directory.mkdir()
        for dtype in ("float32", "bfloat16"):
            write_gguf(model, directory / f"{dtype}.gguf", dtype)

    def version(self) -> str:
        features = self.lib.llama_print_system_info().decode().strip(" |")
        return f"llama-cpp-python {self.lib.__version__} ({features})"

    def prefill(self, prompts: list[list[int]]) -> None:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), False)
        self.length = 0
        size = len(prompts[0])
        for start in range(0, size, CHUNK):
            ids = self._forward([p[start : start + CHUNK] for p in prompts], last_only=True)
            self.length += len(prompts[0][start : start + CHUNK])
        self.emitted = ids

    def step(self) -> None:
        ids = self._forward([[row[-1]] for row in self.emitted])
        self.length += 1
        for row, new in zip(self.emitted, ids, strict=True):
            row += new

    def tokens(self) -> list[list[int]]:
        return self.emitted

    def verify(self, drafts: list[list[int]]) -> list[list[int]]:
        rows = zip(self.emitted, drafts, strict=True)
        ids = self._forward([[row[-1], *draft] for row, draft in rows])
        memory = self.lib.llama_get_memory(self.context)
        for row in range(len(drafts)):
            self.lib.llama_memory_seq_rm(memory, row, self.length, -1)
        return ids

    def score(self, texts: list[list[int]]) -> list[list[float]]:
        import numpy as np

        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), False)
        self.length = 0
        rows: list[list[float]] = [[] for _ in texts]
        for first in range(0, len(texts[0]) - 1, CHUNK):
            following = np.array(texts)[:, first + 1 : first + CHUNK + 1]
            num_new = following.shape[1]
            places = self._decode([text[first : first + num_new] for text in texts])
            self.length += num_new
            for place, token in zip(places, following.ravel().tolist(), strict=True):
                logits = self._logits(place).astype(np.float64)
                highest = logits.max()
                total = np.log(np.exp(logits - highest).sum()) + highest
                rows[place // num_new].append(float(logits[token] - total))
        return rows

    def _make_context(self, dtype: str, threads: int, max_tokens: int, batch: int) -> Any:
        params = self.lib.llama_context_default_params()
        params.n_ctx = batch * -(-max_tokens // PAD) * PAD
        params.n_seq_max = batch
        params.n_batch = CHUNK * batch
        params.n_ubatch = CHUNK
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = self._cache_type(dtype)
        params.flash_attn_type = (
            self.lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if self._takes_flash_attention(dtype)
            else self.lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.kv_unified = False
        context = self.lib.llama_init_from_model(self.model, params)
        if not context:
            raise RuntimeError(f"llama.cpp refuses a context of {params.n_ctx} tokens in {dtype}")
        return context

    def _cache_type(self, dtype: str) -> int:
        wide = self.lib.GGML_TYPE_F32
        half = self.lib.GGML_TYPE_F16
        return int(wide if dtype == "float32" else half)

    def _takes_flash_attention(self, dtype: str) -> bool:
        num_kv_heads = self.lib.llama_model_n_head_kv(self.model)
        shares_heads = num_kv_heads < self.lib.llama_model_n_head(self.model)
        return dtype != "float32" and not shares_heads

    def _forward(self, rows: list[list[int]], last_only: bool = False) -> list[list[int]]:
        """Append `rows` [B, T] and return the greedy ids after each token, [B, T], or with
        `last_only` after the last token, [B, 1]."""
        ids = [int(self._logits(place).argmax()) for place in self._decode(rows, last_only)]
        width = len(ids) // len(rows)
        return [ids[i : i + width] for i in range(0, len(ids), width)]

    def _decode(self, rows: list[list[int]], last_only: bool = False) -> list[int]:
        """Append `rows` [B, T] and return the places in the batch, row after row, that have
        logits: all, or with `last_only` that of each row's last token."""
        import numpy as np

        num_rows = len(rows)
        num_new = len(rows[0])
        total = num_rows * num_new
        arrays = self.arrays
        asked = np.zeros((num_rows, num_new), np.int8)
        asked[:, -1 if last_only else 0 :] = 1
        arrays["token"][:total] = np.ravel(rows)
        arrays["pos"][:total] = np.tile(self.length + np.arange(num_new), num_rows)
        arrays["row"][:total] = np.repeat(np.arange(num_rows), num_new)
        arrays["logits"][:total] = asked.ravel()
        code = self.lib.llama_decode(self.context, self._batch(total))
        if code:
            raise RuntimeError(f"llama_decode ended with {code}")
        places: list[int] = np.flatnonzero(asked).tolist()
        return places

    def _logits(self, place: int) -> Any:
        """Those after the token at this place of the batch, float32 [vocabulary]."""
        import numpy as np

        logits = self.lib.llama_get_logits_ith(self.context, place)
        return np.ctypeslib.as_array(logits, (self.vocab_size,))

    @staticmethod
    def _make_arrays(size: int) -> dict[str, Any]:
        """Arrays for the fields of a `llama_batch`; numpy fills them faster than ctypes. `seq_id`
        is an array of pointers to lists of rows, here of one row per token."""
        import numpy as np

        arrays: dict[str, Any] = {
            name: np.zeros(size, np.int32) for name in ("token", "pos", "row")
        }
        arrays["n_seq_id"] = np.ones(size, np.int32)
        arrays["seq_id"] = arrays["row"].ctypes.data + 4 * np.arange(size, dtype=np.uint64)
        arrays["logits"] = np.zeros(size, np.int8)
        return arrays

    def _batch(self, num_tokens: int) -> Any:
        """A `llama_batch` of the first `num_tokens` tokens in the arrays."""
        batch = self.lib.llama_batch()
        batch.n_tokens = num_tokens
        for name, kind in batch._fields_[1:]:
            if name != "embd":
                setattr(batch, name, self.arrays[name].ctypes.data_as(kind))
        return batch


class LlamaCpp8Bit(LlamaCppPeer):
    """With a KV cache of 8 bits (q8_0), which changes the emitted tokens. Values of few bits need
    flash attention."""

    cache_type = "GGML_TYPE_Q8_0"

    def _cache_type(self, dtype: str) -> int:
        return int(getattr(self.lib, self.cache_type))

    def _takes_flash_attention(self, dtype: str) -> bool:
        return True


class LlamaCpp4Bit(LlamaCpp8Bit):
    """With a KV cache of 4.5 bits (q4_0)."""

    cache_type = "GGML_TYPE_Q4_0"
