// Linear layers in bfloat16 for CPUs with bfloat16 dot products. Weights are packed once and read once per call, for any
// number of rows. With few rows a call is limited by the memory bandwidth, with many by the dot products.
//
// int8 weights have half the bytes. They are converted to bfloat16, which is exact, in registers, and multiplied by the
// same dot products. The sum of an output channel is multiplied by its scale.
//
// The loops over blocks are shared by the threads of the parallel region from which they are called.
#pragma once
#include <omp.h>

#include "../../kernels/bf16.h"
#include "../../kernels/int8.h"

namespace {

constexpr int WIDTH = 64;        // output channels per block: four vectors
constexpr int64_t CHUNK = 48;    // rows that are multiplied by a block of weights together
constexpr int64_t AHEAD = 4096;  // prefetch distance in bytes of weights

// out = sums * scale [width] + bias [width] as bfloat16; scale and bias may be null.
template <int N, int C>
inline void finish(const __m512 (&sums)[N][C], const float* scale, const uint16_t* bias, int64_t width, uint16_t* out,
                   int64_t out_stride) {
    for (int i = 0; 16 * i < width; ++i) {
        const __mmask16 lanes = first_lanes(width - 16 * i);
        __m512 added = _mm512_setzero_ps();
        if (bias) {
            const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, bias + 16 * i));
            added = _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
        }
        const __m512 factor = scale ? _mm512_maskz_loadu_ps(lanes, scale + 16 * i) : _mm512_set1_ps(1.0f);
        for (int n = 0; n < N; ++n)
            _mm256_mask_storeu_epi16(out + n * out_stride + 16 * i, lanes,
                                     (__m256i)_mm512_cvtneps_pbh(_mm512_fmadd_ps(sums[n][i], factor, added)));
    }
}

template <int N>
void product(const uint32_t* x, int64_t x_stride, const uint32_t* block, int64_t pairs, const uint16_t* bias,
             int64_t width, uint16_t* out, int64_t out_stride) {
    __m512 sums[N][4] = {};
    multiply<N, 4>(x, x_stride, block, WIDTH, pairs, sums, Ahead{AHEAD / 4});
    finish<N, 4>(sums, nullptr, bias, width, out, out_stride);
}

constexpr int HALF = WIDTH / 2;      // output channels in 64 bytes of int8 weights, with a pair of inputs each
constexpr int64_t MOST_INT8 = 12;    // most rows whose sums for half a block fit into registers
constexpr int64_t FEW = 6;           // most rows whose sums for a whole block fit: more independent sums

// Pairs of inputs of several rows, with the stride between rows and the stride between pairs.
struct Rows {
    const uint32_t* x;
    int64_t row, pair;
};

// Multiply N rows by C halves (1 or 2) of a block, which are `half` bytes apart.
template <int N, int C>
inline void product_int8(const Widen& widen, Rows rows, const uint8_t* weights, int64_t half, int64_t pairs,
                         __m512 (&sums)[N][2 * C]) {
    for (int64_t pair = 0; pair < pairs; ++pair)
        for (int c = 0; c < C; ++c) {
            __m512bh w[2];
            _mm_prefetch(reinterpret_cast<const char*>(weights + c * half + 64 * pair + AHEAD), _MM_HINT_T0);
            widen(weights + c * half + 64 * pair, w);
            for (int n = 0; n < N; ++n) {
                const __m512bh y = (__m512bh)_mm512_set1_epi32(int(rows.x[pair * rows.pair + n * rows.row]));
                for (int i = 0; i < 2; ++i) sums[n][2 * c + i] = _mm512_dpbf16_ps(sums[n][2 * c + i], y, w[i]);
            }
        }
}

// N rows of a block of output channels, of which `width` exist.
template <int N>
void rows_int8(const Widen& widen, Rows rows, const uint8_t* block, int64_t pairs, const float* scale,
               const uint16_t* bias, int64_t width, uint16_t* out, int64_t out_stride) {
    const int64_t half = 64 * pairs;
    if constexpr (N <= FEW) {
        __m512 sums[N][4] = {};
        product_int8<N, 2>(widen, rows, block, half, pairs, sums);
        finish<N, 4>(sums, scale, bias, width, out, out_stride);
    } else {
        for (int c = 0; c < 2 && width > HALF * c; ++c) {
            __m512 sums[N][2] = {};
            product_int8<N, 1>(widen, {rows.x, 1, N}, block + c * half, half, pairs, sums);
            finish<N, 2>(sums, scale + HALF * c, bias ? bias + HALF * c : nullptr,
                         std::min<int64_t>(HALF, width - HALF * c), out + HALF * c, out_stride);
        }
    }
}

// First row of group g when R rows are divided into `groups`.
inline int64_t group_start(int64_t R, int64_t groups, int64_t g) { return R * g / groups; }

// Transpose x [R, pairs] to [pairs, rows] for each group of rows. Otherwise rows whose distance is a multiple of the page
// size would compete for the same cache sets.
inline void interleave(const uint32_t* x, int64_t R, int64_t pairs, int64_t groups, uint32_t* out) {
#pragma omp for collapse(2) schedule(static) nowait
    for (int64_t g = 0; g < groups; ++g)
        for (int64_t pair = 0; pair < pairs; pair += 16) {
            const int64_t first = group_start(R, groups, g), rows = group_start(R, groups, g + 1) - first;
            const __mmask16 lanes = first_lanes(pairs - pair);
            __m512i r[16] = {};
            for (int i = 0; i < rows; ++i) r[i] = _mm512_maskz_loadu_epi32(lanes, x + (first + i) * pairs + pair);
            transpose(r);
            for (int64_t i = 0; i < std::min<int64_t>(16, pairs - pair); ++i)
                _mm512_mask_storeu_epi32(out + first * pairs + (pair + i) * rows, first_lanes(rows), r[i]);
        }
    wait_for_threads();
}

// Calls body(first row, rows, block) for chunks of at most `most` of R rows and blocks of N output channels, distributed over threads.
template <typename Body>
inline void for_blocks(int64_t R, int64_t N, int64_t most, Body body) {
    const int64_t blocks = (N + WIDTH - 1) / WIDTH, chunks = (R + most - 1) / most;
#pragma omp for collapse(2) schedule(static) nowait
    for (int64_t block = 0; block < blocks; ++block)
        for (int64_t chunk = 0; chunk < chunks; ++chunk)
            body(chunk * most, std::min(most, R - chunk * most), block);
    wait_for_threads();
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
    for_blocks(R, N, CHUNK, [&](int64_t first, int64_t count, int64_t block) {
        const int64_t column = block * WIDTH;
        const uint32_t* rows = reinterpret_cast<const uint32_t*>(x + first * K);
        in_blocks(count, [&]<int rows_here>(int64_t r) {
            product<rows_here>(rows + r * pairs, pairs, packed + block * pairs * WIDTH, pairs,
                               bias ? bias + column : nullptr, std::min<int64_t>(WIDTH, N - column),
                               out + (first + r) * N + column, N);
        });
    });
}

// out [R, N] = x [R, K] times the packed int8 weight, times scale [N], plus bias [N] or null. `room` is scratch memory for
// R * K numbers.
inline void linear_int8(const uint16_t* x, int64_t R, const uint8_t* packed, const float* scale, int64_t N,
                                     int64_t K, const uint16_t* bias, float* room, uint16_t* out) {
    const int64_t pairs = K / 2, groups = (R + MOST_INT8 - 1) / MOST_INT8;
    const int64_t chunks = (R + CHUNK - 1) / CHUNK, blocks = (N + WIDTH - 1) / WIDTH;
    const Widen widen;
    const uint32_t* inputs = reinterpret_cast<const uint32_t*>(x);
    if (R > FEW) {
        uint32_t* interleaved = reinterpret_cast<uint32_t*>(room);
        interleave(inputs, R, pairs, groups, interleaved);
        inputs = interleaved;
    }
#pragma omp for collapse(2) schedule(static) nowait
    for (int64_t block = 0; block < blocks; ++block)
        for (int64_t chunk = 0; chunk < chunks; ++chunk)
            for (int64_t g = groups * chunk / chunks; g < groups * (chunk + 1) / chunks; ++g) {
                const int64_t column = block * WIDTH, r = group_start(R, groups, g);
                const int64_t count = group_start(R, groups, g + 1) - r;
                const Rows rows = {inputs + r * pairs, R > FEW ? 1 : pairs, R > FEW ? count : 1};
                with_count<MOST_INT8>(count, [&]<int rows_here>() {
                    rows_int8<rows_here>(widen, rows, packed + column * K, pairs, scale + column,
                                         bias ? bias + column : nullptr, std::min<int64_t>(WIDTH, N - column),
                                         out + r * N + column, N);
                });
            }
    wait_for_threads();
}

}  // namespace
