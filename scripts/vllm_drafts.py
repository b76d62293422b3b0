"""Drafts of EAGLE-3 heads, ours and vLLM's, compared step by step.

    python scripts/vllm_drafts.py --vllm PYTHON [--cases NAME ...] [--gamma 3] [--gen_len 96] \
        [--threads 1]

`--vllm` names a Python that has vLLM for CPUs. A case is a target and a head in a published format:
the demo model with its trained heads, or random weights with one of the options that heads have.
`magicdec run` decodes three prompts of the demo's text greedily, in float32, and then vLLM decodes
the same token ids. Drafts of a request after the same text must be the same. In the last case ours
takes its states one layer later than vLLM does, which the comparison must see. The exit status is 1
if anything is not as it must be.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "magicdec" / "demo"
ROWS = 3
CHUNK = 16384  # tokens of a forward of vLLM, so that no prompt is cut (see docs/log/drafting.md)
SPARE = 64  # tokens of room, without which vLLM drafts for no request while one is near its end
POSITIONS = 2048  # of random models
ALONE = 3  # factor of what a random layer adds, without which drafts repeat each other

Drafts = dict[tuple[int, int], list[int]]
"""Drafts by request and tokens of its text before them."""


@dataclass(frozen=True)
class Case:
    """`head` is a folder of the demo's, or the options of a random head (`HeadForm` in
    tests/eagle_heads.py); `target` are changes of a random target's config. `layers`: those that
    ours takes states of, which are not the head's in the control."""

    head: str | dict[str, Any]
    target: dict[str, Any] = field(default_factory=dict)
    prefix_len: int = 150
    layers: tuple[int, ...] = ()


CASES = {
    "demo-eagle": Case("eagle"),
    "demo-eagle, 1500 tokens": Case("eagle", prefix_len=1500),
    "demo-eagle-8k, 3000 tokens": Case("eagle-8k", prefix_len=3000),
    "random": Case({}),
    "embedding and last layer": Case({"capture": (0, 4, 8)}),
    "norm_before_fc": Case({"norm_before_fc": True}),
    "fc_norm": Case({"fc_norm": True}),
    "fc_norm, norm_output": Case({"fc_norm": True, "norm_output": True}),
    "norm_before_residual": Case({"norm_before_residual": True}),
    "two layers": Case({"num_layers": 2}),
    "qk_norm": Case({"qk_norm": True}),
    "the whole vocabulary": Case({"draft_vocab": None}),
    "an embedding of its own": Case({"has_embedding": True}),
    "SpecForge's names": Case({"program": "specforge"}),
    "another rope base": Case({"changes": {"rope_theta": 500.0}}),
    "a tied target": Case({}, {"tie_word_embeddings": True}),
    "a Qwen3 target": Case({}, {"architecture": "Qwen3ForCausalLM", "qk_norm": True}),
    "control: one layer later": Case("eagle", layers=(2, 4, 6)),
}


@dataclass
class Decoded:
    prompts: list[list[int]]
    outputs: list[list[int]]
    drafts: Drafts

    def text(self, request: int) -> list[int]:
        return self.prompts[request] + self.outputs[request]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--gen_len", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--inside_vllm", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside_vllm:
        decode_inside_vllm(Path(args.inside_vllm), args)
        return 0
    if args.vllm is None:
        parser.error("--vllm is missing: give a Python that has vLLM for CPUs")
    head = (
        "case",
        "steps of both, ours, vLLM's",
        "tokens a step",
        "drafts",
        "equal",
        "as expected",
    )
    print("|", " | ".join(head), "|\n|---|---|--:|--:|--:|---|")
    is_good = True
    for name in args.cases:
        with tempfile.TemporaryDirectory() as temporary:
            cells, is_expected = compare(CASES[name], Path(temporary), args)
        is_good &= is_expected
        print("|", " | ".join((name, *cells, "yes" if is_expected else "NO")), "|", flush=True)
    return 0 if is_good else 1


def compare(case: Case, folder: Path, args: argparse.Namespace) -> tuple[list[str], bool]:
    """The cells of a case, and whether its drafts are as they must be."""
    target, head = folder / "target", folder / "head"
    if isinstance(case.head, str):
        target.symlink_to(DEMO / "target")
        head.symlink_to(DEMO / case.head)
    else:
        write_target(target, case.target)
        write_random_head(head, target, case.head)
    ours = decode_ours(case, folder, args)
    theirs = decode_with_vllm(folder, ours.prompts, args)
    shared = [
        (request, length)
        for request, length in ours.drafts.keys() & theirs.drafts.keys()
        if ours.text(request)[:length] == theirs.text(request)[:length]
    ]
    pairs = [
        pair
        for place in shared
        for pair in zip(ours.drafts[place], theirs.drafts[place])  # noqa: B905
    ]  # near a text's end ours drafts fewer
    equal = sum(a == b for a, b in pairs)
    emitted = sum(len(output) - 1 for output in ours.outputs)  # the first comes with the prefill
    steps = f"{len(shared)}, {len(ours.drafts)}, {len(theirs.drafts)}"
    cells = [steps, f"{emitted / len(ours.drafts):.2f}", str(len(pairs)), str(equal)]
    is_same = bool(pairs) and equal == len(pairs) and ours.outputs == theirs.outputs
    is_same &= len(shared) == len(ours.drafts) == len(theirs.drafts)
    return cells, is_same if not case.layers else equal < len(pairs)


def write_target(directory: Path, changes: dict[str, Any]) -> None:
    """A random model of the demo tokenizer's vocabulary, whose logits are far apart."""
    import torch
    from safetensors.torch import save_file

    from magicdec.model.checkpoint.weight_map import expected_shapes
    from magicdec.model.config import ModelConfig
    from magicdec.model.families.hf_config import to_hf_config

    sizes: dict[str, Any] = {
        "vocab_size": 2048, "num_layers": 8, "hidden_size": 256, "intermediate_size": 320,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "max_position_embeddings": POSITIONS,
    }  # fmt: skip
    ids: dict[str, Any] = {"bos_token_id": 1, "eos_token_ids": (2,)}
    config = ModelConfig(name="random", dtype="float32", **{**sizes, **ids, **changes})
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        values = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            values = 1 + 0.2 * values
        elif "embed" not in name:
            values *= 2 * shape[1] ** -0.5
        tensors[name] = values
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(to_hf_config(config)), encoding="utf-8")
    (directory / "tokenizer.model").symlink_to(DEMO / "target" / "tokenizer.model")


def write_random_head(directory: Path, target: Path, options: dict[str, Any]) -> None:
    """A random head as the tests write it, with what vLLM asks of a published one."""
    sys.path.insert(0, str(ROOT / "tests"))
    from eagle_heads import HeadForm, random_head, write_head

    from magicdec.model.families.hf_config import load_model_config

    changes = {"max_position_embeddings": POSITIONS, **options.get("changes", {})}
    usual = {"draft_vocab": 700, "capture": (2, 4, 5)}
    form = HeadForm(**{**usual, **options, "changes": changes})
    config = load_model_config(target)
    weights = random_head(config, form, seed=1)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] *= ALONE
    write_head(directory, config, form, weights=weights)
    if form.program == "speculators":
        path = directory / "config.json"
        raw = json.loads(path.read_text(encoding="utf-8"))
        raw["speculators_config"] = {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": str(target), "architectures": [config.architecture]},
        }
        path.write_text(json.dumps(raw), encoding="utf-8")


def decode_ours(case: Case, folder: Path, args: argparse.Namespace) -> Decoded:
    """By `magicdec run` in this process, with what its drafter proposes noted."""
    from magicdec.cli.commands import run_words
    from magicdec.runner.device_batch import DeviceBatch
    from magicdec.runner.request import Request
    from magicdec.runner.sampling.model_tokens import Proposal
    from magicdec.speculation.drafter import DraftShape
    from magicdec.speculation.eagle import EagleDrafter

    requests: list[Request] = []
    drafts: Drafts = {}
    admit, propose = EagleDrafter.admit, EagleDrafter.propose

    def noted_admit(drafter: EagleDrafter, admitted: Sequence[Request]) -> None:
        requests.extend(admitted)
        admit(drafter, admitted)

    def noted_propose(drafter: EagleDrafter, batch: DeviceBatch, shape: DraftShape) -> Proposal:
        lengths = drafter.target.cache.lengths_of(batch.rows).tensor.tolist()
        proposal = propose(drafter, batch, shape)
        number_of = {request.row: i for i, request in enumerate(requests)}
        for row, length, ids in zip(
            batch.rows.numbers, lengths, proposal.ids.tolist(), strict=True
        ):
            drafts[number_of[row], length + 1] = ids  # the newest token is not in the cache
        return proposal

    words = ["run", "--model", str(folder / "target"), "--draft", f"eagle:{folder / 'head'}"]
    words += ["--dataset", "demo", "--prefix_len", str(case.prefix_len), "--B", str(ROWS)]
    words += ["--num_batches", "1", "--warmup_batches", "0", "--gen_len", str(args.gen_len)]
    words += ["--gamma", str(args.gamma), "--budget", "-1", "--dtype", "float32", "--ignore_eos"]
    words += ["--threads", str(args.threads), "--out", str(folder / "run.jsonl")]
    if case.layers:
        words += ["--eagle_layers", *map(str, case.layers)]
    setattr(EagleDrafter, "admit", noted_admit)  # noqa: B010
    setattr(EagleDrafter, "propose", noted_propose)  # noqa: B010
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as said:
            run_words(words)
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"magicdec ended with {ended.code}:\n{said.getvalue()}") from None
    finally:
        setattr(EagleDrafter, "admit", admit)  # noqa: B010
        setattr(EagleDrafter, "propose", propose)  # noqa: B010
    prompts = [list(request.prompt_ids) for request in requests]
    return Decoded(prompts, [list(request.output_ids) for request in requests], drafts)


def decode_with_vllm(folder: Path, prompts: list[list[int]], args: argparse.Namespace) -> Decoded:
    (folder / "prompts.json").write_text(json.dumps(prompts), encoding="utf-8")
    call = [args.vllm, __file__, "--inside_vllm", str(folder), "--gamma", str(args.gamma)]
    call += ["--gen_len", str(args.gen_len), "--threads", str(args.threads)]
    done = subprocess.run(call, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        raise RuntimeError(f"vLLM ended with {done.returncode}:\n{done.stderr[-4000:]}")
    found = json.loads((folder / "vllm.json").read_text(encoding="utf-8"))
    decoded = Decoded(prompts, found["outputs"], {})
    for request, length, newest, drafts in found["steps"]:
        text = decoded.text(request)
        # It drafts after each chunk of a prompt too, and after a request's last token.
        if len(prompts[request]) < length < len(text):
            assert text[length - 1] == newest, "the drafts follow this token"
            decoded.drafts[request, length] = drafts
    return decoded


def decode_inside_vllm(folder: Path, args: argparse.Namespace) -> None:
    """Runs where vLLM is."""
    os.environ |= {
        "OMP_NUM_THREADS": str(args.threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that its steps are in this process
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams
    from vllm.v1.spec_decode.eagle import EagleProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    prompts = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    names: list[str] = []
    steps: list[tuple[int, int, int, list[int]]] = []
    propose, draft = EagleProposer.propose, GPUModelRunner.propose_draft_token_ids

    def named(runner: Any, *arguments: Any, **options: Any) -> Any:
        names[:] = runner.input_batch.req_ids
        return draft(runner, *arguments, **options)

    def noted(proposer: Any, **options: Any) -> Any:
        last = options["token_indices_to_sample"]
        if last is None:
            last = options["common_attn_metadata"].query_start_loc[1:] - 1
        slots = options["target_positions"][last].tolist()  # of the token before the newest
        newest = options["next_token_ids"].tolist()
        drafts = propose(proposer, **options)
        for name, slot, token, ids in zip(names, slots, newest, drafts.tolist(), strict=True):
            steps.append((int(name.split("-")[0]), slot + 2, token, ids))
        return drafts

    EagleProposer.propose, GPUModelRunner.propose_draft_token_ids = noted, named
    model = LLM(
        str(folder / "target"),
        speculative_config={
            "method": "eagle3", "model": str(folder / "head"),
            "num_speculative_tokens": args.gamma,
        },
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=max(map(len, prompts)) + args.gen_len + SPARE,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=CHUNK,
    )  # fmt: skip
    sampling = SamplingParams(
        temperature=0.0, max_tokens=args.gen_len, ignore_eos=True, detokenize=False
    )
    made = model.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    outputs = [list(each.outputs[0].token_ids) for each in made]
    text = json.dumps({"outputs": outputs, "steps": steps})
    (folder / "vllm.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
