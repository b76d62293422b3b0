"""WorkloadRecord: the prompts of a run and the models that decoded them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from magicdec.config.sections import CHAT, PLAIN
from magicdec.records.fields import RecordPart, recorded

GENERATED = "if prompts are generated (`ruler:`)"
# Why items of a prompt set are left out, in words.
REASONS = {
    "longer": "longer than --prefix_len",
    "shorter": "shorter than --prefix_len",
    "refused": "refused by the chat template",
}
NO_SET = "except of prompt sets; in records of earlier versions"


def prompt_format(config: Mapping[str, Any]) -> str:
    """How the prompts of a record were given to the model, from its config. That of an older one
    does not say it."""
    return str(config["workload"].get("prompt_format", PLAIN))


def format_mark(config: Mapping[str, Any]) -> str:
    """What follows the name of a dataset whose texts have a chat template around them."""
    return f" ({CHAT})" if prompt_format(config) == CHAT else ""


@dataclass(frozen=True, kw_only=True)
class ModelRecord(RecordPart):
    """A model and the fingerprint of its weights."""

    model: str = recorded("name of the model that was loaded, without its folder")
    random_weights: bool = recorded(
        "whether the weights are random; if those of the target or of the draft are, times are "
        "meaningful but acceptance is not"
    )
    model_sha256: str = recorded(
        "fingerprint of the weights: a hash over the names and shapes of all tensors and the "
        "values of the small ones (norms, biases)"
    )


@dataclass(frozen=True, kw_only=True)
class WorkloadRecord(ModelRecord):
    """The prompts, and the models that decoded them."""

    draft: ModelRecord | None = recorded(
        "the standalone draft model", null="without a standalone draft"
    )
    tokenizer: str = recorded("the model whose tokenizer made the prompts")
    dataset: str = recorded(
        "name of the dataset, without its folder; several are joined by commas, and one that ends "
        "in a slash is a folder of texts; it begins with `recall:` if a cue was added to its "
        "prefixes"
    )
    num_prompts: int = recorded("number of decoded prompts, over all batches")
    prefix_len: int = recorded("length of a prompt, or of the longest", "tokens")
    num_available: int | None = recorded(
        "number of prefixes that the prompts were drawn from", null=GENERATED
    )
    skip_tokens: int | None = recorded(
        "tokens skipped at the start of each book (`--skip_tokens`)", "tokens", null=GENERATED
    )
    seed: int = recorded("as in `config.workload`")
    sources: list[list[int]] | None = recorded(
        "index of the book or item, and of the chunk in it, of each prompt in order", null=GENERATED
    )
    categories: list[str | None] | None = recorded(
        "the category of each prompt in order, null for one without; of several prompt sets it "
        "begins with the name of its set",
        null=NO_SET,
    )
    num_later_turns: int | None = recorded(
        "questions that follow the first ones of the prompts' items, and are not asked",
        "questions",
        null=NO_SET,
    )
    left_out: dict[str, int] | None = recorded(
        "number of the items that were drawn and left out, by reason: `longer` or `shorter` than "
        "`--prefix_len`, or `refused` by the chat template",
        null=NO_SET,
    )
    sha256: str = recorded(
        "hash over all prompts' token ids and boundaries; runs with equal hashes had the same "
        "prompts"
    )

    @property
    def text(self) -> str:
        if not self.skip_tokens:
            return self.dataset
        return f"{self.dataset} without the first {self.skip_tokens} tokens of each book"

    @property
    def left_out_lines(self) -> list[str]:
        """A line about the items of a prompt set that were left out, if any."""
        if not self.left_out:
            return []
        counts = [f"{count} {REASONS[why]}" for why, count in sorted(self.left_out.items())]
        total = sum(self.left_out.values())
        return [f"{total} more items were drawn and left out: {', '.join(counts)}"]

    @property
    def is_random(self) -> bool:
        """Whether target or draft has random weights."""
        return self.random_weights or (self.draft is not None and self.draft.random_weights)
