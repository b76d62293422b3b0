// Conversions between bfloat16 in memory and float32 in registers, and exp, for all kernels. Portable C++.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

// Before a small function of which loops are made: in a large source the compiler may call it in place of inlining it, and then
// makes no vectors of the loop.
#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace {

struct bfloat16 { uint16_t value; };

ALWAYS_INLINE float to_float(float x) { return x; }
ALWAYS_INLINE float to_float(bfloat16 x) {
    uint32_t wide = uint32_t(x.value) << 16;
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
}
// Whether a number is neither infinite nor NaN, by its bits: kernels are compiled for finite numbers alone, so that a comparison of
// numbers may be taken for true.
ALWAYS_INLINE bool is_finite(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return (bits & 0x7f800000u) != 0x7f800000u;
}
ALWAYS_INLINE bool is_finite(bfloat16 x) { return (x.value & 0x7f80) != 0x7f80; }
ALWAYS_INLINE float not_a_number() {
    const uint32_t bits = 0x7fc00000u;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
ALWAYS_INLINE void store(float* p, float x) { *p = x; }
ALWAYS_INLINE void store(bfloat16* p, float x) {  // round to nearest even
    uint32_t wide;
    std::memcpy(&wide, &x, 4);
    p->value = uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}
// a * b + c, rounded once where the CPU can.
ALWAYS_INLINE float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// The sum of N numbers, a power of two, by halves.
template <int N, typename Real>
ALWAYS_INLINE Real sum_by_halves(const Real* x) {
    if constexpr (N == 2) {
        return x[0] + x[1];
    } else {
        typedef Real vector __attribute__((vector_size(N / 2 * sizeof(Real))));
        vector first, second;
        std::memcpy(&first, x, sizeof(first));
        std::memcpy(&second, x + N / 2, sizeof(second));
        first += second;
        Real half[N / 2];
        std::memcpy(half, &first, sizeof(half));
        return sum_by_halves<N / 2>(half);
    }
}

// The sum of term(i) for i = 0 .. count - 1, in an order that vectors can add them in: LANES_OF_SUM sums, each of every so many
// terms, then these by halves, then the terms that are left. The same bits on every CPU.
constexpr int LANES_OF_SUM = 16;
template <typename Real = float, typename Term>
ALWAYS_INLINE Real sum_of(int64_t count, Term term) {
    Real sums[LANES_OF_SUM] = {};
    int64_t i = 0;
    for (; i + LANES_OF_SUM <= count; i += LANES_OF_SUM)
        for (int lane = 0; lane < LANES_OF_SUM; ++lane) sums[lane] += term(i + lane);
    typedef Real vector __attribute__((vector_size(sizeof(sums))));
    vector all;  // read at once: GCC would keep sums that are read in parts in memory while it adds to them
    std::memcpy(&all, sums, sizeof(sums));
    Real copy[LANES_OF_SUM];
    std::memcpy(copy, &all, sizeof(sums));
    Real sum = sum_by_halves<LANES_OF_SUM>(copy);
    for (; i < count; ++i) sum += term(i);
    return sum;
}

// exp for x <= 0: 2^n times a polynomial on [-ln2/2, ln2/2] (Cephes coefficients); relative error about 1e-7.
ALWAYS_INLINE float exp_negative(float x) {
    x = std::max(x, -87.0f);
    const float n = std::floor(fused(x, 1.44269504f, 0.5f));
    x = fused(n, -0.693359375f, x);
    x = fused(n, 2.12194440e-4f, x);
    float y = 1.9875691500e-4f;
    y = fused(y, x, 1.3981999507e-3f);
    y = fused(y, x, 8.3334519073e-3f);
    y = fused(y, x, 4.1665795894e-2f);
    y = fused(y, x, 1.6666665459e-1f);
    y = fused(y, x, 5.0000001201e-1f);
    y = fused(fused(y, x, 1.0f), x, 1.0f);
    int32_t shifted = (int32_t(n) + 127) << 23;
    float power;
    std::memcpy(&power, &shifted, 4);
    return y * power;
}

}  // namespace
