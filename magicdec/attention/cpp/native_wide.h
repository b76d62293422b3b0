// Attention over tiles of bfloat16 pairs (native_tile.h) for every CPU: they are widened to float32 in registers
// (kernels/wide.h). Queries, weights and sums are float32. For prefills, tiles of codes are widened as well.

inline vec load_scales(const bfloat16* scales) { return load_wide(&scales->value); }
inline vec load_scales(const float* scales) { return load(scales); }

// A tile that is widened for the chunk of a prefill; as FloatRows of native_chunk.h.
struct WidenedTile {
    static constexpr int KEY = 1, DIMENSION = TILE;
    static inline const float SCALE = 1.0f / std::sqrt(float(HEAD_SIZE));
    const float *keys, *values;
    alignas(64) float widened[2 * TILE * HEAD_SIZE];
    void find(const bfloat16* k_pool, const bfloat16* v_pool, int64_t slot) {
        const int64_t tile = slot / TILE * TILE * HEAD_SIZE;
        point_at(slot % TILE);
        widen_pairs<TILE>(k_pool + tile, PAIRS, widened);
        widen_pairs<HEAD_SIZE>(v_pool + tile, TILE / 2, widened + TILE * HEAD_SIZE);
    }
    void find(const int8_t* k_pool, const int8_t* v_pool, int64_t slot) {
        const QuadTile tile = QuadPools::at(k_pool, v_pool, slot / TILE * TILE, TILE);
        point_at(slot % TILE);
        for (int d = 0; d < HEAD_SIZE; ++d)
            for (int i = 0; i < TILE; i += W)
                store(widened + d * TILE + i,
                      of_quad(load_bits(tile.keys + d / 4 * TILE + i), d % 4) * load(tile.key_scales + i));
        for (int t = 0; t < TILE; ++t)
            for (int i = 0; i < HEAD_SIZE; i += W)
                store(widened + (TILE + t) * HEAD_SIZE + i,
                      of_quad(load_bits(tile.values + t / 4 * HEAD_SIZE + i), t % 4) * tile.value_scales[t]);
    }
    void find(const uint8_t* k_pool, const uint8_t* v_pool, int64_t slot) {
        const NibbleTile tile = NibblePools::at(k_pool, v_pool, slot / TILE * TILE, TILE);
        point_at(slot % TILE);
        for (int d = 0; d < HEAD_SIZE; ++d) {
            const int g = d / GROUP_SIZE, part = d % 4 * 2 + d % GROUP_SIZE / HALF, row = g * HALF / 4 + d % HALF / 4;
            for (int i = 0; i < TILE; i += W)
                store(widened + d * TILE + i,
                      of_octet(load_bits(tile.keys + row * TILE + i), part) * load_scales(tile.key_scales + g * TILE + i));
        }
        for (int t = 0; t < TILE; ++t)
            for (int d = 0; d < HEAD_SIZE; d += W) {
                const int g = d / GROUP_SIZE, part = t % 4 * 2 + d % GROUP_SIZE / HALF;
                const uint32_t* row = tile.values + t / 4 * TOKEN_BYTES + g * HALF;
                store(widened + (TILE + t) * HEAD_SIZE + d,
                      of_octet(load_bits(row + d % HALF), part) * to_float(tile.value_scales[g * TILE + t]));
            }
    }
    void point_at(int64_t lane) { keys = widened + lane, values = widened + (TILE + lane) * HEAD_SIZE; }
    // Rows [2 * pairs][WIDTH] from [pairs][WIDTH][2].
    template <int WIDTH>
    static void widen_pairs(const bfloat16* from, int64_t pairs, float* to) {
        for (int64_t pair = 0; pair < pairs; ++pair, from += 2 * WIDTH, to += 2 * WIDTH)
            for (int i = 0; i < WIDTH; i += W) {
                bits both;
                std::memcpy(&both, from + 2 * i, sizeof(both));
                store(to + i, (vec)(both << 16));
                store(to + WIDTH + i, (vec)(both & 0xffff0000));
            }
    }
};

struct WideScratch {
    alignas(64) float scores[MAX_QUERIES * TILE];  // which become weights
    float scale[MAX_QUERIES];
    ChunkScratch chunk;
    WidenedTile tile;
    float* weights_of(int64_t query) { return scores + query * TILE; }
};

// `soften` in place. Not inlined, which would be no faster and take longer to compile.
__attribute__((noinline)) void soften_wide(float* scores, int64_t from, int64_t to, float factor, float* maximum,
                                           float* total, float* scale, float* sums) {
    vec weights[TILE / W];
    if (is_whole(from, to))
        soften<true>(scores, from, to, factor, maximum, total, scale, sums, weights);
    else
        soften<false>(scores, from, to, factor, maximum, total, scale, sums, weights);
    for (int i = 0; i < TILE / W; ++i) store(scores + W * i, weights[i]);
}

// Calls body.operator()<V>(i) for vectors i, i + 1, .. i + V - 1 of COUNT, with V at most MOST.
template <int COUNT, int MOST, typename Body>
inline void in_vectors(Body body) {
    constexpr int rest = COUNT % MOST;
    for (int i = 0; i + MOST <= COUNT; i += MOST) body.template operator()<MOST>(i);
    if constexpr (rest > 0) body.template operator()<rest>(COUNT - rest);
}

// A few columns are multiplied at a time, as registers allow; the next tile is prefetched in the order of its addresses all the
// same, since memory is read at its full rate only so.
struct WidePairs : PairPools {
    using Left = float;
    static constexpr int MOST_ROWS = ROWS;
    static constexpr bool has_registers = false;

    template <int N, int C>
    void score(const float* q, const Tile& tile, int64_t ahead, float* scores) const {
        auto next = reinterpret_cast<const char*>(tile.keys + ahead);
        in_vectors<C * LANES / W, vectors_of(N)>([&]<int V>(int i) {
            vec s[N][V] = {};
            multiply(::Left{q, HEAD_SIZE, 1}, tile.keys + W * i, TILE, PAIRS, s, InOrder<>{next});
            for (int n = 0; n < N; ++n)
                for (int v = 0; v < V; ++v) store(scores + n * TILE + W * (i + v), s[n][v]);
        });
    }

    template <int C>
    void soften(const Tile&, float* scores, int64_t from, int64_t to, float factor, float* maximum, float* total,
                float* scale, float*, float* sums) const {
        soften_wide(scores, from, to, factor, maximum, total, scale, sums);
    }
#if defined(__AVX512F__)
    void soften_fours(const Tile&, float* scores, int64_t count, float factor, float* maximum, float* total, float* scale,
                      float*) const {
        ::soften_fours(scores, count, factor, maximum, total, scale, [&](int64_t m, const vec* w) {
            for (int i = 0; i < TILE / W; ++i) store(scores + m * TILE + W * i, w[i]);
        });
    }
#endif

    template <int N>
    void weigh(const float* weights, const Tile& tile, int64_t ahead, const float* scale, float* acc) const {
        const ::Left left = {weights + 2 * tile.first_group, TILE, 1};
        auto next = reinterpret_cast<const char*>(tile.values + ahead);
        in_vectors<HEAD_SIZE / W, vectors_of(N)>([&]<int V>(int i) {
            vec a[N][V];
            for (int n = 0; n < N; ++n)
                for (int v = 0; v < V; ++v) a[n][v] = load(acc + n * HEAD_SIZE + W * (i + v)) * scale[n];
            multiply(left, tile.values + W * i, HEAD_SIZE, tile.num_groups, a, InOrder<>{next});
            for (int n = 0; n < N; ++n)
                for (int v = 0; v < V; ++v) store(acc + n * HEAD_SIZE + W * (i + v), a[n][v]);
        });
    }
};

struct Wide : WidePairs {
    using Query = float;
    static constexpr int QUERY_SIZE = HEAD_SIZE;
    static constexpr int64_t QUERY_BLOCK = MAX_QUERIES, CHUNK_BLOCK = CHUNK_QUERIES;
    using Scratch = WideScratch;
    template <typename S>
    static void stage(const S* from, Query* to) {
        for (int d = 0; d < HEAD_SIZE; ++d) to[d] = to_float(from[d]);
    }
    static int64_t attend(const Problem& p, const Task& task, const Segment* segments, const Pool* k_pool, const Pool* v_pool,
                          const Query* q, Scratch& scratch, float* maximum, float* total, float* acc, const Mass& mass) {
        if (p.is_prefill() && !mass.data)
            return attend_chunk(scratch.tile, p, task, segments, k_pool, v_pool, q, scratch.chunk, maximum, total, acc);
        return attend_tiles<Wide>(WidePairs{}, p, task, segments, k_pool, v_pool, q, scratch, maximum, total, acc, mass);
    }
};
