"""Writes a copy of a GGUF file with its matrices in another type, or with fewer layers: a worse
copy is a draft model, and one in float32 is a target whose log-probabilities hardly depend on which
rows are computed together.

    python scripts/dev/peers/requantize_gguf.py model.gguf draft.gguf --type Q5_0
    python scripts/dev/peers/requantize_gguf.py model.gguf float32.gguf --type F32

Needs numpy and the `gguf` package. Must not import torch.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def kept_layers(num_layers: int, dropped: int) -> list[int]:
    """The layers left when `dropped` of the middle are taken out."""
    first = (num_layers - dropped + 1) // 2
    return [*range(first), *range(first + dropped, num_layers)]


def layer_of(name: str) -> int | None:
    return int(name.split(".")[1]) if name.startswith("blk.") else None


def write_copy(source: Path, out: Path, name_of_type: str, dropped: int) -> None:
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, architecture)
    count = f"{architecture}.block_count"
    kept = kept_layers(reader.fields[count].contents(), dropped)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = len(kept) if key == count else field.contents()
        types: list[Any] = field.types
        writer.add_key_value(key, value, types[0], types[1] if len(types) > 1 else None)
    for tensor in reader.tensors:
        name = tensor.name
        layer = layer_of(name)
        if layer is not None:
            if layer not in kept:
                continue
            name = name.replace(f"blk.{layer}.", f"blk.{kept.index(layer)}.", 1)
        data = tensor.data
        kind = tensor.tensor_type
        if len(tensor.shape) == 2:
            wide = gguf.quants.dequantize(data, kind)
            kind = gguf.GGMLQuantizationType[name_of_type]
            data = gguf.quants.quantize(wide, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", default="Q5_0", help="Q4_0, Q5_0, Q8_0, F16 or F32 [Q5_0]")
    parser.add_argument("--dropped", type=int, default=0, help="layers left out [0]")
    asked = parser.parse_args()
    write_copy(asked.source, asked.out, asked.type, asked.dropped)


if __name__ == "__main__":
    main()
