// Attention of a few new tokens per row over a paged KV cache, for CPUs: decode and verification.
//
// One pass over the visible keys of each (row, KV head): the query heads that share the KV head and the new
// tokens of the row are packed into M queries, so K and V are read once for all of them. Work is cut into pieces of
// the sequence, spread over threads, and merged by log-sum-exp (Flash-Decoding, Dao et al. 2023). Storage is float32
// or bfloat16, arithmetic float32. This file plans and merges; native_portable.h holds the arithmetic for every CPU,
// native_bf16.h that of bfloat16 where the CPU has dot products for it, which serves long chunks (prefill) as well.
//
// Shapes: B rows, T new tokens, H query heads, G KV heads, D head size; M = T * H/G packed queries, token-major.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <omp.h>

#if defined(__AVX512BF16__)
#include "../bf16.h"
#endif

namespace {

constexpr int TILE = 64;            // keys scored together: their K and V stay in the first-level cache
constexpr int MAX_QUERIES = 64;     // packed queries of one task
constexpr int64_t LONG_CHUNK = 32;  // new tokens from which a chunk is prefill (PREFILL_FROM of native.py)
constexpr int64_t SHARE = 512;      // keys of one task, where a row is cut into pieces
constexpr float HIDDEN = -1e30f;    // score of a key that a query may not see; -ffinite-math-only has no infinities
struct bfloat16 { uint16_t value; };

inline float to_float(float x) { return x; }
inline float to_float(bfloat16 x) {
    uint32_t wide = uint32_t(x.value) << 16;
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
}
inline void store(float* p, float x) { *p = x; }
inline void store(bfloat16* p, float x) {  // round to nearest even
    uint32_t wide;
    std::memcpy(&wide, &x, 4);
    p->value = uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}
// exp for x <= 0: 2^n times a polynomial on [-ln2/2, ln2/2] (Cephes coefficients), about 1e-7 relative.
inline float exp_negative(float x) {
    x = std::max(x, -87.0f);
    float n = std::floor(x * 1.44269504f + 0.5f);
    x -= n * 0.693359375f;
    x += n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * x + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * x * x + x + 1.0f;
    int32_t shifted = (int32_t(n) + 127) << 23;
    float power;
    std::memcpy(&power, &shifted, 4);
    return y * power;
}

struct Segment { int64_t row, first, count, slot; };  // keys first.. of a row, adjacent in the pool from head 0's slot
// Queries first_query.. of one row and KV head over some of the row's segments.
struct Task { int64_t row, head, first_query, num_queries, segment_begin, segment_end, piece; };

struct Problem {
    int64_t B, T, H, G, D, block_size;
    const int64_t* seq_lens;
    int64_t group() const { return H / G; }
    int64_t num_queries() const { return T * group(); }
};

// Tiles end at multiples of TILE, wherever a range begins: each key is always met in the same company.
inline int64_t tile_end(int64_t position) { return position / TILE * TILE + TILE; }

#include "native_portable.h"
#if defined(__AVX512BF16__)
#include "native_bf16.h"
#endif

struct Strides { int64_t row, token; };

// Tokens of one forward, cut into what is adjacent in the pool, and those into pieces of about equal work.
struct Piece { int64_t row, segment_begin, segment_end; };
struct Plan {
    std::vector<Segment> segments;
    std::vector<Piece> pieces;
    std::vector<Task> tasks;
    int64_t query_block;
};

struct Table {
    const int64_t *blocks, *rows;
    int64_t stride;
    int64_t slot(const Problem& p, int64_t b, int64_t position) const {
        return blocks[rows[b] * stride + position / p.block_size] * p.G * p.block_size + position % p.block_size;
    }
};

void make_plan(const Problem& p, const Table& table, const int64_t* ranges, int64_t num_ranges, Plan& plan) {
    const int64_t M = p.num_queries(), threads = omp_get_max_threads();
    plan.query_block = M <= MAX_QUERIES ? M : MAX_QUERIES / 2;
    const int64_t blocks = (M + plan.query_block - 1) / plan.query_block;
    // A row is cut where its positions are multiples of SHARE, and always there: what a query gets in decoding and in
    // verification does not depend, to the bit, on how many others are computed with it. Long chunks are enough tasks
    // by themselves, and are not cut unless threads would idle.
    const bool cut = p.T < LONG_CHUNK || p.B * p.G * blocks < 4 * threads;
    plan.segments.clear();
    plan.pieces.clear();
    plan.tasks.clear();
    for (int64_t b = 0; b < p.B; ++b) {
        const int64_t* range = ranges + b * num_ranges * 2;
        for (int64_t r = 0; r < num_ranges;) {
            int64_t at = range[2 * r], stop = range[2 * r + 1];
            for (++r; r < num_ranges && (range[2 * r] == stop || at == stop); ++r) {  // adjacent, or none so far
                if (at == stop) at = range[2 * r];
                stop = range[2 * r + 1];
            }
            while (at < stop) {
                if (plan.pieces.empty() || plan.pieces.back().row != b || (cut && at % SHARE == 0))
                    plan.pieces.push_back({b, int64_t(plan.segments.size()), 0});
                const int64_t count = std::min({stop - at, p.block_size - at % p.block_size,
                                                cut ? SHARE - at % SHARE : stop - at});
                plan.segments.push_back({b, at, count, table.slot(p, b, at)});
                plan.pieces.back().segment_end = int64_t(plan.segments.size());
                at += count;
            }
        }
    }
    // Pieces of one head follow each other: a thread that takes several reads memory front to back, and what it asked
    // for past the end of one is the beginning of the next.
    for (int64_t first = 0, last; first < int64_t(plan.pieces.size()); first = last) {
        for (last = first; last < int64_t(plan.pieces.size()) && plan.pieces[last].row == plan.pieces[first].row;) ++last;
        for (int64_t g = 0; g < p.G; ++g)
            for (int64_t i = first; i < last; ++i)
                for (int64_t m = 0; m < M; m += plan.query_block)
                    plan.tasks.push_back({plan.pieces[i].row, g, m, std::min(plan.query_block, M - m),
                                          plan.pieces[i].segment_begin, plan.pieces[i].segment_end, i});
    }
}

std::atomic<int64_t> keys_read{0};

template <typename Kernel, typename S>
void run(const Problem& p, const S* q, Strides qs, const S* k_new, Strides ks, const S* v_new, Strides vs, S* k_pool,
         S* v_pool, const Table& table, const int64_t* ranges, int64_t num_ranges, S* out, float* lse) {
    constexpr int D = HEAD_SIZE;
    using Query = typename Kernel::Query;
    const int64_t M = p.num_queries(), rep = p.group(), size = p.block_size;
    static thread_local Plan plan;
    static thread_local std::vector<float> results;
    static thread_local std::vector<Query> queries;
    make_plan(p, table, ranges, num_ranges, plan);
    constexpr int64_t query_size = Kernel::QUERY_SIZE;
    const int64_t width = M * (D + 2);
    queries.resize(p.B * p.G * M * query_size);
    results.resize(plan.pieces.size() * p.G * width);
    Query* query_data = queries.data();  // not the thread-local names: each thread of a region has its own
    float* result_data = results.data();
    const Plan& planned = plan;
#pragma omp parallel
    {
        typename Kernel::Scratch scratch;
#pragma omp for collapse(2) schedule(static)
        for (int64_t b = 0; b < p.B; ++b)
            for (int64_t t = 0; t < p.T; ++t) {
                for (int64_t g = 0; g < p.G; ++g) {
                    const int64_t to = (table.slot(p, b, p.seq_lens[b] + t) + g * size) * D;
                    std::memcpy(k_pool + to, k_new + b * ks.row + t * ks.token + g * D, D * sizeof(S));
                    std::memcpy(v_pool + to, v_new + b * vs.row + t * vs.token + g * D, D * sizeof(S));
                }
                for (int64_t h = 0; h < p.H; ++h)
                    Kernel::stage(q + b * qs.row + t * qs.token + h * D,
                                  query_data + ((b * p.G + h / rep) * M + t * rep + h % rep) * query_size);
            }
        const int64_t taken = std::max<int64_t>(1, int64_t(planned.tasks.size()) / (16 * omp_get_num_threads()));
#pragma omp for schedule(dynamic, taken)
        for (int64_t i = 0; i < int64_t(planned.tasks.size()); ++i) {
            const Task& task = planned.tasks[i];
            float* result = result_data + (task.piece * p.G + task.head) * width;
            keys_read += Kernel::attend(p, task, planned.segments.data(), k_pool, v_pool,
                           query_data + ((task.row * p.G + task.head) * M + task.first_query) * query_size, scratch,
                           result + task.first_query, result + M + task.first_query,
                           result + 2 * M + task.first_query * D);
        }
#pragma omp for collapse(2) schedule(static)
        for (int64_t b = 0; b < p.B; ++b)  // merge the pieces of each row
            for (int64_t t = 0; t < p.T; ++t) {
                const auto& pieces = planned.pieces;
                int64_t first = 0;
                while (pieces[first].row < b) ++first;
                int64_t last = first;
                while (last < int64_t(pieces.size()) && pieces[last].row == b) ++last;
                for (int64_t h = 0; h < p.H; ++h) {
                    const int64_t g = h / rep, m = t * rep + h % rep;
                    float top = HIDDEN, total = 0, merged[D] = {};
                    for (int64_t i = first; i < last; ++i)
                        top = std::max(top, result_data[(i * p.G + g) * width + m]);
                    for (int64_t i = first; i < last; ++i) {
                        const float* result = result_data + (i * p.G + g) * width;
                        const float weight = exp_negative(result[m] - top);
                        total += weight * result[M + m];
                        for (int d = 0; d < D; ++d) merged[d] += weight * result[2 * M + m * D + d];
                    }
                    S* to = out + ((b * p.T + t) * p.H + h) * D;
                    for (int d = 0; d < D; ++d) store(to + d, merged[d] / total);
                    lse[(b * p.T + t) * p.H + h] = top + std::log(total);
                }
            }
    }
}

}  // namespace

// Whether bfloat16 has a path of its own on this CPU, and with it chunks of any length.
extern "C" int magicdec_has_bfloat16_path() {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

// Keys (of one row and KV head, each with its value) read by all calls of this process so far.
extern "C" int64_t magicdec_keys_read() { return keys_read; }

// Appends k_new, v_new [B,T,G,D] at positions seq_lens.. and attends; out [B,T,H,D], lse [B,T,H] float32.
// `shape` is B, T, H, G, D, block_size, table_stride, num_ranges, then (row, token) strides of q, k_new, v_new.
// `ranges` [B, num_ranges, 2] holds the visible keys, new ones included. `portable` asks for the path of every CPU.
// Compiled for one head size, HEAD_SIZE (a second's work); returns 0, or 1 if D is another.
extern "C" int magicdec_attention(int is_bfloat16, int portable, const int64_t* shape, const void* q,
                                  const void* k_new, const void* v_new, void* k_pool, void* v_pool,
                                  const int64_t* table, const int64_t* rows, const int64_t* seq_lens,
                                  const int64_t* ranges, void* out, float* lse) {
    const Problem p{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], seq_lens};
    if (p.D != HEAD_SIZE) return 1;
    auto call = [&](auto kernel, auto storage) {
        using S = decltype(storage);
        run<decltype(kernel)>(p, (const S*)q, {shape[8], shape[9]}, (const S*)k_new, {shape[10], shape[11]},
                              (const S*)v_new, {shape[12], shape[13]}, (S*)k_pool, (S*)v_pool,
                              {table, rows, shape[6]}, ranges, shape[7], (S*)out, lse);
        return 0;
    };
    if (!is_bfloat16) return call(Portable<float>{}, float{});
#if defined(__AVX512BF16__)
    if (!portable) return call(Bf16{}, bfloat16{});
#endif
    return call(Portable<bfloat16>{}, bfloat16{});
}
