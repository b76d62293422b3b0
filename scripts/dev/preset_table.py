"""The table of presets in docs/models.md, made from the presets themselves.

    python scripts/dev/preset_table.py          # prints it
    python scripts/dev/preset_table.py --write  # puts it into docs/models.md, between its marks

A test compares the two. Run it with `--write` after a preset was added or changed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from magicdec.model.config import ModelConfig
from magicdec.model.presets.presets import PRESETS, Preset

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN = "<!-- presets: scripts/dev/preset_table.py --write -->"
END = "<!-- end of presets -->"
LABELS = (
    "preset",
    "layers",
    "width",
    "heads: KV x size",
    "FFN",
    "vocabulary",
    "context",
    "positions",
    "parameters",
    "source",
    "checked",
    "runs",
)


def table() -> str:
    """The whole table in Markdown, one row for each preset."""
    rows = [LABELS, ("---",) * len(LABELS)] + [cells(n, p) for n, p in PRESETS.items()]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def cells(name: str, preset: Preset) -> tuple[str, ...]:
    c = preset.config
    return (
        f"`{name}`",
        str(c.num_layers),
        str(c.hidden_size),
        heads(c),
        mlp(c),
        f"{c.vocab_size}{', tied' if c.tie_word_embeddings else ''}",
        f"{c.max_length}{f', window {c.narrowest_window}' if c.narrowest_window else ''}",
        positions(c),
        f"{preset.num_parameters:,}",
        f"[{preset.repo_id}](https://huggingface.co/{preset.repo_id})",
        "yes" if preset.checked else "no",
        "`plan` alone" if c.planned_only else "yes",
    )


def heads(c: ModelConfig) -> str:
    """Query heads, KV heads and their size, of each kind of layer in which they differ."""
    plain = f"{c.num_heads}: {c.num_kv_heads} x {c.head_dim}"
    found = [plain if kind.mixer is None else kind.mixer.describe() for kind in c.kinds]
    return "; ".join(dict.fromkeys(found))


def mlp(c: ModelConfig) -> str:
    e = c.experts
    if e is None:
        return str(c.intermediate_size)
    shared = f" + {e.shared_width}" if e.shared_width else ""
    return f"{e.num_used} of {e.num_experts} x {e.width}{shared}"


def positions(c: ModelConfig) -> str:
    """How the model encodes positions: by a rotary base and its scaling, or another way."""
    if c.positions != "rope":
        return {"alibi": "ALiBi"}.get(c.positions, c.positions)
    part = f" on {c.rope.rotary_dim} of a head" if c.rope.rotary_dim else ""
    scaled = "" if c.rope.rope_type == "default" else f", {c.rope.rope_type} {c.rope.factor:g}"
    return f"rotary {c.rope.theta:.0f}{scaled}{part}"


def written(text: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(written(PAGE.read_text()))
    else:
        print(table())
