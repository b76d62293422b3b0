// Attention of a few new tokens per row over a paged KV cache, for CPUs: decode and verification.
//
// One pass over the visible keys of each (row, KV head): the query heads that share the KV head and the row's new
// tokens are packed into M queries, so K and V are read once for all of them. A sequence is divided into pieces, which
// are distributed over threads and merged by log-sum-exp (Flash-Decoding, Dao et al. 2023). Storage is float32 or
// bfloat16, arithmetic is float32. On request the same pass also sums the attention weights by blocks of keys, without
// changing a bit of the output. This file plans and merges. native_portable.h has the arithmetic for every CPU.
// native_bf16.h has the one for CPUs with bfloat16 dot products, which also serves long chunks (prefill), and
// native_int8.h uses it to read a draft's int8 KV cache.
//
// Shapes: B rows, T new tokens, H query heads, G KV heads, D head size; M = T * H/G packed queries, token-major.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <omp.h>

#include "../kernels/arithmetic.h"
#if defined(__AVX512BF16__)
#include "../kernels/bf16.h"
#include "../kernels/int8.h"
#endif

namespace {

constexpr int TILE = 64;            // keys processed together: their K and V stay in the L1 cache
constexpr int BLOCK = 16;           // keys whose attention weights are summed (WEIGHTS_BLOCK of kv/view.py); divides TILE
constexpr int MAX_QUERIES = 64;     // most packed queries of one task
constexpr int64_t LONG_CHUNK = 32;  // from this many new tokens on a chunk counts as prefill (PREFILL_FROM of native.py)
constexpr int64_t SHARE = 512;      // keys per piece when a row is divided into pieces
constexpr float HIDDEN = -1e30f;    // score of a masked key; -ffinite-math-only does not allow infinities

enum { FLOAT32, BFLOAT16, INT8 };   // storage of the KV pools

struct Segment { int64_t row, first, count, slot; };  // `count` keys of a row from `first` on; `slot`: head 0's in the pool
// Queries from first_query on of one row and KV head, over some of the row's segments.
struct Task { int64_t row, head, first_query, num_queries, segment_begin, segment_end, piece; };

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
            float sum = 0;
            for (int64_t i = j; i < end; ++i) sum += weights[i];
            of(query)[at] += sum;
        }
    }
};
inline int64_t blocks_touched(int64_t first, int64_t count) { return (first + count - 1) / BLOCK - first / BLOCK + 1; }

struct Problem {
    int64_t B, T, H, G, D, block_size;
    const int64_t* seq_lens;
    int64_t window;  // most keys that are visible to a query, including its own; 0: all
    int64_t group() const { return H / G; }
    int64_t num_queries() const { return T * group(); }
    // Whether the token at `position` comes after all queries of a task.
    bool is_hidden(const Task& task, int64_t position) const {
        return position - seq_lens[task.row] > (task.first_query + task.num_queries - 1) / group();
    }
    struct Span { int64_t from, to; };
    // The range of the `count` keys from `position` on that is visible to the task's query m.
    Span seen(const Task& task, int64_t m, int64_t position, int64_t count) const {
        const int64_t own = seq_lens[task.row] + (task.first_query + m) / group();  // the query's position
        const int64_t first = window ? own + 1 - window - position : 0;
        return {std::clamp<int64_t>(first, 0, count), std::clamp<int64_t>(own + 1 - position, 0, count)};
    }
};

// Tiles end at multiples of TILE wherever a range begins, so that a key is always in a tile with the same keys.
inline int64_t tile_end(int64_t position) { return position / TILE * TILE + TILE; }

#include "native_portable.h"
#if defined(__AVX512BF16__)
#include "native_bf16.h"
#include "native_int8.h"
#endif

struct Strides { int64_t row, token; };

// The visible tokens of one forward as segments that are adjacent in the pool, grouped into pieces of about equal work.
struct Piece { int64_t segment_begin, segment_end, num_keys, num_blocks, mass; };  // mass: index of its first sum
struct Plan {
    std::vector<Segment> segments;
    std::vector<Piece> pieces;        // those of one row and head are adjacent
    std::vector<int64_t> first_piece;  // by row and head, then the end
    std::vector<Task> tasks;
    int64_t query_block, mass_size;
};

struct Table {
    const int64_t *blocks, *rows;
    int64_t stride;
    int64_t slot(const Problem& p, int64_t b, int64_t position) const {
        return blocks[rows[b] * stride + position / p.block_size] * p.G * p.block_size + position % p.block_size;
    }
};

struct Ranges {
    const int64_t* data;  // [B, heads, count, 2]
    int64_t count, heads;
    const int64_t* of(int64_t b, int64_t g) const { return data + (b * heads + (heads > 1 ? g : 0)) * count * 2; }
};

// Segments and pieces of one row and head.
void add_pieces(const Problem& p, const Table& table, const int64_t* range, int64_t num_ranges, int64_t b, bool cut,
                Plan& plan) {
    bool fresh = true;
    for (int64_t r = 0; r < num_ranges;) {
        int64_t at = range[2 * r], stop = range[2 * r + 1];
        for (++r; r < num_ranges && (range[2 * r] == stop || at == stop); ++r) {  // merge adjacent ranges, skip empty ones
            if (at == stop) at = range[2 * r];
            stop = range[2 * r + 1];
        }
        while (at < stop) {
            // Scattered ranges rarely contain a multiple of SHARE, so they are also divided by their number of keys.
            if (fresh || (cut && (at % SHARE == 0 || plan.pieces.back().num_keys >= SHARE)))
                plan.pieces.push_back({int64_t(plan.segments.size()), 0, 0, 0, 0});
            fresh = false;
            const int64_t count = std::min({stop - at, p.block_size - at % p.block_size,
                                            cut ? SHARE - at % SHARE : stop - at});
            plan.segments.push_back({b, at, count, table.slot(p, b, at)});
            Piece& piece = plan.pieces.back();
            piece.segment_end = int64_t(plan.segments.size());
            piece.num_keys += count;
            piece.num_blocks += blocks_touched(at, count);
            at += count;
        }
    }
}

void make_plan(const Problem& p, const Table& table, const Ranges& ranges, Plan& plan) {
    const int64_t M = p.num_queries(), threads = omp_get_max_threads();
    plan.query_block = M <= MAX_QUERIES ? M : MAX_QUERIES / 2;
    const int64_t blocks = (M + plan.query_block - 1) / plan.query_block;
    // A row is always divided at positions that are multiples of SHARE. Therefore a query has the same result, to the
    // bit, in decoding and in verification, whatever other queries are computed with it. Long chunks make enough tasks
    // without this, and are divided only if threads would idle.
    const bool cut = p.T < LONG_CHUNK || p.B * p.G * blocks < 4 * threads;
    plan.segments.clear();
    plan.pieces.clear();
    plan.first_piece.clear();
    plan.tasks.clear();
    plan.mass_size = 0;
    // Pieces of one head are adjacent. A thread that takes several of them reads memory sequentially, and its prefetches
    // beyond the end of one piece fall into the next.
    for (int64_t b = 0; b < p.B; ++b)
        for (int64_t g = 0; g < p.G; ++g) {
            const int64_t begin = int64_t(plan.pieces.size());
            if (g == 0 || ranges.heads > 1) {
                add_pieces(p, table, ranges.of(b, g), ranges.count, b, cut, plan);
            } else {  // the same segments as for the previous head
                for (int64_t i = plan.first_piece.back(); i < begin; ++i) plan.pieces.push_back(Piece(plan.pieces[i]));
            }
            plan.first_piece.push_back(begin);
            for (int64_t i = begin; i < int64_t(plan.pieces.size()); ++i) {
                Piece& piece = plan.pieces[i];
                piece.mass = plan.mass_size;
                plan.mass_size += M * piece.num_blocks;
                for (int64_t m = 0; m < M; m += plan.query_block)
                    plan.tasks.push_back({b, g, m, std::min(plan.query_block, M - m), piece.segment_begin,
                                          piece.segment_end, i});
            }
        }
    plan.first_piece.push_back(int64_t(plan.pieces.size()));
}

std::atomic<int64_t> keys_read{0};

// Convert the sums of one row and head, which are relative to the maxima of its pieces, to attention probabilities. They
// are summed over the queries (into the first query's sums), then over the segments that share a block.
inline void merge_mass(const Problem& p, const Plan& plan, int64_t b, int64_t g, const float* results, int64_t width,
                       float* sums, const float* lse, float* out, int64_t num_blocks) {
    const int64_t M = p.num_queries(), rep = p.group();
    std::fill(out, out + num_blocks, 0.0f);
    for (int64_t i = plan.first_piece[b * p.G + g]; i < plan.first_piece[b * p.G + g + 1]; ++i) {
        const Piece& piece = plan.pieces[i];
        float* added = sums + piece.mass;
        for (int64_t m = 0; m < M; ++m) {
            const float total = lse[(b * p.T + m / rep) * p.H + g * rep + m % rep];
            const float weight = exp_negative(results[i * width + m] - total);
            for (int64_t e = 0; e < piece.num_blocks; ++e) {
                const float part = weight * added[m * piece.num_blocks + e];
                added[e] = m ? added[e] + part : part;
            }
        }
        for (int64_t s = piece.segment_begin; s < piece.segment_end; ++s) {
            const Segment& segment = plan.segments[s];
            const int64_t first = segment.first / BLOCK, count = blocks_touched(segment.first, segment.count);
            for (int64_t e = 0; e < count; ++e) out[first + e] += *added++;
        }
    }
}

template <typename Kernel, typename S>
void run(const Problem& p, const S* q, Strides qs, const S* k_new, Strides ks, const S* v_new, Strides vs,
         typename Kernel::Pool* k_pool, typename Kernel::Pool* v_pool, const Table& table,
         const Ranges& ranges, S* out, float* lse, float* mass, int64_t num_blocks) {
    constexpr int D = HEAD_SIZE;
    using Query = typename Kernel::Query;
    const int64_t M = p.num_queries(), rep = p.group(), size = p.block_size;
    static thread_local Plan plan;
    static thread_local std::vector<float> results, sums;
    static thread_local std::vector<Query> queries;
    make_plan(p, table, ranges, plan);
    constexpr int64_t query_size = Kernel::QUERY_SIZE;
    const int64_t width = M * (D + 2);
    queries.resize(p.B * p.G * M * query_size);
    results.resize(plan.pieces.size() * width);
    if (mass) sums.resize(plan.mass_size);
    Query* query_data = queries.data();  // each OpenMP thread has its own thread-locals, so pass pointers
    float *result_data = results.data(), *sum_data = sums.data();
    const Plan& planned = plan;
#pragma omp parallel
    {
        typename Kernel::Scratch scratch;
#pragma omp for collapse(2) schedule(static)
        for (int64_t b = 0; b < p.B; ++b)
            for (int64_t t = 0; t < p.T; ++t) {
                for (int64_t g = 0; g < p.G; ++g) {
                    Kernel::append(k_new + b * ks.row + t * ks.token + g * D, v_new + b * vs.row + t * vs.token + g * D,
                                   table.slot(p, b, p.seq_lens[b] + t) + g * size, k_pool, v_pool);
                }
                for (int64_t h = 0; h < p.H; ++h)
                    Kernel::stage(q + b * qs.row + t * qs.token + h * D,
                                  query_data + ((b * p.G + h / rep) * M + t * rep + h % rep) * query_size);
            }
        const int64_t taken = std::max<int64_t>(1, int64_t(planned.tasks.size()) / (16 * omp_get_num_threads()));
#pragma omp for schedule(dynamic, taken)
        for (int64_t i = 0; i < int64_t(planned.tasks.size()); ++i) {
            const Task& task = planned.tasks[i];
            float* result = result_data + task.piece * width;
            const Piece& piece = planned.pieces[task.piece];
            const Mass to{mass ? sum_data + piece.mass + task.first_query * piece.num_blocks : nullptr, piece.num_blocks};
            keys_read += Kernel::attend(p, task, planned.segments.data(), k_pool, v_pool,
                           query_data + ((task.row * p.G + task.head) * M + task.first_query) * query_size, scratch,
                           result + task.first_query, result + M + task.first_query,
                           result + 2 * M + task.first_query * D, to);
        }
#pragma omp for collapse(2) schedule(static)
        for (int64_t b = 0; b < p.B; ++b)  // merge the pieces of each row
            for (int64_t t = 0; t < p.T; ++t)
                for (int64_t h = 0; h < p.H; ++h) {
                    const int64_t g = h / rep, m = t * rep + h % rep;
                    const int64_t first = planned.first_piece[b * p.G + g], last = planned.first_piece[b * p.G + g + 1];
                    float top = HIDDEN, total = 0, merged[D] = {};
                    for (int64_t i = first; i < last; ++i)
                        top = std::max(top, result_data[i * width + m]);
                    for (int64_t i = first; i < last; ++i) {
                        const float* result = result_data + i * width;
                        const float weight = exp_negative(result[m] - top);
                        total += weight * result[M + m];
                        for (int d = 0; d < D; ++d) merged[d] += weight * result[2 * M + m * D + d];
                    }
                    S* to = out + ((b * p.T + t) * p.H + h) * D;
                    for (int d = 0; d < D; ++d) store(to + d, merged[d] / total);
                    lse[(b * p.T + t) * p.H + h] = top + std::log(total);
                }
        if (mass) {
#pragma omp for collapse(2) schedule(static)
            for (int64_t b = 0; b < p.B; ++b)
                for (int64_t g = 0; g < p.G; ++g)
                    merge_mass(p, planned, b, g, result_data, width, sum_data, lse, mass + (b * p.G + g) * num_blocks,
                               num_blocks);
        }
    }
}

}  // namespace

// Whether this CPU has the bfloat16 path, which also supports chunks of any length.
extern "C" int magicdec_has_bfloat16_path() {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

// Number of keys (per row and KV head, each with its value) read by all calls in this process so far.
extern "C" int64_t magicdec_keys_read() { return keys_read; }

// Appends k_new, v_new [B,T,G,D] at positions seq_lens.. and computes attention: out [B,T,H,D], lse [B,T,H] float32.
// `shape` is B, T, H, G, D, block_size, table_stride, num_ranges, then (row, token) strides of q, k_new, v_new, then
// range_heads, num_blocks and window (0: none). `ranges` [B, range_heads, num_ranges, 2] are the visible keys, including
// new ones; range_heads is G, or 1 if they are the same for all heads. `mass` [B, G, num_blocks] float32 receives the
// attention probability of each block of keys, summed over the queries, or is null. `portable` selects the portable
// path. `storage` of the pools is FLOAT32 or BFLOAT16, the same as of all other tensors, or INT8 with bfloat16 tensors.
// Compiled for one head size, HEAD_SIZE, in about a second. Returns 0, or 1 if D is another size or this CPU does not
// support the path.
extern "C" int magicdec_attention(int storage, int portable, const int64_t* shape, const void* q,
                                  const void* k_new, const void* v_new, void* k_pool, void* v_pool,
                                  const int64_t* table, const int64_t* rows, const int64_t* seq_lens,
                                  const int64_t* ranges, void* out, float* lse, float* mass) {
    const Problem p{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], seq_lens, shape[16]};
    if (p.D != HEAD_SIZE) return 1;
    auto call = [&](auto kernel, auto number) {
        using S = decltype(number);
        using Pool = typename decltype(kernel)::Pool;
        run<decltype(kernel)>(p, (const S*)q, {shape[8], shape[9]}, (const S*)k_new, {shape[10], shape[11]},
                              (const S*)v_new, {shape[12], shape[13]}, (Pool*)k_pool, (Pool*)v_pool,
                              {table, rows, shape[6]}, {ranges, shape[7], shape[14]}, (S*)out, lse, mass, shape[15]);
        return 0;
    };
    if (storage == FLOAT32) return call(Portable<float>{}, float{});
#if defined(__AVX512BF16__)
    if (storage == INT8) return call(Int8{}, bfloat16{});
    if (!portable) return call(Bf16{}, bfloat16{});
#endif
    return storage == INT8 ? 1 : call(Portable<bfloat16>{}, bfloat16{});
}
