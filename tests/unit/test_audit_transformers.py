"""`magicdec audit` of transformers' assisted generation (`transformers_server.py`): every class
that drafts with a model of any family, as it is installed, and with faults.

What version 5.23.0 does (docs/log/serving.md): greedy tokens are right with all of them, and so are
samples but for those of `UniversalSpeculativeDecodingGenerator`. Of its issue 47932, in which a
class returns the logits of another distribution than its drafts have, none of these has anything
left, but `SinglePositionMultiTokenCandidateGenerator` has, which is for Gemma 4 alone. A test that
fails with a newer version is news."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Command

pytest.importorskip("transformers")

from transformers import GenerationConfig
from transformers.generation.candidate_generator import (
    AssistantToTargetTranslator,
    AssistedCandidateGenerator,
    SinglePositionMultiTokenCandidateGenerator,
)
from transformers.generation.utils import _speculative_sampling
from transformers_server import (
    CLASSES,
    AssistedServer,
    raw_candidates,
    shifted_candidates,
    target_logits_in_order,
)

from magicdec.bench.audit.record import AuditRecord
from magicdec.bench.audit.sampling import Expected, compare_draws
from magicdec.names import AUDIT_CHECKS
from magicdec.records.reading import read_records

GREEDY = "greedy"
SAMPLING = "sampling"
assert {GREEDY, SAMPLING} <= set(AUDIT_CHECKS)
SMALL = ["--prefix_len", 24, "--gen_len", 40, "--num_requests", 4, "--concurrency", 1]
TOP_K = ["--temperature", 1, "--top_k", 5]
FAST = ["--num_places", 1, "--total_variation", 0.2]
GENERATOR = "_generate_candidates"
MEND = "get_target_logits"
OTHER = "other tokenizer"

Auditing = Callable[..., tuple[AssistedServer, AuditRecord]]


@pytest.fixture
def audit(command: Command, tmp_path: Path) -> Iterator[Auditing]:
    """Audits a server that drafts so."""
    servers = list[AssistedServer]()
    letters = random.Random(1)
    book = tmp_path / "book.txt"
    book.write_text("".join(chr(32 + letters.randrange(90)) for _ in range(400)))

    def run(drafts: str, *words: object) -> tuple[AssistedServer, AuditRecord]:
        server = AssistedServer(drafts=drafts)
        servers.append(server)
        server.start()
        url = f"{server.address}/v1"
        out = tmp_path / "audits.jsonl"
        flags = ["--checks", GREEDY, SAMPLING, *SMALL, *words, "--out", out]
        command("audit", "--endpoint", url, "--dataset", book, *flags)
        return server, list(read_records(out, AuditRecord))[-1]

    yield run
    for server in servers:
        server.stop()


def statuses(record: AuditRecord) -> dict[str, str]:
    return {check.name: str(check.status) for check in record.checks}


def test_an_assistant_model_is_clean(audit: Auditing) -> None:
    server, record = audit("assistant", *TOP_K, *FAST)
    assert statuses(record) == {GREEDY: "verified", SAMPLING: "verified"}
    assert {*CLASSES["assistant"]} == server.classes
    assert 1.2 < (record.greedy[0].tokens_per_step or 0) < 4, "drafts are neither right nor wrong"


def test_logits_before_top_k_are_found(audit: Auditing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens do not show it."""
    monkeypatch.setattr(AssistedCandidateGenerator, GENERATOR, raw_candidates)
    _, record = audit("assistant", *TOP_K, "--num_places", 1, "--total_variation", 0.3)
    assert statuses(record) == {GREEDY: "verified", SAMPLING: "mismatch"}


class Gemma4AssistantStandIn:
    """An assistant that says the same logits of any token."""

    device = torch.device("cpu")
    generation_config = GenerationConfig(num_assistant_tokens=1)

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits[None, None]

    def __call__(self, *, inputs_embeds: torch.Tensor, **more: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits, last_hidden_state=inputs_embeds[..., :4])


def test_drafts_of_gemma_4_are_certain_but_have_other_logits() -> None:
    """They are the likeliest tokens of the assistant, and are judged as if they were drawn from
    its distribution."""
    torch.manual_seed(0)
    target, assistant = torch.randn(2, 10)
    generator = SinglePositionMultiTokenCandidateGenerator(
        Gemma4AssistantStandIn(assistant), torch.nn.Embedding(10, 4), GenerationConfig(max_length=9)
    )
    outputs = SimpleNamespace(hidden_states=[torch.zeros(1, 3, 4)], shared_kv_states={})
    ids, logits = generator.get_candidates(torch.ones(1, 3).long(), {}, outputs, False, 0)
    certain = torch.full_like(logits, -torch.inf).scatter(-1, ids[None, :, 3:], 0.0)
    expected = Expected(dict(enumerate(target.softmax(0).tolist())), is_closed=True)
    p_values = list[float]()
    for judged in (logits, certain):
        both = target.expand(1, 2, -1)
        found = [_speculative_sampling(ids, judged, 1, both)[0] for _ in range(1000)]
        test = compare_draws([int(tokens[0, 0]) for tokens in found], expected, 0.0)
        assert test is not None
        p_values.append(test.p_value)
    assert p_values[0] < 1e-9 and p_values[1] > 0.01, "it is mended, or its repair is wrong"


@pytest.mark.wide
@pytest.mark.parametrize("sampling", [TOP_K, ["--temperature", 0.6]], ids=["top_k", "temperature"])
@pytest.mark.parametrize("drafts", CLASSES)
def test_every_class_but_one_is_clean(
    audit: Auditing, monkeypatch: pytest.MonkeyPatch, drafts: str, sampling: list[object]
) -> None:
    """The one is clean if its logits are mended."""
    if drafts == OTHER:
        monkeypatch.setattr(AssistantToTargetTranslator, MEND, target_logits_in_order)
    server, record = audit(drafts, *sampling, *FAST)
    assert statuses(record) == {GREEDY: "verified", SAMPLING: "verified"}
    assert {*CLASSES[drafts]} == server.classes


@pytest.mark.wide
def test_an_assistant_with_another_tokenizer_is_lossy(audit: Auditing) -> None:
    """Its logits are those of other tokens: the pruned head has them in the order of a vocabulary
    as its tokenizer lists it, and they are read in the order of ids. So all drafts are accepted."""
    _, record = audit(OTHER, *TOP_K, *FAST)
    assert statuses(record) == {GREEDY: "verified", SAMPLING: "mismatch"}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("drafts", "fault", "sampling"),
    [
        # Without top-k, so that all drafts are accepted.
        ("early exit", shifted_candidates, ["--temperature", 1]),
        (OTHER, raw_candidates, TOP_K),
    ],
)
def test_logits_of_another_distribution_are_found(
    audit: Auditing,
    monkeypatch: pytest.MonkeyPatch,
    drafts: str,
    fault: Callable[..., Any],
    sampling: list[object],
) -> None:
    """Also with the other classes that draft with a model."""
    monkeypatch.setattr(AssistantToTargetTranslator, MEND, target_logits_in_order)
    monkeypatch.setattr(AssistedCandidateGenerator, GENERATOR, fault)
    _, record = audit(drafts, *sampling, *FAST)
    assert statuses(record) == {GREEDY: "verified", SAMPLING: "mismatch"}
