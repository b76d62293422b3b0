// Converts int8 to bfloat16 in registers, which is exact. Used by linear layers with int8 weights.
// In memory an int8 is stored as a sign bit and a magnitude of seven bits.
#pragma once
#include <bit>
#include <cstdint>

#include <immintrin.h>

namespace {

// Converts 64 bytes to two vectors of bfloat16 pairs: the first from the lower half of each 128-bit lane, the second from
// the upper half.
struct Widen {
#if defined(__AVX512VBMI__)
    // The two bytes of the bfloat16 for each magnitude: tables of 128 bytes, indexed by the lower seven bits.
    __m512i low[2], high[2];

    Widen() {
        alignas(64) uint8_t l[128], h[128];
        for (int m = 0; m < 128; ++m) {
            const uint32_t bits = std::bit_cast<uint32_t>(float(m));
            l[m] = uint8_t(bits >> 16);
            h[m] = uint8_t(bits >> 24);
        }
        for (int i = 0; i < 2; ++i) low[i] = _mm512_load_si512(l + 64 * i), high[i] = _mm512_load_si512(h + 64 * i);
    }

    void operator()(const uint8_t* bytes, __m512bh (&out)[2]) const {
        const __m512i w = _mm512_load_si512(bytes), sign = _mm512_set1_epi8(char(0x80));
        const __m512i l = _mm512_permutex2var_epi8(low[0], w, low[1]);
        __m512i h = _mm512_permutex2var_epi8(high[0], w, high[1]);
        h = _mm512_ternarylogic_epi32(h, w, sign, 0xf8);  // h | (w & sign)
        out[0] = (__m512bh)_mm512_unpacklo_epi8(l, h);
        out[1] = (__m512bh)_mm512_unpackhi_epi8(l, h);
    }
#else
    void operator()(const uint8_t* bytes, __m512bh (&out)[2]) const {
        const __m512i w = _mm512_load_si512(bytes), m = _mm512_and_si512(w, _mm512_set1_epi8(0x7f));
        const __m512i v = _mm512_mask_sub_epi8(m, _mm512_movepi8_mask(w), _mm512_setzero_si512(), m);
        out[0] = floats(_mm512_srai_epi16(_mm512_unpacklo_epi8(v, v), 8));
        out[1] = floats(_mm512_srai_epi16(_mm512_unpackhi_epi8(v, v), 8));
    }

    // int16 to bfloat16. The values are small, so the lower 16 bits of their float32 are zeros and can be dropped.
    static __m512bh floats(__m512i v) {
        const __m512 even = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, 16), 16));
        const __m512 odd = _mm512_cvtepi32_ps(_mm512_srai_epi32(v, 16));
        return (__m512bh)_mm512_or_si512(_mm512_srli_epi32((__m512i)even, 16), (__m512i)odd);
    }
#endif
};

}  // namespace
