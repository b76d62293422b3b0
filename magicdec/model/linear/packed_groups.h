// Linear layers with weights of 4 or 8 bits in groups of inputs, on every CPU. A weight is number * scale + minimum, with a
// scale and, if there is one, a minimum for each group and output channel. There are two ways to compute:
//
// - Exact weights: a weight is widened to float32 in registers, to the bits that its format means, and multiplied as those of
//   packed_float32.h: the result has the bits of the same layer with float32 weights.
// - Rounded activations: they are rounded to int8 with a scale for each row and group, so that a CPU multiplies many numbers
//   in one instruction; their sums over a group are exact. The groups are added in their order, in float32.
//
// Either way the bits of a row do not depend on what else is computed in the same call, nor on the CPU if it has fused
// multiply-adds.
//
// In a block of channels, a group has its scales, its minima, and then [group * bits / 32][WIDTH] entries: with 4 bits eight
// inputs of a channel, those of inputs 0 to 3 in the lower halves of the bytes, those of 4 to 7 in the upper ones; with 8 bits
// four. Numbers are stored without a sign, as number - least.
#pragma once
#include "packed_float32.h"

namespace groups {

using float32::WIDTH;
enum ScaleType : int64_t { FLOAT32, BFLOAT16, FLOAT16 };

// As in grouped.py, field by field. `group` is 16, 32, 64 or 128.
struct Format {
    int64_t bits, group, scale, has_minimum, least;
    int64_t scale_words() const { return scale == FLOAT32 ? WIDTH : WIDTH / 2; }
    int64_t before() const { return scale_words() * (1 + has_minimum); }  // the numbers of a group, in words
    int64_t entries() const { return group * bits / 32; }
    int64_t words() const { return before() + entries() * WIDTH; }
};
struct Weights {
    const uint32_t* packed;
    Format format;
    const int32_t* order;  // the input that each packed one is, [K], or null: activations are read in this order
    const uint32_t* block(int64_t b, int64_t K) const { return packed + b * (K / format.group) * format.words(); }
};


inline float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest >= 0x400) return std::bit_cast<float>(sign | ((rest << 13) + (112u << 23)));
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(float(rest) * 0x1p-24f));
}

// The scales, or the minima, that begin at `from`, of W channels.
inline vec scales(const Format& f, const uint32_t* from, int64_t channel) {
    if (f.scale == FLOAT32) return load((const float*)from + channel);
    const uint16_t* at = (const uint16_t*)from + channel;
    if (f.scale == FLOAT16) {
#if defined(__AVX512F__)
        return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at));
#elif defined(__F16C__)
        return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at));
#else
        vec out;
        for (int i = 0; i < W; ++i) out[i] = half_to_float(at[i]);
        return out;
#endif
    }
    half_bits narrow;
    std::memcpy(&narrow, at, sizeof(narrow));
    return (vec)(__builtin_convertvector(narrow, bits) << 16);
}

// Numbers of W channels as float32: those at bits `shift` and up of `both`.
template <int BITS>
struct Numbers {
    int32_t least;
#if defined(__AVX512F__)
    __m512 table;  // of 4 bits: the permutation reads only the lowest four bits of an index
    explicit Numbers(int64_t first) : least(int32_t(first)) {
        alignas(64) float values[16];
        for (int i = 0; i < 16; ++i) values[i] = float(i + least);
        table = _mm512_load_ps(values);
    }
    vec at(bits both, int shift) const {
        if constexpr (BITS == 4) return (vec)_mm512_permutexvar_ps((__m512i)(both >> shift), table);
        return __builtin_convertvector((integers)(both >> shift & 0xff) + least, vec);
    }
#else
    explicit Numbers(int64_t first) : least(int32_t(first)) {}
    vec at(bits both, int shift) const {
        return __builtin_convertvector((integers)(both >> shift & (BITS == 4 ? 0xf : 0xff)) + least, vec);
    }
#endif
};
template <int BITS>
constexpr int shift_of(int i) { return BITS == 4 ? i % 4 * 8 + i / 4 * 4 : i * 8; }

// Exact weights, as a storage of packed_float32.h.
template <int BITS>
struct Exact {
    static constexpr int EACH = 32 / BITS;  // inputs of an entry
    static constexpr int MOST = 3;          // rows of which sums, scales and weights fit into registers
    const Format f;
    const uint32_t* data;
    const Numbers<BITS> numbers;
    Exact(const void* weights, int64_t K, int64_t block)
        : f(((const Weights*)weights)->format), data(((const Weights*)weights)->block(block, K)), numbers(f.least) {}
    const void* at(int64_t input) const { return data + input / f.group * f.words(); }

    // Calls body(input, vector of channels, its weights) for all inputs and V vectors.
    template <int V, typename Prefetch, typename Body>
    void widen(int64_t channel, int64_t first, int64_t count, Prefetch ahead, Body body) const {
        const uint32_t* group = data + first / f.group * f.words();
        for (int64_t k = 0; k < count; k += f.group, group += f.words()) {
            vec scale[V], minimum[V];
            for (int i = 0; i < V; ++i) {
                if (i * W % 32 == 0) ahead(group);
                scale[i] = scales(f, group, channel + i * W);
                if (f.has_minimum) {
                    if (i * W % 32 == 0) ahead(group);
                    minimum[i] = scales(f, group + f.scale_words(), channel + i * W);
                }
            }
            const uint32_t* from = group + f.before() + channel;
            for (int64_t e = 0; e < f.entries(); ++e, from += WIDTH) {
                bits both[V];
                for (int i = 0; i < V; ++i) {
                    if (i * W % 16 == 0) ahead(from + i * W);
                    std::memcpy(&both[i], from + i * W, sizeof(bits));
                }
                unrolled<EACH>([&]<int j>() {
                    unrolled<V>([&]<int i>() {
                        const vec number = numbers.at(both[i], shift_of<BITS>(j));
                        const vec weight = f.has_minimum ? fused(number, scale[i], minimum[i]) : number * scale[i];
                        body(k + e * EACH + j, std::integral_constant<int, i>{}, weight);
                    });
                });
            }
        }
    }

    template <int N, int V, typename Prefetch>
    void add(Left rows, int64_t channel, int64_t first, int64_t count, Prefetch ahead, vec (&sums)[N][V]) const {
        widen<V>(channel, first, count, ahead, [&](int64_t k, auto i, vec weight) {
            const float* x = rows.x + k * rows.step;
            unrolled<N>([&]<int n>() { sums[n][i] = fused(broadcast(x[n * rows.row]), weight, sums[n][i]); });
        });
    }

    // The weights of `count` inputs from `first` on, float32 [count, WIDTH].
    template <typename Prefetch>
    void expand(int64_t first, int64_t count, Prefetch ahead, float* out) const {
        constexpr int V = 4;
        for (int64_t channel = 0; channel < WIDTH; channel += V * W)
            widen<V>(channel, first, count, ahead,
                     [&](int64_t k, auto i, vec weight) { store(out + k * WIDTH + channel + i * W, weight); });
    }
};

constexpr int64_t CHUNK = 48;         // rows that are multiplied by a block of weights together
constexpr int64_t PART = 32;          // inputs whose products of bytes can be added in 16 bits
constexpr int64_t NEAR = 2304, FAR = 16384;  // prefetch distances in bytes, into the L1 and the L2 cache

ALWAYS_INLINE void prefetch(const uint32_t* weights) {  // GCC would take it for a function without effects
    __builtin_prefetch((const char*)weights + NEAR, 0, 3);
    __builtin_prefetch((const char*)weights + FAR, 0, 2);
}

// What `combine` makes of all lanes of a vector of integers, by halves.
template <typename Vector, typename Combine>
ALWAYS_INLINE int32_t across_lanes(Vector x, Combine combine) {
    if constexpr (sizeof(Vector) == sizeof(int32_t)) {
        return x[0];
    } else {
        typedef int32_t half __attribute__((vector_size(sizeof(Vector) / 2)));
        half low, high;
        std::memcpy(&low, &x, sizeof(low));
        std::memcpy(&high, reinterpret_cast<const char*>(&x) + sizeof(low), sizeof(high));
        return across_lanes(combine(low, high), combine);
    }
}

typedef int8_t narrow_integers __attribute__((vector_size(W)));

inline vec widened(const float* x) { return load(x); }
inline vec widened(const bfloat16* x) {
    half_bits narrow;
    std::memcpy(&narrow, x, sizeof(narrow));
    return (vec)(__builtin_convertvector(narrow, bits) << 16);
}

// Whether bytes are multiplied as pairs of 16 bits.
#if defined(__AVX512VNNI__)
constexpr bool HAS_PAIRS = false;
#else
constexpr bool HAS_PAIRS = true;
#endif

// Activations of R rows: quads of int8 [R, K / 4]; for each group [K / group, R] the scales, what the sums of products of
// numbers without a sign lack (`zeros`), and what a minimum is multiplied by (`shifts`). Without products of bytes of 8 bits
// (VNNI), `pairs` has the quads for weights of 8 bits in 16 bits, of each quad inputs 0 and 2, then 1 and 3.
struct Activations {
    int64_t R, K, group, least;
    bool has_pairs;
    int32_t* quads;
    float* scales;
    int32_t* zeros;
    float* shifts;
    int32_t* pairs;
    Activations(float* room, int64_t R, int64_t K, const Format& f)
        : R(R), K(K), group(f.group), least(f.least), has_pairs(HAS_PAIRS && f.bits == 8),
          quads((int32_t*)room), scales(room + R * K / 4), zeros((int32_t*)scales + R * K / group),
          shifts((float*)zeros + R * K / group),
          pairs((int32_t*)shifts + R * K / group) {}

    template <typename S>
    void round_group(const S* x, int64_t row, int64_t g) const {
        switch (group) {
            case 16: return round_numbers<16>(x, row, g);
            case 32: return round_numbers<32>(x, row, g);
            case 64: return round_numbers<64>(x, row, g);
            default: return round_numbers<128>(x, row, g);
        }
    }

    template <int GROUP, typename S>
    void round_numbers(const S* x, int64_t row, int64_t g) const {
        int8_t* out = (int8_t*)quads + row * K + g * group;
        vec numbers[GROUP / W];
        integers largest = {}, total = {};
        for (int i = 0; i < GROUP / W; ++i) {
            numbers[i] = widened(x + W * i);
            const integers size = (integers)((bits)numbers[i] & 0x7fffffff);
            largest = size > largest ? size : largest;
        }
        const uint32_t most_bits = across_lanes(largest, [](auto a, auto b) { return a > b ? a : b; });
        const float most = std::bit_cast<float>(most_bits);
        const bool is_number = most_bits < NOT_FINITE;  // by another scale every output is no number
        const float inverse = most > 0.0f && is_number ? 127.0f / most : 0.0f;
        for (int i = 0; i < GROUP / W; ++i) {
            const vec number = is_number ? numbers[i] : vec{};
            const vec half = (vec)(((bits)number & 0x80000000) | std::bit_cast<uint32_t>(0.5f));
            const integers rounded = __builtin_convertvector(fused(number, broadcast(inverse), half), integers);
            total += rounded;
            const auto bytes = __builtin_convertvector(rounded, narrow_integers);
            std::memcpy(out + W * i, &bytes, W);
        }
        const int32_t sum = across_lanes(total, [](auto a, auto b) { return a + b; });
        const int64_t place = g * R + row;
        scales[place] = most / 127.0f;
        zeros[place] = int32_t(least) * sum;
        shifts[place] = scales[place] * float(sum);
        if (!has_pairs) return;
        int16_t* wide = (int16_t*)pairs + row * K + g * group;
        for (int64_t i = 0; i < group; ++i) wide[i / 4 * 4 + i % 2 * 2 + i / 2 % 2] = out[i];
    }
};

// The sums of products of weights without a sign with quads of activations, for W channels, which may begin at another number
// than 0. `end` closes a part of PART inputs; `total` adds `zero`.
template <int BITS>
struct Sums {
#if defined(__AVX512VNNI__)
    __m512i sum = {};
    void begin(int32_t zero) { sum = _mm512_set1_epi32(zero); }
    void add(bits w, const int32_t* quad, const int32_t*) {
        sum = _mm512_dpbusd_epi32(sum, (__m512i)w, _mm512_set1_epi32(*quad));
    }
    void end() {}
    vec total(int32_t zero) const { return (vec)_mm512_cvtepi32_ps(_mm512_add_epi32(sum, _mm512_set1_epi32(zero))); }
#else
    integers sum = {};
    void begin(int32_t zero) { sum = integers{} + zero; }
    bits part = {};  // of 4 bits: sums in 16 bits of the products that half of a lane takes
    void add(bits w, const int32_t* quad, const int32_t* pair) {
        if constexpr (BITS == 8) {
            sum += pair_products(w & 0x00ff00ff, pair[0]) + pair_products(w >> 8 & 0x00ff00ff, pair[1]);
        } else {
#if defined(__AVX512BW__)
            const __m512i each = _mm512_maddubs_epi16((__m512i)w, _mm512_set1_epi32(*quad));
            part = (bits)_mm512_add_epi16((__m512i)part, each);
#elif defined(__AVX2__)
            const __m256i each = _mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(*quad));
            part = (bits)_mm256_add_epi16((__m256i)part, each);
#else
            for (int i = 0; i < 32; i += 8) sum += (integers)(w >> i & 0xff) * int32_t(int8_t(*quad >> i));
#endif
        }
    }
    void end() {
#if defined(__AVX512BW__)
        if (BITS == 4) sum += (integers)_mm512_madd_epi16((__m512i)part, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
        if (BITS == 4) sum += (integers)_mm256_madd_epi16((__m256i)part, _mm256_set1_epi16(1));
#endif
        part = bits{};
    }
    vec total(int32_t zero) const { return __builtin_convertvector(sum + zero, vec); }
#endif
};

// Rows of a product at a time, and vectors of channels whose sums then fit into registers.
constexpr int MOST = W == 16 ? 8 : 4;
constexpr int vectors(int N) { return W == 16 ? (N <= 4 ? 4 : 2) : N <= 2 ? 4 : 2; }

// `sum` plus the products of a group, `total`, for W channels, by the scales of both sides.
inline vec with_group(vec total, vec scale, float x_scale, bool has_minimum, vec minimum, float shift, vec sum) {
    sum = fused(total, scale * broadcast(x_scale), sum);
    return has_minimum ? fused(minimum, broadcast(shift), sum) : sum;
}

// sums [N][WIDTH] = N rows from `row` on, times a block of weights, which is read in the order of memory.
template <int BITS, int N>
inline void multiply(const Activations& x, const Format& f, int64_t row, const uint32_t* group, float* sums) {
    constexpr int V = vectors(N), QUADS = BITS == 4 ? 2 : 1;  // of an entry
    const int64_t K = x.K, count = K / f.group, part_entries = std::min(PART, f.group) * BITS / 32;
    std::fill_n(sums, N * WIDTH, 0.0f);
    for (int64_t g = 0; g < count; ++g, group += f.words()) {
        const int64_t first = row * K / 4 + g * f.group / 4;
        for (int64_t channel = 0; channel < WIDTH; channel += V * W) {
            Sums<BITS> part[N][V];
            const uint32_t* from = group + f.before() + channel;
            const int32_t *quads = x.quads + first, *pairs = x.pairs + 2 * first;
            for (int64_t e = 0; e < f.entries();) {
                for (int64_t end = e + part_entries; e < end; ++e, from += WIDTH, quads += QUADS, pairs += 2 * QUADS) {
                    bits low[V], high[V];
#pragma GCC unroll 8
                    for (int i = 0; i < V; ++i) {
                        if (i * W % 16 == 0) prefetch(from + i * W);
                        std::memcpy(&low[i], from + i * W, sizeof(bits));
                        if constexpr (BITS == 4) {
                            high[i] = low[i] >> 4 & 0x0f0f0f0f;
                            low[i] &= 0x0f0f0f0f;
                        }
                    }
#pragma GCC unroll 8
                    for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
                        for (int i = 0; i < V; ++i) {
                            const int64_t at = n * K / 4;
                            part[n][i].add(low[i], quads + at, pairs + 2 * at);
                            if constexpr (BITS == 4) part[n][i].add(high[i], quads + at + 1, pairs + 2 * at + 2);
                        }
                }
#pragma GCC unroll 8
                for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
                    for (int i = 0; i < V; ++i) part[n][i].end();
            }
#pragma GCC unroll 8
            for (int i = 0; i < V; ++i) {
                const int64_t at = channel + i * W;
                const vec scale = scales(f, group, at);
                const vec minimum = f.has_minimum ? scales(f, group + f.scale_words(), at) : vec{};
#pragma GCC unroll 8
                for (int n = 0; n < N; ++n) {
                    const int64_t place = g * x.R + row + n;
                    const vec total = part[n][i].total(x.zeros[place]);
                    float* sum = sums + n * WIDTH + at;
                    store(sum, with_group(total, scale, x.scales[place], f.has_minimum, minimum, x.shifts[place], load(sum)));
                }
            }
        }
    }
}

// The same of many rows, with AVX-512, and weights that are in a cache: products of N rows and two vectors at a time, whose sums
// over a group and over all groups both fit into registers. GCC keeps them there if the loop over a part is unrolled. A group has
// several parts, one, or half of one.
enum Parts { SEVERAL, ONE, HALF };
constexpr int MANY = 6;
template <int BITS, Parts PARTS, int N>
__attribute__((noinline)) void multiply_many(const Activations& x, const Format& f, int64_t row, const uint32_t* block,
                                             float* sums) {
    constexpr int V = 2, QUADS = BITS == 4 ? 2 : 1;
    constexpr int64_t inputs = PARTS == HALF ? PART / 2 : PART;
    for (int64_t channel = 0; channel < WIDTH; channel += V * W) {
        vec out[N][V];
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
            for (int i = 0; i < V; ++i) out[n][i] = vec{};
        const uint32_t* group = block;
        for (int64_t g = 0; g < x.K / f.group; ++g, group += f.words()) {
            Sums<BITS> part[N][V];
            const uint32_t* from = group + f.before() + channel;
            const int64_t first = row * x.K / 4 + g * f.group / 4;
            const int32_t *quads = x.quads + first, *pairs = x.pairs + 2 * first;
            const int64_t place = g * x.R + row;
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
                for (int i = 0; i < V; ++i) part[n][i].begin(x.zeros[place + n]);
            for (int64_t k = 0; k < (PARTS == SEVERAL ? f.group : inputs); k += inputs) {
#pragma GCC unroll 8
                for (int e = 0; e < inputs * BITS / 32; ++e, from += WIDTH, quads += QUADS, pairs += 2 * QUADS) {
                    bits low[V], high[V];
#pragma GCC unroll 8
                    for (int i = 0; i < V; ++i) {
                        low[i] = load_bits(from + i * W);
                        if constexpr (BITS == 4) {
                            high[i] = low[i] >> 4 & 0x0f0f0f0f;
                            low[i] &= 0x0f0f0f0f;
                        }
                    }
#pragma GCC unroll 8
                    for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
                        for (int i = 0; i < V; ++i) {
                            const int64_t at = n * x.K / 4;
                            part[n][i].add(low[i], quads + at, pairs + 2 * at);
                            if constexpr (BITS == 4) part[n][i].add(high[i], quads + at + 1, pairs + 2 * at + 2);
                        }
                }
#pragma GCC unroll 8
                for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
                    for (int i = 0; i < V; ++i) part[n][i].end();
            }
#pragma GCC unroll 8
            for (int i = 0; i < V; ++i) {
                const int64_t at = channel + i * W;
                const vec scale = scales(f, group, at);
                const vec minimum = f.has_minimum ? scales(f, group + f.scale_words(), at) : vec{};
#pragma GCC unroll 8
                for (int n = 0; n < N; ++n)
                    out[n][i] = with_group(part[n][i].total(0), scale, x.scales[place + n], f.has_minimum, minimum,
                                           x.shifts[place + n], out[n][i]);
            }
        }
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
            for (int i = 0; i < V; ++i) store(sums + n * WIDTH + channel + i * W, out[n][i]);
    }
}

// sums [count][WIDTH] = rows from `row` on, times a block of weights, which the first rows read from memory.
template <int BITS>
inline void multiply_rows(const Activations& x, const Format& f, int64_t row, int64_t count, const uint32_t* block, float* sums) {
    const bool has_many = W == 16 && count > MOST;
    in_blocks<MOST>(has_many ? MANY : count, [&]<int N>(int64_t r) {
        multiply<BITS, N>(x, f, row + r, block, sums + r * WIDTH);
    });
    if constexpr (W == 16)
        if (has_many)
            in_blocks<MANY>(count - MANY, [&]<int N>(int64_t r) {
                const auto multiply = f.group == PART  ? multiply_many<BITS, ONE, N>
                                      : f.group < PART ? multiply_many<BITS, HALF, N>
                                                       : multiply_many<BITS, SEVERAL, N>;
                multiply(x, f, row + MANY + r, block, sums + (MANY + r) * WIDTH);
            });
}

// Rounds the activations x [R, K], in the order of the weights.
template <typename S>
inline void round_all(const S* x, const Activations& rounded, const Weights& w) {
    const int64_t K = rounded.K, group = rounded.group, groups = K / group, count = rounded.R * groups;
    constexpr int64_t together = 8;  // groups that a thread rounds at a time
    share((count + together - 1) / together, [&](int64_t part) {
        for (int64_t i = part * together; i < std::min(count, (part + 1) * together); ++i) {
            const S* from = x + i * group;
            S inputs[128];
            if (w.order) {
                const S* row = x + i / groups * K;
                const int32_t* order = w.order + i % groups * group;
                for (int64_t k = 0; k < group; ++k) inputs[k] = row[order[k]];
                from = inputs;
            }
            rounded.round_group(from, i / groups, i % groups);
        }
    });
}

template <int BITS, typename S>
inline void linear_rounded(const S* x, int64_t R, const Weights& w, int64_t N, int64_t K, const S* bias, float* room, S* out) {
    const Format& f = w.format;
    const Activations rounded(room, R, K, f);
    round_all(x, rounded, w);
    const BlockOrder order((N + WIDTH - 1) / WIDTH, (R + CHUNK - 1) / CHUNK, CHUNK * K);
    alignas(64) float sums[CHUNK * WIDTH];
    share(
        order.count(),
        [&](int64_t i) {
            const auto [block, chunk] = order[i];
            const int64_t row = chunk * CHUNK;
            multiply_rows<BITS>(rounded, f, row, std::min(CHUNK, R - row), w.block(block, K), sums);
        },
        [&](int64_t i) {
            const auto [block, chunk] = order[i];
            const int64_t row = chunk * CHUNK;
            float32::add_bias_and_store(sums, row, std::min(CHUNK, R - row), block, N, bias, out);
        });
}

// out [R, N] = x [R, K] times the packed weight, plus bias [N] or null. `rounds`: with rounded activations. `room` is scratch
// memory for R * K numbers.
template <typename S>
inline void linear(const S* x, int64_t R, const Weights& w, int64_t N, int64_t K, bool rounds, const S* bias, float* room,
                   S* out) {
    if (w.format.bits == 4) {
        if (rounds) return linear_rounded<4>(x, R, w, N, K, bias, room, out);
        return float32::linear<Exact<4>>(x, R, &w, N, K, bias, room, out, w.order);
    }
    if (rounds) return linear_rounded<8>(x, R, w, N, K, bias, room, out);
    float32::linear<Exact<8>>(x, R, &w, N, K, bias, room, out, w.order);
}

}  // namespace groups
