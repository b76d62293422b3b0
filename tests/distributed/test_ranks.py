"""The drivers from the command line, over 1, 2 and 3 ranks: same tokens, right records, whatever
the order of ranks. Also int8 weights, quantised while loading or stored so."""

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import TINY, Drive, Launch, save_checkpoint, tiny_transformer
from several_ranks import check_numbers, read_records

from magicdec.model.checkpoint.convert import convert, find_checkpoint, quantized

FLAGS = (
    "--B",
    3,
    "--prefix_len",
    80,
    "--gen_len",
    40,
    "--num_batches",
    2,
    "--warmup_batches",
    0,
    "--dtype",
    "float32",
)
SPECULATION = ("--gamma", 3, "--streamingllm_budget", 24, "--num_sink_tokens", 4)


Words = tuple[object, ...]


@pytest.fixture
def tiny(tiny_checkpoint: Path, text_file: Path) -> Words:
    return "--model", tiny_checkpoint, "--dataset", text_file, *FLAGS


@pytest.fixture(scope="module")
def single() -> dict[str, list[list[int]]]:
    """Output tokens of one rank, filled by the first test that needs them."""
    return {}


@pytest.mark.parametrize(
    ("ranks", "collectives"),
    [
        ("0", "auto"),
        ("1 0", "auto"),
        pytest.param("0 1 2", "gloo", marks=pytest.mark.wide),
        ("2 0 1", "shared_memory"),
    ],
)
def test_every_rank_count_and_order_emits_the_same_tokens(
    ranks: str, collectives: str, drive: Drive, tiny: Words, single: dict[str, list[list[int]]]
) -> None:
    group = ranks.split()
    found = drive(
        "selfspec",
        *tiny,
        *SPECULATION,
        "--rank_group",
        *group,
        "--collectives",
        collectives,
        num_ranks=len(group),
        torchrun=ranks == "1 0",
    )
    plain, record = found.records
    assert record["status"] == "verified" and record["correctness"]["identical"] is True
    assert record["correctness"]["num_tokens"] == 6 * 40
    assert record["config"]["parallel"]["rank_group"] == list(map(int, group))
    assert record["environment"]["world_size"] == len(group)
    for run_record in (plain, record):
        threads = [batch["threads"] for batch in run_record["groups"]]
        assert threads == [[1] * len(group)] * 2, "of each batch"
    assert 0 < record["metrics"]["draft_acceptance_rate"] < 1
    assert [len(sample["prompt_ids"]) for sample in found.saved] == [80] * 6
    assert found.tokens == single.setdefault("tokens", found.tokens)


def test_the_draft_length_that_pays(drive: Drive, tiny: Words) -> None:
    """Clocks decide, and differ between ranks: all follow the first. No ignored end tokens, so rows
    end apart."""
    flags = "--gamma", "auto", "--warmup_batches", 1
    found = drive("selfspec", *tiny, *SPECULATION, *flags, num_ranks=2)
    plain, record = found.records
    assert record["correctness"]["identical"] is True
    assert record["config"]["decoding"]["gamma"] == "auto"
    assert "gamma auto" in found.stdout
    metrics = record["metrics"]
    groups = record["groups"]
    drafted = [batch["step_max_gamma"] for batch in groups]
    assert 0 <= metrics["mean_draft_tokens"] <= 8 and metrics["calibration_ms"] > 0
    assert all(0 <= count <= 8 for batch in drafted for count in batch)
    for batch, counts in zip(groups, drafted, strict=True):
        assert len(batch["verify_ms"]) == sum(count > 0 for count in counts)
    assert plain["metrics"]["calibration_ms"] is None
    in_warm_up = metrics["warmup_calibration_ms"]
    in_batches = [batch["calibration_ms"] for batch in groups]
    assert in_warm_up > 0 and len(in_batches) == 2
    assert metrics["calibration_ms"] == in_warm_up + sum(in_batches)
    check_numbers(plain, record)


def test_bfloat16_agrees_with_its_own_baseline(drive: Drive, tiny: Words) -> None:
    """With whatever kernels `auto` takes here; three ranks have shards of an odd width."""
    words = *tiny, *SPECULATION, "--dtype", "bfloat16", "--ignore_eos"
    *_, record = drive("selfspec", *words, num_ranks=3).records
    assert record["config"]["model"]["dtype"] == "bfloat16"
    assert record["correctness"]["num_tokens"] == 6 * 40
    if record["config"]["model"]["linear"] == "packed":
        assert record["correctness"]["identical"] is True


def test_without_a_compiler_auto_says_what_it_takes(
    drive: Drive, tiny: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = drive("baseline", *tiny)
    assert found.stderr.count("--attention auto: grouped; native needs a C++ compiler") == 1
    (record,) = found.records
    assert record["config"]["attention"]["backend"] == "grouped"
    assert record["config"]["model"]["linear"] == "torch"


def test_the_baseline_driver_and_its_text(
    launch: Launch, tiny_checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    done = launch(
        "baseline_benchmark.py",
        "--model",
        tiny_checkpoint,
        "--dataset",
        text_file,
        "--B",
        2,
        "--prefix_len",
        50,
        "--max_len",
        60,
        "--num_batches",
        1,
        "--printoutput",
        "--threads",
        1,
    )
    assert done.returncode == 0, done.stderr
    assert "--- sequence 0" in done.stdout and "--- sequence 1" in done.stdout
    (record,) = read_records(tmp_path / "results" / "runs.jsonl")
    assert record["correctness"]["reference"] is None and record["name"] == "static"
    assert record["metrics"]["draft_acceptance_rate"] is None
    assert record["config"]["workload"]["gen_len"] == 10


INT8_FLAGS = (
    "--B",
    2,
    "--prefix_len",
    120,
    "--gen_len",
    24,
    "--num_batches",
    1,
    "--warmup_batches",
    0,
    "--gamma",
    3,
    "--streamingllm_budget",
    40,
    "--prefill_chunk",
    64,
)
FLOAT32 = ("--dtype", "float32")


@pytest.fixture(scope="module")
def whole_groups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose inputs 1 to 3 ranks share in groups: of 96, two ranks have 48 each, which
    is within a group of 32."""
    config = replace(TINY, vocab_size=2051, eos_token_ids=(2, 5), intermediate_size=96)
    return save_checkpoint(tiny_transformer(config), tmp_path_factory.mktemp("groups"))


@pytest.fixture(scope="module")
def int8_checkpoint(whole_groups: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`whole_groups`, quantised by the converter."""
    out = tmp_path_factory.mktemp("int8")
    source = quantized(find_checkpoint("--checkpoint_dir", whole_groups), "int8")
    convert(source, out / "model.safetensors", None)
    return out


@pytest.mark.wide
def test_int8_weights_have_the_same_tokens_on_all_ranks(
    drive: Drive, text_file: Path, whole_groups: Path, int8_checkpoint: Path
) -> None:
    """Quantised while loading, or stored so; each has the tokens of its own baseline. Weights are
    exact: activations are rounded in groups, which depend on the ranks."""
    flags = (*INT8_FLAGS, *FLOAT32, "--dataset", text_file, "--linear", "packed")
    quantise = ("--target_dtype", "int8")
    outputs = []
    for num_ranks, model in (
        (1, (whole_groups, *quantise)),
        (2, (int8_checkpoint,)),
        (3, (whole_groups, *quantise)),
    ):
        outputs.append(drive("selfspec", *flags, "--model", *model, num_ranks=num_ranks))
        *_, record = outputs[-1].records
        assert record["status"] == "verified" and record["correctness"]["identical"] is True
        section = record["config"]["model"]
        weights = "stored" if num_ranks == 2 else "int8"
        assert (section["dtype"], section["target_dtype"]) == ("float32", weights)
        assert section["linear"] == "packed" and outputs[-1].tokens == outputs[0].tokens, num_ranks
    plain = drive("selfspec", *flags, "--model", whole_groups)
    assert plain.records[-1]["config"]["model"]["target_dtype"] == "float32"
    assert plain.tokens != outputs[0].tokens
    read = [run.records[0]["metrics"]["bytes_read"] for run in (outputs[0], plain)]
    assert read[0] < 0.75 * read[1]


@pytest.mark.wide
def test_bfloat16_activations_and_the_largest_draft(drive: Drive) -> None:
    """The target's weights in int8 draft for it: most is accepted, where bfloat16 ones get all."""
    flags = ("--target", "demo", "--model", "demo", "--dataset", "demo", "--dtype", "bfloat16")
    kinds = ("--draft_weights", "int8", "--draft_budget", -1)  # of all of the cache
    *_, record = drive("longspec", *INT8_FLAGS, *flags, *kinds, num_ranks=2).records
    assert record["status"] in ("verified", "verified_with_ties")
    assert record["config"]["model"]["target_dtype"] == "bfloat16"
    assert record["config"]["draft"]["draft_dtype"] == "int8"
    assert 0.7 < record["metrics"]["draft_acceptance_rate"] < 1
