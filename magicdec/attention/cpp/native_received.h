// The attention weights that the keys of a row receive from its newest tokens, without copying a key out of its tile.
#pragma once
#include "native_plan.h"

namespace {

// Scores of M queries for one tile of keys from `slot` on, of which `count` exist: scores[m * TILE + j]. Times `FACTOR`
// they are q . k / sqrt(D).
struct Float32Scores {
    using Kernel = Float32;
    static constexpr float FACTOR = 1.0f;  // the queries are scaled
    void operator()(const float* q, int64_t M, const float* keys, int64_t slot, int64_t count, float* scores) const {
        score<HEAD_SIZE>(q, M, keys + slot * HEAD_SIZE, count, scores);
    }
};

#if defined(__AVX512BF16__)
struct Bf16Scores {
    using Kernel = Bf16;
    inline static const float FACTOR = 1.0f / std::sqrt(float(HEAD_SIZE));
    Bf16Scores() {
        if (by_registers) registers.load(SIDE);
    }
    void operator()(const uint32_t* q, int64_t M, const bfloat16* keys, int64_t slot, int64_t, float* scores) const {
        const Tile tile = PairPools::at(keys, keys, slot, TILE);
        if (by_registers) return score_in_registers(M, q, tile, scores);
        in_blocks(M, [&]<int N>(int64_t m) { score_queries<N, 4>(q + m * PAIRS, tile.keys, 0, scores + m * TILE); });
    }
    const bool by_registers = FITS_REGISTERS && may_use_tiles();
    amx::Registers registers;
};
#endif
template <typename AnyWide>
struct WideScores {
    using Kernel = AnyWide;
    inline static const float FACTOR = 1.0f / std::sqrt(float(HEAD_SIZE));
    void operator()(const typename Kernel::Query* q, int64_t M, const typename Kernel::Pool* keys, int64_t slot, int64_t, float* scores) const {
        const auto tile = Kernel::at(keys, keys, slot, TILE);
        in_blocks(M, [&]<int N>(int64_t m) {
            Kernel{}.template score<N, TILE / LANES>(q + m * Kernel::QUERY_SIZE, tile, 0, scores + m * TILE);
        });
    }
};

struct Fp8Scores {
    using Kernel = Fp8;
    inline static const float FACTOR = 1.0f / std::sqrt(float(HEAD_SIZE));
    void operator()(const typename Kernel::Query* q, int64_t M, const fp8* keys, int64_t slot, int64_t, float* scores) const {
        Fp8Pairs widened;
        const Fp8::Tiles tiles{{}, &widened};
        const auto tile = tiles.at(keys, keys, slot, TILE);
        tiles.begin_keys(tile, M, 0);
        in_blocks<Fp8::Tiles::MOST_ROWS>(M, [&]<int N>(int64_t m) {
            tiles.template score<N, TILE / LANES>(q + m * Kernel::QUERY_SIZE, tile, 0, scores + m * TILE);
        });
    }
};

// The keys [first, length) of each of B rows, whose last T tokens have the queries q [B, T, H, D]. `sinks` [H]: as in `merge`.
struct Received {
    int64_t B, T, H, G, block_size, first, length;
    const float* sinks;
    int64_t tiles() const { return (length + TILE - 1) / TILE - first / TILE; }
    int64_t position(int64_t tile) const { return (first / TILE + tile) * TILE; }
};

// Adds to out [length - first] the weights of M queries from query `from` of KV head g on, given the scores of all tiles,
// [tiles][rows][TILE]. Tiles are met in the order of memory.
inline void add_weights(const Received& r, int64_t g, int64_t from, int64_t M, int64_t rows, float factor, float* scores,
                        float* out) {
    const int64_t rep = r.H / r.G;
    float top[MAX_QUERIES], total[MAX_QUERIES] = {};
    auto sink = [&](int64_t m) { return r.sinks[g * rep + (from + m) % rep] / factor; };  // as a score
    for (int64_t m = 0; m < M; ++m) top[m] = r.sinks ? sink(m) : HIDDEN;
    auto each = [&](auto body) {  // with the scores of a query for a tile, and the keys of it that the query sees
        for (int64_t i = 0; i < r.tiles(); ++i)
            for (int64_t m = 0; m < M; ++m) {
                const int64_t position = r.position(i), end = r.length - r.T + (from + m) / rep + 1;
                body(m, scores + (i * rows + m) * TILE, std::max<int64_t>(0, r.first - position),
                     std::clamp<int64_t>(end - position, 0, TILE), position);
            }
    };
    each([&](int64_t m, const float* s, int64_t begin, int64_t stop, int64_t) {
        float most = top[m];
        for (int64_t j = begin; j < stop; ++j) most = std::max(most, s[j]);
        top[m] = most;
    });
    if (r.sinks)
        for (int64_t m = 0; m < M; ++m) total[m] = exp_negative((sink(m) - top[m]) * factor);
    each([&](int64_t m, float* s, int64_t begin, int64_t stop, int64_t) {
        for (int64_t j = begin; j < stop; ++j) s[j] = exp_negative((s[j] - top[m]) * factor);
        total[m] += sum_of(stop - begin, [&](int64_t i) { return s[begin + i]; });
    });
    each([&](int64_t m, const float* s, int64_t begin, int64_t stop, int64_t position) {
        const float scale = 1.0f / total[m];
        float* to = out + position - r.first;
        for (int64_t j = begin; j < stop; ++j) to[j] += s[j] * scale;
    });
}

// out [B, G, length - first]: the weights that each key received, summed over the queries and heads of its KV head.
template <typename Scores, typename S, typename Pool>
void receive(const Received& r, const S* q, const Pool* keys, const Table& table, float* out) {
    using Kernel = typename Scores::Kernel;
    const int64_t rep = r.H / r.G, M = r.T * rep, rows = std::min<int64_t>(MAX_QUERIES, (M + 15) / 16 * 16);
    const Problem p{r.B, r.T, r.H, r.G, HEAD_SIZE, r.block_size, nullptr, 0, false};
#pragma omp parallel
    {
        const Scores score_tile;
        std::vector<typename Kernel::Query> queries(rows * Kernel::QUERY_SIZE);
        std::vector<float> room(r.tiles() * rows * TILE + 16);
        float* scores = room.data() + (64 - reinterpret_cast<uintptr_t>(room.data()) % 64) / 4;  // aligned to vectors
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t b = 0; b < r.B; ++b)
            for (int64_t g = 0; g < r.G; ++g) {
                float* to = out + (b * r.G + g) * (r.length - r.first);
                std::fill_n(to, r.length - r.first, 0.0f);
                for (int64_t from = 0; from < M; from += rows) {
                    const int64_t count = std::min(rows, M - from);
                    for (int64_t m = 0; m < count; ++m) {
                        const int64_t t = (from + m) / rep, h = g * rep + (from + m) % rep;
                        Kernel::stage(q + ((b * r.T + t) * r.H + h) * HEAD_SIZE, &queries[m * Kernel::QUERY_SIZE]);
                    }
                    for (int64_t i = 0; i < r.tiles(); ++i) {
                        const int64_t slot = table.slot(p, b, r.position(i)) + g * r.block_size;
                        score_tile(queries.data(), count, keys, slot, std::min<int64_t>(TILE, r.length - r.position(i)),
                                   scores + i * rows * TILE);
                    }
                    add_weights(r, g, from, count, rows, Scores::FACTOR, scores, to);
                }
            }
    }
}

}  // namespace
