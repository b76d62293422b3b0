// Attention of a few new tokens per row over a paged KV cache, for CPUs: decode and verification.
//
// One pass over the visible keys of each (row, KV head): the query heads that share the KV head and the new
// tokens of the row are packed into M queries, so K and V are read once for all of them. Work is cut into pieces of
// the sequence, spread over threads, and merged by log-sum-exp (Flash-Decoding, Dao et al. 2023). Storage is float32
// or bfloat16, arithmetic float32. Vectors are the compiler's own: nothing here names an instruction set.
//
// Shapes: B rows, T new tokens, H query heads, G KV heads, D head size; M = T * H/G packed queries, token-major.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <omp.h>

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#else
constexpr int W = 8;
#endif
typedef float vec __attribute__((vector_size(W * 4), aligned(4)));
typedef uint16_t half_bits __attribute__((vector_size(W * 2), aligned(2)));
typedef uint32_t bits __attribute__((vector_size(W * 4), aligned(4)));

constexpr int TILE = 64;            // keys scored together: their K and V stay in the first-level cache
constexpr float HIDDEN = -1e30f;    // score of a key that a query may not see; -ffinite-math-only has no infinities
struct bfloat16 { uint16_t value; };

inline vec load(const float* p) { return *reinterpret_cast<const vec*>(p); }
inline vec load(const bfloat16* p) {
    return (vec)(__builtin_convertvector(*reinterpret_cast<const half_bits*>(p), bits) << 16);
}
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
// Horizontal sums of four vectors at once, into out[0..3].
typedef float eight __attribute__((vector_size(32), aligned(4)));
typedef float four __attribute__((vector_size(16), aligned(4)));
inline eight fold(vec v) {
#if defined(__AVX512F__)
    return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
           __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
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
struct Piece { int64_t row, segment_begin, segment_end; };

struct Problem {
    int64_t B, T, H, G, D, block_size;
    const int64_t* seq_lens;
    int64_t group() const { return H / G; }
    int64_t num_queries() const { return T * group(); }
};

// Scores of four keys against N queries (rows of D from q on): s[n * TILE + 0..3].
template <int D, int N, typename S>
inline void score_four(const float* q, const S* const* keys, float* s) {
    vec a[N][4] = {};
    for (int d = 0; d < D; d += W) {
        vec k[4];
        for (int i = 0; i < 4; ++i) k[i] = load(keys[i] + d);
        for (int n = 0; n < N; ++n) {
            const vec x = load(q + n * D + d);
            for (int i = 0; i < 4; ++i) a[n][i] += x * k[i];
        }
    }
    for (int n = 0; n < N; ++n) sum_four(a[n][0], a[n][1], a[n][2], a[n][3], s + n * TILE);
}

// Scores of `count` keys (rows of D) against M queries: s[m * TILE + j].
template <int D, typename S>
void score(const float* q, int64_t M, const S* k, int64_t count, float* s) {
    for (int64_t j = 0; j < count; j += 4) {
        const S* keys[4];
        for (int i = 0; i < 4; ++i) keys[i] = k + std::min(j + i, count - 1) * D;
        int64_t m = 0;
        for (; m + 2 <= M; m += 2) score_four<D, 2>(q + m * D, keys, s + m * TILE + j);
        if (m < M) score_four<D, 1>(q + m * D, keys, s + m * TILE + j);
    }
}

// acc[m][d] += sum_j p[m * TILE + j] * v[j][d] for N queries from m on: N x 2 vectors stay in registers.
template <int D, int N, typename S>
void accumulate(const float* p, const S* v, int64_t count, float* acc) {
    for (int d = 0; d < D; d += 2 * W) {
        constexpr int step = 2;
        vec a[N][step];
        const int parts = std::min(step, (D - d) / W);
        for (int n = 0; n < N; ++n)
            for (int i = 0; i < parts; ++i) a[n][i] = load(acc + n * D + d + i * W);
        for (int64_t j = 0; j < count; ++j)
            for (int i = 0; i < parts; ++i) {
                vec x = load(v + j * D + d + i * W);
                for (int n = 0; n < N; ++n) a[n][i] += p[n * TILE + j] * x;
            }
        for (int n = 0; n < N; ++n)
            for (int i = 0; i < parts; ++i) *reinterpret_cast<vec*>(acc + n * D + d + i * W) = a[n][i];
    }
}

// One piece for one KV head: running maximum, sum and weighted values of M queries.
template <int D, typename S>
void attend_piece(const Problem& p, const Piece& piece, int64_t head, const Segment* segments, const S* k_pool,
                  const S* v_pool, const float* q, float* scores, float* maximum, float* total, float* acc) {
    const int64_t M = p.num_queries(), rep = p.group();
    std::fill(maximum, maximum + M, HIDDEN);
    std::fill(total, total + M, 0.0f);
    std::fill(acc, acc + M * D, 0.0f);
    for (int64_t i = piece.segment_begin; i < piece.segment_end; ++i) {
        const Segment& segment = segments[i];
        const int64_t base = (segment.slot + head * p.block_size) * D;
        for (int64_t at = 0; at < segment.count; at += TILE) {
            const int64_t count = std::min<int64_t>(TILE, segment.count - at);
            const S *k = k_pool + base + at * D, *v = v_pool + base + at * D;
            score<D>(q, M, k, count, scores);
            const int64_t past = segment.first + at - p.seq_lens[piece.row];  // key j is new token past + j
            for (int64_t m = 0; m < M; ++m) {
                float* s = scores + m * TILE;
                const int64_t seen = std::clamp<int64_t>(m / rep + 1 - past, 0, count);
                float top = maximum[m];
                for (int64_t j = 0; j < seen; ++j) top = std::max(top, s[j]);
                const float scale = exp_negative(maximum[m] - top);
                if (maximum[m] != top)
                    for (int d = 0; d < D; ++d) acc[m * D + d] *= scale;
                float added = 0;
                for (int64_t j = 0; j < seen; ++j) s[j] = exp_negative(s[j] - top);
                for (int64_t j = 0; j < seen; ++j) added += s[j];
                for (int64_t j = seen; j < count; ++j) s[j] = 0.0f;
                total[m] = total[m] * scale + added;
                maximum[m] = top;
            }
            int64_t m = 0;
            for (; m + 4 <= M; m += 4) accumulate<D, 4>(scores + m * TILE, v, count, acc + m * D);
            for (; m + 2 <= M; m += 2) accumulate<D, 2>(scores + m * TILE, v, count, acc + m * D);
            for (; m < M; ++m) accumulate<D, 1>(scores + m * TILE, v, count, acc + m * D);
        }
    }
}

struct Strides { int64_t row, token; };

template <int D, typename S>
void run(const Problem& p, const S* q, Strides qs, const S* k_new, Strides ks, const S* v_new, Strides vs, S* k_pool,
         S* v_pool, const int64_t* table, int64_t table_stride, const int64_t* rows, const int64_t* ranges,
         int64_t num_ranges, S* out, float* lse) {
    const int64_t M = p.num_queries(), rep = p.group(), size = p.block_size;
    auto slot = [&](int64_t b, int64_t position) {
        return table[rows[b] * table_stride + position / size] * p.G * size + position % size;
    };
    for (int64_t b = 0; b < p.B; ++b)  // append: a few tokens, not worth threads
        for (int64_t t = 0; t < p.T; ++t)
            for (int64_t g = 0; g < p.G; ++g) {
                const int64_t to = (slot(b, p.seq_lens[b] + t) + g * size) * D;
                std::memcpy(k_pool + to, k_new + b * ks.row + t * ks.token + g * D, D * sizeof(S));
                std::memcpy(v_pool + to, v_new + b * vs.row + t * vs.token + g * D, D * sizeof(S));
            }
    int64_t keys = 0;
    for (int64_t i = 0; i < p.B * num_ranges; ++i) keys += ranges[2 * i + 1] - ranges[2 * i];
    const int64_t threads = omp_get_max_threads();
    const int64_t share = std::clamp<int64_t>(keys * p.G / (4 * threads), 2 * TILE, 2048) / TILE * TILE;
    static thread_local std::vector<Segment> segments;
    static thread_local std::vector<Piece> pieces;
    static thread_local std::vector<float> queries, results;
    segments.clear();
    pieces.clear();
    for (int64_t b = 0; b < p.B; ++b) {
        int64_t filled = share;
        for (int64_t r = 0; r < num_ranges; ++r) {
            const int64_t* range = ranges + (b * num_ranges + r) * 2;
            for (int64_t at = range[0]; at < range[1];) {
                if (filled >= share) {
                    pieces.push_back({b, int64_t(segments.size()), int64_t(segments.size())});
                    filled = 0;
                }
                const int64_t count = std::min({range[1] - at, size - at % size, share - filled});
                segments.push_back({b, at, count, slot(b, at)});
                pieces.back().segment_end = int64_t(segments.size());
                filled += count;
                at += count;
            }
        }
    }
    queries.resize(p.B * p.G * M * D);
    const float scale = 1.0f / std::sqrt(float(D));
    for (int64_t b = 0; b < p.B; ++b)
        for (int64_t t = 0; t < p.T; ++t)
            for (int64_t h = 0; h < p.H; ++h) {
                const S* from = q + b * qs.row + t * qs.token + h * D;
                float* to = queries.data() + ((b * p.G + h / rep) * M + t * rep + h % rep) * D;
                for (int d = 0; d < D; ++d) to[d] = to_float(from[d]) * scale;
            }
    const int64_t width = M * (D + 2), num_pieces = int64_t(pieces.size());
    results.resize(num_pieces * p.G * width);
    const Segment* segment_data = segments.data();
    const Piece* piece_data = pieces.data();
    const float* query_data = queries.data();
    float* result_data = results.data();
#pragma omp parallel
    {
        std::vector<float> scores((M + 1) * TILE);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < num_pieces * p.G; ++task) {
            const Piece& piece = piece_data[task / p.G];
            const int64_t head = task % p.G;
            float* result = result_data + task * width;
            attend_piece<D>(p, piece, head, segment_data, k_pool, v_pool,
                            query_data + (piece.row * p.G + head) * M * D, scores.data(), result, result + M,
                            result + 2 * M);
        }
    }
    for (int64_t b = 0, first = 0; b < p.B; ++b) {  // merge the pieces of each row
        int64_t last = first;
        while (last < num_pieces && piece_data[last].row == b) ++last;
        for (int64_t h = 0; h < p.H; ++h)
            for (int64_t t = 0; t < p.T; ++t) {
                const int64_t g = h / rep, m = t * rep + h % rep;
                float top = HIDDEN, total = 0, merged[D] = {};
                for (int64_t i = first; i < last; ++i) top = std::max(top, result_data[(i * p.G + g) * width + m]);
                for (int64_t i = first; i < last; ++i) {
                    const float* result = result_data + (i * p.G + g) * width;
                    const float weight = exp_negative(result[m] - top);
                    total += weight * result[M + m];
                    for (int d = 0; d < D; ++d) merged[d] += weight * result[2 * M + m * D + d];
                }
                S* to = out + ((b * p.T + t) * p.H + h) * D;
                for (int d = 0; d < D; ++d) store(to + d, merged[d] / total);
                if (lse) lse[(b * p.T + t) * p.H + h] = top + std::log(total);
            }
        first = last;
    }
}

}  // namespace

// Appends k_new, v_new [B,T,G,D] at positions seq_lens.. and attends; out [B,T,H,D], lse [B,T,H] or null.
// `shape` is B, T, H, G, D, block_size, table_stride, num_ranges, then (row, token) strides of q, k_new, v_new.
// `ranges` [B, num_ranges, 2] holds the visible keys, new ones included. Compiled for one
// head size, HEAD_SIZE (a second's work); returns 0, or 1 if D is another.
extern "C" int magicdec_attention(int is_bfloat16, const int64_t* shape, const void* q, const void* k_new,
                                  const void* v_new, void* k_pool, void* v_pool, const int64_t* table,
                                  const int64_t* rows, const int64_t* seq_lens, const int64_t* ranges, void* out,
                                  float* lse) {
    const Problem p{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], seq_lens};
    auto call = [&](auto storage) {
        using S = decltype(storage);
        run<HEAD_SIZE>(p, (const S*)q, {shape[8], shape[9]}, (const S*)k_new, {shape[10], shape[11]},
                                   (const S*)v_new, {shape[12], shape[13]}, (S*)k_pool, (S*)v_pool, table, shape[6],
                                   rows, ranges, shape[7], (S*)out, lse);
        return 0;
    };
    if (p.D != HEAD_SIZE) return 1;
    return is_bfloat16 ? call(bfloat16{}) : call(float{});
}
