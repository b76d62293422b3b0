// Attention over tiles of bfloat16 pairs (native_tile.h) for CPUs with bfloat16 dot products (AVX512-BF16). Both products
// are small GEMMs on tiles of TILE keys, so that M queries cost little more than one.

// Per thread: the scores and weights of up to MAX_QUERIES queries on one tile.
struct TileScratch {
    alignas(64) float scores[MAX_QUERIES * TILE];
    alignas(64) uint32_t weights[MAX_QUERIES * TILE / 2];  // bfloat16 pairs
    float scale[MAX_QUERIES];
    uint32_t* weights_of(int64_t query) { return weights + query * TILE / 2; }
};

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

struct Bf16Tiles : PairPools {
    using Left = uint32_t;
    static constexpr int MOST_ROWS = ROWS;
    static constexpr bool has_registers = FITS_REGISTERS;
    static const Tile& whole_pairs(const Tile& tile, int64_t, int64_t, int64_t) { return tile; }
    template <int N, int C>
    void score(const uint32_t* q, const Tile& tile, int64_t ahead, float* scores) const {
        score_queries<N, C>(q, tile.keys, ahead, scores);
    }
    template <int C>
    void soften(const Tile&, const float* scores, int64_t from, int64_t to, float factor, float* maximum, float* total,
                float* scale, uint32_t* weights, float* sums) const {
        soften_to_pairs<C>(scores, from, to, factor, maximum, total, scale, weights, sums);
    }
    void soften_fours(const Tile&, const float* scores, int64_t count, float factor, float* maximum, float* total, float* scale,
                      uint32_t* weights) const {
        ::soften_fours(scores, count, factor, maximum, total, scale,
                       [&](int64_t m, const vec* w) { store_weights(w, weights + m * TILE / 2); });
    }
    template <int N>
    void weigh(const uint32_t* weights, const Tile& tile, int64_t ahead, const float* scale, float* acc) const {
        weigh_queries<N>(weights + tile.first_group, tile.values, tile.num_groups, ahead, scale, acc);
    }
};

struct Bf16 : PairPools {
    using Query = uint32_t;
    static constexpr int QUERY_SIZE = PAIRS;
    static constexpr int64_t QUERY_BLOCK = MAX_QUERIES / 2, CHUNK_BLOCK = QUERY_BLOCK;
    using Scratch = TileScratch;
    static void stage(const bfloat16* from, Query* to) { std::memcpy(to, from, HEAD_SIZE * sizeof(bfloat16)); }
    static int64_t attend(const Problem& p, const Task& task, const Segment* segments, const bfloat16* k_pool,
                          const bfloat16* v_pool, const Query* q, Scratch& scratch, float* maximum, float* total,
                          float* acc, const Mass& mass) {
        return attend_tiles<Bf16>(Bf16Tiles{}, p, task, segments, k_pool, v_pool, q, scratch, maximum, total, acc, mass);
    }
};
