// The operations of rows.h over all rows, as Python calls them. A call takes microseconds, where torch's operators take ten
// times as long.
#include "rows.h"

namespace {

constexpr int64_t WORTH_THREADS = 1 << 15;  // elements from which several threads are faster than one

// Rows of x are `stride` elements apart; out is [rows, width].
template <typename S>
void rms_norm(const S* x, int64_t stride, const S* weight, float eps, int64_t rows, int64_t width, S* out) {
#pragma omp parallel for if (rows * width >= WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) rms_norm_row(x + row * stride, weight, eps, width, out + row * width);
}

// x [tokens, all_heads, size], table [tokens, 2, pairs].
template <typename S>
void rotate(S* x, const float* table, int64_t tokens, int64_t all_heads, int64_t size, int64_t heads, int64_t pairs,
            bool interleaved) {
#pragma omp parallel for if (tokens * heads * size >= WORTH_THREADS)
    for (int64_t token = 0; token < tokens; ++token)
        rotate_token(x + token * all_heads * size, table + token * 2 * pairs, size, heads, pairs, interleaved);
}

// x [rows, 2 width], out [rows, width].
template <typename S>
void gate(const Gate& kind, const S* x, int64_t rows, int64_t width, S* out) {
#pragma omp parallel for if (rows * width >= WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) gate_row(kind, x + row * 2 * width, width, out + row * width);
}

// logits [rows, experts], chosen and weights [rows, used].
template <typename S>
void route(const S* logits, int64_t rows, int64_t experts, int64_t used, bool renormalises, int64_t* chosen, float* weights) {
#pragma omp parallel for if (rows * experts * used >= WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row)
        route_row(logits + row * experts, experts, used, renormalises, chosen + row * used, weights + row * used);
}

// Row tokens[i] of sum [.., width] += weights[i] * (x [rows, width] + bias [width]).
template <typename S>
void add_expert(const S* x, const S* bias, const int64_t* tokens, const float* weights, int64_t rows, int64_t width,
                float* sum) {
#pragma omp parallel for if (rows * width >= WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row)
        add_expert_row(x + row * width, bias, weights[row], width, sum + tokens[row] * width);
}

}  // namespace

// `is_float32`: of x, the weight and out; otherwise they are bfloat16.
extern "C" void magicdec_rms_norm(int is_float32, const void* x, int64_t stride, const void* weight, float eps,
                                  int64_t rows, int64_t width, void* out) {
    if (is_float32) return rms_norm((const float*)x, stride, (const float*)weight, eps, rows, width, (float*)out);
    rms_norm((const bfloat16*)x, stride, (const bfloat16*)weight, eps, rows, width, (bfloat16*)out);
}

extern "C" void magicdec_rotate(int is_float32, void* x, const float* table, int64_t tokens, int64_t all_heads,
                                int64_t size, int64_t heads, int64_t pairs, int interleaved) {
    if (is_float32) return rotate((float*)x, table, tokens, all_heads, size, heads, pairs, interleaved);
    rotate((bfloat16*)x, table, tokens, all_heads, size, heads, pairs, interleaved);
}

// `kind` is one of Gate's.
extern "C" void magicdec_gate(int is_float32, int64_t kind, float limit, float alpha, const void* x, int64_t rows, int64_t width,
                              void* out) {
    const Gate own{kind, limit, alpha};
    if (is_float32) return gate(own, (const float*)x, rows, width, (float*)out);
    gate(own, (const bfloat16*)x, rows, width, (bfloat16*)out);
}

extern "C" void magicdec_route(int is_float32, const void* logits, int64_t rows, int64_t experts, int64_t used,
                               int renormalises, int64_t* chosen, float* weights) {
    if (is_float32) return route((const float*)logits, rows, experts, used, renormalises, chosen, weights);
    route((const bfloat16*)logits, rows, experts, used, renormalises, chosen, weights);
}

extern "C" void magicdec_weigh(int is_float32, const void* logits, int64_t rows, float* weights) {
    for (int64_t row = 0; row < rows; ++row)
        weights[row] = is_float32 ? weigh(((const float*)logits)[row]) : weigh(((const bfloat16*)logits)[row]);
}

extern "C" void magicdec_add_expert(int is_float32, const void* x, const void* bias, const int64_t* tokens,
                                    const float* weights, int64_t rows, int64_t width, float* sum) {
    if (is_float32) return add_expert((const float*)x, (const float*)bias, tokens, weights, rows, width, sum);
    add_expert((const bfloat16*)x, (const bfloat16*)bias, tokens, weights, rows, width, sum);
}
