"""SmolLM2-135M-Instruct from its GGUF file, a trained model that is not ours, where
`scripts/fetch_smollm2.py` has fetched it: transformers' logits on the weights that the `gguf`
package dequantises, and speculation's tokens under each arithmetic."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from conftest import make_runner
from gguf.quants import dequantize
from torch import Tensor

from magicdec import LLM
from magicdec.config.sections import KVSection
from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint.gguf_tensors import hf_name
from magicdec.model.checkpoint.source import find_model
from magicdec.model.tokenizer import load_tokenizer
from magicdec.names import STORED
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.setup.loading import load_kind
from magicdec.setup.model_plan import Kinds
from magicdec.workload.books import read_books

FILE = Path(__file__).parents[2] / "checkpoints" / "smollm2" / "model.gguf"
pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(not FILE.is_file(), reason="run scripts/fetch_smollm2.py"),
    pytest.mark.two_threads,
]
LENGTH = 2000
TEXTS = 16
HEADS = {"q_proj": 9, "k_proj": 3}


def reference() -> Any:
    """Transformers' Llama with the weights of the file, put into its order here."""
    reader = gguf.GGUFReader(FILE)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    weights: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        name = hf_name(tensor.name)
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        for part, heads in HEADS.items():
            if f".{part}." in name:  # adjacent rows are rotated together there
                values = values.view(heads, 32, 2, 576).transpose(1, 2).reshape(-1, 576)
        weights[name] = values
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model


def texts() -> Tensor:
    """[TEXTS, LENGTH] tokens of the packaged text."""
    tokenizer = load_tokenizer(FILE)
    ids: list[int] = []
    for book in read_books("demo", 100):
        ids += tokenizer.encode(book[: 6 * TEXTS * LENGTH])
    assert len(ids) >= TEXTS * LENGTH
    return torch.tensor(ids[: TEXTS * LENGTH]).view(TEXTS, LENGTH)


@pytest.mark.parametrize("linear", ["torch", "packed"])
def test_the_next_token_of_every_position_is_transformers(linear: str) -> None:
    """In float32 after every token of 16 texts; by torch's layers, which are slow, of one."""
    source = find_model("--model", str(FILE))
    model = load_kind(source, Shard(), Kinds("float32", STORED, linear), torch.device("cpu"))
    runner = make_runner(model, 1, LENGTH)
    runner.allocate(0)
    theirs = reference()
    for text in texts()[: 1 if linear == "torch" else TEXTS]:
        runner.truncate([0], [0])
        with torch.inference_mode():
            expected = theirs(text[None]).logits[0]
            parts = [
                runner.forward(ForwardBatch(part[None], [0], num_outputs=len(part)))[0]
                for part in text.split([700, 700, 599, 1])
            ]
        found = torch.cat(parts)
        assert (found - expected).abs().max() <= 2e-4 * expected.abs().max()
        assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_speculation_emits_the_tokens_of_decoding_without_it(dtype: str) -> None:
    """Requests in flight, with the arithmetic that `auto` takes. Both in bfloat16 too, since native
    kernels compute a row's bits whatever else they compute."""
    tokenizer = load_tokenizer(FILE)
    (book,) = list(read_books("demo", 1))
    prompts = [tuple(tokenizer.encode(book[at : at + 3000])) for at in (0, 5000, 9000)]
    outputs = []
    for draft in ("none", "self", "ngram"):
        kv = KVSection("streaming_llm", 129)
        options: dict[str, Any] = {} if draft == "none" else {"draft": draft}
        if draft == "self":
            options["kv"] = kv
        llm = LLM(str(FILE), dtype=dtype, max_tokens=1200, max_concurrency=2, **options)
        streams = [llm.submit(prompt, 40, ignore_eos=True) for prompt in prompts]
        outputs.append([list(stream) for stream in streams])
    assert outputs[0] == outputs[1] == outputs[2]
    assert len({token for output in outputs[0] for token in output}) > 20
