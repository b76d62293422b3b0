// Linear layers in float32. Weights are packed once, in blocks of output channels, and read once per call for any number
// of rows. Each output is one chain of additions in the order of the inputs, so its bits do not depend on what else is
// computed in the same call.
//
// The loop over blocks is shared by the threads of the parallel region from which it is called.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include <omp.h>

namespace float32 {

constexpr int64_t WIDTH = 64;  // output channels per block
constexpr int64_t CHUNK = 48;  // rows that are multiplied by a block of weights together
constexpr int64_t AHEAD = 1024;  // prefetch distance in weights
#if defined(__AVX512F__)
constexpr int LANES = 16, VECTORS = 4;  // vectors of output channels at a time: with six rows, 24 of 32 registers
#else
constexpr int LANES = 8, VECTORS = 2;  // with six rows, 12 of 16 registers
#endif
typedef float Vector __attribute__((vector_size(4 * LANES)));

inline Vector load(const float* from) {
    Vector x;
    std::memcpy(&x, from, sizeof(x));
    return x;
}

// N rows times VECTORS vectors of a block; `width` of their columns exist.
template <int N>
inline void product(const float* x, int64_t x_stride, const float* block, int64_t K, const float* bias, int64_t width,
                    float* out, int64_t out_stride) {
    Vector sums[N][VECTORS] = {};
    for (int64_t k = 0; k < K; ++k)
        for (int i = 0; i < VECTORS; ++i) {
            const Vector w = load(block + k * WIDTH + i * LANES);
            __builtin_prefetch(block + k * WIDTH + i * LANES + AHEAD);
            for (int n = 0; n < N; ++n) sums[n][i] += x[n * x_stride + k] * w;
        }
    for (int i = 0; i < VECTORS && i * LANES < width; ++i) {
        const int64_t bytes = std::min<int64_t>(width - i * LANES, LANES) * 4;
        Vector added = {};
        if (bias) std::memcpy(&added, bias + i * LANES, bytes);
        for (int n = 0; n < N; ++n) {
            const Vector sum = sums[n][i] + added;
            if (bytes == sizeof(Vector))
                std::memcpy(out + n * out_stride + i * LANES, &sum, sizeof(Vector));
            else
                std::memcpy(out + n * out_stride + i * LANES, &sum, bytes);
        }
    }
}

template <int N>
inline void block_product(const float* x, int64_t x_stride, const float* block, int64_t K, const float* bias,
                          int64_t width, float* out, int64_t out_stride) {
    for (int64_t i = 0; i < width; i += VECTORS * LANES)
        product<N>(x, x_stride, block + i, K, bias ? bias + i : nullptr, width - i, out + i, out_stride);
}

}  // namespace float32

namespace {

// out [R, N] = x [R, K] times the packed weight [ceil(N / 64), K, 64], plus bias [N] or null.
inline void linear_float32(const float* x, int64_t R, const float* packed, int64_t N, int64_t K, const float* bias,
                           float* out) {
    using namespace float32;
    const int64_t blocks = (N + float32::WIDTH - 1) / float32::WIDTH, chunks = (R + float32::CHUNK - 1) / float32::CHUNK;
#pragma omp for collapse(2) schedule(static)
    for (int64_t block = 0; block < blocks; ++block)
        for (int64_t chunk = 0; chunk < chunks; ++chunk)
            for (int64_t r = chunk * float32::CHUNK, end = std::min(R, r + float32::CHUNK), count; r < end; r += count) {
                const int64_t column = block * float32::WIDTH, width = std::min(float32::WIDTH, N - column);
                const float* weights = packed + block * K * float32::WIDTH;
                const float* added = bias ? bias + column : nullptr;
                auto rows = [&]<int n>() {
                    block_product<n>(x + r * K, K, weights, K, added, width, out + r * N + column, N);
                };
                count = std::min<int64_t>(6, end - r);
                switch (count) {
                    case 1: rows.template operator()<1>(); break;
                    case 2: rows.template operator()<2>(); break;
                    case 3: rows.template operator()<3>(); break;
                    case 4: rows.template operator()<4>(); break;
                    case 5: rows.template operator()<5>(); break;
                    default: rows.template operator()<6>(); break;
                }
            }
}

}  // namespace
