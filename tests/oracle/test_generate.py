"""The baseline and self-speculation against `transformers`' own greedy `generate`, and attention to
long prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import TINY, decode_both, make_requests, make_runner, random_prompts, tiny_transformer

from magicdec.config.sections import KVSection
from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint.source import find_model, load_transformer


@pytest.mark.parametrize("kv_heads", [6, 2])
def test_tokens_equal_transformers_greedy_generate(kv_heads: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=kv_heads, max_position_embeddings=512,
        initializer_range=0.4, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    source = find_model("--model", str(tmp_path))
    model = load_transformer(
        source.config, source.weights, Shard(), None, torch.float32, torch.device("cpu")
    )
    prompts = random_prompts([40, 7, 90], 97)
    runner = make_runner(model, 3, 90 + 50 + 4)
    requests = make_requests(prompts, 50, eos=source.config.eos_token_ids)
    baseline, ours, _ = decode_both(runner, requests, KVSection("streaming_llm", 24, 4), 4)
    for prompt, tokens, speculated in zip(prompts, baseline, ours, strict=True):
        out = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=50, do_sample=False, use_cache=True
        )
        assert tokens == speculated == out[0, len(prompt) :].tolist()


@torch.inference_mode()
def test_chunks_and_one_forward_give_the_same_logits() -> None:
    prompt = torch.tensor(random_prompts([130], TINY.vocab_size))
    logits = []
    for chunk in (130, 48, 1):
        runner = make_runner(tiny_transformer(), 1, 130)
        runner.cache.allocate(0, 130)
        logits.append(torch.cat([runner.forward(part, [0]) for part in prompt.split(chunk, 1)], 1))
    assert (logits[0] - logits[1]).abs().max() < 1e-4
    assert (logits[0] - logits[2]).abs().max() < 1e-4
