// The linear layers of packed.h on the matrix unit AMX, over the same packed weights. The bits of a row do not depend on
// how many rows there are.
#pragma once
#include "../../kernels/amx.h"
#if defined(HAS_TILES)

namespace {

constexpr int64_t AMX_CHUNK = 2 * amx::ROWS;  // rows that are multiplied by a block of weights together

// Whether x has the width that tiles need, and the system lets this process use them.
inline bool amx_serves(int64_t K) { return K % (2 * amx::STEP) == 0 && may_use_tiles(); }

// The product of `count` rows x and a block of weights, of which `width` output channels exist. `first` rows are in the
// first block of rows.
template <int BLOCKS>
inline void product_amx(const uint32_t* x, int64_t first, int64_t count, const uint32_t* block, int64_t pairs,
                        const uint16_t* bias, int64_t width, bool is_far, uint16_t* out, int64_t out_stride) {
    constexpr int COLUMNS = 4 / BLOCKS;
    alignas(64) float sums[BLOCKS * amx::ROWS * WIDTH];
    amx::Ahead ahead{block + AHEAD / 4, 16 * BLOCKS, is_far};
    for (int column = 0; column < WIDTH; column += 16 * COLUMNS) {
        amx::zero_sums<4>();
        amx::add_products<BLOCKS, COLUMNS>({x, pairs * 4, first * pairs}, {block + column, WIDTH * 4},
                                           pairs / amx::STEP, ahead);
        ahead.lines = 0;  // the first columns have prefetched all
        amx::store_sums<BLOCKS, COLUMNS>(sums + column, WIDTH * 4, first * WIDTH);
    }
    for (int64_t r = 0; r < count; ++r) {
        __m512 row[1][4];
        for (int i = 0; i < 4; ++i) row[0][i] = _mm512_load_ps(sums + r * WIDTH + 16 * i);
        finish<1, 4>(row, bias, width, out + r * out_stride, out_stride);
    }
}

// See `linear_bf16`.
inline void linear_amx(const uint16_t* x, int64_t R, const uint32_t* packed, int64_t N, int64_t K, const uint16_t* bias,
                       uint16_t* out) {
    const int64_t pairs = K / 2;
    amx::Registers registers;
    for_blocks<AMX_CHUNK>(R, N, K, out, [&](int64_t r, int64_t count, int64_t block, uint16_t* to) {
        const int64_t column = block * WIDTH, width = std::min<int64_t>(WIDTH, N - column);
        const uint32_t *rows = reinterpret_cast<const uint32_t*>(x + r * K), *weights = packed + column * pairs;
        const uint16_t* added = bias ? bias + column : nullptr;
        const int64_t first = count <= amx::ROWS ? count : (count + 1) / 2;
        registers.load(first, count <= amx::ROWS ? count : count - first);
        const auto product = count <= amx::ROWS ? product_amx<1> : product_amx<2>;
        product(rows, first, count, weights, pairs, added, width, 2 * N * K >= FAR_BYTES, to, WIDTH);
    });
}

}  // namespace
#endif
