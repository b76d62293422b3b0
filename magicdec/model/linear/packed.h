// Linear layers in bfloat16 for CPUs with bfloat16 dot products. Weights are packed once and read once per call, for any
// number of rows. With few rows a call is limited by the memory bandwidth, with many by the dot products.
//
// The loops over blocks are shared by the team of the threads that call them.
#pragma once
#include "../../kernels/bf16.h"
#include "../../kernels/team.h"
#include "block_order.h"

namespace {

constexpr int WIDTH = 64;        // output channels per block: four vectors
constexpr int64_t CHUNK = 48;    // rows that are multiplied by a block of weights together
constexpr int64_t AHEAD = 4096;  // prefetch distance in bytes of weights

// out = sums + bias [width] as bfloat16; bias may be null.
template <int N, int C>
inline void finish(const __m512 (&sums)[N][C], const uint16_t* bias, int64_t width, uint16_t* out,
                   int64_t out_stride) {
    for (int i = 0; 16 * i < width; ++i) {
        const __mmask16 lanes = first_lanes(width - 16 * i);
        __m512 added = _mm512_setzero_ps();
        if (bias) {
            const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, bias + 16 * i));
            added = _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
        }
        for (int n = 0; n < N; ++n)
            _mm256_mask_storeu_epi16(out + n * out_stride + 16 * i, lanes,
                                     (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(sums[n][i], added)));
    }
}

template <int N>
void product(const uint32_t* x, int64_t x_stride, const uint32_t* block, int64_t pairs, const uint16_t* bias,
             int64_t width, uint16_t* out, int64_t out_stride) {
    __m512 sums[N][4] = {};
    multiply<N, 4>(x, x_stride, block, WIDTH, pairs, sums, Ahead{AHEAD / 4});
    finish<N, 4>(sums, bias, width, out, out_stride);
}

// Calls body(first row, rows, block, out [rows][WIDTH]) for chunks of at most MOST of R rows of K inputs and blocks of N output
// channels, distributed over threads, and writes to out [R, N].
template <int64_t MOST, typename Body>
inline void for_blocks(int64_t R, int64_t N, int64_t K, uint16_t* out, Body body) {
    const BlockOrder order((N + WIDTH - 1) / WIDTH, (R + MOST - 1) / MOST, MOST * K * sizeof(uint16_t));
    alignas(64) uint16_t results[MOST * WIDTH];
    const auto rows = [&](int64_t chunk) { return std::min(MOST, R - chunk * MOST); };
    share(
        order.count(),
        [&](int64_t i) {
            const auto [block, chunk] = order[i];
            body(chunk * MOST, rows(chunk), block, results);
        },
        [&](int64_t i) {
            const auto [block, chunk] = order[i];
            const int64_t column = block * WIDTH, width = std::min<int64_t>(WIDTH, N - column);
            uint16_t* to = out + chunk * MOST * N + column;
            for (int64_t r = 0; r < rows(chunk); ++r) std::copy_n(results + r * WIDTH, width, to + r * N);
        });
}

}  // namespace

#include "packed_amx.h"

namespace {

// out [R, N] = x [R, K] times the packed weight, plus bias [N] or null.
inline void linear_bf16(const uint16_t* x, int64_t R, const uint32_t* packed, int64_t N, int64_t K,
                        const uint16_t* bias, float*, uint16_t* out) {
#if defined(HAS_TILES)
    if (amx_serves(K)) return linear_amx(x, R, packed, N, K, bias, out);
#endif
    const int64_t pairs = K / 2;
    for_blocks<CHUNK>(R, N, K, out, [&](int64_t first, int64_t count, int64_t block, uint16_t* to) {
        const int64_t column = block * WIDTH;
        const uint32_t* rows = reinterpret_cast<const uint32_t*>(x + first * K);
        in_blocks(count, [&]<int rows_here>(int64_t r) {
            product<rows_here>(rows + r * pairs, pairs, packed + block * pairs * WIDTH, pairs,
                               bias ? bias + column : nullptr, std::min<int64_t>(WIDTH, N - column),
                               to + r * WIDTH, WIDTH);
        });
    });
}

}  // namespace
