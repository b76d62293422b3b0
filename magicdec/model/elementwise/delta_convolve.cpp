// The convolution before linear attention (delta.py, convolve): each channel of a token is a sum over the newest tokens, then silu;
// queries and keys are divided by their lengths. A token has the same bits alone and among others.
//
// Shapes: B rows, T new tokens, H value heads and G key heads, D and E the sizes of a key and of a value, C = 2 G D + H E channels,
// K tokens in a sum.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <omp.h>

#include "../../kernels/wide.h"

namespace {

constexpr int64_t TOKENS = 8;  // that a thread takes together, since each reads those before it
constexpr float LOG2_E = 1.44269504f, NORM_EPS = 1e-6f;

struct Problem {
    int64_t B, T, G, H, D, E, K;
    const float *channels, *before;  // [B, T, C], [B, K - 1, C]
    float *q, *k, *v;                // [B, T, G, D] twice, [B, T, H, E]
    int64_t num_channels() const { return 2 * G * D + H * E; }
};

// The channels of one head.
struct Head {
    int64_t first, size;
    float* out;        // of the first token
    int64_t out_step;  // from token to token
    bool is_normed;
    float scale;
};

Head describe(const Problem& p, int64_t number) {
    if (number < p.G) return {number * p.D, p.D, p.q + number * p.D, p.G * p.D, true, 1 / std::sqrt(float(p.D))};
    number -= p.G;
    if (number < p.G) return {(p.G + number) * p.D, p.D, p.k + number * p.D, p.G * p.D, true, 1};
    number -= p.G;
    return {2 * p.G * p.D + number * p.E, p.E, p.v + number * p.E, p.H * p.E, false, 1};
}

// The first `count` of W numbers, and zeros.
inline vec load_some(const float* x, int64_t count) {
    vec some{};
    std::memcpy(&some, x, count * sizeof(float));
    return some;
}

inline vec silu(vec x) {
    const vec e = exp2_wide(-larger(x, -x) * broadcast(LOG2_E)), one = broadcast(1);
    return x * ((x < 0 ? e : one) / (one + e));
}

// One head of the tokens from `begin` on. `weights` are [K, C].
void mix(const Problem& p, const Head& head, const float* weights, int64_t b, int64_t begin) {
    const int64_t C = p.num_channels();
    const auto token = [&](int64_t t) {
        const float* row = t < 0 ? p.before + (b * (p.K - 1) + p.K - 1 + t) * C : p.channels + (b * p.T + t) * C;
        return row + head.first;
    };
    for (int64_t t = begin; t < std::min(begin + TOKENS, p.T); ++t) {
        float* out = head.out + (b * p.T + t) * head.out_step;
        vec squares{};
        for (int64_t c = 0; c < head.size; c += W) {
            const int64_t count = std::min<int64_t>(W, head.size - c);
            vec sum{};
            for (int64_t i = 0; i < p.K; ++i) {
                const float *x = token(t - p.K + 1 + i) + c, *weight = weights + i * C + head.first + c;
                sum = count == W ? fused(load(x), load(weight), sum) : fused(load_some(x, count), load_some(weight, count), sum);
            }
            sum = silu(sum);
            squares = fused(sum, sum, squares);
            std::memcpy(out + c, &sum, count * sizeof(float));
        }
        if (!head.is_normed) continue;
        const float factor = head.scale / std::sqrt(sum_across(squares) + NORM_EPS);
        for (int64_t c = 0; c < head.size; ++c) out[c] *= factor;
    }
}

}  // namespace

extern "C" void magicdec_delta_convolve(const int64_t* sizes, const float* channels, const float* before, const void* weight,
                                        float* q, float* k, float* v) {
    const Problem p{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], channels, before, q, k, v};
    const int64_t C = p.num_channels(), blocks = (p.T + TOKENS - 1) / TOKENS;
    const bool is_float32 = sizes[7];
    std::vector<float> weights(p.K * C);  // from [C, K]
#pragma omp parallel
    {
#pragma omp for
        for (int64_t c = 0; c < C; ++c)
            for (int64_t i = 0; i < p.K; ++i) {
                const int64_t at = c * p.K + i;
                weights[i * C + c] = is_float32 ? static_cast<const float*>(weight)[at]
                                                : to_float(static_cast<const bfloat16*>(weight)[at]);
            }
#pragma omp for collapse(2)
        for (int64_t block = 0; block < p.B * blocks; ++block)
            for (int64_t head = 0; head < 2 * p.G + p.H; ++head)
                mix(p, describe(p, head), weights.data(), block / blocks, block % blocks * TOKENS);
    }
}
