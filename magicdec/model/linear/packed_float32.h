// Linear layers whose arithmetic is float32, on every CPU, over packed weights in float32 or bfloat16. Weights are
// packed once, in blocks of output channels, and read once per call for any number of rows; those of fewer bits are widened
// in registers. Each output is one chain of additions in the order of the inputs, so its bits do not depend on what else is
// computed in the same call.
//
// The loops over blocks are shared by the team of the threads that call them.
#pragma once
#include <bit>

#include "../../kernels/team.h"
#include "../../kernels/wide.h"

// Numbers without their sign, in their order, as bits: compilers may take comparisons of floats to be of finite ones. From
// NOT_FINITE on they are infinite or no numbers.
constexpr uint32_t NOT_FINITE = 0x7f800000;
inline uint32_t magnitude(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffff; }

namespace float32 {

constexpr int WIDTH = 64;        // output channels per block
constexpr int64_t CHUNK = 8;     // groups of ROWS that are multiplied by a block of weights together
constexpr int64_t INPUTS = 128;  // inputs whose weights stay in the L1 cache while a chunk of rows is multiplied

// The number of groups of R rows, and the first row of group g.
inline int64_t num_groups(int64_t R) { return (R + ROWS - 1) / ROWS; }
inline int64_t group_start(int64_t R, int64_t g) { return R * g / num_groups(R); }

// x [R, K] as float32, [K, rows] for each group of rows. Otherwise rows whose distance is a multiple of the page size would
// compete for the same cache sets. `order`: the inputs in the order of the weights, or null.
template <typename S>
inline void interleave(const S* x, int64_t R, int64_t K, const int32_t* order, float* out) {
    constexpr int64_t part = 256;
    const int64_t parts = (K + part - 1) / part;
    share(num_groups(R) * parts, [&](int64_t i) {
        const int64_t g = i / parts, from = i % parts * part;
        const int64_t first = group_start(R, g), rows = group_start(R, g + 1) - first;
        const int64_t to = std::min(K, from + part);
        for (int64_t r = 0; r < rows; ++r) {
            const S* row = x + (first + r) * K;
            float* column = out + first * K + r;
            if (order)
                for (int64_t k = from; k < to; ++k) column[k * rows] = to_float(row[order[k]]);
            else
                for (int64_t k = from; k < to; ++k) column[k * rows] = to_float(row[k]);
        }
    });
}

// The weights of a block of output channels, by their storage. `at` is where those of an input begin. `add<N, V>` adds to sums
// [N][V] the products of N rows, which begin at input `first`, and V vectors of channels from `channel` on, for `count` inputs
// from `first` on. `ahead` is called for every 64 bytes of weights.

struct Floats {  // [K][WIDTH]
    const float* data;
    Floats(const void* packed, int64_t K, int64_t block) : data((const float*)packed + block * K * WIDTH) {}
    const void* at(int64_t input) const { return data + input * WIDTH; }
    template <int N, int V, typename Prefetch>
    void add(Left rows, int64_t channel, int64_t first, int64_t count, Prefetch ahead, vec (&sums)[N][V]) const {
        const float* from = data + first * WIDTH + channel;
        for (int64_t k = 0; k < count; ++k, from += WIDTH, rows.x += rows.step)
            for (int i = 0; i < V; ++i) {
                if (i * W % 16 == 0) ahead(from);
                const vec w = load(from + i * W);
                for (int n = 0; n < N; ++n) sums[n][i] = fused(broadcast(rows.x[n * rows.row]), w, sums[n][i]);
            }
    }
};

struct Pairs {  // bfloat16: [K / 2][WIDTH] pairs
    const uint32_t* data;
    Pairs(const void* packed, int64_t K, int64_t block) : data((const uint32_t*)packed + block * K / 2 * WIDTH) {}
    const void* at(int64_t input) const { return data + input / 2 * WIDTH; }
    template <int N, int V, typename Prefetch>
    void add(Left rows, int64_t channel, int64_t first, int64_t count, Prefetch ahead, vec (&sums)[N][V]) const {
        multiply(rows, data + first / 2 * WIDTH + channel, WIDTH, count / 2, sums, ahead);
    }
};

// Float32 weights [INPUTS][WIDTH] of the inputs from `begin` on, which were widened for several groups of rows.
struct Panel {
    const float* data;
    int64_t begin;
    template <int N, int V, typename Prefetch>
    void add(Left rows, int64_t channel, int64_t first, int64_t count, Prefetch ahead, vec (&sums)[N][V]) const {
        const float* from = data + (first - begin) * WIDTH + channel;
        for (int64_t k = 0; k < count; ++k, from += WIDTH, rows.x += rows.step)
            for (int i = 0; i < V; ++i) {
                const vec w = load(from + i * W);
                for (int n = 0; n < N; ++n) sums[n][i] = fused(broadcast(rows.x[n * rows.row]), w, sums[n][i]);
            }
    }
};

// Whether a storage is widened once for all rows, where these are more than its MOST.
template <typename Weights>
concept Expands = requires { Weights::MOST; };

// sums [N][WIDTH] += N rows times the weights of `count` inputs from `first` on.
template <int N, typename Weights, typename Prefetch>
inline void add_products(const Weights& weights, Left rows, int64_t first, int64_t count, Prefetch ahead, float* sums) {
    constexpr int V = vectors_of(N);
    for (int64_t channel = 0; channel < WIDTH; channel += V * W) {
        vec part[N][V];
        for (int n = 0; n < N; ++n)
            for (int i = 0; i < V; ++i) part[n][i] = load(sums + n * WIDTH + channel + i * W);
        weights.add(rows, channel, first, count, ahead, part);
        for (int n = 0; n < N; ++n)
            for (int i = 0; i < V; ++i) store(sums + n * WIDTH + channel + i * W, part[n][i]);
    }
}

inline void store_all(float* out, const float* sums, int64_t count) { std::copy_n(sums, count, out); }
inline void store_all(bfloat16* out, const float* sums, int64_t count) {
    for (int64_t i = 0; i < count; i += W) store(&out[i].value, load(sums + i), count - i);
}

// out [row .. row + count - 1][N] of a block of output channels = sums [count][WIDTH], plus bias [N] or null.
template <typename S>
inline void add_bias_and_store(float* sums, int64_t row, int64_t count, int64_t block, int64_t N, const S* bias, S* out) {
    const int64_t channel = block * WIDTH, width = std::min<int64_t>(WIDTH, N - channel);
    for (int64_t r = 0; r < count; ++r) {
        float* sum = sums + r * WIDTH;
        if (bias)
            for (int64_t i = 0; i < width; ++i) sum[i] += to_float(bias[channel + i]);
        store_all(out + (row + r) * N + channel, sum, width);
    }
}

// out [R, N] = x [R, K] times the packed weight, plus bias [N] or null. `room` is scratch memory for R * K numbers.
// `order`: see `interleave`.
template <typename Weights, typename S>
void linear(const S* x, int64_t R, const void* packed, int64_t N, int64_t K, const S* bias, float* room, S* out,
            const int32_t* order = nullptr) {
    interleave(x, R, K, order, room);
    const int64_t blocks = (N + WIDTH - 1) / WIDTH, groups = num_groups(R), chunks = (groups + CHUNK - 1) / CHUNK;
    alignas(64) float sums[CHUNK * ROWS * WIDTH];
    share(
        blocks * chunks,
        [&](int64_t part) {
            const int64_t block = part / chunks, chunk = part % chunks;
            const int64_t from = groups * chunk / chunks, to = groups * (chunk + 1) / chunks;
            const int64_t begin = group_start(R, from), end = group_start(R, to);
            std::fill_n(sums, (end - begin) * WIDTH, 0.0f);
            const Weights weights(packed, K, block);
            for (int64_t first = 0; first < K; first += INPUTS) {
                // The first rows prefetch the weights of the next inputs, in the order of memory.
                auto next = static_cast<const char*>(weights.at(first + INPUTS));
                if constexpr (Expands<Weights>)
                    if (end - begin > Weights::MOST) {
                        alignas(64) float panel[INPUTS * WIDTH];
                        const int64_t count = std::min(INPUTS, K - first);
                        weights.expand(first, count, InOrder{next}, panel);
                        for (int64_t g = from; g < to; ++g) {
                            const int64_t row = group_start(R, g), rows = group_start(R, g + 1) - row;
                            with_count<ROWS>(rows, [&]<int n>() {
                                const Left left = {room + row * K + first * n, 1, n};
                                add_products<n>(Panel{panel, first}, left, first, count, NotAhead{},
                                                sums + (row - begin) * WIDTH);
                            });
                        }
                        continue;
                    }
                for (int64_t g = from; g < to; ++g) {
                    const int64_t row = group_start(R, g), rows = group_start(R, g + 1) - row;
                    with_count<ROWS>(rows, [&]<int n>() {
                        const Left left = {room + row * K + first * n, 1, n};
                        const int64_t count = std::min(INPUTS, K - first);
                        float* to_sums = sums + (row - begin) * WIDTH;
                        if (g == from)
                            add_products<n>(weights, left, first, count, InOrder{next}, to_sums);
                        else
                            add_products<n>(weights, left, first, count, NotAhead{}, to_sums);
                    });
                }
            }
        },
        [&](int64_t part) {
            const int64_t block = part / chunks, chunk = part % chunks;
            const int64_t begin = group_start(R, groups * chunk / chunks), end = group_start(R, groups * (chunk + 1) / chunks);
            add_bias_and_store(sums, begin, end - begin, block, N, bias, out);
        });
}

}  // namespace float32

namespace {

inline void linear_float32(const float* x, int64_t R, const float* packed, int64_t N, int64_t K, const float* bias,
                           float* room, float* out) {
    float32::linear<float32::Floats>(x, R, packed, N, K, bias, room, out);
}

#if !defined(__AVX512BF16__)
inline void linear_bf16(const uint16_t* x, int64_t R, const uint32_t* packed, int64_t N, int64_t K, const uint16_t* bias,
                        float* room, uint16_t* out) {
    float32::linear<float32::Pairs>((const bfloat16*)x, R, packed, N, K, (const bfloat16*)bias, room, (bfloat16*)out);
}
#endif

}  // namespace
