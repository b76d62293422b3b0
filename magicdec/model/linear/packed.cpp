// Packing of weights, and the linear layers of packed.h, as Python calls them.
#include "packed.h"
#include "packed_float32.h"

// weight [N, K] to packed [ceil(N / 64), K, 64]; rows past N are zeros.
extern "C" void magicdec_pack_float32(const float* weight, int64_t N, int64_t K, float* packed) {
    constexpr int64_t width = float32::WIDTH;
#pragma omp parallel for
    for (int64_t block = 0; block < (N + width - 1) / width; ++block)
        for (int64_t k = 0; k < K; ++k)
            for (int64_t j = 0, row; j < width; ++j)
                packed[(block * K + k) * width + j] = (row = block * width + j) < N ? weight[row * K + k] : 0.0f;
}

// See `linear_float32`.
extern "C" void magicdec_linear_float32(const float* x, int64_t R, const float* packed, int64_t N, int64_t K,
                                        const float* bias, float* out) {
#pragma omp parallel
    linear_float32(x, R, packed, N, K, bias, out);
}

#if defined(__AVX512BF16__)
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

// weight [N, K] (K even, -127 .. 127) to packed [ceil(N / 64), 2, K / 2, 64] bytes of sign and magnitude, in the order
// that `Widen` expects; rows past N are zeros.
extern "C" void magicdec_pack_int8(const int8_t* weight, int64_t N, int64_t K, uint8_t* packed) {
    const int64_t pairs = K / 2;
#pragma omp parallel for
    for (int64_t block = 0; block < (N + WIDTH - 1) / WIDTH; ++block)
        for (int64_t j = 0; j < WIDTH; ++j) {
            const int64_t row = block * WIDTH + j, vector = j / 16, lane = j % 16 / 4;
            // 64 bytes hold two vectors; each 128-bit lane holds 8 bytes of the first and 8 bytes of the second.
            uint8_t* place = packed + (2 * block + vector / 2) * pairs * 64 + lane * 16 + vector % 2 * 8 + j % 4 * 2;
            for (int64_t pair = 0; pair < pairs; ++pair)
                for (int i = 0; i < 2; ++i) {
                    const int w = row < N ? weight[row * K + 2 * pair + i] : 0;
                    place[64 * pair + i] = uint8_t(w < 0 ? 0x80 - w : w);
                }
        }
}

// See `linear_bf16` and `linear_int8`.
extern "C" void magicdec_linear(const uint16_t* x, int64_t R, const uint32_t* packed, int64_t N, int64_t K,
                                const uint16_t* bias, uint16_t* out) {
#pragma omp parallel
    linear_bf16(x, R, packed, N, K, bias, out);
}

extern "C" void magicdec_linear_int8(const uint16_t* x, int64_t R, const uint8_t* packed, const float* scale, int64_t N,
                                     int64_t K, const uint16_t* bias, uint32_t* room, uint16_t* out) {
#pragma omp parallel
    linear_int8(x, R, packed, scale, N, K, bias, room, out);
}
#endif
