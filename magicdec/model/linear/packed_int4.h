// Linear layers with int4 weights, whose products are integers, on every CPU. A group of inputs has a scale for each output
// channel. Activations are rounded to int8 with a scale for each row and group, so that a CPU multiplies many numbers in one
// instruction; their sums over a group are exact. The groups are added in their order, in float32. So the bits of a row
// depend neither on what else is computed in the same call nor on the CPU.
//
// In a block of channels, a group has first its scales in bfloat16, of channels c and c + 32 in entry c, and then
// [GROUP / 8][WIDTH] entries with eight inputs of a channel: those of inputs 0 to 3 in the lower halves of the bytes, those
// of 4 to 7 in the upper ones, as number + 8.
#pragma once
#include "../../kernels/amx.h"
#include "packed_float32.h"

namespace int4 {

using float32::WIDTH;
constexpr int64_t GROUP = 32, DEPTH = GROUP / 4;  // inputs and quads of a group
constexpr int64_t SCALES = WIDTH / 2, ENTRIES = SCALES + GROUP / 8 * WIDTH;
constexpr int64_t CHUNK = 32;         // rows that are multiplied by a block of weights together
constexpr int64_t FEWEST_ON_TILES = 9;
constexpr int64_t NEAR = 2304, FAR = 16384;  // prefetch distances in bytes, into the L1 and the L2 cache
typedef int32_t integers __attribute__((vector_size(W * 4)));

inline void prefetch(const uint32_t* weights) {
    __builtin_prefetch((const char*)weights + NEAR, 0, 3);
    __builtin_prefetch((const char*)weights + FAR, 0, 2);
}

// Activations of R rows: quads of int8 [R, K / 4]; by row and group the scale, and -8 times the sum, for the 8 that weights
// have too much.
struct Activations {
    int32_t* quads;
    float* scales;
    int32_t* zeros;
    Activations(float* room, int64_t R, int64_t K)
        : quads((int32_t*)room), scales(room + R * K / 4), zeros((int32_t*)scales + R * K / GROUP) {}
};

template <typename S>
inline void round_group(const S* x, int8_t* out, float* scale, int32_t* zero) {
    float numbers[GROUP];
    uint32_t largest = 0;
    for (int64_t i = 0; i < GROUP; ++i) {
        numbers[i] = to_float(x[i]);
        largest = std::max(largest, magnitude(numbers[i]));
    }
    const float most = std::bit_cast<float>(largest);
    if (largest >= NOT_FINITE) std::fill_n(numbers, GROUP, 0.0f);  // by such a scale: every output of the row is no number
    const float inverse = most > 0.0f ? 127.0f / most : 0.0f;
    int32_t sum = 0, rounded[GROUP];
    for (int64_t i = 0; i < GROUP; ++i) {
        rounded[i] = int32_t(std::fma(numbers[i], inverse, numbers[i] < 0.0f ? -0.5f : 0.5f));
        sum += rounded[i];
    }
    for (int64_t i = 0; i < GROUP; ++i) out[i] = int8_t(rounded[i]);
    *scale = most / 127.0f;
    *zero = -8 * sum;
}

// The sums of products of weights, 0 .. 15, with quads of activations, for W channels. `total` adds `zero`.
struct Sums {
#if defined(__AVX512BW__)
    __m512i sum;
    void add(bits w, int32_t quad) {
#if defined(__AVX512VNNI__)
        sum = _mm512_dpbusd_epi32(sum, (__m512i)w, _mm512_set1_epi32(quad));
    }
    void begin(int32_t zero) { sum = _mm512_set1_epi32(zero); }
    vec total(int32_t) const { return (vec)_mm512_cvtepi32_ps(sum); }
#else  // sums of the 16 products that a half of a lane takes have 16 bits
        sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16((__m512i)w, _mm512_set1_epi32(quad)));
    }
    void begin(int32_t) { sum = _mm512_setzero_si512(); }
    vec total(int32_t zero) const {
        const __m512i all = _mm512_madd_epi16(sum, _mm512_set1_epi16(1));
        return (vec)_mm512_cvtepi32_ps(_mm512_add_epi32(all, _mm512_set1_epi32(zero)));
    }
#endif
#elif defined(__AVX2__)
    __m256i sum;
    void begin(int32_t) { sum = _mm256_setzero_si256(); }
    void add(bits w, int32_t quad) {
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(quad)));
    }
    vec total(int32_t zero) const {
        const __m256i all = _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
        return (vec)_mm256_cvtepi32_ps(_mm256_add_epi32(all, _mm256_set1_epi32(zero)));
    }
#else
    integers sum;
    void begin(int32_t zero) { sum = integers{} + zero; }
    void add(bits w, int32_t quad) {
        for (int i = 0; i < 32; i += 8) sum += (integers)(w >> i & 0xff) * int32_t(int8_t(quad >> i));
    }
    vec total(int32_t) const { return __builtin_convertvector(sum, vec); }
#endif
};

// The scales of a group for W channels.
inline vec scales(const uint32_t* group, int64_t channel) {
    bits both;
    std::memcpy(&both, group + channel % SCALES, sizeof(both));
    return (vec)(channel < SCALES ? both << 16 : both & 0xffff0000);
}

// Rows of a product at a time, and vectors of channels whose sums then fit into registers.
constexpr int MOST = W == 16 ? 8 : 4;
constexpr int vectors(int N) { return W == 16 ? (N <= 4 ? 4 : 2) : N <= 2 ? 4 : 2; }

// sums [N][WIDTH] = N rows from `row` on, times a block of weights.
template <int N>
inline void multiply(const Activations& x, int64_t row, const uint32_t* block, int64_t K, float* sums) {
    constexpr int V = vectors(N);
    const int64_t groups = K / GROUP;
    std::fill_n(sums, N * WIDTH, 0.0f);
    for (int64_t g = 0; g < groups; ++g, block += ENTRIES) {
        const int32_t* quads = x.quads + row * K / 4 + g * GROUP / 4;
        for (int64_t channel = 0; channel < WIDTH; channel += V * W) {
            Sums part[N][V];
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
                for (int i = 0; i < V; ++i) part[n][i].begin(x.zeros[(row + n) * groups + g]);
#pragma GCC unroll 4
            for (int64_t e = 0; e < GROUP / 8; ++e) {
                const uint32_t* from = block + SCALES + e * WIDTH + channel;
                bits low[V], high[V];
#pragma GCC unroll 8
                for (int i = 0; i < V; ++i) {
                    if (i * W % 16 == 0) prefetch(from + i * W);
                    std::memcpy(&low[i], from + i * W, sizeof(bits));
                    high[i] = low[i] >> 4 & 0x0f0f0f0f;
                    low[i] &= 0x0f0f0f0f;
                }
#pragma GCC unroll 8
                for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
                    for (int i = 0; i < V; ++i) {
                        part[n][i].add(low[i], quads[n * K / 4 + 2 * e]);
                        part[n][i].add(high[i], quads[n * K / 4 + 2 * e + 1]);
                    }
            }
#pragma GCC unroll 8
            for (int i = 0; i < V; ++i) {
                const int64_t first = channel + i * W;
                const vec scale = scales(block, first);
#pragma GCC unroll 8
                for (int n = 0; n < N; ++n) {
                    float* sum = sums + n * WIDTH + first;
                    const int64_t place = (row + n) * groups + g;
                    store(sum, fused(part[n][i].total(x.zeros[place]), scale * broadcast(x.scales[place]), load(sum)));
                }
            }
        }
    }
}

#if defined(HAS_TILES) && defined(__AMX_INT8__)
// The same on tiles, for `count` rows, of which `first` are in the first block of rows.
template <int BLOCKS>
inline void multiply_amx(const Activations& x, int64_t row, int64_t first, int64_t count, const uint32_t* block, int64_t K,
                         float* sums) {
    constexpr int COLUMNS = 4 / BLOCKS;
    const int64_t groups = K / GROUP;
    alignas(64) uint32_t weights[DEPTH * WIDTH];
    alignas(64) int32_t part[BLOCKS * amx::ROWS * WIDTH];
    std::fill_n(sums, count * WIDTH, 0.0f);
    for (int64_t g = 0; g < groups; ++g, block += ENTRIES) {
        for (int64_t i = 0; i < GROUP / 8 * WIDTH; i += W) {
            prefetch(block + SCALES + i);
            const __m512i both = _mm512_load_si512(block + SCALES + i), low = _mm512_set1_epi32(0x0f0f0f0f);
            uint32_t* to = weights + i / WIDTH * 2 * WIDTH + i % WIDTH;
            _mm512_store_si512(to, _mm512_and_si512(both, low));
            _mm512_store_si512(to + WIDTH, _mm512_and_si512(_mm512_srli_epi32(both, 4), low));
        }
        const int32_t* quads = x.quads + row * K / 4 + g * DEPTH;
        for (int column = 0; column < WIDTH; column += 16 * COLUMNS) {
            amx::zero_sums<4>();
            amx::unrolled<BLOCKS>([&]<int b>() { amx::load<amx::LEFT + b>(quads + b * first * K / 4, K); });
            amx::unrolled<COLUMNS>([&]<int i>() {
                constexpr int right = amx::RIGHT + i % 2;
                amx::load<right>(weights + column + 16 * i, WIDTH * 4);
                amx::unrolled<BLOCKS>([&]<int b>() { amx::multiply_quads<b * COLUMNS + i, amx::LEFT + b, right>(); });
            });
            amx::store_sums<BLOCKS, COLUMNS>((float*)part + column, WIDTH * 4, first * WIDTH);
        }
        for (int64_t i = 0; i < WIDTH; i += W) {
            const vec scale = scales(block, i);
            for (int64_t r = 0; r < count; ++r) {
                const int64_t place = (row + r) * groups + g;
                const __m512i sum = _mm512_load_si512(part + r * WIDTH + i);
                const vec total = (vec)_mm512_cvtepi32_ps(_mm512_add_epi32(sum, _mm512_set1_epi32(x.zeros[place])));
                float* to = sums + r * WIDTH + i;
                store(to, fused(total, scale * broadcast(x.scales[place]), load(to)));
            }
        }
    }
}
#endif

// Calls body(sums [rows][WIDTH], first row, rows) for all rows from `row` to `end`, times a block of weights.
template <typename Body>
inline void multiply_rows(const Activations& x, int64_t row, int64_t end, const uint32_t* block, int64_t K, Body body) {
    alignas(64) float sums[CHUNK * WIDTH];
#if defined(HAS_TILES) && defined(__AMX_INT8__)
    if (end - row >= FEWEST_ON_TILES && may_use_tiles()) {
        amx::Registers registers(DEPTH);
        const int64_t count = end - row, first = count <= amx::ROWS ? count : (count + 1) / 2;
        registers.load(first, count <= amx::ROWS ? count : count - first);
        const auto multiply = count <= amx::ROWS ? multiply_amx<1> : multiply_amx<2>;
        multiply(x, row, first, count, block, K, sums);
        return body(sums, row, count);
    }
#endif
    for (int64_t count; row < end; row += count) {
        const int64_t left = end - row;
        count = left <= MOST ? left : left < 2 * MOST ? (left + 1) / 2 : MOST;
        with_count<MOST>(count, [&]<int rows>() { multiply<rows>(x, row, block, K, sums); });
        body(sums, row, count);
    }
}

// out [R, N] = x [R, K] times the packed weight, plus bias [N] or null. `room` is scratch memory for R * K numbers.
template <typename S>
inline void linear(const S* x, int64_t R, const uint32_t* packed, int64_t N, int64_t K, const S* bias, float* room, S* out) {
    const Activations rounded(room, R, K);
    const int64_t blocks = (N + WIDTH - 1) / WIDTH, groups = K / GROUP, chunks = (R + CHUNK - 1) / CHUNK;
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < R * groups; ++i)
        round_group(x + i * GROUP, (int8_t*)rounded.quads + i * GROUP, rounded.scales + i, rounded.zeros + i);
    wait_for_threads();
#pragma omp for collapse(2) schedule(static) nowait
    for (int64_t block = 0; block < blocks; ++block)
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            const int64_t channel = block * WIDTH, width = std::min<int64_t>(WIDTH, N - channel);
            const auto finish = [&](float* sums, int64_t row, int64_t count) {
                for (int64_t r = 0; r < count; ++r) {
                    float* sum = sums + r * WIDTH;
                    if (bias)
                        for (int64_t i = 0; i < width; ++i) sum[i] += to_float(bias[channel + i]);
                    float32::store_all(out + (row + r) * N + channel, sum, width);
                }
            };
            multiply_rows(rounded, chunk * CHUNK, std::min(R, (chunk + 1) * CHUNK), packed + block * groups * ENTRIES, K,
                          finish);
        }
    wait_for_threads();
}

}  // namespace int4
