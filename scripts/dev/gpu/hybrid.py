"""Stage `hybrid`: whole forwards of a model with linear attention, whose weights are random, as in
stage `llama31`: decode, verification, and drafts of a small budget. States are read and written
once a forward, by one launch a layer; their bytes are in those of the rows."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from train.hybrid_init import randomise
from train_hybrid import CONFIG, export

from gpu.latency import measure
from gpu.scale import Suite
from magicdec.model.families.hf_config import parse_hf_config
from magicdec.model.transformer import Transformer


def run(suite: Suite) -> None:
    scale = suite.scale
    with TemporaryDirectory() as folder:
        name = scale.hybrid_model or small_hybrid(Path(folder))
        for B in scale.hybrid_batch_sizes:
            contexts = list(scale.hybrid_contexts)
            cell = f"B{B}/S{'+'.join(map(str, contexts))}"
            suite.results.cell(cell, partial(measure, suite, name, B, contexts))


def small_hybrid(folder: Path) -> str:
    """A model of the demo's sizes with random weights, for rehearsals."""
    torch.manual_seed(0)
    config = parse_hf_config(CONFIG, name="demo-hybrid", generation={})
    export(randomise(Transformer(config)), folder)
    return str(folder)
