"""`--ini FILE`: the configuration file of Flover as flags of `magicdec inflight`.

Owns the syntax, whose entries know their line, and the meaning of the keys. A key that Flover reads
but does not use means here what its documentation says; a key whose meaning does not exist here is
refused unless it has its neutral value. Must not know what a flag does. Imports no torch.

Source: Flover (Yao et al. 2023, arXiv 2305.13484), its README and configuration files.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from magicdec.model.config import ModelConfig

COMMENTS = ";#"


@dataclass(frozen=True)
class Entry:
    """One key with its value. `place` names the file, the line and the key."""

    key: str
    text: str
    place: str

    def refuse(self, why: str) -> ValueError:
        return ValueError(f"{self.place} = {self.text}: {why}")

    def integer(self, least: int = 0) -> int:
        """Raises ValueError if it is no whole number of at least `least`."""
        try:
            value = int(self.text)
        except ValueError:
            value = least - 1
        if value < least:
            raise self.refuse(f"it must be a whole number of at least {least}")
        return value

    def number(self, least: float = 0.0, most: float = math.inf) -> float:
        """Raises ValueError if it is no finite number from `least` to `most`."""
        try:
            value = float(self.text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or value == math.inf:
            end = "" if most == math.inf else f" and at most {most:g}"
            raise self.refuse(f"it must be a number of at least {least:g}{end}")
        return value


class IniFile:
    """The sections of a file. Raises ValueError, naming `flag`, the file and the line, if it cannot
    be read or a line is malformed."""

    def __init__(self, flag: str, path: Path) -> None:
        self.name = f"{flag} {path}"
        self.sections: dict[str, dict[str, Entry]] = {}
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ValueError(f"{self.name}: {why}") from None
        section: dict[str, Entry] | None = None
        for number, line in enumerate(lines, 1):
            text = without_comment(line)
            place = f"{self.name}, line {number}"
            if text.startswith("[") and text.endswith("]"):
                section = self.sections.setdefault(text[1:-1].strip().lower(), {})
            elif text:
                self._add(section, text, place)

    def _add(self, section: dict[str, Entry] | None, text: str, place: str) -> None:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not key:
            raise ValueError(f"{place}: {text!r} is neither [section] nor key = value")
        if section is None:
            raise ValueError(f"{place}: {key} comes before the first [section]")
        if key.lower() in section:
            raise ValueError(f"{place}: {key} is in this section twice")
        section[key.lower()] = Entry(key.lower(), value, f"{place}: {key}")


def without_comment(line: str) -> str:
    """The line up to its comment. A `;` or `#` inside a word begins none."""
    for at, letter in enumerate(line):
        if letter in COMMENTS and (at == 0 or line[at - 1].isspace()):
            return line[:at].strip()
    return line.strip()


MODEL, RUNTIME, REQUEST = "model_specification", "runtime_hyperparameter", "request"
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
LEAST_RANDOM_LENGTH = 128  # of a request with its prompt, where `use_mem_shuffle` draws lengths
NEEDED = ("model_type", "max_concurrency", "max_seq_len", "fixed_input_len")
BEAMS, NO_LIMIT = "there is no beam search", "a request ends only at its output length"
# Keys that have one value here, and why.
NEUTRAL = {
    MODEL: {
        "per_batch_size": (1, "a request is one sequence; raise max_concurrency instead"),
        "fixed_prompt_len": (0, "there are no soft prompts"),
        "beam_width": (1, BEAMS),
        "pipeline_para_size": (1, "ranks share layers by tensor parallelism only"),
    },
    RUNTIME: {
        "len_penalty": (0, BEAMS),
        "beam_search_diversity_rate": (0, BEAMS),
        "min_length": (0, NO_LIMIT),
        "enable_custom_all_reduce": (0, "choose --collectives instead"),
    },
    REQUEST: {"memory_len": (0, "attention reads the whole context")},
}
USED = {
    MODEL: (
        *("model_type", "data_type", "max_concurrency", "max_seq_len", "fixed_input_len"),
        *("tensor_para_size", "model_dir"),
    ),
    RUNTIME: (
        *("top_k", "top_p", "temperature", "repetition_penalty", "presence_penalty", "data_type"),
        *("interval", "use_mem_shuffle", "seed"),
    ),
    REQUEST: ("request_output_len",),
}
# Numbers with their smallest and largest value.
SAMPLING = {
    "top_p": (0.0, 1.0),
    "temperature": (0.0,),
    "repetition_penalty": (0.01,),
    "presence_penalty": (-2.0, 2.0),
}
# The shape of a model, which must be that of the model that is served.
SHAPE = {
    "head_num": "num_heads",
    "size_per_head": "head_dim",
    "inter_size": "intermediate_size",
    "decoder_layers": "num_layers",
    "vocab_size": "vocab_size",
}
PROMPT_LEARNING = "there is no prompt learning"
ARCHITECTURE = {
    "num_tasks": (0, PROMPT_LEARNING),
    "prompt_learning_type": (0, PROMPT_LEARNING),
}
# What the files of a model say themselves.
SAID_BY_MODEL = (
    *("rotary_embedding", "start_id", "end_id", "layernorm_eps", "weight_data_type"),
    *("shared_contexts_ratio", "prompt_learning_start_id"),
)


@dataclass(frozen=True)
class FloverIni:
    """`values` has the values of the file by the names of flags. `shape` are the entries of `SHAPE`
    that the model must agree with."""

    values: dict[str, Any] = field(default_factory=dict)
    shape: tuple[Entry, ...] = ()

    def check_model(self, model: ModelConfig) -> None:
        """Raises ValueError, naming file, line and key, if the model has another shape."""
        for entry in self.shape:
            size = getattr(model, SHAPE[entry.key])
            if entry.integer(1) != size:
                raise entry.refuse(f"{model.name} has {size}")


def read_flover_ini(path: Path, typed: Collection[str]) -> FloverIni:
    """`typed` are the flags on the command line, which win. Raises ValueError, naming file, line
    and key."""
    file = IniFile("--ini", path)
    for name in (MODEL, RUNTIME, REQUEST):
        section = file.sections.setdefault(name, {})
        check_keys(section, [*USED[name], *NEUTRAL[name]], NEUTRAL[name])
    for key in NEEDED:
        if key not in file.sections[MODEL]:
            raise ValueError(f"{file.name}: [{MODEL}] has no {key}")
    own = architecture_of(file)
    values = {
        **model_values(file, own, typed),
        **length_values(file),
        **arrival_values(file.sections[RUNTIME]),
        **sampling_values(file.sections[RUNTIME]),
    }
    shape = () if "--model" in typed else tuple(own[key] for key in SHAPE if key in own)
    return FloverIni(values, shape)


def check_keys(
    section: dict[str, Entry], known: Sequence[str], neutral: dict[str, tuple[int, str]]
) -> None:
    """Raises ValueError for a key that is not known, or is not neutral where it must be."""
    for key, entry in section.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(known)}"
            raise ValueError(f"{entry.place} is not known; {hint}")
        if key in neutral and entry.number() != neutral[key][0]:
            raise entry.refuse(f"it must be {neutral[key][0]}: {neutral[key][1]}")


def architecture_of(file: IniFile) -> dict[str, Entry]:
    """The section that `model_type` names, empty if there is none. Those of other models are only
    checked for their keys."""
    known = [*SHAPE, *ARCHITECTURE, *SAID_BY_MODEL, "model_dir"]
    others = file.sections.keys() - {MODEL, RUNTIME, REQUEST}
    for name in sorted(others):
        check_keys(file.sections[name], known, {})
    own = file.sections.get(file.sections[MODEL]["model_type"].text.lower(), {})
    check_keys(own, known, ARCHITECTURE)
    return own


def model_values(file: IniFile, own: dict[str, Entry], typed: Collection[str]) -> dict[str, Any]:
    section, runtime = file.sections[MODEL], file.sections[RUNTIME]
    model = own.get("model_dir") or section.get("model_dir") or section["model_type"]
    rows = section["max_concurrency"].integer(1)
    values: dict[str, Any] = {"model": model.text, "B": rows, "num_requests": rows}
    if "tensor_para_size" in section:
        values["nproc"] = section["tensor_para_size"].integer(1)
    dtypes = [of["data_type"] for of in (section, runtime) if "data_type" in of]
    for dtype in dtypes if "--dtype" not in typed else ():
        if dtype.text not in DTYPES:
            raise dtype.refuse(f"choose from {', '.join(DTYPES)}, or give --dtype")
        if dtype.text != dtypes[0].text:
            raise dtype.refuse(f"[{MODEL}] has {dtypes[0].text}")
        values["dtype"] = DTYPES[dtype.text]
    return values


def length_values(file: IniFile) -> dict[str, Any]:
    """With `use_mem_shuffle` 1, total lengths are uniform from `LEAST_RANDOM_LENGTH` on, and rows
    are moved into a window. Otherwise every request has the largest output length."""
    section, request = file.sections[MODEL], file.sections[REQUEST]
    prompt, total = section["fixed_input_len"].integer(1), section["max_seq_len"]
    most = total.integer(1) - prompt
    if most < 1:
        raise total.refuse(f"fixed_input_len {prompt} leaves no room for output")
    if "request_output_len" in request:
        entry = request["request_output_len"]
        if entry.integer(1) > most:
            raise entry.refuse(f"max_seq_len {total.text} has room for {most} after the prompt")
        most = entry.integer(1)
    shuffles = file.sections[RUNTIME].get("use_mem_shuffle")
    if shuffles is None:
        return {"prefix_len": prompt, "gen_len": most}
    length, compaction = str(most), "none"
    if is_on(shuffles):
        least = max(1, LEAST_RANDOM_LENGTH - prompt)
        if least > most:
            raise shuffles.refuse(
                f"it draws lengths from {LEAST_RANDOM_LENGTH} tokens on, and the longest request "
                f"has {prompt + most}"
            )
        length, compaction = f"uniform:{least}:{most}", "window"
    return {"prefix_len": prompt, "gen_len": length, "compaction": compaction}


def arrival_values(section: dict[str, Entry]) -> dict[str, Any]:
    """`interval` ms between two requests; 0 is a burst."""
    if "interval" not in section:
        return {}
    interval = section["interval"].number()
    return {"arrival": f"constant:{interval:g}" if interval else "burst"}


def sampling_values(section: dict[str, Entry]) -> dict[str, Any]:
    """`top_k` 1, and no filter at all, are greedy, as in Flover."""
    numbers = {key: section[key].number(*ends) for key, ends in SAMPLING.items() if key in section}
    top_k = section["top_k"].integer() if "top_k" in section else 1
    top_p, temperature = numbers.get("top_p", 0.0), numbers.get("temperature", 1.0)
    seed = {"seed": section["seed"].integer()} if "seed" in section else {}
    values: dict[str, Any] = dict(seed)
    if temperature and top_k != 1 and (top_k or top_p):
        values["temperature"] = temperature
        values |= {"top_k": top_k} if top_k else {}
        values |= {"top_p": top_p} if top_p else {}
        values |= {"sampling_seed": seed["seed"]} if seed else {}
    penalties = ("repetition_penalty", "presence_penalty")
    return values | {key: numbers[key] for key in penalties if key in numbers}


def is_on(entry: Entry) -> bool:
    if entry.text not in ("0", "1"):
        raise entry.refuse("it must be 0 or 1")
    return entry.text == "1"
