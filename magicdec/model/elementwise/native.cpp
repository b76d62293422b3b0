// The operations between a layer's GEMMs: RMS norm, rotary embedding of queries and keys, gated activation. Storage is
// bfloat16; values are computed in float32 and rounded once. A call takes microseconds, where torch's operators take ten
// times as long, which for a few rows is most of the time of a draft. The result for a row is independent of other rows.
#include "../../kernels/arithmetic.h"

namespace {

constexpr int64_t WORTH_THREADS = 1 << 15;  // elements from which several threads are faster than one
inline float sigmoid(float x) {
    const float e = exp_negative(-std::abs(x));
    return (x < 0 ? e : 1.0f) / (1.0f + e);
}

}  // namespace

// out [rows, width] = x / sqrt(mean(x^2) + eps) * weight [width]; rows of x are `stride` elements apart.
extern "C" void magicdec_rms_norm(const bfloat16* x, int64_t stride, const bfloat16* weight, float eps, int64_t rows,
                                  int64_t width, bfloat16* out) {
#pragma omp parallel for if (rows * width >= WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) {
        const bfloat16* from = x + row * stride;
        float sum = 0;
        for (int64_t i = 0; i < width; ++i) sum += to_float(from[i]) * to_float(from[i]);
        const float scale = 1.0f / std::sqrt(sum / float(width) + eps);
        for (int64_t i = 0; i < width; ++i) store(out + row * width + i, to_float(from[i]) * scale * to_float(weight[i]));
    }
}

// Rotate in place the first `heads` heads of x [tokens, all_heads, size] by table [tokens, 2, pairs] (cos, sin). The two
// dimensions of a pair are half the rotated dimensions apart, or neighbours if `interleaved`.
extern "C" void magicdec_rotate(bfloat16* x, const float* table, int64_t tokens, int64_t all_heads, int64_t size,
                                int64_t heads, int64_t pairs, int interleaved) {
    const int64_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : pairs;
#pragma omp parallel for if (tokens * heads * size >= WORTH_THREADS)
    for (int64_t token = 0; token < tokens; ++token) {
        const float *cosine = table + token * 2 * pairs, *sine = cosine + pairs;
        for (int64_t head = 0; head < heads; ++head) {
            bfloat16* first = x + (token * all_heads + head) * size;
            bfloat16* second = first + apart;
            for (int64_t i = 0; i < pairs; ++i) {
                const float a = to_float(first[i * step]), b = to_float(second[i * step]);
                store(first + i * step, a * cosine[i] - b * sine[i]);
                store(second + i * step, b * cosine[i] + a * sine[i]);
            }
        }
    }
}

// out [rows, width] = silu(x[:, :width]) * x[:, width:].
extern "C" void magicdec_silu_gate(const bfloat16* x, int64_t rows, int64_t width, bfloat16* out) {
#pragma omp parallel for if (rows * width >= WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) {
        const bfloat16 *gate = x + row * 2 * width, *up = gate + width;
        for (int64_t i = 0; i < width; ++i) {
            const float g = to_float(gate[i]);
            store(out + row * width + i, g * sigmoid(g) * to_float(up[i]));
        }
    }
}
