// A tile of keys and values in the layout of native_bf16.h, and the weights that its scores become: what both ways to
// multiply a tile share, that with vectors and that with tile registers (native_registers.h).
constexpr int PAIRS = HEAD_SIZE / 2;
constexpr int LANES = 16;

// Keys of one segment that are processed together: vectors of LANES keys from `keys` on, and pairs of values from
// `values` on. Lanes before `low` and from `high` on do not belong to the segment.
struct Tile {
    const uint32_t *keys, *values;
    int64_t low, high, first_pair, num_pairs;  // pairs are counted from the first vector's first lane
};

inline Tile make_tile(const bfloat16* k_pool, const bfloat16* v_pool, int64_t slot, int64_t count) {
    const int64_t tile = slot / TILE * TILE * PAIRS, lane = slot % TILE;
    const int64_t vector = lane / LANES * LANES, low = lane - vector, high = low + count;
    return {reinterpret_cast<const uint32_t*>(k_pool) + tile + vector,
            reinterpret_cast<const uint32_t*>(v_pool) + tile + lane / 2 * HEAD_SIZE,
            low, high, low / 2, (high + 1) / 2 - low / 2};
}

// 2^x for x <= 0: a polynomial (Taylor series of 2^f on [-1/2, 1/2], relative error 2e-7) times a power of two.
inline __m512 exp2_negative(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, n);
    __m512 y = _mm512_set1_ps(1.5403530e-4f);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.3333558e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.6181291e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.5504109e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022651e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314718e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, n);
}

// Softmax of one query's scores for C vectors: weights `w` of the visible lanes [from, to), relative to the running
// `maximum`. Updates `maximum` and `total`; `scale` is the factor for earlier sums. All exponents are to base 2.
template <int C>
inline void to_weights(const float* scores, int64_t from, int64_t to, float factor, float* maximum, float* total,
                       float* scale, __m512 (&w)[4]) {
    __m512 s[C];
    __mmask16 seen[C];
    const __m512 hidden = _mm512_set1_ps(HIDDEN);
    __m512 top = hidden;
    for (int i = 0; i < C; ++i) {
        seen[i] = first_lanes(to - LANES * i) & ~first_lanes(from - LANES * i);
        s[i] = _mm512_mask_mul_ps(hidden, seen[i], _mm512_load_ps(scores + LANES * i), _mm512_set1_ps(factor));
        top = _mm512_max_ps(top, s[i]);
    }
    const float highest = std::max(*maximum, _mm512_reduce_max_ps(top));
    const __m512 shift = _mm512_set1_ps(highest);
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < C; ++i) {
        w[i] = _mm512_maskz_mov_ps(seen[i], exp2_negative(_mm512_sub_ps(s[i], shift)));
        sum = _mm512_add_ps(sum, w[i]);
    }
    for (int i = C; i < 4; ++i) w[i] = _mm512_setzero_ps();
    // Mostly the maximum stays. Then the factor is exactly 1.
    *scale = highest == *maximum ? 1.0f : _mm512_cvtss_f32(exp2_negative(_mm512_set1_ps(*maximum - highest)));
    *total = *total * *scale + _mm512_reduce_add_ps(sum);
    *maximum = highest;
}

// Store the weights of C vectors of keys as bfloat16 pairs.
template <int C>
inline void store_weights(const __m512 (&w)[4], uint32_t* weights) {
    _mm512_store_si512(weights, (__m512i)_mm512_cvtne2ps_pbh(w[1], w[0]));
    if (C > 2) _mm512_store_si512(weights + 16, (__m512i)_mm512_cvtne2ps_pbh(w[3], w[2]));
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
