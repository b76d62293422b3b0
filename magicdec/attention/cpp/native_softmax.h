// Scores of one query to weights, with AVX-512, for native_bf16.h and native_registers.h.

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

// The sums of the first C vectors, each of which holds one block of keys.
template <int C>
inline void store_sums(const __m512 (&w)[4], float* sums) {
    _mm_mask_storeu_ps(sums, __mmask8((1 << C) - 1), sum_each(w));
}
