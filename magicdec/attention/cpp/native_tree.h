// The nodes of draft trees (kv/tree.py): where they lie, and the keys that each of them sees, in the order of positions.
//
// A tree of a row is one more range of its keys, [base, base + length of the longest path), in which every new token sees the
// nodes of its own path. A key of this range is thus at the place that it has in a chain, and a token has the same bits as
// in a chain of its ancestors.

struct Paths {
    int64_t num_new, num_nodes, longest;  // longest: the most tokens of any path
    std::vector<int64_t> bases;   // tokens before the tree [B]
    std::vector<int64_t> depths;  // of the new tokens [B, T]
    std::vector<int64_t> nodes;   // of their paths, from the root on [B, T, longest]
    std::vector<int64_t> slots;   // of all nodes, in the pool of head 0 [B, U]

    int64_t position(int64_t b, int64_t t) const { return bases[b] + depths[b * num_new + t]; }
    int64_t cell(int64_t b, int64_t t) const { return bases[b] + num_nodes - num_new + t; }
    int64_t slot(int64_t b, int64_t t, int64_t depth) const {
        return slots[b * num_nodes + nodes[(b * num_new + t) * longest + depth]];
    }
    // The slot of the first node of a row.
    int64_t first_slot(int64_t b) const { return slots[b * num_nodes]; }
};

// Keys and values of one path, in the layout of the pools: SPAN tokens of SIZE pool numbers each.
template <typename Pool, int64_t SPAN, int64_t SIZE>
struct PathRoom {
    alignas(64) Pool keys[SPAN * SIZE], values[SPAN * SIZE];
    int64_t held[SPAN];  // the slots whose tokens were copied here, or -1
};

// For `count` keys of a segment from `at` on, some of which are nodes, which lie in one span of SPAN positions: calls
// body(first, last, lane) for the task's queries [first, last) of each token that sees one of these nodes or a key before
// them. The room then holds the keys of this token's path from `lane` on.
template <typename Kernel, typename Pool, int64_t SPAN, int64_t SIZE, typename Body>
void by_path(const Problem& p, const Task& task, const Segment& segment, int64_t at, int64_t count, const Pool* k_pool,
             const Pool* v_pool, PathRoom<Pool, SPAN, SIZE>& room, Body body) {
    const Paths& paths = *p.paths;
    const int64_t head = task.head * p.block_size, position = segment.first + at, lane = position % SPAN;
    const int64_t num_before = std::clamp<int64_t>(segment.num_before - at, 0, count), base = paths.bases[task.row];
    for (int64_t to = lane / TILE * TILE; to < lane + count; to += TILE) {  // keys before the tree, in whole tiles
        const int64_t from = segment.slot + head + at - lane + to;
        Pool *keys = room.keys + to * SIZE, *values = room.values + to * SIZE;
        if (to < lane + num_before) {
            std::copy_n(k_pool + from * SIZE, TILE * SIZE, keys);
            std::copy_n(v_pool + from * SIZE, TILE * SIZE, values);
        } else {
            std::fill_n(keys, TILE * SIZE, Pool{});
            std::fill_n(values, TILE * SIZE, Pool{});
        }
    }
    std::fill_n(room.held, SPAN, -1);
    const int64_t group = p.group(), begin = task.first_query, end = begin + task.num_queries;
    for (int64_t t = begin / group; t * group < end; ++t) {
        const int64_t own = paths.position(task.row, t);
        if (own < position) continue;
        for (int64_t key = position + num_before; key < position + count && key <= own; ++key) {
            const int64_t slot = paths.slot(task.row, t, key - base) + head, to = lane + key - position;
            if (room.held[to] != slot) Kernel::copy(k_pool, v_pool, slot, to, room.keys, room.values);
            room.held[to] = slot;
        }
        body(std::max(t * group, begin) - begin, std::min(t * group + group, end) - begin, lane);
    }
}
