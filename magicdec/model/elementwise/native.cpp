// What lies between a layer's matrix products, in bfloat16 with float32 arithmetic and one rounding at the end: the norm,
// the rotation of queries and keys, the gated activation. A call costs microseconds where torch's chain of operators
// costs ten times that, which on a few rows is most of what a draft costs. A row does not depend on the rows beside it.
#include "../../kernels/arithmetic.h"

namespace {

constexpr int64_t WORTH_THREADS = 1 << 15;  // numbers from which several threads pay
inline float sigmoid(float x) {
    const float e = exp_negative(-std::abs(x));
    return (x < 0 ? e : 1.0f) / (1.0f + e);
}

}  // namespace

// out [rows, width] = x / sqrt(mean(x^2) + eps) * weight [width]; rows of x are `stride` numbers apart.
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

// Turn, in place, the first `heads` of each token's heads x [tokens, all_heads, size] by table [tokens, 2, pairs] (cos and
// sin): pairs half the rotated dimensions apart, or neighbours.
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
