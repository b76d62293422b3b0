// The bfloat16 path of native.cpp for CPUs with bfloat16 dot products (AVX512-BF16). Both products of attention are
// small GEMMs on tiles of TILE keys, so that M queries cost little more than one.
//
// The KV pools have a layout for these GEMMs (Tiled of kv/layout.py). For every TILE tokens of a head, keys are stored
// as [pair of dimensions][token] and values as [pair of tokens][dimension], where an entry holds the two elements of a
// pair. They are loaded from memory into the dot products without shuffles, and the result for a query is the same to
// the bit whatever other queries are computed with it. A token's lane in a tile is its position modulo TILE.
#include "native_tile.h"
#include "native_registers.h"

// Per thread: the scores and weights of up to MAX_QUERIES queries on one tile, and room for the tile of a path.
template <typename Pool, int64_t SIZE>
struct TileScratch {
    alignas(64) float scores[MAX_QUERIES * TILE];
    alignas(64) uint32_t weights[MAX_QUERIES * TILE / 2];  // bfloat16 pairs
    float scale[MAX_QUERIES];
    PathRoom<Pool, TILE, SIZE> path;
};
using Bf16Scratch = TileScratch<bfloat16, HEAD_SIZE>;

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

// Scores of N queries for C vectors of keys. While keys are read, those `ahead` entries further on are prefetched.
template <int N, int C>
inline void score_queries(const uint32_t* q, const uint32_t* keys, int64_t ahead, float* scores) {
    __m512 s[N][C] = {};
    multiply<N, C>(q, PAIRS, keys, TILE, PAIRS, s, Ahead{ahead});
    for (int n = 0; n < N; ++n)
        for (int i = 0; i < C; ++i) _mm512_store_ps(scores + n * TILE + LANES * i, s[n][i]);
}

// 16 C dimensions of the weighted sum of values.
template <int N, int C>
inline void weigh_part(const uint32_t* weights, const uint32_t* values, int64_t pairs, int64_t ahead, const float* scale,
                       float* acc) {
    __m512 a[N][C];
    for (int n = 0; n < N; ++n)
        for (int i = 0; i < C; ++i)
            a[n][i] = _mm512_mul_ps(_mm512_loadu_ps(acc + n * HEAD_SIZE + 16 * i), _mm512_set1_ps(scale[n]));
    multiply<N, C>(weights, TILE / 2, values, HEAD_SIZE, pairs, a, Ahead{ahead});
    for (int n = 0; n < N; ++n)
        for (int i = 0; i < C; ++i) _mm512_storeu_ps(acc + n * HEAD_SIZE + 16 * i, a[n][i]);
}

template <int N>
inline void weigh_queries(const uint32_t* weights, const uint32_t* values, int64_t pairs, int64_t ahead,
                          const float* scale, float* acc) {
    constexpr int REST = HEAD_SIZE % 64 / 16;
    for (int d = 0; d + 64 <= HEAD_SIZE; d += 64) weigh_part<N, 4>(weights, values + d, pairs, ahead, scale, acc + d);
    constexpr int d = HEAD_SIZE - 16 * REST;
    if constexpr (REST > 0) weigh_part<N, REST>(weights, values + d, pairs, ahead, scale, acc + d);
}

// The interface between a KV storage and attention: its tiles, and the products over a tile. Here for bfloat16.
struct Bf16Tiles {
    using Pool = bfloat16;
    static constexpr bool has_registers = FITS_REGISTERS;
    Tile at(const Pool* k_pool, const Pool* v_pool, int64_t slot, int64_t count) const {
        return make_tile(k_pool, v_pool, slot, count);
    }
    template <int N, int C>
    void score(const uint32_t* q, const Tile& tile, int64_t ahead, float* scores) const {
        score_queries<N, C>(q, tile.keys, ahead, scores);
    }
    template <int C>
    void store(const __m512 (&w)[4], const Tile&, uint32_t* weights) const { store_weights<C>(w, weights); }
    template <int N>
    void weigh(const uint32_t* weights, const Tile& tile, int64_t ahead, const float* scale, float* acc) const {
        weigh_queries<N>(weights + tile.first_pair, tile.values, tile.num_pairs, ahead, scale, acc);
    }
};

// Like attend_piece of native_portable.h, but q is [queries][PAIRS] bfloat16 pairs and not scaled.
template <typename Kernel, typename Tiles, typename Scratch>
inline int64_t attend_tiles(const Tiles& tiles, const Problem& p, const Task& task, const Segment* segments,
                            const typename Tiles::Pool* k_pool, const typename Tiles::Pool* v_pool, const uint32_t* q,
                            Scratch& x, float* maximum, float* total, float* acc, const Mass& mass) {
    const int64_t M = task.num_queries, head = task.head * p.block_size;
    int64_t read = 0, met = 0;  // keys read, and blocks of keys processed for `mass`
    const float factor = 1.44269504f / std::sqrt(float(HEAD_SIZE));
    mass.clear(M);
    std::fill(maximum, maximum + M, HIDDEN);
    std::fill(total, total + M, 0.0f);
    std::fill(acc, acc + M * HEAD_SIZE, 0.0f);
    const bool has_registers = Tiles::has_registers && p.is_prefill() && may_use_tiles();
    amx::Registers registers;
    if (has_registers) registers.load(SIDE);
    // Adds the keys of a tile, `count` from `position` on, to the results of queries [first, last). While they are read,
    // the keys and values of `next` are prefetched.
    auto add = [&](const auto& tile, const auto& next, int64_t position, int64_t count, bool are_before, int64_t first,
                   int64_t last) {
        const int64_t keys_ahead = next.keys - tile.keys, values_ahead = next.values - tile.values;
        const bool by_registers = has_registers && tile.low == 0 && tile.high == TILE;
        by_vectors(tile.high, [&]<int C>() {
            if (by_registers)
                score_in_registers(M, q, tile, x.scores);
            else
                in_blocks(last - first, [&]<int N>(int64_t i) {
                    const int64_t m = first + i;
                    tiles.template score<N, C>(q + m * PAIRS, tile, keys_ahead, x.scores + m * TILE);
                });
            for (int64_t m = first; m < last; ++m) {
#if defined(HAS_TILES)
                if (by_registers && !mass.data && four_see_all(p, task, m, position)) {
                    to_four_weights(x.scores + m * TILE, factor, maximum + m, total + m, x.scale + m,
                                    x.weights + m * TILE / 2);
                    m += 3;
                    continue;
                }
#endif
                const auto [from, to] = p.seen(task, m, position, count, are_before);
                __m512 w[4];
                to_weights<C>(x.scores + m * TILE, tile.low + from, tile.low + to, factor, maximum + m, total + m,
                              x.scale + m, w);
                tiles.template store<C>(w, tile, x.weights + m * TILE / 2);
                if (!mass.data) continue;
                mass.rescale(m, met, x.scale[m]);  // one vector holds one block of keys
                _mm_mask_storeu_ps(mass.of(m) + met, __mmask8((1 << C) - 1), sum_each(w));
            }
        });
        if (by_registers)
            weigh_in_registers(M, x.weights, tile, x.scale, acc);
        else
            in_blocks(last - first, [&]<int N>(int64_t i) {
                const int64_t m = first + i;
                tiles.template weigh<N>(x.weights + m * TILE / 2, tile, values_ahead, x.scale + m, acc + m * HEAD_SIZE);
            });
    };
    for (int64_t i = task.segment_begin; i < task.segment_end; ++i) {
        const Segment& segment = segments[i];
        for (int64_t at = 0, count; at < segment.count; at += count) {
            const int64_t position = segment.first + at;
            count = std::min(tile_end(position) - segment.first, segment.count) - at;
            if (p.is_hidden(task, position)) break;  // all later keys are hidden as well
            read += count;
            if (at + count > segment.num_before) {
                by_path<Kernel>(p, task, segment, at, count, k_pool, v_pool, x.path,
                                [&](int64_t first, int64_t last, int64_t lane) {
                                    const auto tile = tiles.at(x.path.keys, x.path.values, lane, count);
                                    add(tile, tile, position, count, false, first, last);
                                });
            } else {
                const auto tile = tiles.at(k_pool, v_pool, segment.slot + head + at, count);
                const bool is_end = at + count == segment.count, is_last = i + 1 == task.segment_end;
                const int64_t following = is_end ? (is_last ? task.next : head + segments[i + 1].slot)
                                                 : head + segment.slot + at + count;
                const auto next = tiles.at(k_pool, v_pool, following, 1);
                add(tile, next, position, count, p.is_before(segment, at + count), 0, M);
            }
            met += blocks_touched(position, count);
        }
    }
    for (int64_t m = 0; m < M; ++m) maximum[m] *= 0.69314718f;  // to base e
    return read;
}

struct Bf16 {
    using Pool = bfloat16;
    using Query = uint32_t;
    static constexpr int QUERY_SIZE = PAIRS;
    using Scratch = Bf16Scratch;
    static void stage(const bfloat16* from, Query* to) { std::memcpy(to, from, HEAD_SIZE * sizeof(bfloat16)); }
    static void append(const bfloat16* k, const bfloat16* v, int64_t slot, bfloat16* k_pool, bfloat16* v_pool) {
        const int64_t tile = slot / TILE * TILE * HEAD_SIZE, lane = slot % TILE;
        for (int pair = 0; pair < PAIRS; ++pair) std::memcpy(k_pool + tile + (pair * TILE + lane) * 2, k + 2 * pair, 4);
        for (int d = 0; d < HEAD_SIZE; ++d) v_pool[tile + (lane / 2 * HEAD_SIZE + d) * 2 + lane % 2] = v[d];
    }
    static void copy(const bfloat16* k_pool, const bfloat16* v_pool, int64_t slot, int64_t to, bfloat16* keys,
                     bfloat16* values) {
        const int64_t tile = slot / TILE * TILE * HEAD_SIZE, lane = slot % TILE;
        bfloat16 k[HEAD_SIZE], v[HEAD_SIZE];
        for (int pair = 0; pair < PAIRS; ++pair) std::memcpy(k + 2 * pair, k_pool + tile + (pair * TILE + lane) * 2, 4);
        for (int d = 0; d < HEAD_SIZE; ++d) v[d] = v_pool[tile + (lane / 2 * HEAD_SIZE + d) * 2 + lane % 2];
        append(k, v, to, keys, values);
    }
    static int64_t attend(const Problem& p, const Task& task, const Segment* segments, const bfloat16* k_pool,
                       const bfloat16* v_pool, const Query* q, Scratch& scratch, float* maximum, float* total, float* acc,
                       const Mass& mass) {
        return attend_tiles<Bf16>(Bf16Tiles{}, p, task, segments, k_pool, v_pool, q, scratch, maximum, total, acc, mass);
    }
};
