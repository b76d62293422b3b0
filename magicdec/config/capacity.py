"""Capacity: the requests that a model holds at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from magicdec.config.sections import WorkloadSection


@dataclass(frozen=True)
class Capacity:
    """The requests that a model holds at once, by which its cache and its buffers are sized: of a
    run a batch, of other systems the most requests that they serve together. The longest prompt and
    the longest output may be those of different requests."""

    rows: int  # requests
    prompt_len: int  # tokens of the longest prompt
    max_len: int  # tokens of the longest request, prompt and output
    new_tokens: int  # tokens of the longest output
    turns: int = 1  # of a conversation that are asked at most

    @classmethod
    def for_batch(cls, workload: WorkloadSection) -> Capacity:
        """The capacity for a batch of a run, whose prompts are as long as each other."""
        new_tokens = workload.num_new_tokens
        max_len = workload.prefix_len + new_tokens
        return cls(workload.batch_size, workload.prefix_len, max_len, new_tokens)

    @property
    def after_longest_prompt(self) -> int:
        """The tokens of the longest request behind the longest prompt."""
        return self.max_len - self.prompt_len

    @property
    def described(self) -> str:
        """The lengths in the words of messages, with the flag that they come from."""
        following = self.after_longest_prompt
        return f"--prefix_len {self.prompt_len} + {following} generated tokens = {self.max_len}"

    def without_outputs(self) -> Capacity:
        """The capacity of a draft whose own tokens stand in place of outputs."""
        new_tokens = self.new_tokens - self.after_longest_prompt
        return replace(self, max_len=self.prompt_len, new_tokens=new_tokens)

    def resized(self, rows: int, prompt_len: int) -> Capacity:
        """The capacity for other prompts, with as many tokens behind them."""
        max_len = prompt_len + self.after_longest_prompt
        return replace(self, rows=rows, prompt_len=prompt_len, max_len=max_len)
