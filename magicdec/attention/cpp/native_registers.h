// The two products of native_bf16.h in tile registers (AMX), for the queries of a prefill. Products are over whole tiles of
// keys, also of those that a segment has a part of: other keys have weight 0, and what the pool holds for them is finite
// (kv/pool.py). How a query's weights of a tile are computed follows from whether it sees all of it, so that the bits of a
// prompt do not depend on where it was cut into chunks.
//
// Queries past the last one of a task are computed too, 16 at a time: their scores and weights are scratch memory, and
// their sums are not kept. Without such registers nothing here is called.

constexpr int SIDE = 16;  // queries, columns, or pairs in a register

#if defined(HAS_TILES)
constexpr bool FITS_REGISTERS = HEAD_SIZE % 32 == 0;

// Scores of SIDE queries for TILE keys.
inline void score_register(const uint32_t* q, const uint32_t* keys, float* scores) {
    static_assert(TILE == 4 * SIDE);
    amx::Ahead nothing;
    amx::zero_sums<4>();
    amx::add_products<1, 4>({q, PAIRS * 4}, {keys, TILE * 4}, PAIRS / SIDE, nothing);
    amx::store_sums<1, 4>(scores, TILE * 4);
}

// sums [SIDE, HEAD_SIZE] += weights of SIDE queries times TILE values, for the COLUMNS registers of dimensions from d on.
template <int COLUMNS>
inline void weigh_columns(const uint32_t* weights, const uint32_t* values, int d, float* sums) {
    amx::Ahead nothing;
    amx::load_sums<1, COLUMNS>(sums + d, HEAD_SIZE * 4);
    amx::add_products<1, COLUMNS>({weights, TILE * 2}, {values + d, HEAD_SIZE * 4}, TILE / 2 / SIDE, nothing);
    amx::store_sums<1, COLUMNS>(sums + d, HEAD_SIZE * 4);
}

inline void weigh_register(const uint32_t* weights, const uint32_t* values, float* sums) {
    constexpr int rest = HEAD_SIZE % 64 / SIDE, last = HEAD_SIZE - rest * SIDE;
    for (int d = 0; d < last; d += 64) weigh_columns<4>(weights, values, d, sums);
    if constexpr (rest > 0) weigh_columns<rest>(weights, values, last, sums);
}

inline void score_in_registers(int64_t M, const uint32_t* q, const Tile& tile, float* scores) {
    for (int64_t m = 0; m < M; m += SIDE) score_register(q + m * PAIRS, tile.keys, scores + m * TILE);
}

// acc [M, HEAD_SIZE] = acc * scale + weights times values.
inline void weigh_in_registers(int64_t M, const uint32_t* weights, const Tile& tile, const float* scale, float* acc) {
    for (int64_t m = 0; m < M; ++m) {
        if (scale[m] == 1.0f) continue;
        for (float* sum = acc + m * HEAD_SIZE; sum < acc + (m + 1) * HEAD_SIZE; sum += 16)
            _mm512_storeu_ps(sum, _mm512_mul_ps(_mm512_loadu_ps(sum), _mm512_set1_ps(scale[m])));
    }
    for (int64_t m = 0; m < M; m += SIDE) {
        if (m + SIDE <= M) {
            weigh_register(weights + m * TILE / 2, tile.values, acc + m * HEAD_SIZE);
            continue;
        }
        alignas(64) float rest[SIDE * HEAD_SIZE] = {};
        const int64_t count = (M - m) * HEAD_SIZE;
        std::copy(acc + m * HEAD_SIZE, acc + m * HEAD_SIZE + count, rest);
        weigh_register(weights + m * TILE / 2, tile.values, rest);
        std::copy(rest, rest + count, acc + m * HEAD_SIZE);
    }
}

// 2^x for x <= 0, to a relative error of 3e-6, which the weights' 8 bits do not show. Cheaper than `exp2_each`.
inline __m512 exp2_short(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-126.0f));
    const __m512i n = _mm512_cvtps_epi32(x);
    const __m512 f = _mm512_sub_ps(x, _mm512_cvtepi32_ps(n));
    __m512 y = _mm512_set1_ps(9.58285388e-3f);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.59064262e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.40240991e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.93124175e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
    return (__m512)_mm512_add_epi32((__m512i)y, _mm512_slli_epi32(n, 23));
}

// The sum of each of four vectors, in order.
inline __m128 sum_each(const __m512 (&w)[4]) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(w[0], w[1]), _mm512_unpackhi_ps(w[0], w[1]));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(w[2], w[3]), _mm512_unpackhi_ps(w[2], w[3]));
    const __m512 all = _mm512_add_ps(
        (__m512)_mm512_unpacklo_pd((__m512d)ab, (__m512d)cd), (__m512)_mm512_unpackhi_pd((__m512d)ab, (__m512d)cd));
    const __m128 low = _mm_add_ps(_mm512_extractf32x4_ps(all, 0), _mm512_extractf32x4_ps(all, 1));
    return _mm_add_ps(low, _mm_add_ps(_mm512_extractf32x4_ps(all, 2), _mm512_extractf32x4_ps(all, 3)));
}

// The largest number of each of four vectors, in order.
inline __m128 max_each(const __m512 (&w)[4]) {
    const __m512 ab = _mm512_max_ps(_mm512_unpacklo_ps(w[0], w[1]), _mm512_unpackhi_ps(w[0], w[1]));
    const __m512 cd = _mm512_max_ps(_mm512_unpacklo_ps(w[2], w[3]), _mm512_unpackhi_ps(w[2], w[3]));
    const __m512 all = _mm512_max_ps(
        (__m512)_mm512_unpacklo_pd((__m512d)ab, (__m512d)cd), (__m512)_mm512_unpackhi_pd((__m512d)ab, (__m512d)cd));
    const __m128 low = _mm_max_ps(_mm512_extractf32x4_ps(all, 0), _mm512_extractf32x4_ps(all, 1));
    return _mm_max_ps(low, _mm_max_ps(_mm512_extractf32x4_ps(all, 2), _mm512_extractf32x4_ps(all, 3)));
}

// As `soften_to_pairs`, for four adjacent queries that see every key of the tile.
inline void to_four_weights(const float* scores, float factor, float* maximum, float* total, float* scale,
                            uint32_t* weights) {
    __m512 tops[4], sums[4];
    for (int n = 0; n < 4; ++n) {
        const float* s = scores + n * TILE;
        tops[n] = _mm512_max_ps(_mm512_max_ps(_mm512_load_ps(s), _mm512_load_ps(s + 16)),
                                _mm512_max_ps(_mm512_load_ps(s + 32), _mm512_load_ps(s + 48)));
    }
    const __m128 before = _mm_loadu_ps(maximum);
    const __m128 highest = _mm_max_ps(before, _mm_mul_ps(max_each(tops), _mm_set1_ps(factor)));
    _mm_storeu_ps(maximum, highest);
    _mm_storeu_ps(scale, _mm512_castps512_ps128(exp2_short(_mm512_castps128_ps512(_mm_sub_ps(before, highest)))));
    for (int n = 0; n < 4; ++n) {
        const __m512 shift = _mm512_set1_ps(maximum[n]), times = _mm512_set1_ps(factor);
        __m512 w[4];
        for (int i = 0; i < 4; ++i)
            w[i] = exp2_short(_mm512_fmsub_ps(_mm512_load_ps(scores + n * TILE + 16 * i), times, shift));
        sums[n] = _mm512_add_ps(_mm512_add_ps(w[0], w[1]), _mm512_add_ps(w[2], w[3]));
        store_weights(w, weights + n * TILE / 2);
    }
    _mm_storeu_ps(total, _mm_add_ps(_mm_mul_ps(_mm_loadu_ps(total), _mm_loadu_ps(scale)), sum_each(sums)));
}

// The same of one query, with the same bits.
inline void to_lone_weights(const float* scores, float factor, float* maximum, float* total, float* scale,
                            uint32_t* weights) {
    alignas(64) float of_four[4 * TILE];
    alignas(64) uint32_t weights_of_four[4 * TILE / 2];
    float maxima[4], totals[4], scales[4];
    for (int n = 0; n < 4; ++n) {
        std::copy_n(scores, TILE, of_four + n * TILE);
        maxima[n] = *maximum, totals[n] = *total;
    }
    to_four_weights(of_four, factor, maxima, totals, scales, weights_of_four);
    *maximum = maxima[0], *total = totals[0], *scale = scales[0];
    std::copy_n(weights_of_four, TILE / 2, weights);
}

// Adds the keys of a tile, `count` from `position` on, to the results of a task's queries.
template <typename Scratch>
inline void add_in_registers(const Problem& p, const Task& task, const Tile& part, int64_t position, int64_t count,
                             const uint32_t* q, float factor, Scratch& x, float* maximum, float* total, float* acc) {
    const int64_t M = task.num_queries, lane = position % TILE;
    const Tile whole{part.keys - lane / LANES * LANES, part.values - lane / 2 * HEAD_SIZE, 0, TILE, 0, TILE / 2};
    const auto sees_all = [&](int64_t m) {
        const auto [from, to] = p.seen(task, m, position, count);
        return count == TILE && from == 0 && to == TILE;
    };
    score_in_registers(M, q, whole, x.scores);
    for (int64_t m = 0; m < M; ++m) {
        float* scores = x.scores + m * TILE;
        if (m + 4 <= M && sees_all(m) && sees_all(m + 3)) {
            to_four_weights(scores, factor, maximum + m, total + m, x.scale + m, x.weights_of(m));
            m += 3;
        } else if (sees_all(m)) {
            to_lone_weights(scores, factor, maximum + m, total + m, x.scale + m, x.weights_of(m));
        } else {
            const auto [from, to] = p.seen(task, m, position, count);
            soften_to_pairs<4>(scores, lane + from, lane + to, factor, maximum + m, total + m, x.scale + m, x.weights_of(m),
                               nullptr);
        }
    }
    weigh_in_registers(M, x.weights_of(0), whole, x.scale, acc);
}
#else
constexpr bool FITS_REGISTERS = false;
inline void score_in_registers(int64_t, const uint32_t*, const Tile&, float*) {}
#endif
