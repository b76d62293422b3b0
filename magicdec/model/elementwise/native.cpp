// The operations of rows.h over all rows, as Python calls them. A call takes microseconds, where torch's operators take ten
// times as long.
#include "rows.h"

namespace {

constexpr int64_t WORTH_THREADS = 1 << 15;  // elements from which several threads are faster than one

}  // namespace

// Rows of x are `stride` elements apart; out is [rows, width].
extern "C" void magicdec_rms_norm(const bfloat16* x, int64_t stride, const bfloat16* weight, float eps, int64_t rows,
                                  int64_t width, bfloat16* out) {
#pragma omp parallel for if (rows * width >= WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) rms_norm_row(x + row * stride, weight, eps, width, out + row * width);
}

// x [tokens, all_heads, size], table [tokens, 2, pairs].
extern "C" void magicdec_rotate(bfloat16* x, const float* table, int64_t tokens, int64_t all_heads, int64_t size,
                                int64_t heads, int64_t pairs, int interleaved) {
#pragma omp parallel for if (tokens * heads * size >= WORTH_THREADS)
    for (int64_t token = 0; token < tokens; ++token)
        rotate_token(x + token * all_heads * size, table + token * 2 * pairs, size, heads, pairs, interleaved);
}

// x [rows, 2 width], out [rows, width].
extern "C" void magicdec_silu_gate(const bfloat16* x, int64_t rows, int64_t width, bfloat16* out) {
#pragma omp parallel for if (rows * width >= WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) silu_gate_row(x + row * 2 * width, width, out + row * width);
}
