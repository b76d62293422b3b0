"""ShapedOptions: what follows from the shapes of all requests that a command serves.

Must not know how the requests are served.
"""

from __future__ import annotations

from dataclasses import replace

from magicdec.config.sections import WorkloadSection
from magicdec.workload.trace import RequestShape


class ShapedOptions:
    """A base of the options of commands that serve requests of several shapes."""

    shapes: tuple[RequestShape, ...]

    @property
    def longest_prompt(self) -> int:
        return max(shape.prompt_len for shape in self.shapes)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, output included."""
        return max(shape.prompt_len + shape.output_len for shape in self.shapes)

    @property
    def mean_context(self) -> int:
        """Cached tokens of a request, halfway through its output, in the mean over requests."""
        total = sum(shape.prompt_len + shape.output_len // 2 for shape in self.shapes)
        return total // len(self.shapes)

    def batch_of(self, asked: WorkloadSection, rows: int, spare: int = 0) -> WorkloadSection:
        """`asked` with one batch of so many rows. A row has room for the longest request, which
        need not have the longest prompt, and for `spare` tokens. The longest output may be that of
        another request."""
        prompt = self.longest_prompt
        new = self.longest - prompt
        extra = max(shape.output_len for shape in self.shapes) - new
        return replace(
            asked, batch_size=rows, prefix_len=prompt, gen_len=new + spare, num_batches=1,
            extra_new_tokens=extra,
        )  # fmt: skip
