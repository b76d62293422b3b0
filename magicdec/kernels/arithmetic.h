// Conversions between bfloat16 in memory and float32 in registers, and exp, for all kernels. Portable C++.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

// Before a function that has the same bits wherever it is called, also in different libraries: it is compiled by itself, without
// what the compiler knows of its callers. Otherwise, sums may be regrouped in each in another way.
#if defined(__clang__)
#define COMPILED_ALONE __attribute__((noinline))
#else
#define COMPILED_ALONE __attribute__((noipa))
#endif

// Before a small function that is a part of such functions: in a large source the compiler may call it in place of inlining it,
// and then computes the loop around it number by number, whose products it groups otherwise than those of vectors.
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
// a * b + c, rounded once where the CPU can. Kernels are compiled so that sums may be regrouped, and each place that a function is
// inlined into may do it in its own way; chains of this have the same bits in all of them.
ALWAYS_INLINE float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// x, which is not regrouped with what it is multiplied or added to.
ALWAYS_INLINE float grouped(float x) {
#if defined(__clang__)
    return __arithmetic_fence(x);
#elif __GNUC__ >= 12
    return __builtin_assoc_barrier(x);
#else
    return x;
#endif
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
