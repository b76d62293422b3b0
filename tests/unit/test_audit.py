"""`magicdec audit` finds the faults of servers and raises no false alarm: against a server that is
written from the definitions (`speculating_server.py`), in the forms of three programs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from conftest import Command, EndedCommand
from speculating_server import (
    COUNTER_FAULTS,
    FAULTS,
    GREEDY_FAULTS,
    PREEMPTION_FAULTS,
    SAMPLING_FAULTS,
    STATE_FAULTS,
    SpeculatingServer,
)

from magicdec.bench.audit.record import AuditRecord
from magicdec.names import AUDIT_CHECKS
from magicdec.records.reading import read_records

GREEDY, COUNTERS, STATE, PREEMPTION, SAMPLING = AUDIT_CHECKS
SMALL = ["--prefix_len", 48, "--gen_len", 40, "--concurrency", 1, 4, "--total_variation", 0.25]


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    letters = random.Random(1)
    path = tmp_path_factory.mktemp("books") / "book.txt"
    path.write_text("".join(chr(32 + letters.randrange(90)) for _ in range(2000)))
    return path


@dataclass
class Audited:
    """An audit that has ended, and the last record of its file."""

    ended: EndedCommand
    records: list[AuditRecord]

    @property
    def record(self) -> AuditRecord:
        return self.records[-1]

    def status(self, name: str) -> str:
        return next(check.status for check in self.record.checks if check.name == name)

    def findings(self, name: str) -> dict[str, str]:
        found = next(check.findings for check in self.record.checks if check.name == name)
        return {finding.name: finding.text for finding in found}


Auditing = Callable[..., Audited]


@pytest.fixture
def audit(command: Command, book: Path, tmp_path: Path) -> Iterator[Auditing]:
    """Audits a server with these flags. `server` has its settings."""
    servers = list[SpeculatingServer]()

    def run(*words: object, plain: SpeculatingServer | None = None, **server: Any) -> Audited:
        audited = SpeculatingServer(**server)
        servers.append(audited)
        audited.start()
        url = f"{audited.address}/v1"
        more: list[object] = []
        if plain is not None:
            servers.append(plain)
            plain.start()
            more = ["--plain", f"{plain.address}/v1"]
        metrics = [] if "--no_metrics" in words else [f"{audited.address}/metrics"]
        flags = [word for word in words if word != "--no_metrics"]
        more += ["--endpoint_metrics", *metrics] if metrics else []
        out = tmp_path / "audits.jsonl"
        ended = command(
            "audit", "--endpoint", url, "--dataset", book, *SMALL, *more, *flags, "--out", out
        )
        records = list(read_records(out, AuditRecord)) if out.is_file() else []
        return Audited(ended, records)

    yield run
    for server in servers:
        server.stop()


APIS = {"openai": [], "sglang": ["--no_metrics"], "llama.cpp": ["--no_metrics"]}


@pytest.mark.parametrize("api", APIS)
def test_a_sound_server_is_clean(audit: Auditing, api: str) -> None:
    """Its drafts are judged, and nothing is found, though what it says is noisy."""
    found = audit("--endpoint_api", api, *APIS[api])
    assert found.ended.code == 0, found.ended.out
    assert [check.name for check in found.record.checks] == [GREEDY, COUNTERS, STATE, SAMPLING]
    assert not any(check.findings for check in found.record.checks)
    assert found.record.greedy[0].num_wrong == 0 and found.record.greedy[0].num_tokens == 320
    assert max(pair.largest for pair in found.record.noise) > 0
    assert 2 < (found.record.greedy[0].tokens_per_step or 0) < 5
    assert found.record.sampled and all(place.p_value > 1e-4 for place in found.record.sampled)
    assert found.record.program == {"openai": "vllm"}.get(api, api)


# Of a server with room for some of so many requests, which take turns.
CROWDED = ["--preemption_concurrency", 12]
SMALL_SERVER = {"room": 300, "step_s": 0.01}
# Which flags show a fault of which server, and in which check it has which name.
FLAGS = {
    "top-k after acceptance": ["--top_k", 3, "--total_variation", 0.12],
    "draft state lost at a cancellation": ["--concurrency", 1],
    "stale KV after a preemption": CROWDED,
    # When one gives way depends on the machine's load: of short answers the last ones have too few
    # drafts left to lose.
    "draft state lost at a preemption": [*CROWDED, "--gen_len", 80],
}
SERVERS: dict[str, dict[str, Any]] = dict.fromkeys(PREEMPTION_FAULTS, SMALL_SERVER)
CHECK_OF = (
    dict.fromkeys(GREEDY_FAULTS, (GREEDY, "tokens"))
    | dict.fromkeys(SAMPLING_FAULTS, (SAMPLING, "distribution"))
    | {
        "wrong scores of texts": (GREEDY, "log-probabilities"),
        "double counts": (COUNTERS, "double counts"),
        "drafts counted that were not judged": (COUNTERS, "drafts never judged"),
        "bonus tokens counted as accepted": (COUNTERS, "double counts"),
        "counters of cancelled drafts": (COUNTERS, "counters"),
        "accepted tokens a step in place of a rate": (COUNTERS, "rate above 1"),
        "acceptance length without the bonus token": (COUNTERS, "acceptance length"),
        "stale KV after a preemption": (PREEMPTION, "tokens after a preemption"),
        "draft state lost at a preemption": (PREEMPTION, "acceptance after a preemption"),
        "draft state lost at a hit": (STATE, "acceptance after a cache hit"),
        "draft state lost at a cancellation": (STATE, "acceptance beside a cancelled request"),
        "draft decays": (STATE, "acceptance later"),
        "more drafts than the head was trained for": (COUNTERS, "useless drafts"),
    }
)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_named(audit: Auditing, fault: str) -> None:
    check, name = CHECK_OF[fault]
    flags = FLAGS.get(fault, ())
    found = audit("--checks", check, *flags, fault=fault, **SERVERS.get(fault, {}))
    assert found.ended.code == 1, found.ended
    assert found.status(check) == "mismatch"
    assert name in found.findings(check), found.findings(check)


def test_samples_are_drawn_where_lookups_draft(audit: Auditing) -> None:
    """Texts without repeats, after which they draft nothing else."""
    flags = ["--checks", SAMPLING]
    sound = audit(*flags, looks_up=True)
    assert sound.ended.code == 0, sound.ended
    assert sound.record.sampled and sound.status(SAMPLING) == "verified"
    lossy = audit(*flags, looks_up=True, fault="drafts accepted by the likeliest token")
    assert lossy.ended.code == 1 and "distribution" in lossy.findings(SAMPLING)


def test_samples_without_a_known_distribution_are_not_judged(audit: Auditing) -> None:
    """Of a flat one the likeliest tokens are not as much as `top_p`."""
    flags = ["--checks", SAMPLING, "--temperature", 1, "--top_p", 0.999]
    found = audit(*flags, sharpness=1.2)
    assert found.ended.code == 3 and not found.record.sampled
    assert "no place was found" in found.record.checks[0].text


def test_every_kind_of_fault_is_planted() -> None:
    assert {*CHECK_OF} == {*FAULTS}
    assert {check for check, _ in CHECK_OF.values()} == {*AUDIT_CHECKS}
    assert all((COUNTER_FAULTS, STATE_FAULTS))


def test_preempted_requests_go_on_as_if_alone(audit: Auditing) -> None:
    found = audit("--checks", PREEMPTION, *CROWDED, **SMALL_SERVER)
    assert found.ended.code == 0, found.ended
    states = {cell.state: cell for cell in found.record.states}
    assert {*states} == {"after a preemption", "beside preempted requests"}
    assert states["after a preemption"].num_requests >= 4
    assert sum(cell.num_requests for cell in states.values()) % 12 == 0
    assert not any(cell.num_different for cell in states.values())


def test_preemption_is_not_judged_where_none_is_seen(audit: Auditing) -> None:
    flags = ["--checks", PREEMPTION, *CROWDED]
    with_room = audit(*flags)
    assert with_room.ended.code == 3 and with_room.status(PREEMPTION) == "unverified"
    assert "preempted none of 12 requests at once" in with_room.record.checks[0].text
    uncounted = audit(*flags, prefix="llamacpp:")
    assert uncounted.ended.code == 3
    assert "llama.cpp say nothing of preemptions" in uncounted.record.checks[0].text


def test_wrong_answers_are_in_the_record(audit: Auditing) -> None:
    """Each with its first wrong token, whether the page names it or not."""
    found = audit("--checks", GREEDY, fault="lenient acceptance")
    wrong = found.record.wrong
    assert len(wrong) == sum(cell.num_wrong_requests for cell in found.record.greedy) > 3
    text = found.findings(GREEDY)["tokens"]
    assert all(str(token) in text for token in wrong[:3]) and str(wrong[3]) not in text
    assert all(token.margin > (found.record.tolerance or 0) for token in wrong)


def test_a_plain_server_judges(audit: Auditing) -> None:
    """Also where the audited server says wrong log-probabilities everywhere."""
    sound = audit("--checks", GREEDY, plain=SpeculatingServer(speculates=False))
    assert sound.ended.code == 0 and "by the plain server" in sound.record.checks[0].text
    lossy = audit(
        "--checks", GREEDY, fault="lenient acceptance", plain=SpeculatingServer(speculates=False)
    )
    assert "tokens" in lossy.findings(GREEDY)


def test_a_plain_server_of_another_model_is_refused(audit: Auditing) -> None:
    other = SpeculatingServer(speculates=False, sharpness=9.0)
    found = audit("--checks", GREEDY, plain=other)
    assert found.ended.code == 2 and not found.records
    assert "serves another model" in found.ended.err.splitlines()[-1]


def test_a_server_that_scores_no_texts_is_judged_token_by_token(audit: Auditing) -> None:
    found = audit("--checks", GREEDY, lacks=("texts",), fault="stale KV after a rejection")
    assert "tokens" in found.findings(GREEDY)
    assert not any("whole text" in pair.ways for pair in found.record.noise)


def test_tokens_without_an_event_are_judged(audit: Auditing) -> None:
    """The answer is asked for in one piece, its log-probabilities too."""
    words = ["--endpoint_api", "llama.cpp", "--no_metrics", "--checks", GREEDY]
    found = audit(*words, lacks=("events",))
    assert found.ended.code == 0 and found.record.greedy[0].num_tokens == 320


def test_a_sample_of_tokens_says_what_could_hide(audit: Auditing) -> None:
    found = audit("--checks", GREEDY, "--judged", 10, lacks=("texts",))
    assert found.record.greedy[0].num_tokens == 80
    assert "in fewer than" in (found.record.checks[0].bound or "")


def test_without_log_probabilities_the_rest_is_judged(audit: Auditing) -> None:
    found = audit(lacks=("scores",))
    assert found.ended.code == 3
    assert {name: found.status(name) for name in (GREEDY, COUNTERS, STATE, SAMPLING)} == {
        GREEDY: "unverified",
        COUNTERS: "verified",
        STATE: "verified",
        SAMPLING: "unverified",
    }


def test_few_log_probabilities_judge(audit: Auditing) -> None:
    """The server cuts those of the 20 likeliest tokens to 5."""
    sound = audit("--checks", GREEDY, SAMPLING, lacks=("many scores",))
    assert sound.ended.code == 0, sound.ended
    lossy = audit("--checks", GREEDY, lacks=("many scores",), fault="lenient acceptance")
    assert "tokens" in lossy.findings(GREEDY)


def test_without_counts_steps_are_seen(audit: Auditing) -> None:
    """The tokens of a step come together."""
    found = audit("--checks", COUNTERS, STATE, "--no_metrics", lacks=("counts",))
    assert found.status(COUNTERS) == "unverified" and "--endpoint_metrics" in found.ended.out
    assert found.status(STATE) == "verified"
    assert 2 < (found.record.states[0].tokens_per_step or 0) < 5


def test_drafts_that_never_are_prove_nothing(audit: Auditing) -> None:
    found = audit("--checks", COUNTERS, speculates=False)
    assert found.ended.code == 3
    assert "nothing was drafted" in found.record.checks[0].text


def test_what_is_finished_is_kept_if_the_server_fails(audit: Auditing) -> None:
    """It answers garbage with status 200."""
    found = audit("--checks", GREEDY, STATE, fails_after=160)
    assert found.ended.code == 3
    # Near ties may be lost to the noise of requests that come to be open together.
    assert found.status(GREEDY) in ("verified", "verified_with_ties")
    assert found.status(STATE) == "failed"
    assert "no JSON" in next(c.text for c in found.record.checks if c.name == STATE)
    at_once = audit(fails_after=0)
    assert at_once.ended.code == 2 and len(at_once.records) == 1
    assert "no JSON" in at_once.ended.err.splitlines()[-1]


def test_prompts_that_are_too_short_are_refused(audit: Auditing) -> None:
    found = audit("--prefix_len", 1500)
    assert found.ended.code == 2
    assert "has 1 parts of --prefix_len 1500 tokens" in found.ended.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--top_p", 0.9], "--top_p 0.9 with --temperature 0.6"),
        (["--top_k", 5, "--top_p", 0.9, "--temperature", 1], "give one of them"),
        (["--top_k", 20], "--top_k 20"),
        (["--endpoint_model", "other"], "--endpoint_model other is not served there"),
        (["--plain", "nowhere"], "is no URL"),
        (["--checks", "preemption"], "preemption needs --endpoint URL and --preemption_concurr"),
        ([*CROWDED, "--checks", "state"], "--preemption_concurrency 12 is for the check preemp"),
        ([*CROWDED, "--no_metrics"], "--preemption_concurrency 12 needs --endpoint_metrics URL"),
        (["--baseline", "none.jsonl"], "none.jsonl"),
        (["--price_per_hour", 2], "there is no --arm"),
    ],
)
def test_what_cannot_be_audited_is_refused_in_one_line(
    audit: Auditing, flags: list[object], reason: str
) -> None:
    found = audit(*flags)
    assert found.ended.code == 2 and reason in found.ended.err
    assert len(found.ended.err.splitlines()) == 1


def test_text_without_ids_is_refused(audit: Auditing) -> None:
    found = audit(lacks=("ids",))
    assert found.ended.code == 2 and "no token ids" in found.ended.err.splitlines()[-1]


def test_verdicts_as_junit_and_beside_an_earlier_audit(
    audit: Auditing, tmp_path: Path, book: Path
) -> None:
    junit = tmp_path / "audit.xml"
    audit("--checks", COUNTERS, GREEDY)
    found = audit(
        *("--checks", COUNTERS, GREEDY, "--junit", junit),
        *("--baseline", tmp_path / "audits.jsonl"),
        fault="more drafts than the head was trained for",
    )
    assert found.ended.code == 1
    assert "regression" in found.ended.out or "in the baseline" in found.ended.out
    suite = ElementTree.parse(junit).getroot()
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert COUNTERS in failed and any("tokens a step" in str(name) for name in failed)
    assert suite.get("name") == "Audit of a server"
