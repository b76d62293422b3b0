"""The drivers: the commands that decode, by name, each as the config that its flags start from.
Imports no torch.

A new way to run is a line here; the commands and `magicdec sweep` take their names from it.
"""

from __future__ import annotations

from magicdec.config.run_config import RunConfig
from magicdec.config.sections import DecodingSection, DraftSection, TargetSection
from magicdec.names import BASELINE

DRIVERS = {
    "baseline": RunConfig(decoding=DecodingSection(strategy=BASELINE)),
    "selfspec": RunConfig(decoding=DecodingSection(strategy="speculative", drafter="self")),
    "longspec": RunConfig(
        model=TargetSection(),
        draft=DraftSection(),
        decoding=DecodingSection(strategy="speculative", drafter="model"),
    ),
}
