// The float32 storage of native.cpp, on every CPU. Every sum over d or over keys is a chain of `fused`, the same
// for one query as for several at once.

// Horizontal sums of four vectors at once, into out[0..3].
inline eight fold(vec v) {
#if defined(__AVX512F__)
    return low_half(v) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
#else
    return v;
#endif
}
inline void sum_four(vec a, vec b, vec c, vec d, float* out) {
    const eight w = fold(a), x = fold(b), y = fold(c), z = fold(d);
    const eight wx = __builtin_shufflevector(w, x, 0, 8, 2, 10, 4, 12, 6, 14) +
                     __builtin_shufflevector(w, x, 1, 9, 3, 11, 5, 13, 7, 15);
    const eight yz = __builtin_shufflevector(y, z, 0, 8, 2, 10, 4, 12, 6, 14) +
                     __builtin_shufflevector(y, z, 1, 9, 3, 11, 5, 13, 7, 15);
    const eight all = __builtin_shufflevector(wx, yz, 0, 1, 8, 9, 4, 5, 12, 13) +
                      __builtin_shufflevector(wx, yz, 2, 3, 10, 11, 6, 7, 14, 15);
    *reinterpret_cast<four*>(out) =
        __builtin_shufflevector(all, all, 0, 1, 2, 3) + __builtin_shufflevector(all, all, 4, 5, 6, 7);
}

// Scores of N queries (rows of D elements from q on) for four keys: s[n * TILE + 0..3].
template <int D, int N>
inline void score_four(const float* q, const float* const* keys, float* s) {
    vec a[N][4] = {};
    for (int d = 0; d < D; d += W) {
        vec k[4];
        for (int i = 0; i < 4; ++i) k[i] = load(keys[i] + d);
        for (int n = 0; n < N; ++n) {
            const vec x = load(q + n * D + d);
            for (int i = 0; i < 4; ++i) a[n][i] = fused(x, k[i], a[n][i]);
        }
    }
    for (int n = 0; n < N; ++n)
        sum_four(a[n][0], a[n][1], a[n][2], a[n][3], s + n * TILE);
}

// Scores of M queries for `count` keys (rows of D elements): s[m * TILE + j].
template <int D>
void score(const float* q, int64_t M, const float* k, int64_t count, float* s) {
    for (int64_t j = 0; j < count; j += 4) {
        const float* keys[4];
        for (int i = 0; i < 4; ++i) keys[i] = k + std::min(j + i, count - 1) * D;
        int64_t m = 0;
        for (; m + 2 <= M; m += 2) score_four<D, 2>(q + m * D, keys, s + m * TILE + j);
        if (m < M) score_four<D, 1>(q + m * D, keys, s + m * TILE + j);
    }
}

// acc[n][d] += sum_j p[n * TILE + j] * v[j][d] for N queries; N x 2 vectors of sums stay in registers.
template <int D, int N>
void accumulate(const float* p, const float* v, int64_t count, float* acc) {
    for (int d = 0; d < D; d += 2 * W) {
        constexpr int step = 2;
        vec a[N][step];
        const int parts = std::min(step, (D - d) / W);
        for (int n = 0; n < N; ++n)
            for (int i = 0; i < parts; ++i) a[n][i] = load(acc + n * D + d + i * W);
        for (int64_t j = 0; j < count; ++j)
            for (int i = 0; i < parts; ++i) {
                vec x = load(v + j * D + d + i * W);
                for (int n = 0; n < N; ++n) a[n][i] = fused(broadcast(p[n * TILE + j]), x, a[n][i]);
            }
        for (int n = 0; n < N; ++n)
            for (int i = 0; i < parts; ++i) *reinterpret_cast<vec*>(acc + n * D + d + i * W) = a[n][i];
    }
}

// Weights of one query for `count` keys from their scores, in place, relative to the running `maximum`: zeros but for the visible
// keys [from, to). Updates `maximum` and `total`. Returns the factor of earlier sums.
inline float soften_float32(float* s, int64_t from, int64_t to, int64_t count, float* maximum, float* total) {
    float top = *maximum;
    for (int64_t j = from; j < to; ++j) top = std::max(top, s[j]);
    const float scale = exp_negative(*maximum - top);
    for (int64_t j = from; j < to; ++j) s[j] = exp_negative(s[j] - top);
    const float added = sum_of(to - from, [&](int64_t i) { return s[from + i]; });
    for (int64_t j = 0; j < from; ++j) s[j] = 0.0f;
    for (int64_t j = to; j < count; ++j) s[j] = 0.0f;
    *total = *total * scale + added;
    *maximum = top;
    return scale;
}

// Online softmax over one piece of one KV head: maximum, sum and weighted values of M queries. Returns the number of keys
// read.
template <int D>
int64_t attend_piece(const Problem& p, const Task& task, const Segment* segments, const float* k_pool, const float* v_pool,
                     const float* q, float* scores, float* maximum, float* total, float* acc,
                     const Mass& mass) {
    const int64_t M = task.num_queries;
    int64_t read = 0, met = 0;  // keys read, and blocks of keys processed for `mass`
    mass.clear(M);
    std::fill(maximum, maximum + M, HIDDEN);
    std::fill(total, total + M, 0.0f);
    std::fill(acc, acc + M * D, 0.0f);
    // Adds `count` keys from `position` on to the results. Not inlined, as in native_tile.h.
    auto add = [&](const float* k, const float* v, int64_t position, int64_t count) __attribute__((noinline)) {
        score<D>(q, M, k, count, scores);
        for (int64_t m = 0; m < M; ++m) {
            float* s = scores + m * TILE;
            const auto [from, to] = p.seen(task, m, position, count);
            const float scale = soften_float32(s, from, to, count, maximum + m, total + m);
            if (scale != 1.0f)
                for (int d = 0; d < D; ++d) acc[m * D + d] *= scale;
            if (mass.data) {
                mass.rescale(m, met, scale);
                mass.add(m, met, position % BLOCK, s, to);
            }
        }
        int64_t m = 0;
        for (; m + 4 <= M; m += 4) accumulate<D, 4>(scores + m * TILE, v, count, acc + m * D);
        for (; m + 2 <= M; m += 2) accumulate<D, 2>(scores + m * TILE, v, count, acc + m * D);
        for (; m < M; ++m) accumulate<D, 1>(scores + m * TILE, v, count, acc + m * D);
    };
    for (int64_t i = task.segment_begin; i < task.segment_end; ++i) {
        const Segment& segment = segments[i];
        const int64_t base = (segment.slot + task.head * p.block_size) * D;
        for (int64_t at = 0, count; at < segment.count; at += count) {
            const int64_t position = segment.first + at;
            count = std::min(tile_end(position) - segment.first, segment.count) - at;
            read += count;
            add(k_pool + base + at * D, v_pool + base + at * D, position, count);
            met += blocks_touched(position, count);
        }
    }
    return read;
}

#include "native_chunk.h"

struct Float32 {
    using Pool = float;
    using Query = float;
    static constexpr int QUERY_SIZE = HEAD_SIZE;
    static constexpr int64_t QUERY_BLOCK = MAX_QUERIES, CHUNK_BLOCK = CHUNK_QUERIES;
    union Scratch {
        float scores[(MAX_QUERIES + 1) * TILE];
        ChunkScratch chunk;
    };
    static void stage(const float* from, Query* to) {
        const float scale = 1.0f / std::sqrt(float(HEAD_SIZE));
        for (int d = 0; d < HEAD_SIZE; ++d) to[d] = from[d] * scale;
    }
    static void append(const float* k, const float* v, int64_t slot, float* k_pool, float* v_pool) {
        std::memcpy(k_pool + slot * HEAD_SIZE, k, HEAD_SIZE * sizeof(float));
        std::memcpy(v_pool + slot * HEAD_SIZE, v, HEAD_SIZE * sizeof(float));
    }
    static int64_t attend(const Problem& p, const Task& task, const Segment* segments, const float* k_pool,
                          const float* v_pool, const Query* q, Scratch& scratch, float* maximum, float* total, float* acc, const Mass& mass) {
        if (p.is_prefill() && !mass.data) {
            FloatRows rows;
            return attend_chunk(rows, p, task, segments, k_pool, v_pool, q, scratch.chunk, maximum, total, acc);
        }
        return attend_piece<HEAD_SIZE>(p, task, segments, k_pool, v_pool, q, scratch.scores, maximum, total, acc, mass);
    }
};
