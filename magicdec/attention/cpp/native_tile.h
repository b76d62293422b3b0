// Tiles of keys and values in bfloat16 pairs, and attention over tiles: what is the same for all ways to multiply one
// (native_bf16.h with bfloat16 dot products, native_wide.h without, native_codes.h for codes, native_registers.h).
//
// The KV pools have a layout for small GEMMs (Tiled of kv/layout.py). For every TILE tokens of a head, keys are stored as
// [pair of dimensions][token] and values as [pair of tokens][dimension], where an entry holds the two elements of a pair.
// They are loaded from memory into the products without shuffles, and the result for a query is the same to the bit whatever
// other queries are computed with it. A token's lane in a tile is its position modulo TILE.

// Keys of one segment that are processed together: vectors of LANES keys from `keys` on, and pairs of values from
// `values` on. Lanes before `low` and from `high` on do not belong to the segment.
struct Tile {
    const uint32_t *keys, *values;
    int64_t low, high, first_group, num_groups;  // pairs, which are counted from the first vector's first lane
};

// Pools of bfloat16 pairs.
struct PairPools {
    using Pool = bfloat16;
    static Tile at(const Pool* k_pool, const Pool* v_pool, int64_t slot, int64_t count) {
        const int64_t tile = slot / TILE * TILE * PAIRS, lane = slot % TILE;
        const int64_t vector = lane / LANES * LANES, low = lane - vector, high = low + count;
        return {reinterpret_cast<const uint32_t*>(k_pool) + tile + vector,
                reinterpret_cast<const uint32_t*>(v_pool) + tile + lane / 2 * HEAD_SIZE,
                low, high, low / 2, (high + 1) / 2 - low / 2};
    }
    // Numbers need not be unpacked.
    static void begin_keys(const Tile&, int64_t, int64_t) {}
    static void begin_values(const Tile&, int64_t) {}
    static void append(const bfloat16* k, const bfloat16* v, int64_t slot, Pool* k_pool, Pool* v_pool) {
        const int64_t tile = slot / TILE * TILE * HEAD_SIZE, lane = slot % TILE;
        for (int pair = 0; pair < PAIRS; ++pair) std::memcpy(k_pool + tile + (pair * TILE + lane) * 2, k + 2 * pair, 4);
        for (int d = 0; d < HEAD_SIZE; ++d) v_pool[tile + (lane / 2 * HEAD_SIZE + d) * 2 + lane % 2] = v[d];
    }
};

// Calls body.operator()<C>() with the number C of vectors that hold `count` keys.
template <typename Body>
inline void by_vectors(int64_t count, Body body) {
    switch ((count + LANES - 1) / LANES) {
        case 1: body.template operator()<1>(); break;
        case 2: body.template operator()<2>(); break;
        case 3: body.template operator()<3>(); break;
        default: body.template operator()<4>(); break;
    }
}

#include "native_registers.h"

// Like attend_piece of native_float32.h, but the queries are not scaled. `Tiles` knows a storage and how to multiply it:
// the tile `at` a slot, `score`, `soften` (scores to weights) and `weigh` (the weighted sum of values). Its `Left` operands
// are queries [queries][Kernel::QUERY_SIZE] and weights. It may have `registers`, which score and weigh for all queries.
// With AVX-512 it has `soften_fours`, for adjacent queries that see all of a whole tile, a multiple of four.
template <typename Kernel, typename Tiles, typename Scratch>
inline int64_t attend_tiles(const Tiles& tiles, const Problem& p, const Task& task, const Segment* segments,
                            const typename Tiles::Pool* k_pool, const typename Tiles::Pool* v_pool,
                            const typename Tiles::Left* q, Scratch& x, float* maximum, float* total, float* acc,
                            const Mass& mass) {
    const int64_t M = task.num_queries, head = task.head * p.block_size;
    int64_t read = 0, met = 0;  // keys read, and blocks of keys processed for `mass`
    const float factor = LOG2_E / std::sqrt(float(HEAD_SIZE));
    mass.clear(M);
    std::fill(maximum, maximum + M, HIDDEN);
    std::fill(total, total + M, 0.0f);
    std::fill(acc, acc + M * HEAD_SIZE, 0.0f);
    int64_t own[MAX_QUERIES];  // the queries' positions
    for (int64_t m = 0; m < M; ++m) own[m] = p.own_position(task, m);
    constexpr bool may_be_in_registers = requires { tiles.registers(); };
    const auto sees_all = [&](int64_t own, int64_t position) {
        const auto [from, to] = p.seen_from(own, position, TILE);
        return to - from == TILE;
    };
    const bool has_registers = Tiles::has_registers && p.is_prefill() && may_use_tiles();
    amx::Registers registers;
    if (has_registers) registers.load(SIDE);
    // Adds the keys of a tile, `count` from `position` on, to the results. While they are read, the keys and values of
    // `next` are prefetched. Inlined it is slower: within the loops over segments, registers are spilled.
    auto add = [&](const auto& tile, const auto& next, int64_t position, int64_t count)
                   __attribute__((noinline)) {
        const int64_t keys_ahead = next.keys - tile.keys, values_ahead = next.values - tile.values;
#if defined(HAS_TILES)
        if constexpr (Tiles::has_registers)
            if (has_registers && !mass.data) {
                const Tile pairs = tiles.whole_pairs(tile, position % TILE, keys_ahead, values_ahead);
                add_in_registers(p, task, pairs, position, count, q, factor, x, maximum, total, acc);
                return;
            }
#endif
        const auto score = [&]<int C>() {
            if constexpr (may_be_in_registers)
                if (const auto found = tiles.registers()) return found->template score<C>(q, tile, keys_ahead, x.scores);
            tiles.begin_keys(tile, M, keys_ahead);
            in_blocks<Tiles::MOST_ROWS>(M, [&]<int N>(int64_t m) {
                tiles.template score<N, C>(q + m * Kernel::QUERY_SIZE, tile, keys_ahead, x.scores + m * TILE);
            });
        };
        by_vectors(tile.high, [&]<int C>() {
            score.template operator()<C>();
            for (int64_t m = 0; m < M; ++m) {
                const auto [from, to] = p.seen_from(own[m], position, count);
                if constexpr (W == 16) {
                    int64_t fours = 0;
                    if (!mass.data && to - from == TILE)
                        while (m + fours + 4 <= M && sees_all(own[m + fours + 3], position)) fours += 4;
                    if (fours > 0) {
                        tiles.soften_fours(tile, x.scores + m * TILE, fours, factor, maximum + m, total + m, x.scale + m,
                                           x.weights_of(m));
                        m += fours - 1;
                        continue;
                    }
                }
                tiles.template soften<C>(tile, x.scores + m * TILE, tile.low + from, tile.low + to, factor, maximum + m,
                                         total + m, x.scale + m, x.weights_of(m), mass.data ? mass.of(m) + met : nullptr);
                if (mass.data) mass.rescale(m, met, x.scale[m]);  // one vector holds one block of keys
            }
        });
        if constexpr (may_be_in_registers)
            if (const auto found = tiles.registers()) return found->weigh(x.weights_of(0), tile, values_ahead, x.scale, acc);
        tiles.begin_values(tile, values_ahead);
        in_blocks<Tiles::MOST_ROWS>(M, [&]<int N>(int64_t m) {
            tiles.template weigh<N>(x.weights_of(m), tile, values_ahead, x.scale + m, acc + m * HEAD_SIZE);
        });
    };
    for (int64_t i = task.segment_begin; i < task.segment_end; ++i) {
        const Segment& segment = segments[i];
        for (int64_t at = 0, count; at < segment.count; at += count) {
            const int64_t position = segment.first + at;
            count = std::min(tile_end(position) - segment.first, segment.count) - at;
            if (p.is_hidden(task, position)) break;  // all later keys are hidden as well
            read += count;
            const auto tile = tiles.at(k_pool, v_pool, segment.slot + head + at, count);
            const bool is_end = at + count == segment.count, is_last = i + 1 == task.segment_end;
            const int64_t following = is_end ? (is_last ? task.next : head + segments[i + 1].slot)
                                             : head + segment.slot + at + count;
            const auto next = tiles.at(k_pool, v_pool, following, 1);
            add(tile, next, position, count);
            met += blocks_touched(position, count);
        }
    }
    for (int64_t m = 0; m < M; ++m) maximum[m] *= LN_2;  // to base e
    return read;
}
