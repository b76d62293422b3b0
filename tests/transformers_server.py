"""A server on the loopback whose tokens are those of transformers' assisted generation, in vLLM's
form (`speculating_server.py`), with tiny random models. Holds no tests itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from speculating_server import VOCABULARY, Asked, Logits, SpeculatingServer, Step
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.generation.candidate_generator import (
    AssistantToTargetTranslator,
    AssistedCandidateGenerator,
    AssistedCandidateGeneratorDifferentTokenizers,
    CandidateGenerator,
    EarlyExitCandidateGenerator,
    PromptLookupCandidateGenerator,
    UniversalSpeculativeDecodingGenerator,
)

NUM_LAYERS = 3
EARLY = 2  # layers of a draft that exits early
HIDDEN = 32
WIDE_WEIGHTS = 0.3  # standard deviation, so that tokens depend on those before them
SHARPNESS = 12.0  # by which logits are multiplied, so that tokens are neither certain nor all alike
WEIGHT_NOISE = 0.02  # of the assistant's weights, beside those of the target
FLATNESS = 0.1  # of the assistant's logits, by which its samples differ from the target's
NUM_ASSISTANT_TOKENS = 4
NUM_FOREIGN = 4  # letters that the assistant's tokenizer has alone
LETTERS = [chr(0x4E00 + number) for number in range(VOCABULARY + NUM_FOREIGN)]
# How a server drafts: the class that drafts greedy tokens, and the one that drafts samples.
CLASSES: dict[str, tuple[type[CandidateGenerator], type[CandidateGenerator]]] = {
    "assistant": (AssistedCandidateGenerator, AssistedCandidateGenerator),
    "other tokenizer": (
        AssistedCandidateGeneratorDifferentTokenizers,
        UniversalSpeculativeDecodingGenerator,
    ),
    "lookup": (PromptLookupCandidateGenerator, PromptLookupCandidateGenerator),
    "early exit": (EarlyExitCandidateGenerator, EarlyExitCandidateGenerator),
}


class WatchedLlama(LlamaForCausalLM):
    """Notes what drafts of a call of `generate`, and how many tokens each draft has."""

    def _get_candidate_generator(self, **words: Any) -> CandidateGenerator:
        generator = super()._get_candidate_generator(**words)
        self.generator_class = type(generator)
        get_candidates = generator.get_candidates

        def watched(input_ids: torch.Tensor, **more: Any) -> Any:
            found = get_candidates(input_ids, **more)
            self.drafted.append(found[0].shape[1] - input_ids.shape[1])
            return found

        generator.get_candidates = watched  # type: ignore[method-assign]
        return generator


class StepStreamer:
    """The tokens of each step of `generate`, which gives it the prompt first."""

    def __init__(self) -> None:
        self.parts = list[list[int]]()

    def put(self, tokens: torch.Tensor) -> None:
        self.parts.append(tokens.flatten().tolist())

    def end(self) -> None:
        """Says nothing."""


def config_of(vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=WIDE_WEIGHTS,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )


@cache
def make_target() -> WatchedLlama:
    torch.manual_seed(0)
    target = WatchedLlama(config_of(VOCABULARY)).eval()
    with torch.no_grad():
        target.lm_head.weight.mul_(SHARPNESS / HIDDEN**0.5)
    target.generation_config.num_assistant_tokens = NUM_ASSISTANT_TOKENS  # of an early exit
    return target


def make_assistant(order: Sequence[int]) -> LlamaForCausalLM:
    """The target with noise in its weights and flatter logits. Its id of the target's token n is
    `order[n]`; more ids are tokens of its own."""
    torch.manual_seed(1)
    assistant = LlamaForCausalLM(config_of(len(order))).eval()
    theirs = make_target().state_dict()
    for name, weight in assistant.state_dict().items():
        noisy = theirs[name] + WEIGHT_NOISE * theirs[name].std() * torch.randn_like(theirs[name])
        is_by_token = name in ("model.embed_tokens.weight", "lm_head.weight")
        weight[order[:VOCABULARY] if is_by_token else slice(None)] = noisy
    assistant.lm_head.weight.data.mul_(FLATNESS)
    assistant.generation_config.num_assistant_tokens = NUM_ASSISTANT_TOKENS
    return assistant


def make_tokenizer(ids: dict[str, int]) -> PreTrainedTokenizerFast:
    """A tokenizer of one letter a token; what is no letter of its is the first one."""
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=LETTERS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def words_of(drafts: str) -> dict[str, Any]:
    """What `generate` is given so that it drafts in this way."""
    if drafts == "lookup":
        return {"prompt_lookup_num_tokens": NUM_ASSISTANT_TOKENS}
    if drafts == "early exit":
        return {"assistant_early_exit": EARLY}
    if drafts == "assistant":
        return {"assistant_model": make_assistant(range(VOCABULARY))}
    order = np.random.default_rng(0).permutation(len(LETTERS)).tolist()
    return {
        "assistant_model": make_assistant(order),
        "tokenizer": make_tokenizer({letter: n for n, letter in enumerate(LETTERS[:VOCABULARY])}),
        "assistant_tokenizer": make_tokenizer(dict(zip(LETTERS, order, strict=True))),
    }


def raw_candidates(
    self: AssistedCandidateGenerator, generation_args: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A fault to plant as `_generate_candidates`: the logits that it returns are those before
    temperature and top-k, of which the drafts were not drawn (as in transformers' issue 47932)."""
    self.generation_config.output_logits = True
    output = self.assistant_model.generate(**generation_args, **self.assistant_kwargs)
    self.assistant_kwargs["past_key_values"] = output.past_key_values
    return output.sequences, torch.stack(output.logits, dim=1)


def shifted_candidates(
    self: AssistedCandidateGenerator, generation_args: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Another one: the logits are those of other tokens."""
    sequences, logits = raw_candidates(self, generation_args)
    return sequences, logits.roll(1, dims=-1)


def target_logits_in_order(
    self: AssistantToTargetTranslator, assistant_logits: torch.Tensor
) -> torch.Tensor:
    """A repair of `get_target_logits`, in the order of the pruned head's tokens."""
    shape = (*assistant_logits.shape[:-1], self.target_vocab_size)
    logits = torch.full(shape, self.FILTER_VALUE)
    ids = self._assistant_to_target_input_ids[self.assistant_overlap_token_ids]
    logits[..., ids] = assistant_logits
    return logits


@dataclass
class AssistedServer(SpeculatingServer):
    """Serves the target with drafts of one of `CLASSES`, one request after the other."""

    drafts: str = "assistant"
    classes: set[type[CandidateGenerator]] = field(default_factory=set)  # that have drafted
    turn: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.target = make_target()
        # Two of all: sampling with another tokenizer changes the assistant for good, so that greedy
        # drafts of it are wrong afterwards, or end with an error.
        self.words = {is_sampled: words_of(self.drafts) for is_sampled in (False, True)}

    def logits(self, cache: Sequence[int], position: int) -> Logits:
        key = tuple(cache)
        if key not in self.tables:
            with self.turn, torch.no_grad():
                found = self.target(torch.tensor([key])).logits[0, -1]
            self.tables[key] = found.double().numpy()
        return self.tables[key]

    def decode(self, asked: Asked) -> Iterator[Step]:
        steps = StepStreamer()
        is_sampled = asked.temperature > 0
        sampling = {"temperature": asked.temperature, "top_k": asked.top_k} if is_sampled else {}
        config = GenerationConfig(
            max_new_tokens=asked.max_tokens, do_sample=is_sampled, pad_token_id=0, **sampling
        )
        ids = torch.tensor([asked.prompt])
        with self.turn:
            torch.manual_seed(asked.seed)
            self.target.drafted = []
            self.target.generate(
                ids,
                attention_mask=torch.ones_like(ids),  # no token of a prompt is padding
                generation_config=config,
                streamer=steps,
                **self.words[is_sampled],
            )
            drafted = self.target.drafted
            self.classes.add(self.target.generator_class)
        for tokens, count in zip(steps.parts[1:], drafted, strict=True):
            yield Step(tokens, count, len(tokens) - 1)
