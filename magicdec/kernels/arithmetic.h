// Conversions between bfloat16 in memory and float32 in registers, and exp, for all kernels. Portable C++.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct bfloat16 { uint16_t value; };

inline float to_float(float x) { return x; }
inline float to_float(bfloat16 x) {
    uint32_t wide = uint32_t(x.value) << 16;
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
}
inline void store(float* p, float x) { *p = x; }
inline void store(bfloat16* p, float x) {  // round to nearest even
    uint32_t wide;
    std::memcpy(&wide, &x, 4);
    p->value = uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}
// exp for x <= 0: 2^n times a polynomial on [-ln2/2, ln2/2] (Cephes coefficients); relative error about 1e-7.
inline float exp_negative(float x) {
    x = std::max(x, -87.0f);
    float n = std::floor(x * 1.44269504f + 0.5f);
    x -= n * 0.693359375f;
    x += n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * x + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * x * x + x + 1.0f;
    int32_t shifted = (int32_t(n) + 127) << 23;
    float power;
    std::memcpy(&power, &shifted, 4);
    return y * power;
}

}  // namespace
