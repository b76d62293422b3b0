// Linear layers with int8 weights, whose products are integers, on every CPU. Activations are rounded to 16 bits with a
// scale for each row and group of inputs, which is finer than bfloat16 but for inputs below 1/128 of the group's largest.
// Their sums over a group are exact, and the groups are added in their order, in float32. So the bits of a row depend neither
// on what else is computed in the same call nor on the CPU. The sum of an output channel is multiplied by its scale.
//
// A block of channels is [inputs / 4][WIDTH] entries with four inputs of a channel, as number + 128; inputs are filled up to
// whole tiles.
#pragma once
#include "../../kernels/amx.h"
#include "packed_float32.h"

namespace int8 {

using float32::WIDTH;
constexpr int64_t GROUP = 256, TILE = 64;  // inputs that share a scale, and those of a tile
constexpr int64_t CHUNK = 16;  // rows that are multiplied by a block of weights together
constexpr int64_t FEWEST_ON_TILES = 4;
constexpr int64_t AHEAD = 4096;  // prefetch distance in bytes of weights
constexpr float LARGEST = 127 * 256;  // of a rounded input, whose upper byte is then at most 127

inline int64_t whole_tiles(int64_t K) { return (K + TILE - 1) / TILE * TILE; }

// Activations of R rows: the inputs, and by row and group the scale and -128 times the sum, for the 128 that weights have too
// much. With products of bytes a row of inputs is its upper bytes and then its lower ones, which are signed. Otherwise it is
// pairs of 16 bits: of each four inputs the first and third, then the second and fourth.
struct Activations {
#if defined(__AVX512VNNI__)
    static constexpr bool BYTES = true;
#else
    static constexpr bool BYTES = false;
#endif
    int64_t width, groups;
    int32_t* inputs;
    float* scales;
    int32_t* zeros;
    Activations(float* room, int64_t R, int64_t K)
        : width(whole_tiles(K)), groups((K + GROUP - 1) / GROUP), inputs((int32_t*)room), scales(room + R * width / 2),
          zeros((int32_t*)scales + R * groups) {}

    // The entry of a quad of inputs, and the distance to its other half.
    int64_t place(int64_t row, int64_t quad) const { return row * width / 2 + (BYTES ? quad : 2 * quad); }
    int64_t other() const { return BYTES ? width / 4 : 1; }
    int64_t quads(int64_t g) const { return std::min(GROUP, width - g * GROUP) / 4; }

    template <typename S>
    void round_group(const S* x, int64_t K, int64_t row, int64_t g) {
        uint32_t largest = 0;
        int64_t count = std::min(GROUP, K - g * GROUP);
        for (int64_t i = 0; i < count; ++i) largest = std::max(largest, magnitude(to_float(x[i])));
        float most = std::bit_cast<float>(largest);
        if (largest >= NOT_FINITE) count = 0;  // zeros by such a scale: every output of the row is no number
        if (most < 1e-30f) most = 0.0f;  // its inverse would be no number
        const float inverse = most > 0.0f ? LARGEST / most : 0.0f;
        int32_t rounded[GROUP] = {}, sum = 0;
        for (int64_t i = 0; i < count; ++i) {
            const float number = to_float(x[i]);
            rounded[i] = int32_t(std::fma(number, inverse, number < 0.0f ? -0.5f : 0.5f));
            sum += rounded[i];
        }
        scales[row * groups + g] = most / LARGEST;
        zeros[row * groups + g] = -128 * sum;
        int32_t* to = inputs + place(row, g * GROUP / 4);
        if (BYTES) {
            int8_t *upper = (int8_t*)to, *lower = (int8_t*)(to + other());
            for (int64_t i = 0; i < 4 * quads(g); ++i) {
                lower[i] = int8_t(rounded[i]);
                upper[i] = int8_t((rounded[i] - lower[i]) >> 8);
            }
        } else {
            int16_t* pairs = (int16_t*)to;
            for (int64_t i = 0; i < 4 * quads(g); ++i) pairs[i / 4 * 4 + i % 2 * 2 + i / 2 % 2] = int16_t(rounded[i]);
        }
    }
};

inline vec scaled_sum(integers total, float scale, vec sum) {
    return fused(__builtin_convertvector(total, vec), broadcast(scale), sum);
}

// Four weights, 0 .. 255, of W channels, and the sums of their products with both halves of activations.
#if defined(__AVX512VNNI__)
struct Weights {
    __m512i quads;
    explicit Weights(bits w) : quads((__m512i)w) {}
};
struct Sums {
    __m512i upper = {}, lower = {};
    void add(const Weights& w, const int32_t* x, int64_t other) {
        upper = _mm512_dpbusd_epi32(upper, w.quads, _mm512_set1_epi32(x[0]));
        lower = _mm512_dpbusd_epi32(lower, w.quads, _mm512_set1_epi32(x[other]));
    }
    integers total() const { return ((integers)upper << 8) + (integers)lower; }
};
#else
struct Weights {
    bits even, odd;
    explicit Weights(bits w) : even(w & 0x00ff00ff), odd(w >> 8 & 0x00ff00ff) {}
};
struct Sums {
    integers sum = {};
    void add(const Weights& w, const int32_t* x, int64_t other) {
        sum += pair_products(w.even, x[0]) + pair_products(w.odd, x[other]);
    }
    integers total() const { return sum; }
};
#endif

// Rows of a product at a time, and vectors of channels whose sums then fit into registers.
constexpr int MOST = W == 16 ? 6 : 4;
constexpr int vectors(int N) { return W == 16 ? (N <= 3 ? 4 : 2) : N == 1 ? 4 : 2; }

// sums [N][WIDTH] = N rows from `row` on, times a block of weights.
template <int N>
inline void multiply(const Activations& x, int64_t row, const uint32_t* block, float* sums) {
    constexpr int V = vectors(N);
    const int64_t stride = x.width / 2, other = x.other();
    std::fill_n(sums, N * WIDTH, 0.0f);
    for (int64_t g = 0; g < x.groups; ++g) {
        const int64_t quads = x.quads(g);
        for (int64_t channel = 0; channel < WIDTH; channel += V * W) {
            Sums part[N][V];
            auto next = (const char*)block + AHEAD;  // the first channels prefetch for all, in the order of memory
            const int32_t* inputs = x.inputs + x.place(row, g * GROUP / 4);
            for (int64_t q = 0; q < quads; ++q, inputs += x.BYTES ? 1 : 2) {
                if (channel == 0)
                    for (int i = 0; i < WIDTH / 16; ++i, next += 64) __builtin_prefetch(next, 0, 2);
                const uint32_t* from = block + q * WIDTH + channel;
                unrolled<V>([&]<int i>() {
                    bits both;
                    std::memcpy(&both, from + i * W, sizeof(both));
                    const Weights w(both);
                    unrolled<N>([&]<int n>() { part[n][i].add(w, inputs + n * stride, other); });
                });
            }
            unrolled<N>([&]<int n>() {
                const int64_t place = (row + n) * x.groups + g;
                unrolled<V>([&]<int i>() {
                    float* sum = sums + n * WIDTH + channel + i * W;
                    store(sum, scaled_sum(part[n][i].total() + x.zeros[place], x.scales[place], load(sum)));
                });
            });
        }
        block += quads * WIDTH;
    }
}

#if defined(HAS_TILES) && defined(__AMX_INT8__) && defined(__AVX512VNNI__)
// The same on tiles, for `count` rows, of which `first` are in the first block. Both bytes of an input are rows of a tile.
template <int BLOCKS>
inline void multiply_amx(const Activations& x, int64_t row, int64_t first, int64_t count, const uint32_t* block, float* sums) {
    constexpr int COLUMNS = 4 / BLOCKS;
    alignas(64) int32_t part[BLOCKS * amx::ROWS * WIDTH];
    std::fill_n(sums, count * WIDTH, 0.0f);
    for (int64_t g = 0; g < x.groups; ++g) {
        amx::Ahead ahead{block + AHEAD / 4, 16 * BLOCKS};
        const uint32_t* left = (const uint32_t*)x.inputs + x.place(row, g * GROUP / 4);
        for (int column = 0; column < WIDTH; column += 16 * COLUMNS) {
            amx::zero_sums<4>();
            amx::add_products<BLOCKS, COLUMNS, true>({left, x.width, first * x.width / 2}, {block + column, WIDTH * 4},
                                                     x.quads(g) / amx::STEP, ahead);
            ahead.lines = 0;  // the first columns have prefetched all
            amx::store_sums<BLOCKS, COLUMNS>((float*)part + column, WIDTH * 4, 2 * first * WIDTH);
        }
        block += x.quads(g) * WIDTH;
        for (int64_t r = 0; r < count; ++r) {
            const int64_t place = (row + r) * x.groups + g;
            for (int64_t i = 0; i < WIDTH; i += W) {
                const auto upper = (integers)_mm512_load_si512(part + 2 * r * WIDTH + i);
                const auto lower = (integers)_mm512_load_si512(part + (2 * r + 1) * WIDTH + i);
                float* sum = sums + r * WIDTH + i;
                store(sum, scaled_sum((upper << 8) + lower + x.zeros[place], x.scales[place], load(sum)));
            }
        }
    }
}
#endif

// sums [count][WIDTH] = at most CHUNK rows from `row` on, times a block of weights.
inline void multiply_rows(const Activations& x, int64_t row, int64_t count, const uint32_t* block, float* sums) {
#if defined(HAS_TILES) && defined(__AMX_INT8__) && defined(__AVX512VNNI__)
    if (count >= FEWEST_ON_TILES && may_use_tiles()) {
        amx::Registers registers;
        const bool is_one = 2 * count <= amx::ROWS;
        const int64_t first = is_one ? count : (count + 1) / 2;
        registers.load(2 * first, is_one ? 2 * count : 2 * (count - first));
        return (is_one ? multiply_amx<1> : multiply_amx<2>)(x, row, first, count, block, sums);
    }
#endif
    in_blocks<MOST>(count, [&]<int rows>(int64_t r) { multiply<rows>(x, row + r, block, sums + r * WIDTH); });
}

// out [R, N] = x [R, K] times the packed weight, times scale [N], plus bias [N] or null. `room` is scratch memory for
// R * (K + TILE) numbers.
inline void linear(const bfloat16* x, int64_t R, const uint32_t* packed, const float* scale, int64_t N, int64_t K,
                   const bfloat16* bias, float* room, bfloat16* out) {
    Activations rounded(room, R, K);
    const int64_t blocks = (N + WIDTH - 1) / WIDTH, chunks = (R + CHUNK - 1) / CHUNK;
    share(R * rounded.groups, [&](int64_t i) {
        const int64_t r = i / rounded.groups, g = i % rounded.groups;
        rounded.round_group(x + r * K + g * GROUP, K, r, g);
    });
    alignas(64) float sums[CHUNK * WIDTH];
    share(
        blocks * chunks,
        [&](int64_t part) {
            const int64_t row = part % chunks * CHUNK, count = std::min(CHUNK, R - row);
            multiply_rows(rounded, row, count, packed + part / chunks * rounded.width / 4 * WIDTH, sums);
        },
        [&](int64_t part) {
            const int64_t channel = part / chunks * WIDTH, width = std::min<int64_t>(WIDTH, N - channel);
            const int64_t row = part % chunks * CHUNK, count = std::min(CHUNK, R - row);
            for (int64_t r = 0; r < count; ++r) {
                float* sum = sums + r * WIDTH;
                for (int64_t i = 0; i < width; ++i)
                    sum[i] = std::fma(sum[i], scale[channel + i], bias ? to_float(bias[channel + i]) : 0.0f);
                float32::store_all(out + (row + r) * N + channel, sum, width);
            }
        });
}

}  // namespace int8
