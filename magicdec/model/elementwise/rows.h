// The operations between a layer's GEMMs on one row, for kernels that loop over rows: RMS norm, rotary embedding, gated
// activation. Storage is S (float or bfloat16); values are computed in float32 and rounded once. The result for a row is
// independent of other rows.
#pragma once
#include "../../kernels/arithmetic.h"

namespace {

inline float sigmoid(float x) {
    const float e = exp_negative(-std::abs(x));
    return (x < 0 ? e : 1.0f) / (1.0f + e);
}

// out [width] = x / sqrt(mean(x^2) + eps) * weight [width]. Not inlined: a compiler that knew the width would add the
// squares in another order, and callers would get other bits.
template <typename S>
__attribute__((noinline)) void rms_norm_row(const S* x, const S* weight, float eps, int64_t width, S* out) {
    float sum = 0;
    for (int64_t i = 0; i < width; ++i) sum += to_float(x[i]) * to_float(x[i]);
    const float scale = 1.0f / std::sqrt(sum / float(width) + eps);
    for (int64_t i = 0; i < width; ++i) store(out + i, to_float(x[i]) * scale * to_float(weight[i]));
}

// Rotate in place the first `heads` heads of x [all heads, size] by table [2, pairs] (cos, sin). The two dimensions of a
// pair are half the rotated dimensions apart, or neighbours if `interleaved`.
template <typename S>
inline void rotate_token(S* x, const float* table, int64_t size, int64_t heads, int64_t pairs, bool interleaved) {
    const int64_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : pairs;
    const float *cosine = table, *sine = table + pairs;
    for (int64_t head = 0; head < heads; ++head) {
        S* first = x + head * size;
        S* second = first + apart;
        for (int64_t i = 0; i < pairs; ++i) {
            const float a = to_float(first[i * step]), b = to_float(second[i * step]);
            store(first + i * step, a * cosine[i] - b * sine[i]);
            store(second + i * step, b * cosine[i] + a * sine[i]);
        }
    }
}

// out [width] = silu(x[:width]) * x[width:]
template <typename S>
inline void silu_gate_row(const S* x, int64_t width, S* out) {
    const S *gate = x, *up = x + width;
    for (int64_t i = 0; i < width; ++i) {
        const float g = to_float(gate[i]);
        store(out + i, g * sigmoid(g) * to_float(up[i]));
    }
}

// out [width] = gelu(x[:width]) * x[width:], with the approximation of GELU by tanh. 1 + tanh(u) is 2 sigmoid(2 u).
template <typename S>
inline void gelu_gate_row(const S* x, int64_t width, S* out) {
    const S *gate = x, *up = x + width;
    constexpr float twice_root = 2 * 0.7978845608028654f;  // of 2 / pi
    for (int64_t i = 0; i < width; ++i) {
        const float g = to_float(gate[i]);
        store(out + i, g * sigmoid(twice_root * (g + 0.044715f * g * g * g)) * to_float(up[i]));
    }
}

template <typename S>
inline void gate_row(bool is_gelu, const S* x, int64_t width, S* out) {
    is_gelu ? gelu_gate_row(x, width, out) : silu_gate_row(x, width, out);
}

}  // namespace
