// Small GEMMs on numbers that are bfloat16 in memory and float32 in registers, for every CPU; shared by attention
// and linear layers. CPUs with bfloat16 dot products have bf16.h.
//
// The right operand is stored as for bf16.h: entry [k][i] holds elements 2k and 2k + 1 of column i. The left operand is
// float32. Each output is one chain of fused multiply-adds in the order of k, so its bits do not depend on what else is
// computed in the same call. The vector types are the compiler's.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "arithmetic.h"

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#else
constexpr int W = 8;
#endif
typedef float vec __attribute__((vector_size(W * 4), aligned(4)));
typedef uint32_t bits __attribute__((vector_size(W * 4), aligned(4)));
typedef uint16_t half_bits __attribute__((vector_size(W * 2), aligned(2)));

inline vec load(const float* p) { return *reinterpret_cast<const vec*>(p); }
inline void store(float* p, vec x) { *reinterpret_cast<vec*>(p) = x; }
inline vec broadcast(float x) { return x - vec{}; }

// a * b + c, rounded once.
inline vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// The larger number in each lane. Compilers make a comparison and a slow selection of `a > b ? a : b`.
inline vec larger(vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

// W bfloat16 numbers from float32, rounded to nearest even, of which the first `count` are stored.
inline void store(uint16_t* p, vec x, int64_t count) {
    const bits wide = (bits)x;
    const half_bits narrow = __builtin_convertvector((wide + 0x7fff + ((wide >> 16) & 1)) >> 16, half_bits);
    if (count >= W)
        std::memcpy(p, &narrow, sizeof(narrow));  // no call, since the size is known
    else
        std::memcpy(p, &narrow, 2 * count);
}

// The sum and the maximum of a vector's lanes.
typedef float eight __attribute__((vector_size(32), aligned(4)));
typedef float four __attribute__((vector_size(16), aligned(4)));
inline eight low_half(vec x) {
#if defined(__AVX512F__)
    return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7);
#else
    return x;
#endif
}
template <typename Combine>
inline float across(vec x, Combine combine) {
    eight e = low_half(x);
#if defined(__AVX512F__)
    e = combine(e, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
#endif
    const four f = combine(__builtin_shufflevector(e, e, 0, 1, 2, 3), __builtin_shufflevector(e, e, 4, 5, 6, 7));
    const four g = combine(f, __builtin_shufflevector(f, f, 2, 3, 0, 1));
    return combine(g, __builtin_shufflevector(g, g, 1, 0, 3, 2))[0];
}
inline float sum_across(vec x) { return across(x, [](auto a, auto b) { return a + b; }); }
inline float max_across(vec x) { return across(x, [](auto a, auto b) { return a > b ? a : b; }); }

// Called for every 64 bytes that are loaded of the right operand: does nothing, prefetches what lies `entries` further on, or
// prefetches memory in the order of its addresses, whatever the order in which the operand is read.
struct NotAhead { void operator()(const void*) const {} };
struct Ahead {
    int64_t entries;
    void operator()(const uint32_t* loaded) const { __builtin_prefetch(loaded + entries); }
};
// `InOrder` does so into the L2 cache, since L1 has too few buffers for much that is under way, or into another.
template <int CACHE = 2>
struct InOrder {
    const char*& at;
    explicit InOrder(const char*& at) : at(at) {}
    void operator()(const void*) const {
        __builtin_prefetch(at, 0, 4 - CACHE);
        at += 64;
    }
};

// The sums of both products of pairs of 16 bits: those of each lane, and a pair for all lanes.
typedef int32_t integers __attribute__((vector_size(W * 4)));
inline integers pair_products(bits w, int32_t x) {
#if defined(__AVX512BW__)
    return (integers)_mm512_madd_epi16((__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
    return (integers)_mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(x));
#else
    return (integers)(w & 0xffff) * int32_t(int16_t(x)) + (integers)(w >> 16) * int32_t(int16_t(x >> 16));
#endif
}

// `sums` plus these, which may not exceed 32 bits. The order of several has no influence.
inline integers add_pair_products(integers sums, bits w, int32_t x) {
#if defined(__AVX512VNNI__)
    return (integers)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)w, _mm512_set1_epi32(x));
#else
    sums += pair_products(w, x);
    // Integers may be regrouped, and the products then need registers that there are not.
#if defined(__AVX512F__)
    asm("" : "+v"(sums));
#elif defined(__AVX__)
    asm("" : "+x"(sums));
#endif
    return sums;
#endif
}

// 2^x for x <= 0, in place: a polynomial times a power of two; below 2^-126 the result is at most 2^-126. The polynomial is that
// of its degree with the least relative error among those that are 1 at 0, 2e-7 with rounding. The chains of N vectors go in
// step, since a CPU looks ahead over few operations that wait.
template <int N>
inline void exp2_each(vec (&x)[N]) {
    vec y[N];
    const auto polynomial = [&](float first, std::initializer_list<float> others) {
        for (int i = 0; i < N; ++i) y[i] = broadcast(first);
        for (const float c : others)
            for (int i = 0; i < N; ++i) y[i] = fused(y[i], x[i], broadcast(c));
    };
#if defined(__AVX512DQ__)
    __m512 whole[N];
    for (int i = 0; i < N; ++i) {
        whole[i] = (__m512)x[i];
        x[i] = (vec)_mm512_reduce_ps(whole[i], _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x less the integer below
    }
    polynomial(1.86714530e-3f, {9.01699346e-3f, 5.57999462e-2f, 2.40164444e-1f, 6.93151295e-1f, 1.0f});
    for (int i = 0; i < N; ++i) x[i] = (vec)_mm512_scalef_ps((__m512)y[i], whole[i]);  // times 2 to the power of that integer
#else
    typedef int32_t signed_bits __attribute__((vector_size(W * 4)));
    signed_bits nearest[N];
    for (int i = 0; i < N; ++i) {
        x[i] = larger(x[i], broadcast(-126.0f));
        nearest[i] = __builtin_convertvector(x[i] - 0.5f, signed_bits);  // rounds towards zero
        x[i] -= __builtin_convertvector(nearest[i], vec);
    }
    polynomial(1.32647203e-3f, {9.67151299e-3f, 5.55073395e-2f, 2.40222424e-1f, 6.93147004e-1f, 1.0f});
    for (int i = 0; i < N; ++i) x[i] = (vec)((bits)y[i] + ((bits)nearest[i] << 23));
#endif
}
inline vec exp2_wide(vec x) {
    vec one[] = {x};
    exp2_each(one);
    return one[0];
}

inline bits load_bits(const uint32_t* p) { return *reinterpret_cast<const bits*>(p); }

// Number `part` of the four int8 of each entry.
inline vec of_quad(bits quads, int part) {
    typedef int32_t signed_bits __attribute__((vector_size(W * 4)));
    return __builtin_convertvector((signed_bits)(quads << (24 - 8 * part)) >> 24, vec);
}

// Number `part` of the eight of 4 bits of each entry.
inline vec of_octet(bits octets, int part) {
    typedef int32_t signed_bits __attribute__((vector_size(W * 4)));
    return __builtin_convertvector((signed_bits)(octets << (28 - 4 * part)) >> 28, vec);
}

// Numbers of `of_quad` and `of_octet` as pairs of 16 bits. Part 0 has the even bytes of each entry and part 1 the odd ones; of
// 4 bits, parts 0 and 1 have the low and high halves of even bytes, and parts 2 and 3 those of odd ones.
typedef int16_t shorts __attribute__((vector_size(W * 4)));
inline bits pairs_of_quad(bits quads, int part) {
    return part ? (bits)((shorts)quads >> 8) : (bits)((shorts)((shorts)quads << 8) >> 8);
}
inline bits pairs_of_octet(bits octets, int part) { return (bits)((shorts)((shorts)octets << (12 - 4 * part)) >> 12); }

// W bfloat16 numbers.
inline vec load_wide(const uint16_t* p) {
    half_bits narrow;
    std::memcpy(&narrow, p, sizeof(narrow));
    return (vec)(__builtin_convertvector(narrow, bits) << 16);
}

// Most rows of a product at a time for which sums are not spilled to memory.
constexpr int ROWS = W == 16 ? 6 : 5;

// Calls body.operator()<n>() for n = 0 .. N - 1. Unlike those of a loop, the indices are constants early enough for compilers
// to keep an array in registers from the beginning to the end.
template <int N, typename Body>
inline void unrolled(Body body) {
    if constexpr (N > 0) {
        unrolled<N - 1>(body);
        body.template operator()<N - 1>();
    }
}

// Calls body.operator()<N>() for N = count, 1 .. MOST.
template <int MOST, typename Body>
inline void with_count(int64_t count, Body body) {
    if constexpr (MOST > 1)
        if (count < MOST) return with_count<MOST - 1>(count, body);
    body.template operator()<MOST>();
}

// Calls body.operator()<N>(m) for blocks of N rows, at most MOST, that cover m = 0 .. M - 1.
template <int MOST = ROWS, typename Body>
inline void in_blocks(int64_t M, Body body) {
    for (int64_t m = 0, count; m < M; m += count) {
        const int64_t left = M - m;
        count = left <= MOST ? left : left < 2 * MOST ? (left + 1) / 2 : MOST;
        with_count<MOST>(count, [&]<int N>() { body.template operator()<N>(m); });
    }
}

// Vectors of columns whose sums for N rows fit into registers: at most 24 of 32, or 12 of 16.
constexpr int vectors_of(int N) { return W == 16 ? 4 : N == 1 ? 8 : 2; }

// The left operand: entry (n, k) is x[n * row + k * step].
struct Left {
    const float* x;
    int64_t row, step;
};

// out[n][i] += sum over k of entry (n, k) of `left` times column vector i of `right`, whose pairs are `stride` apart.
template <int N, int V, typename Prefetch = NotAhead>
inline void multiply(Left left, const uint32_t* right, int64_t stride, int64_t pairs, vec (&out)[N][V],
                     Prefetch prefetch = {}) {
    for (int64_t pair = 0; pair < pairs; ++pair, right += stride, left.x += 2 * left.step) {
        bits both[V];
        for (int i = 0; i < V; ++i) {
            std::memcpy(&both[i], right + W * i, sizeof(bits));
            if (W * i % 16 == 0) prefetch(right + W * i);
        }
        for (int odd = 0; odd < 2; ++odd) {
            vec x[V];
            for (int i = 0; i < V; ++i) x[i] = (vec)(odd ? both[i] & 0xffff0000 : both[i] << 16);
            for (int n = 0; n < N; ++n) {
                const vec y = broadcast(left.x[n * left.row + odd * left.step]);
                for (int i = 0; i < V; ++i) out[n][i] = fused(y, x[i], out[n][i]);
            }
        }
    }
}

}  // namespace
