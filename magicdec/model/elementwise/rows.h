// The operations between a layer's GEMMs on one row, for kernels that loop over rows: RMS norm, rotary embedding, gated
// activation. Storage is S (float or bfloat16); values are computed in float32 and rounded once. The result for a row is
// independent of other rows.
#pragma once
#include <algorithm>

#include "../../kernels/arithmetic.h"

// The activation of a gated MLP. `limit` and `alpha` are of CLAMPED.
enum { SILU, GELU, CLAMPED };
struct Gate {
    int64_t kind;
    float limit, alpha;
};

namespace {

ALWAYS_INLINE float sigmoid(float x) {
    const float e = exp_negative(-std::abs(x));
    return (x < 0 ? e : 1.0f) / (1.0f + e);
}

// out [width] = x / sqrt(mean(x^2) + eps) * weight [width].
template <typename S>
inline void rms_norm_row(const S* x, const S* weight, float eps, int64_t width, S* out) {
    const float squares = sum_of(width, [&](int64_t i) { return to_float(x[i]) * to_float(x[i]); });
    const float scale = 1.0f / std::sqrt(squares / float(width) + eps);
    for (int64_t i = 0; i < width; ++i) store(out + i, to_float(x[i]) * scale * to_float(weight[i]));
}

// Pairs of numbers, each STEP further on, to the angles of `cosine` and `sine`. A constant step lets the loop become vectors.
template <int STEP, typename S>
ALWAYS_INLINE void rotate_pairs(S* __restrict first, S* __restrict second, const float* __restrict cosine,
                                const float* __restrict sine, int64_t pairs) {
    for (int64_t i = 0; i < pairs; ++i) {
        const float a = to_float(first[i * STEP]), b = to_float(second[i * STEP]);
        store(first + i * STEP, a * cosine[i] - b * sine[i]);
        store(second + i * STEP, b * cosine[i] + a * sine[i]);
    }
}

// Rotate in place the first `heads` heads of x [all heads, size] by table [2, pairs] (cos, sin). The two dimensions of a
// pair are half the rotated dimensions apart, or neighbours if `interleaved`.
template <typename S>
inline void rotate_token(S* x, const float* table, int64_t size, int64_t heads, int64_t pairs, bool interleaved) {
    const float *cosine = table, *sine = table + pairs;
    for (int64_t head = 0; head < heads; ++head, x += size)
        interleaved ? rotate_pairs<2>(x, x + 1, cosine, sine, pairs) : rotate_pairs<1>(x, x + pairs, cosine, sine, pairs);
}

// out [width] = silu(x[:width]) * x[width:].
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
        const float inner = fused(0.044715f * g * g, g, g);
        store(out + i, g * sigmoid(twice_root * inner) * to_float(up[i]));
    }
}

// out [width] = (up + 1) gate sigmoid(alpha gate) with gate = x[:width], at most `limit`, and up = x[width:], at most `limit`
// on either side.
template <typename S>
inline void clamped_gate_row(const S* x, float limit, float alpha, int64_t width, S* out) {
    const S *gate = x, *up = x + width;
    for (int64_t i = 0; i < width; ++i) {
        const float g = std::min(to_float(gate[i]), limit), u = std::clamp(to_float(up[i]), -limit, limit);
        store(out + i, (u + 1.0f) * (g * sigmoid(alpha * g)));
    }
}

template <typename S>
inline void gate_row(const Gate& gate, const S* x, int64_t width, S* out) {
    if (gate.kind == CLAMPED) return clamped_gate_row(x, gate.limit, gate.alpha, width, out);
    gate.kind == GELU ? gelu_gate_row(x, width, out) : silu_gate_row(x, width, out);
}

// The `used` experts of a token with the largest logits [experts], the first of equal ones, in descending order, and their
// weights, rounded to S: the softmax over all logits, or over those of the chosen ones if it `renormalises`.
template <typename S>
inline void route_row(const S* logits, int64_t experts, int64_t used, bool renormalises, int64_t* chosen,
                      float* weights) {
    for (int64_t k = 0; k < used; ++k) {
        int64_t best = -1;
        for (int64_t e = 0; e < experts; ++e) {
            const bool is_taken = std::find(chosen, chosen + k, e) != chosen + k;
            if (!is_taken && (best < 0 || to_float(logits[e]) > to_float(logits[best]))) best = e;
        }
        chosen[k] = best;
    }
    const float top = to_float(logits[chosen[0]]);
    for (int64_t k = 0; k < used; ++k) weights[k] = exp_negative(to_float(logits[chosen[k]]) - top);
    const float total = renormalises
                            ? sum_of(used, [&](int64_t k) { return weights[k]; })
                            : sum_of(experts, [&](int64_t e) { return exp_negative(to_float(logits[e]) - top); });
    const float scale = 1.0f / total;
    for (int64_t k = 0; k < used; ++k) {
        S rounded;
        store(&rounded, weights[k] * scale);
        weights[k] = to_float(rounded);
    }
}

// The weight of the MLP that all tokens go to: the sigmoid of its gate's output, rounded to S.
template <typename S>
inline float weigh(S logit) {
    S rounded;
    store(&rounded, sigmoid(to_float(logit)));
    return to_float(rounded);
}

// sum [width] += weight * (x + bias); `bias` may be null.
template <typename S>
inline void add_expert_row(const S* x, const S* bias, float weight, int64_t width, float* sum) {
    if (!bias)
        for (int64_t i = 0; i < width; ++i) sum[i] = fused(weight, to_float(x[i]), sum[i]);
    else
        for (int64_t i = 0; i < width; ++i) sum[i] = fused(weight, to_float(x[i]) + to_float(bias[i]), sum[i]);
}

}  // namespace
