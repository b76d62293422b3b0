"""The settings of `magicdec pipeline` from which a soak draws its cases."""

from __future__ import annotations

import random
from typing import Any

SPLITS = {
    2: ["0.5,0.5/head", "0,1.0/head", "1.0/1.0"],
    3: ["0.3,0.3,0.4/head", "0.5,0.5/1.0", "0,0.5,0.5/head"],
    4: ["0.25,0.25,0.25,0.25/head", "0.3,0.3,0.4/1.0", "0,0.5,0.5/1.0"],
}
MODES = ("iterative", "sync", "async")
CHOICES: dict[str, list[Any]] = {  # of a flag; None: leave it out, True: it has no value
    "--temperature": [None, None, 0.8],
    "--draft": ["model:demo-draft", "model:demo-draft", "self", "ngram"],
    "--budget": [None, 40],
    "--gamma": [1, 2, 4, 8],
    "--pa": [0.0, 0.3, 0.6],
    "--pr": [0.0, 0.1],
    "--pd": [0.0, 0.05],
    "--max_in_flight": [None, None, None, 1, 2, 5],
    "--lanes": [1, 1, 2, 3],
    "--collectives": ["shared_memory", "shared_memory", "gloo"],
    "--native_steps": ["auto", "off"],
    "--attention": ["auto", "auto", "sdpa", "grouped"],
    "--emulate_link_ms": [None, None, None, 0.5],
    "--ignore_eos": [None, True],
    "--prefill_chunk": [32, 128],
}
FIXED = ("--dtype", "float32", "--threads", 1)


def draw(chooser: random.Random, is_repeated: bool) -> tuple[int, list[str]]:
    """The number of ranks and the flags of a case. One that is repeated has short requests, always
    the same number of them, and one mode; the others have all modes."""
    num_ranks = chooser.choice([2, 3, 4])
    values = {flag: chooser.choice(choices) for flag, choices in CHOICES.items()}
    modes = [chooser.choice(["async", "async", *MODES])] if is_repeated else MODES
    if modes == ["iterative"]:
        drafting = ("--gamma", "--pa", "--pr", "--pd", "--max_in_flight")
        values |= dict.fromkeys(("--draft", *drafting))
    if values["--draft"] in (None, "ngram"):
        values["--budget"] = None  # no draft has a KV cache
    values["--layer_split"] = chooser.choice(SPLITS[num_ranks])
    longest = chooser.choice([40, 300])
    values["--prefix_len"] = f"uniform:4:{60 if is_repeated else longest}"
    values["--gen_len"] = 12 if is_repeated else f"uniform:1:{chooser.choice([12, 60])}"
    values["--num_requests"] = 4 if is_repeated else chooser.randint(1, 4)
    values["--seed"] = chooser.randrange(1000)
    words: list[Any] = []
    for flag, value in values.items():
        if value is not None:
            words += [flag] if value is True else [flag, value]
    return num_ranks, [*map(str, (*FIXED, *words)), "--modes", "sequential", *modes]
