"""`PrefixCache` finds a text's longest beginning after which a snapshot of states was taken, and is
held: against texts that are kept in a list, over random texts that share beginnings."""

from collections import OrderedDict
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.kv.prefix_cache import PrefixCache, SnapshotRoom

BLOCK = 4
Text = tuple[int, ...]


@settings(max_examples=200)
@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(1, 3))
def test_a_text_begins_where_a_snapshot_was_taken(seed: int, count: int, fewest: int) -> None:
    random = Random(seed)
    prefixes = PrefixCache(BLOCK, snapshots=SnapshotRoom(count, fewest))
    taken = OrderedDict[Text, int]()  # the text used longest ago first
    texts = list[Text]([()])
    for number in range(20):
        before = random.choice(texts)
        before = before[: random.randint(0, len(before))]
        text = (*before, *(random.randrange(2) for _ in range(random.randint(1, 9))))
        found = prefixes.find(text)
        usable = [t for t in taken if t == text[: len(t)] and len(t) <= len(text) - fewest]
        best = max(usable, key=len, default=())
        assert found.num_tokens == len(best)
        assert found.snapshot == taken.get(best)
        if best:
            prefixes.adopt(0, found)
            taken.move_to_end(best)
            if found.source is not None:
                prefixes.copied(0)
        # A row's own blocks, and those of its path.
        own = range(1000 * (number + 1), 1000 * (number + 1) + 100)
        blocks = [node.block for node in found.path]
        blocks += [*own][: len(text) // BLOCK + 1 - len(blocks)]
        prefixes.leave(0, text, blocks)
        for length in sorted({*random.choices(range(1, len(text) + 1), k=3), len(text)}):
            place = prefixes.take_snapshot(text[:length])
            if text[:length] in taken:
                assert place is None
                continue
            assert place is not None
            if len(taken) == count:
                _, given_up = taken.popitem(last=False)
                assert place == given_up
            taken[text[:length]] = place
        assert len(set(taken.values())) == len(taken) <= count
        texts.append(text)
        if random.random() < 0.2:
            prefixes.clear()
            taken.clear()


def test_a_block_that_is_forgotten_loses_its_snapshots() -> None:
    prefixes = PrefixCache(BLOCK, snapshots=SnapshotRoom(2))
    prefixes.leave(0, (1,) * 8, [0, 1])
    assert prefixes.take_snapshot((1,) * 6) is not None
    assert prefixes.find((1,) * 9).num_tokens == 6
    assert prefixes.evict(1) == [1]
    found = prefixes.find((1,) * 9)
    assert (found.num_tokens, found.num_known) == (0, 4)
    assert prefixes.take_snapshot((1,) * 6) is None, "its text is not here"
    assert prefixes.take_snapshot((1,) * 4) is not None
    assert prefixes.find((1,) * 9).num_tokens == 4
