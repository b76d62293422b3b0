"""RunConfig and its flags: what is refused and how, what `auto` becomes, and how little is loaded
to say so."""

import ast
import dataclasses
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import HANG, ROOT

from magicdec import names as module
from magicdec.cli import flags as cli
from magicdec.cli.drivers import ALIASES, DRIVERS, Driver
from magicdec.cli.flags import config_of
from magicdec.cli.parsing.parser import Parser
from magicdec.config import resolved
from magicdec.config.choices.backend import AttentionCase, choose_backend
from magicdec.config.choices.choice import How
from magicdec.config.machine import Machine, ModelTraits
from magicdec.config.resolve import resolve
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    DraftSection,
)
from magicdec.config.setting import Declared, declared

DRIVER = DRIVERS["selfspec"].config
LONGSPEC = DRIVERS["longspec"].config


def parsed(*argv: object, driver: RunConfig = DRIVER) -> RunConfig:
    return Driver("", driver).read([str(a) for a in argv])


def parser_of(driver: RunConfig) -> Parser:
    return Driver("", driver).build_parser()


def mapped(*argv: object, driver: RunConfig) -> RunConfig:
    """As `parsed`, but flags that would do nothing are taken too."""
    return config_of(parser_of(driver).read([str(a) for a in argv]), driver)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--threads 0", "--threads 0 is too small; it must be at least 1"),
        ("--prefix_len 9 --max_len 9", "--max_len 9 minus --prefix_len 9 is 0; it must be at"),
        (
            "--prefix_len 9 --gen_len 3 --max_len 13",
            "--max_len 13 is not --prefix_len 9 + --gen_len 3; give one of the two",
        ),
        (
            "--streamingllm_budget 16",
            "--budget 16 must be larger than --num_sink_tokens 16",
        ),
        (
            "--kv_policy verified --draft_budget 40 --recent_window 25",
            "--recent_window 25 does not fit --budget 40 beside --num_sink_tokens 16",
        ),
        (
            "--kv_policy verified --gamma 31",
            "31 draft tokens (--gamma) are too many for --kv_policy verified; it takes at most 30",
        ),
        ("--drafter ngram --pa 0.3", "--pa 0.3 --drafter ngram: prompt lookup ends"),
        ("--rank_group 0 1", "0 1: name all of the launched ranks, each once: 0 1 2"),
        ("--rank_group 0 1 -1", "--rank_group 0 1 -1: name all"),
        ("--rank_group 0 1 1", "--rank_group 0 1 1: name all"),
        ("--rank_group 0 1 2 3", "--rank_group 0 1 2 3: name all"),
    ],
)
def test_check_names_flag_and_value(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        parsed(*flags.split()).check(world_size=3)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--gamma 1 --B 1 --prefix_len 1 --num_batches 1 --warmup_batches 0 --prefill_chunk 1",
        "--num_sink_tokens 0 --draft_budget 1 --threads 1 --gen_len 1",
        "--prefix_len 9 --gen_len 3 --max_len 12",
        "--kv_policy full --streamingllm_budget -1",
        "--kv_policy verified --draft_budget 40 --recent_window 24 --gamma 30",
    ],
)
def test_the_least_that_is_allowed(flags: str) -> None:
    parsed(*flags.split()).check(world_size=1)


def test_the_rank_group_is_all_ranks_in_any_order() -> None:
    for ranks in itertools.permutations(range(3)):
        config = parsed("--rank_group", *ranks)
        config.check(world_size=3)
        assert resolve(config, Machine(4, world_size=3)).parallel.rank_group == ranks
    resolved = resolve(RunConfig(), Machine(4, world_size=3))
    assert resolved.parallel.rank_group == (0, 1, 2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--gama 3", "unknown argument --gama; did you mean --gamma?"),
        ("--streaming_llm_budget 9", "did you mean --streamingllm_budget?"),
        ("--prefix 9", "unknown argument --prefix; did you mean --prefix_len?"),
        ("--xyzzy", "unknown argument --xyzzy; choose from"),
        ("demo", "unknown argument demo; "),
        ("--strategy autoregressive", "unknown argument --strategy"),
        ("--gamma", "argument --gamma: expected one argument"),
        ("--rank_group", "argument --rank_group: expected at least one argument"),
        ("--rank_group 0,1", "--rank_group 0,1 is not a whole number"),
    ],
)
def test_flags_that_do_not_exist_or_hold_what_they_cannot(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        parsed(*flags.split())
    assert "\n" not in str(error.value)


def fields(config: RunConfig) -> Iterator[tuple[str, Declared, Any]]:
    """(section, setting, value) of all that has a flag."""
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        if values is None:  # this way of decoding has no such section
            continue
        for name, declaration in declared(type(values)).items():
            yield section.name, declaration, getattr(values, name)


BASELINE_DRIVER = DRIVERS["baseline"].config


@pytest.mark.parametrize(
    ("driver", "flags", "message"),
    [
        (BASELINE_DRIVER, "--gamma 7", "--gamma does nothing here: autoregressive decoding drafts"),
        (BASELINE_DRIVER, "--no_baseline", "--no_baseline does nothing here"),
        (DRIVER, "--window_size 9", "--window_size does nothing here: --kv_policy streaming_llm"),
        (DRIVER, "--kv_policy snapkv --num_sink_tokens 9", "--num_sink_tokens does nothing here"),
        (DRIVER, "--kv_policy full --budget 9", "--budget does nothing here: --kv_policy full"),
        (
            DRIVER,
            "--drafter ngram --kv_policy full",
            "--kv_policy does nothing here: drafts of ngram",
        ),
        (DRIVER, "--sampling_seed 9", "--sampling_seed does nothing here: --temperature 0"),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused(
    driver: RunConfig, flags: str, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parsed(*flags.split(), driver=driver)


def test_the_help_has_two_levels() -> None:
    parser = parser_of(DRIVER)
    short = parser.format_help()
    whole = parser.format_help_all()
    assert "--gamma" in short and "--prefill_chunk" not in short and "--help_all shows" in short
    assert "--prefill_chunk" in whole and len(re.findall(r"^  --", short, re.M)) <= 13
    assert parser.format_help_all() == whole


@pytest.mark.parametrize("driver", [DRIVER, LONGSPEC], ids=["selfspec", "longspec"])
def test_every_flag_reaches_its_own_field(driver: RunConfig) -> None:
    for section, field, default in fields(driver):
        choices = field.setting.choices
        most = field.setting.most
        given: Any = {int: 77, float: 7.5, bool: not default}.get(type(default), "77")
        if choices:
            given = next(c for c in choices if c != default)
        elif most is not None:
            given = most / 2
        elif field.name in ("rank_group", "eagle_layers"):
            given = (2, 0, 1)
        elif "tuple[float" in str(field.kind):
            given = (0.5, 0.25)
        elif default is None and "int" in str(field.kind):
            given = 77
        words = () if type(default) is bool else given if type(given) is tuple else (given,)
        for flag in (*field.flags, *ALIASES.get(f"{section}.{field.name}", ())):
            changed = dataclasses.replace(getattr(driver, section), **{field.name: given})
            expected = dataclasses.replace(driver, **{section: changed})
            assert mapped(flag, *words, driver=driver) == expected, flag
            assert mapped(flag, *words, driver=driver) != driver, flag


def test_the_draft_has_the_flags_of_the_original_suite() -> None:
    config = parsed("--target", "a", "--model", "b", "--draft_ranks", 1, 0, driver=LONGSPEC)
    assert config.draft is not None
    assert (config.model.model, config.draft.model, config.draft.rank_group) == ("a", "b", (1, 0))
    for other in ("--draft_rank_group", "--draft_group"):
        spelt = parsed("--target", "a", "--model", "b", other, 1, 0, driver=LONGSPEC)
        assert spelt == config
    for flag in ("--target", "--draft_ranks", "--draft_group"):
        with pytest.raises(ValueError, match=f"unknown argument {flag}"):
            parsed(flag, 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (("--draft_ranks", 3), "--draft_ranks 3: name some of the launched ranks, each once"),
        (("--draft_ranks", 0, -1), "--draft_ranks 0 -1: name some"),
        (("--draft_group", 2, 0, 2), "--draft_ranks 2 0 2: name some"),
        (("--drafter", "self"), "--drafter self: the draft --model would do nothing"),
        (
            ("--kv_policy", "snapkv", "--reselect_every", 3),
            "--reselect_every 3: a standalone draft keeps no whole context",
        ),
        (("--draft_budget", -2), "--budget -2 must be larger than"),
    ],
)
def test_what_a_draft_cannot_be(config: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parsed(*config, driver=LONGSPEC).check(world_size=3)
    with pytest.raises(ValueError, match="--draft_ranks : name some of the launched ranks"):
        dataclasses.replace(LONGSPEC, draft=DraftSection(rank_group=())).check(2)


def test_a_draft_stands_on_any_ranks_and_by_default_on_the_targets_first() -> None:
    machine = Machine(4, world_size=3)
    for ranks in itertools.chain(*(itertools.permutations(range(3), n) for n in (1, 2, 3))):
        config = parsed("--draft_ranks", *ranks, driver=LONGSPEC)
        config.check(world_size=3)
        draft = resolve(config, machine).draft
        assert draft is not None and draft.rank_group == ranks
    draft = resolve(parsed("--rank_group", 2, 0, 1, driver=LONGSPEC), machine).draft
    assert draft is not None and draft.rank_group == (2,)


def test_a_draft_has_the_attention_that_its_own_head_size_allows() -> None:
    resolved = resolve(LONGSPEC, Machine(2, has_compiler=True), draft=ModelTraits(72))
    assert resolved.attention.backend == "native" and resolved.draft is not None
    assert resolved.draft.backend == "grouped"
    assert resolved.draft.backend.why == "auto: grouped; head size 72 is not a multiple of 16"
    with pytest.raises(ValueError, match="--attention native: head size 72"):
        asked = parsed("--attention", "native", driver=LONGSPEC)
        resolve(asked, Machine(2, has_compiler=True), draft=ModelTraits(72))


FAST = Machine(2, has_compiler=True, has_bfloat16_products=True)


def test_an_int8_cache_must_be_read() -> None:
    assert resolve(parsed("--kv_dtype", "int8"), FAST).attention.kv_dtype == "int8"
    assert resolve(parsed("--dtype", "float32"), FAST).attention.kv_dtype == "float32"
    for flags, traits, message in (
        ("--attention grouped", ModelTraits(), "--attention grouped does not read it; choose auto"),
        ("--dtype float32", ModelTraits(), "it is for --dtype bfloat16, not float32"),
        ("--attention sdpa", ModelTraits(70), "head size 70 is not a multiple of 4; choose auto"),
        ("", ModelTraits(has_alibi=True), "codes would round the positions of ALiBi, which lie in"),
    ):
        config = parsed("--kv_dtype", "int8", *flags.split())
        with pytest.raises(ValueError, match=f"--kv_dtype int8: {message}"):
            resolve(config, FAST, traits)
    config = parsed("--kv_dtype", "int4", "--attention", "sdpa")
    with pytest.raises(ValueError, match="--kv_dtype int4: head size 12 is not a multiple of 8"):
        resolve(config, FAST, ModelTraits(12))
    for kv_dtype in ("fp8", "int8", "int4"):
        slowly = parsed("--kv_dtype", kv_dtype, "--attention", "sdpa")
        assert resolve(slowly, FAST).attention.kv_dtype == kv_dtype


def test_a_copy_of_codes_must_be_read_and_save_bytes() -> None:
    """`--kv_policy quantised`, whose drafts read codes. Where native attention does not serve, auto
    takes what reads codes."""
    copying = "--kv_policy", "quantised"
    slow = Machine(2, has_compiler=False)
    for machine, backend in ((FAST, "native"), (slow, "sdpa")):
        found = resolve(parsed(*copying), machine)
        assert found.attention.backend == backend and found.kv.policy == "quantised"
    assert resolve(parsed(), slow).attention.backend == "grouped"
    assert resolve(parsed(*copying, "--draft_budget", -1), FAST).kv.policy == "quantised"
    for kv_dtype in ("fp8", "int8"):
        resolve(parsed(*copying, "--kv_dtype", kv_dtype), FAST)
    gpu = dataclasses.replace(FAST, has_cuda=True)
    for words in (copying, ("--kv_dtype", "int4")):
        assert resolve(parsed(*words, "--device", "cuda"), gpu).attention.backend == "triton"
    flags = "--kv_policy quantised"
    for words, machine, traits, message in (
        ("--attention grouped", FAST, ModelTraits(), "--attention grouped does not read the codes"),
        (
            "--device cuda --attention flash_attn",
            gpu,
            ModelTraits(),
            "--attention flash_attn does not read the codes",
        ),
        ("--kv_dtype int4", FAST, ModelTraits(), f"{flags}: a copy in --draft_kv_dtype int4 has"),
        (
            "--kv_dtype fp8 --draft_kv_dtype int8",
            FAST,
            ModelTraits(),
            "--draft_kv_dtype int8 has no fewer bits than the target's cache in --kv_dtype fp8",
        ),
        ("", FAST, ModelTraits(has_alibi=True), "int4: codes would round the positions of ALiBi"),
        (
            "--draft_kv_dtype int8 --attention sdpa",
            FAST,
            ModelTraits(70),
            "--draft_kv_dtype int8: head size 70 is not a multiple of 4; choose another policy",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            resolve(parsed(*copying, *words.split()), machine, traits)


def test_a_budget_of_minus_one_is_the_full_cache() -> None:
    for policy in ("streaming_llm", "snapkv", "full"):
        config = parsed("--draft_budget", -1, "--kv_policy", policy)
        config.check(world_size=1)
        assert resolve(config, Machine(1)).kv.policy == "full"


def test_two_spellings_of_a_length() -> None:
    by_gen = parsed("--prefix_len", 100, "--gen_len", 28)
    by_max = parsed("--prefix_len", 100, "--max_len", 128)
    both = parsed("--prefix_len", 100, "--gen_len", 28, "--max_len", 128)
    machine = Machine(num_cpus=1)
    found = [resolve(config, machine).workload for config in (by_gen, by_max, both)]
    assert found[0] == found[1] == found[2]
    assert by_max.workload.num_new_tokens == 28
    assert resolve(parsed("--prefix_len", 100), machine).workload.num_new_tokens == 64


def test_the_recent_window_is_a_share_of_the_budget_unless_given() -> None:
    machine = Machine(num_cpus=1)
    verified = parsed("--kv_policy", "verified", "--draft_budget", 257)
    assert resolve(verified, machine).kv.recent_window == (257 - 16) // 4
    given = parsed("--kv_policy", "verified", "--recent_window", 9)
    assert resolve(given, machine).kv.recent_window == 9
    assert resolve(parsed(), machine).kv.recent_window is None


@pytest.mark.parametrize("config", [RunConfig(), DRIVER, LONGSPEC])
def test_resolve_leaves_no_auto_and_no_gap(config: RunConfig) -> None:
    resolved = resolve(config, Machine(num_cpus=8, world_size=2, local_world_size=2))
    open_ends = {
        ("decoding", "pa"),
        ("decoding", "lookup_corpus"),
        ("decoding", "step_cost"),
        ("decoding", "emulate_acceptance"),
        ("output", "save_tokens"),
        ("kv", "recent_window"),
        ("decoding", "draft_weights"),
        ("workload", "skip_tokens"),
    }
    if config.decoding.strategy == "autoregressive":
        open_ends.add(("decoding", "drafter"))
    sections = {s: section for s, section in resolved.to_dict().items() if section is not None}
    assert ("draft" in sections) == (config.draft is not None)
    values = {(s, n): v for s, section in sections.items() for n, v in section.items()}
    assert "auto" not in values.values()
    assert {name for name, value in values.items() if value is None} == open_ends
    config.check(world_size=2)
    assert resolved.run_config is config


@pytest.mark.parametrize(
    ("machine", "device", "dtype", "threads"),
    [
        (Machine(8), "cpu", "float32", 8),
        (Machine(8, 8, 3, has_bfloat16_products=True), "cpu", "bfloat16", 2),
        (Machine(8, has_compiler=True, widens_bfloat16=True), "cpu", "bfloat16", 8),
        (Machine(2, 4, 4), "cpu", "float32", 1),
        (Machine(8, has_cuda=True), "cuda", "bfloat16", 8),
    ],
)
def test_auto_is_what_the_machine_is_good_at(
    machine: Machine, device: str, dtype: str, threads: int
) -> None:
    resolved = resolve(RunConfig(), machine)
    assert (resolved.parallel.device, resolved.model.dtype) == (device, dtype)
    assert resolved.parallel.threads == threads
    assert resolved.parallel.rank_group == tuple(range(machine.world_size))
    assert resolved.attention.backend in module.ATTENTION_BACKENDS


def test_what_was_chosen_is_kept() -> None:
    flags = "--device cpu --dtype float32 --threads 3 --attention sdpa"
    machine = Machine(8, has_cuda=True, has_bfloat16_products=True)
    resolved = resolve(parsed(*flags.split()), machine)
    assert (resolved.parallel.device, resolved.parallel.threads) == ("cpu", 3)
    assert (resolved.model.dtype, resolved.attention.backend) == ("float32", "sdpa")
    with pytest.raises(ValueError, match="--device cuda: no CUDA device here; choose from auto"):
        resolve(parsed("--device", "cuda"), Machine(8))


def test_rank_0_says_why_and_another_only_if_it_was_not_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait a while, so that the line comes before torchrun's summary, which ends them;
    one that alone refuses says so."""
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        assert capsys.readouterr().err == ""
        waited.append(seconds)

    monkeypatch.setattr(cli.time, "sleep", sleep)
    monkeypatch.setattr(sys, "argv", ["somewhere/driver.py", "--gamma", "0"])
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(SystemExit) as stopped:
            cli.start(Driver("", DRIVER).parse)
        out, err = capsys.readouterr()
        assert stopped.value.code == 2 and out == ""
        assert err.startswith("driver.py: --gamma 0 is too small") and err.count("\n") == 1
        assert len(waited) == rank


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    loaded = "print(*sorted({'torch', 'numpy', 'datasets', 'transformers'} & set(sys.modules)))"
    program = f"import sys\n{code}\n{loaded}"
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG, check=True
    )


def test_the_config_is_light() -> None:
    assert run_python("import magicdec.config.run_config").stdout == "\n"


def test_a_refusal_is_one_line_and_loads_nothing() -> None:
    code = """
from magicdec.cli.drivers import selfspec
sys.argv = ["some/driver.py", "--gamma", "0"]
try:
    selfspec()
except SystemExit as stopped:
    assert stopped.code == 2
else:
    raise AssertionError("not refused")
"""
    result = run_python(code)
    line = "driver.py: --gamma 0 is too small; it must be at least 1\n"
    assert (result.stdout, result.stderr) == ("\n", line)


def named(asked: str, device: str, machine: Machine, head_dim: int = 64) -> tuple[str, str]:
    """(name, reason) of the attention backend."""
    choice = choose_backend(asked, machine, AttentionCase(device, model=ModelTraits(head_dim)))
    return str(choice), choice.why


def test_auto_attention_on_a_cpu_is_native_where_it_can_be() -> None:
    machine = Machine(num_cpus=2, has_compiler=True)
    assert named("auto", "cpu", machine) == ("native", "auto: native")
    no_compiler = "auto: grouped; native needs a C++ compiler (on Debian: apt install g++)"
    assert named("auto", "cpu", machine, 72)[0] == "grouped"
    assert named("auto", "cpu", Machine(2)) == ("grouped", no_compiler)
    assert named("sdpa", "cpu", machine) == ("sdpa", "asked for")
    with pytest.raises(ValueError, match=r"--attention native: native needs a C\+\+ compiler"):
        choose_backend("native", Machine(2), AttentionCase("cpu"))
    with pytest.raises(ValueError, match="--attention native: head size 72 is not"):
        choose_backend("native", machine, AttentionCase("cpu", model=ModelTraits(72)))


FLASH = "flash_attn is for --dtype bfloat16, not float32"
ON_CUDA = [
    (AttentionCase("cuda", "bfloat16"), {}, ["triton"]),
    (AttentionCase("cuda", "bfloat16"), {"triton": "no triton"}, ["flash_attn", "no triton"]),
    (AttentionCase("cuda"), {"triton": "no triton"}, ["sdpa", "no triton", FLASH]),
    (
        AttentionCase("cuda", "bfloat16"),
        {"triton": "no triton", "flash_attn": "no flash-attn"},
        ["sdpa", "no triton", "no flash-attn"],
    ),
    (
        AttentionCase("cuda", "bfloat16", ModelTraits(320)),
        {},
        [
            "sdpa",
            "head size 320 is not at most 256",
            "head size 320 is not a multiple of 8, at most 256",
        ],
    ),
    (
        AttentionCase("cuda", "bfloat16", kv_policy="verified"),
        {"triton": "no triton"},
        ["sdpa", "no triton", "flash_attn does not return attention weights"],
    ),
    (
        AttentionCase("cuda", "bfloat16", ModelTraits(sliding_window=64), longest=65),
        {"triton": "no triton"},
        ["sdpa", "no triton", "flash_attn does not keep to a sliding window"],
    ),
    (
        AttentionCase("cuda", "bfloat16", ModelTraits(sliding_window=64), longest=64),
        {"triton": "no triton"},
        ["flash_attn", "no triton"],
    ),
]


@pytest.mark.parametrize(("case", "missing", "found"), ON_CUDA)
def test_auto_attention_on_cuda_is_the_first_of_its_line_that_can_serve(
    case: AttentionCase, missing: dict[str, str], found: list[str]
) -> None:
    """Nothing is measured, and what kept it from the first is the reason."""
    machine = Machine(2, has_cuda=True, missing_backends=missing)
    choice = choose_backend("auto", machine, case)
    assert choice == found[0] and choice.why == "; ".join([f"auto: {found[0]}", *found[1:]])
    assert choice.how is (How.AUTO if len(found) == 1 else How.SECOND_BEST)


def test_auto_attention_on_a_cpu_rounds_no_alibi() -> None:
    """Without a compiler, where grouped attention would be refused for such a model."""
    case = AttentionCase("cpu", "bfloat16", ModelTraits(has_alibi=True))
    assert choose_backend("auto", Machine(2), case) == "sdpa"
    assert choose_backend("auto", Machine(2), AttentionCase("cpu", "bfloat16")) == "grouped"


@pytest.mark.parametrize(
    ("asked", "device", "head_dim", "dtype", "obstacle"),
    [
        ("triton", "cuda", 257, "float32", "head size 257 is not at most 256"),
        ("flash_attn", "cuda", 64, "float32", "flash_attn is for --dtype bfloat16, not float32"),
        ("flash_attn", "cuda", 84, "bfloat16", "head size 84 is not a multiple of 8, at most 256"),
        ("flash_attn", "cpu", 64, "bfloat16", "flash_attn is for --device cuda"),
        ("flash_attn", "cuda", 64, "bfloat16", "flash-attn is not installed"),
    ],
)
def test_an_attention_backend_that_cannot_serve_is_refused(
    asked: str, device: str, head_dim: int, dtype: str, obstacle: str
) -> None:
    missing = {"triton": "triton is not installed", "flash_attn": "flash-attn is not installed"}
    machine = Machine(
        num_cpus=2,
        has_cuda=True,
        missing_backends={asked: missing[asked]} if "installed" in obstacle else {},
    )
    message = f"--attention {asked}: {obstacle}; choose from auto, sdpa, grouped"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        choose_backend(asked, machine, AttentionCase(device, dtype, ModelTraits(head_dim)))
    with pytest.raises(ValueError, match=re.escape(obstacle)):
        config = parsed("--attention", asked, "--device", device, "--dtype", dtype)
        resolve(config, machine, ModelTraits(head_dim))


def test_triton_on_a_cpu_is_said_to_be_interpreted(capsys: pytest.CaptureFixture[str]) -> None:
    config = resolve(parsed("--attention", "triton", "--device", "cpu"), Machine(2))
    cli.announce_backend(config)
    line = "--attention triton: asked for; interpreted on a CPU, for checks and not for times\n"
    assert capsys.readouterr().err == line


GRAPHS = [
    ("", "on", "auto: on"),
    ("--attention triton", "on", "auto: on"),
    ("--cuda_graphs off", "off", "asked for"),
    ("--cuda_graphs on --attention sdpa", "on", "asked for"),
    ("--attention grouped", "off", "auto: off, --attention grouped needs lengths on the host"),
    ("--temperature 0.5 --top_p 0.9", "on", "auto: on"),
    ("--presence_penalty 1", "on", "auto: on"),
    ("--device cpu", "off", "auto: off, --device cpu has none"),
]


@pytest.mark.parametrize(("flags", "graphs", "why"), GRAPHS)
def test_graphs_are_used_where_they_can_be(flags: str, graphs: str, why: str) -> None:
    machine = Machine(num_cpus=2, has_cuda=True)
    d = resolve(parsed(*flags.split()), machine).decoding
    assert (d.cuda_graphs, d.cuda_graphs.why) == (graphs, why)
    assert d.cuda_graphs.is_auto == why.startswith("auto")
    if not why.startswith("auto: off"):
        return
    with pytest.raises(ValueError, match=f"^--cuda_graphs on: {why[11:]}; choose from auto, off$"):
        resolve(parsed("--cuda_graphs", "on", *flags.split()), machine)


def test_nothing_of_a_run_on_cuda_is_left_to_its_ranks() -> None:
    """Backends and graphs are known when the config is, also those of a standalone draft."""
    resolved = resolve(LONGSPEC, Machine(2, has_cuda=True))
    assert (resolved.attention.backend, resolved.draft.backend) == ("triton", "triton")
    assert resolved.model.elementwise == "triton" and resolved.decoding.cuda_graphs == "on"
    bare = {"triton": "no triton", "flash_attn": "no flash-attn"}
    resolved = resolve(LONGSPEC, Machine(2, has_cuda=True, missing_backends=bare))
    assert (resolved.attention.backend, resolved.draft.backend) == ("sdpa", "sdpa")
    assert resolved.decoding.cuda_graphs == "on"


@pytest.mark.parametrize("name", ["flash_attn"])
def test_the_verified_policy_needs_a_backend_that_tells(name: str) -> None:
    machine = Machine(2, has_cuda=True)
    message = f"--attention {name} does not return attention"
    flags = ("--attention", name, "--dtype", "bfloat16", "--kv_policy")
    with pytest.raises(ValueError, match=f"{message} weights, which --kv_policy verified"):
        resolve(parsed(*flags, "verified"), machine)
    assert resolve(parsed(*flags, "snapkv"), machine).attention.backend == name
    whole = parsed(*flags, "verified", "--draft_budget", -1)  # all of the cache: the full policy
    assert resolve(whole, machine).attention.backend == name


SECTIONS = ("config", "parallel", "decoding", "attention", "draft", "model", "section")


def test_no_file_but_those_of_the_config_chooses_for_a_run() -> None:
    """What a resolved section chose is never replaced."""
    classes = (getattr(resolved, name) for name in vars(resolved) if name.startswith("Resolved"))
    fields = [field for kind in classes for field in dataclasses.fields(kind)]
    chosen = {field.name for field in fields if "Choice" in str(field.type)}
    assert chosen == {"backend", "collectives", "cuda_graphs", "elementwise", "native_steps"}
    for path in (ROOT / "magicdec").rglob("*.py"):
        if path.is_relative_to(ROOT / "magicdec" / "config"):
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("replace"):
                section = ast.unparse(call.args[0]).rpartition(".")[2] if call.args else ""
                given = {keyword.arg for keyword in call.keywords} & chosen
                assert section not in SECTIONS or not given, (path, given)
