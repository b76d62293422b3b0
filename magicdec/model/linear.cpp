// Linear layers in bfloat16 for CPUs with bfloat16 dot products: weights laid out once, read once a call, whatever the
// number of rows. A few rows are bound by the bandwidth of the weights, many by the dot products.
#include <omp.h>

#if defined(__AVX512BF16__)
#include "../bf16.h"

namespace {

constexpr int WIDTH = 64;        // outputs of one block: four vectors
constexpr int64_t CHUNK = 48;    // rows that meet a block of weights together

template <int N>
void product(const uint32_t* x, int64_t x_stride, const uint32_t* block, int64_t pairs, const uint16_t* bias,
             int64_t width, uint16_t* out, int64_t out_stride) {
    __m512 sums[N][4] = {};
    multiply<N, 4>(x, x_stride, block, WIDTH, pairs, sums);
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

}  // namespace

// weight [N, K] (K even) to packed [ceil(N / 64), K / 2, 64] pairs; rows past N are zeros.
extern "C" void magicdec_pack(const uint16_t* weight, int64_t N, int64_t K, uint32_t* packed) {
    const int64_t pairs = K / 2;
#pragma omp parallel for
    for (int64_t block = 0; block < (N + WIDTH - 1) / WIDTH; ++block)
        for (int64_t j = 0; j < WIDTH; j += 16)
            for (int64_t pair = 0; pair < pairs; pair += 16) {
                const __mmask16 lanes = first_lanes(pairs - pair);
                __m512i r[16];
                for (int i = 0; i < 16; ++i) {
                    const int64_t row = block * WIDTH + j + i;
                    r[i] = _mm512_maskz_loadu_epi32(row < N ? lanes : 0, weight + std::min(row, N - 1) * K + 2 * pair);
                }
                transpose(r);
                for (int64_t i = 0; i < std::min<int64_t>(16, pairs - pair); ++i)
                    _mm512_storeu_si512(packed + (block * pairs + pair + i) * WIDTH + j, r[i]);
            }
}

// out [R, N] = x [R, K] times the packed weight, plus bias [N] or null.
extern "C" void magicdec_linear(const uint16_t* x, int64_t R, const uint32_t* packed, int64_t N, int64_t K,
                                const uint16_t* bias, uint16_t* out) {
    const int64_t pairs = K / 2, blocks = (N + WIDTH - 1) / WIDTH, chunks = (R + CHUNK - 1) / CHUNK;
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t block = 0; block < blocks; ++block)
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            const int64_t first = chunk * CHUNK, column = block * WIDTH;
            const uint32_t* rows = reinterpret_cast<const uint32_t*>(x + first * K);
            in_blocks(std::min(CHUNK, R - first), [&]<int rows_here>(int64_t r) {
                product<rows_here>(rows + r * pairs, pairs, packed + block * pairs * WIDTH, pairs,
                                   bias ? bias + column : nullptr, std::min<int64_t>(WIDTH, N - column),
                                   out + (first + r) * N + column, N);
            });
        }
}
#endif
