// Small GEMMs on bfloat16 dot products (AVX512-BF16), shared by attention and linear layers.
//
// The right operand is stored in pairs: entry [k][i] holds elements 2k and 2k + 1 of column i. One instruction then
// multiplies 16 columns by a broadcast pair of the left operand, without sums across lanes. Each output is one chain of
// additions in the order of k, so its bits do not depend on what else is computed in the same call.
#pragma once
#include <algorithm>
#include <cstdint>

#include <immintrin.h>

#include "wide.h"

namespace {

inline __mmask16 first_lanes(int64_t n) { return n >= 16 ? __mmask16(0xffff) : n <= 0 ? __mmask16(0) : __mmask16((1u << n) - 1); }

// Transpose a 16 x 16 block of 32-bit entries.
inline void transpose(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int c = 0; c < 4; ++c) {
        const __m512i a = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88), b = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
        const __m512i d = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd), e = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
        t[c] = _mm512_shuffle_i32x4(a, b, 0x88);
        t[8 + c] = _mm512_shuffle_i32x4(a, b, 0xdd);
        t[4 + c] = _mm512_shuffle_i32x4(d, e, 0x88);
        t[12 + c] = _mm512_shuffle_i32x4(d, e, 0xdd);
    }
    for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// out[n][i] += sum over `steps` of the broadcast pair left[n][step] times the vector right[step][i].
template <int N, int C, typename Prefetch = NotAhead>
inline void multiply(const uint32_t* left, int64_t left_stride, const uint32_t* right, int64_t right_stride,
                     int64_t steps, __m512 (&out)[N][C], Prefetch prefetch = {}) {
    for (int64_t step = 0; step < steps; ++step) {
        __m512bh x[C];
        for (int i = 0; i < C; ++i) {
            const uint32_t* at = right + step * right_stride + 16 * i;
            x[i] = (__m512bh)_mm512_load_si512(at);
            prefetch(at);
        }
        for (int n = 0; n < N; ++n) {
            const __m512bh y = (__m512bh)_mm512_set1_epi32(int(left[n * left_stride + step]));
            for (int i = 0; i < C; ++i) out[n][i] = _mm512_dpbf16_ps(out[n][i], y, x[i]);
        }
    }
}

}  // namespace
