// What attention is computed for: rows, segments of their keys, tasks, and attention weights by block; and the arithmetic
// of the files that are included at the end, which works on them.
//
// Shapes: B rows, T new tokens, H query heads, G KV heads, D head size; M = T * H/G packed queries, token-major.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include <omp.h>

#include "../../kernels/arithmetic.h"
#include "../../kernels/amx.h"
#include "../../kernels/wide.h"
#if defined(__AVX512BF16__)
#include "../../kernels/bf16.h"
#endif

namespace {

constexpr int TILE = 64;            // keys processed together: their K and V stay in the L1 cache
constexpr int BLOCK = 16;           // keys whose attention weights are summed (WEIGHTS_BLOCK of kv/view.py); divides TILE
constexpr int MAX_QUERIES = 64;     // most packed queries of one task, but for those of native_chunk.h
constexpr int PAIRS = HEAD_SIZE / 2;
constexpr int LANES = 16;           // keys of a tile are counted in vectors of so many
constexpr int64_t LONG_CHUNK = 256;  // from this many new tokens on any forward counts as prefill (PREFILL_FROM of kernels/build.py)
constexpr int64_t SHARE = 512;      // keys per piece when a row is divided into pieces
constexpr float HIDDEN = -1e30f;    // score of a masked key; -ffinite-math-only does not allow infinities
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;  // most exponents are to base 2

// Storage of the KV pools. FP8, INT8 and INT4, codes, are in libraries of their own, by what is computed from them: numbers of
// type `Computed`.
enum { FLOAT32, BFLOAT16, FP8, INT8, INT4 };
#if defined(CODES_OF_FLOAT32)
#define HAS_CODES 1
using Computed = float;
#elif defined(CODES_OF_BFLOAT16)
#define HAS_CODES 1
using Computed = bfloat16;
#endif

// `count` keys of a row from `first` on; `slot`: head 0's in the pool.
struct Segment { int64_t row, first, count, slot; };
// Queries from first_query on of one row and KV head, over some of the row's segments. The task that probably
// follows begins with a segment of `next_count` keys at slot `next`, which is prefetched. `is_far`: whether keys and values
// are far (FAR_BYTES).
struct Task {
    int64_t row, head, first_query, num_queries, segment_begin, segment_end, piece, next, next_count;
    bool is_far;
};

// One task's attention weights by block: for each query the sums of weights in `width` (segment, block) pairs, in order
// and relative to the query's running maximum. `data` is null if they are not requested.
struct Mass {
    float* data;
    int64_t width;
    float* of(int64_t query) const { return data + query * width; }
    void clear(int64_t num_queries) const {
        if (data) std::fill(data, data + num_queries * width, 0.0f);
    }
    // The maximum of a query has risen: scale the first `count` sums, which are relative to the previous maximum.
    void rescale(int64_t query, int64_t count, float scale) const {
        if (scale != 1.0f)
            for (int64_t i = 0; i < count; ++i) of(query)[i] *= scale;
    }
    // Add the weights of adjacent keys to the sums from `at` on; the first key is `offset` keys into its block.
    void add(int64_t query, int64_t at, int64_t offset, const float* weights, int64_t count) const {
        for (int64_t j = 0, end; j < count; j = end, ++at) {
            end = std::min(count, (offset + j) / BLOCK * BLOCK + BLOCK - offset);
            of(query)[at] += sum_of(end - j, [&](int64_t i) { return weights[j + i]; });
        }
    }
};
inline int64_t blocks_touched(int64_t first, int64_t count) { return (first + count - 1) / BLOCK - first / BLOCK + 1; }

struct Problem {
    int64_t B, T, H, G, D, block_size;
    const int64_t* seq_lens;
    int64_t window;  // most keys that are visible to a query, including its own; 0: all
    bool is_of_prompt;  // a part of a prompt, however short
    int64_t group() const { return H / G; }
    int64_t num_queries() const { return T * group(); }
    bool is_prefill() const { return is_of_prompt || T >= LONG_CHUNK; }
    // The position of token t of row b.
    int64_t position(int64_t b, int64_t t) const { return seq_lens[b] + t; }
    // Whether the token at `position` comes after all queries of a task.
    bool is_hidden(const Task& task, int64_t position) const {
        return position > this->position(task.row, (task.first_query + task.num_queries - 1) / group());
    }
    struct Span { int64_t from, to; };
    // The range of the `count` keys from `position` on that is visible to the task's query m.
    Span seen(const Task& task, int64_t m, int64_t position, int64_t count) const {
        return seen_from(own_position(task, m), position, count);
    }
    int64_t own_position(const Task& task, int64_t m) const {
        return position(task.row, (task.first_query + m) / group());
    }
    Span seen_from(int64_t own, int64_t position, int64_t count) const {
        const int64_t first = window ? own + 1 - window - position : 0;
        return {std::clamp<int64_t>(first, 0, count), std::clamp<int64_t>(own + 1 - position, 0, count)};
    }
};

// Tiles end at multiples of TILE wherever a range begins, so that a key is always in a tile with the same keys.
inline int64_t tile_end(int64_t position) { return position / TILE * TILE + TILE; }

#include "native_float32.h"
#include "native_softmax.h"
#include "native_tile.h"
#if defined(__AVX512BF16__)
#include "native_bf16.h"
#endif
#include "native_int8.h"
#include "native_int4.h"
#include "native_wide.h"
#include "native_codes.h"
#include "native_fp8.h"
#if defined(HAS_TILES)
#include "native_amx.h"
#endif

}  // namespace
