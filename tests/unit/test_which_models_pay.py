"""scripts/dev/which_models_pay.py: the tables of its page, and five cells by hand, from the
published shapes, as docs/log/models.md has them."""

from collections.abc import Callable
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

# Of an H200.
READ = 0.8 * 4.8e12
COMPUTE = 0.6 * 989e12
LAYER_S = 5e-6
Seconds = Callable[[int, int], float]  # of a forward: new tokens of a row, visible tokens


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch) -> Any:
    import which_models_pay

    return which_models_pay


def test_the_page_has_the_tables_as_they_are(pays: Any) -> None:
    text = pays.PAGE.read_text()
    for name in pays.TABLES:
        assert pays.BEGIN.format(name) in text and pays.END.format(name) in text
    assert pays.written(text) == text, "run scripts/dev/which_models_pay.py --write"


def time_of(weights: float, flops: float, kv: float, attention: float, layers: int) -> float:
    linear = max(weights / READ, flops / COMPUTE)
    return linear + max(kv / READ, attention / COMPUTE) + layers * LAYER_S


def speedup(target: Seconds, S: int, budget: int, gamma: int, acceptance: float) -> float:
    """Of `gamma` drafts of the model itself that read `budget` tokens, as section 3 of MagicDec."""
    draft = sum(target(1, budget + k) for k in range(gamma))
    tokens = sum(acceptance**k for k in range(gamma + 1))
    return tokens * target(1, S) / (draft + target(gamma + 1, S))


def cell(pays: Any, name: str, way: int, B: int, S: int) -> tuple[float, int]:
    place = pays.Place(name, pays.SPECS["h200"])
    found: tuple[float, int] = place.speedup(pays.WAYS[way], B, S)
    return found


def test_llama_31_8b_by_hand(pays: Any) -> None:
    """Eight requests of 32,768 tokens: 7.50 billion weights, and 131,072 bytes a token."""

    def target(T: int, S: int) -> float:
        kv = 8 * (S + T) * 32 * 2 * 8 * 128 * 2
        return time_of(2 * 7.505e9, 2 * 8 * T * 7.505e9, kv, 0, 32)

    found, gamma = cell(pays, "llama-3.1-8b", 0, 8, 32768)
    assert (gamma, round(found, 2)) == (3, 1.50)
    assert found == pytest.approx(speedup(target, 32768, 512, gamma, 0.8), rel=2e-3)


def test_gpt_oss_20b_by_hand(pays: Any) -> None:
    """Sixteen requests of 131,072 tokens: 32 experts in 4.25 bits, 12 layers with a window."""
    expert = 3 * 2880 * 2880
    dense = 24 * (2880 * 64 * (64 + 2 * 8) + 64 * 64 * 2880) + 201088 * 2880

    def target(T: int, S: int) -> float:
        touched = 32 * (1 - (1 - 4 / 32) ** (16 * T))
        weights = 2 * dense + 24 * touched * expert * 4.25 / 8
        flops = 2 * 16 * T * (dense + 24 * 4 * expert)
        kv = 16 * 12 * (S + T + min(S, 127) + T) * 2 * 8 * 64 * 2
        return time_of(weights, flops, kv, 0, 24)

    found, gamma = cell(pays, "gpt-oss-20b", 1, 16, 131072)
    assert (gamma, round(found, 2)) == (5, 2.05)
    assert found == pytest.approx(speedup(target, 131072, 2048, gamma, 0.85), rel=5e-3)


def test_qwen35_27b_by_hand(pays: Any) -> None:
    """Four requests of 262,144 tokens: 16 layers of attention, 48 with a state for each request."""
    mlp = 3 * 5120 * 17408
    full = 5120 * 256 * (2 * 24 + 2 * 4) + 24 * 256 * 5120
    channels = 2 * 16 * 128 + 48 * 128
    linear = 5120 * (channels + 48 * 128 + 2 * 48) + 48 * 128 * 5120
    weights = 64 * mlp + 16 * full + 48 * linear + 248320 * 5120
    state = 48 * (48 * 128 * 128 * 4 + 3 * channels * 2)
    written = 48 * 4 * (16 * 128 + 48 * 128 + 48)

    def target(T: int, S: int) -> float:
        kv = 4 * ((S + T) * 16 * 2 * 4 * 256 * 2 + 2 * (state + T * written))
        return time_of(2 * weights, 2 * 4 * T * weights, kv, 0, 64)

    found, gamma = cell(pays, "qwen3.5-27b", 1, 4, 262144)
    assert (gamma, round(found, 2)) == (3, 1.37)
    assert found == pytest.approx(speedup(target, 262144, 2048, gamma, 0.85), rel=2e-3)


def test_deepseek_v3_by_hand(pays: Any) -> None:
    """Four requests of 131,072 tokens on 8 GPUs: experts in FP8 and latents on every GPU."""
    expert = 3 * 7168 * 2048
    whole = 7168 * 1536 + 7168 * 576  # of the latents, on every GPU
    heads = 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    layers = 61 * (whole + heads / 8) + 3 * 3 * 7168 * 18432 / 8 + 58 * expert / 8
    head = 129280 * 7168 / 8

    def target(T: int, S: int) -> float:
        touched = 256 * (1 - (1 - 8 / 256) ** (4 * T))
        weights = layers + 58 * touched * expert / 8 + 2 * head + 2 * 58 * 256 * 7168
        kv = 4 * (S + T) * 61 * 576 * 2
        per_key = 16 * 2 * (576 + 512)
        attention = 4 * 61 * per_key * (T * S + T * (T + 1) / 2)
        sums = 123 * 8e-6 + 122 * 1.75 * 4 * T * 7168 * 2 / 450e9
        flops = 2 * 4 * T * (layers + 58 * 8 * expert / 8 + head)
        return time_of(weights, flops, kv, attention, 61) + sums

    found, gamma = cell(pays, "deepseek-v3", 0, 4, 131072)
    assert (gamma, round(found, 2)) == (2, 1.25)
    assert found == pytest.approx(speedup(target, 131072, 512, gamma, 0.8), rel=5e-3)


def test_a_head_of_qwen3_30b_by_hand(pays: Any) -> None:
    """Four requests of 4096 tokens: a draft makes the verification read more experts than it
    brings tokens."""
    expert = 3 * 2048 * 768
    dense = 48 * (2048 * 128 * (32 + 2 * 4) + 32 * 128 * 2048 + 128 * 2048) + 151936 * 2048
    # The states, a layer that reads token and state, its MLP, and 32,000 tokens.
    head = 3 * 2048**2 + (16 + 2 * 8) * 128 * 4096 + 2048**2 + 3 * 2048 * 7168 + 32000 * 2048

    def target(T: int, S: int) -> float:
        touched = 128 * (1 - (1 - 8 / 128) ** (4 * T))
        kv = 4 * (S + T) * 48 * 2 * 4 * 128 * 2
        return time_of(2 * (dense + 48 * touched * expert), 0, kv, 0, 48)

    draft = time_of(2 * head, 0, 4 * 4097 * 2 * 8 * 128 * 2, 0, 1)
    expected = 1.65 * target(1, 4096) / (draft + target(2, 4096))
    found, gamma = cell(pays, "qwen3-30b-a3b", 2, 4, 4096)
    assert (gamma, round(found, 2)) == (1, 1.04)
    assert found == pytest.approx(expected, rel=2e-3)


def test_room_by_hand(pays: Any) -> None:
    """Of 127 GB, bfloat16 weights take 16.06; each request 131,072 bytes a token."""
    place = pays.Place("llama-3.1-8b", pays.SPECS["h200"])
    most = int((0.9 * 141e9 - 2 * 8_030_261_248) / 131072)
    assert place.fits(1, most) and not place.fits(1, most + 1)
    assert place.fits(64, most // 64) and not place.fits(64, most // 64 + 1)


def test_experts_of_alike_drafts_are_read_once(pays: Any) -> None:
    plain, alike = (pays.Place("qwen3-30b-a3b", pays.SPECS["h200"], a) for a in (False, True))
    forwards = [place.target().forward(1, 4, 100).weight_bytes for place in (plain, alike)]
    one = plain.target().forward(1, 1, 100).weight_bytes
    assert forwards[0] > 1.9 * one and forwards[1] == one


def test_what_is_said_of_contexts(pays: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place = pays.Place("llama-3.1-8b", pays.SPECS["h200"])
    way = pays.WAYS[0]

    def paying_contexts(*paying: int) -> str:
        monkeypatch.setattr(
            pays.Place, "speedup", lambda self, way, B, S, level: (1.05 if S in paying else 1.0, 1)
        )
        text: str = place.pays(way, 1)
        return text

    asked = place.contexts(1)
    assert asked == [1 << n for n in range(10, 18)]
    assert paying_contexts(*asked) == "always" and paying_contexts() == "never"
    assert paying_contexts(*asked[3:]) == "from 8k" and paying_contexts(2048, 4096) == "2k to 4k"
    assert place.pays(way, 4096) == "no room"


def test_a_cell_of_the_map_is_that_of_its_context_and_requests(pays: Any) -> None:
    """Its colour says what pays, and its number is the faster one of both."""

    class Cell:
        longest = pays.CONTEXTS[-2]

        def fits(self, B: int, S: int) -> bool:
            return pays.BATCHES.index(B) < len(pays.BATCHES) - 1

        def speedup(self, way: Any, B: int, S: int) -> tuple[float, int]:
            place = pays.CONTEXTS.index(S) if way.budget is not None else pays.BATCHES.index(B)
            return 1.0 + 0.3 * place, 2

    ax = Figure().subplots()
    pays.draw_map(ax, Cell())
    texts = [[text.get_text() for text in axis.get_ticklabels()] for axis in (ax.xaxis, ax.yaxis)]
    assert texts == [[pays.thousands(S) for S in pays.CONTEXTS], list(map(str, pays.BATCHES))]
    cells = {(round(c.get_x()), round(c.get_y())): to_hex(c.get_facecolor()) for c in ax.patches}
    assert {*cells} == {(x, y) for x in range(len(texts[0]) - 1) for y in range(len(texts[1]) - 1)}
    cell_texts = {
        tuple(int(end) for end in text.get_position()): text.get_text() for text in ax.texts
    }
    for (x, y), colour in cells.items():
        pay = x > 0, y > 0
        assert colour == to_hex(pays.KINDS[(*pay, any(pay) and x > y)][1])
        assert cell_texts[x, y] == (f"{1 + 0.3 * max(x, y):.1f}" if any(pay) else "")
