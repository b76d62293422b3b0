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
#include "block_order.h"

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

// The most rows that a storage multiplies at a time.
template <typename Weights>
constexpr int most_rows() {
    if constexpr (Expands<Weights>) {
        static_assert(Weights::MOST <= ROWS, "as few rows are one group");
        return Weights::MOST;
    }
    return ROWS;
}

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

// Groups of rows that are multiplied by a block of weights together: `rows` of the R in `room`, from `begin` on.
struct Chunk {
    const float* room;
    int64_t R, K, from, to, begin, rows;
    Chunk(const float* room, int64_t R, int64_t K, int64_t chunk, int64_t chunks)
        : room(room), R(R), K(K), from(num_groups(R) * chunk / chunks), to(num_groups(R) * (chunk + 1) / chunks),
          begin(group_start(R, from)), rows(group_start(R, to) - begin) {}

    // Calls body.operator()<n>(group, its rows at input `first`, its part of sums [rows][WIDTH]) for all groups of n rows.
    template <int MOST, typename Body>
    void for_groups(int64_t first, float* sums, Body body) const {
        for (int64_t g = from; g < to; ++g) {
            const int64_t row = group_start(R, g);
            with_count<MOST>(group_start(R, g + 1) - row, [&]<int n>() {
                body.template operator()<n>(g, Left{room + row * K + first * n, 1, n}, sums + (row - begin) * WIDTH);
            });
        }
    }
};

// sums [rows][WIDTH] += the rows of a chunk times the weights of `count` inputs, which were widened. A function of its own, which
// is compiled once for all storages.
inline void add_panel(const Chunk& chunk, const Panel& panel, int64_t count, float* sums) {
    chunk.for_groups<ROWS>(panel.begin, sums, [&]<int n>(int64_t, Left rows, float* to) {
        add_products<n>(panel, rows, panel.begin, count, NotAhead{}, to);
    });
}

// sums [rows][WIDTH] = the rows of a chunk times a block of weights. It takes long to compile and is the same for activations of
// both dtypes, which is why it is no part of `linear`.
template <typename Weights>
inline void multiply_chunk(const Chunk& chunk, const Weights& weights, float* sums) {
    std::fill_n(sums, chunk.rows * WIDTH, 0.0f);
    for (int64_t first = 0; first < chunk.K; first += INPUTS) {
        const int64_t count = std::min(INPUTS, chunk.K - first);
        // The first rows prefetch the weights of the next inputs, in the order of memory.
        auto next = static_cast<const char*>(weights.at(first + INPUTS));
        if constexpr (Expands<Weights>)
            if (chunk.rows > Weights::MOST) {
                alignas(64) float panel[INPUTS * WIDTH];
                weights.expand(first, count, InOrder<>{next}, panel);
                add_panel(chunk, Panel{panel, first}, count, sums);
                continue;
            }
        chunk.template for_groups<most_rows<Weights>()>(first, sums, [&]<int n>(int64_t g, Left rows, float* to) {
            if constexpr (!Expands<Weights>)
                if (g > chunk.from) return add_products<n>(weights, rows, first, count, NotAhead{}, to);
            add_products<n>(weights, rows, first, count, InOrder<>{next}, to);
        });
    }
}

// out [R, N] = x [R, K] times the packed weight, plus bias [N] or null. `room` is scratch memory for R * K numbers.
// `order`: see `interleave`.
template <typename Weights, typename S>
void linear(const S* x, int64_t R, const void* packed, int64_t N, int64_t K, const S* bias, float* room, S* out,
            const int32_t* order = nullptr) {
    interleave(x, R, K, order, room);
    const BlockOrder parts((N + WIDTH - 1) / WIDTH, (num_groups(R) + CHUNK - 1) / CHUNK, CHUNK * ROWS * K * sizeof(float));
    alignas(64) float sums[CHUNK * ROWS * WIDTH];
    share(
        parts.count(),
        [&](int64_t i) {
            const auto [block, chunk] = parts[i];
            multiply_chunk(Chunk(room, R, K, chunk, parts.chunks), Weights(packed, K, block), sums);
        },
        [&](int64_t i) {
            const auto [block, part] = parts[i];
            const Chunk chunk(room, R, K, part, parts.chunks);
            add_bias_and_store(sums, chunk.begin, chunk.rows, block, N, bias, out);
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
