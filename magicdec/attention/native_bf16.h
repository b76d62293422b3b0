// The bfloat16 path of native.cpp for CPUs with bfloat16 dot products (AVX512-BF16): both products of attention as
// small GEMMs on tiles of TILE keys, which is what makes M queries cost little more than one.
//
// Keys are transposed, values interleaved in pairs as they are read (bf16.h says why). Up to FUSED queries take them
// from the registers; more would each need them again, and share a packed tile in the first-level cache. Both ways
// add in the same order: a query gets the same bits from either.
constexpr int PADDED = (HEAD_SIZE + 31) / 32 * 32;  // dimensions, rounded up to what an interleaved vector pair holds
constexpr int PAIRS = HEAD_SIZE / 2;
constexpr int FUSED = 6;  // one block of in_blocks: its accumulators fill the registers

// Per thread: one tile and the state of up to MAX_QUERIES queries.
struct Bf16Scratch {
    alignas(64) uint32_t keys[PAIRS * TILE];            // [pair of dimensions][key]
    alignas(64) uint32_t values[TILE / 2 * PADDED];     // [pair of keys][dimension, permuted by unpack]
    alignas(64) float scores[MAX_QUERIES * TILE];
    alignas(64) uint32_t weights[MAX_QUERIES * TILE / 2];  // bfloat16 pairs
    alignas(64) float acc[MAX_QUERIES * PADDED];           // dimensions permuted as in `values`
    float scale[MAX_QUERIES];
};

// Keys of one segment that are met together, and how far ahead, in elements, the next such keys lie.
struct Tile { int64_t count, ahead; };

// Keys j .. j + 15 of a tile, 16 pairs of dimensions from `pair`, one vector a pair; the next tile is asked for. Keys
// past `count` repeat the last one: they are hidden later, and must be readable now.
inline void load_keys(const bfloat16* k, int64_t j, Tile tile, int pair, __m512i r[16]) {
    const __mmask16 lanes = first_lanes(PAIRS - pair);
    for (int i = 0; i < 16; ++i) {
        const bfloat16* row = k + std::min(j + i, tile.count - 1) * HEAD_SIZE + 2 * pair;
        r[i] = _mm512_maskz_loadu_epi32(lanes, row);
        _mm_prefetch((const char*)(row + tile.ahead), _MM_HINT_T0);
    }
    transpose(r);
}

// Values 2j and 2j + 1 of a tile, 32 dimensions from d: pairs, permuted by unpack; the next tile is asked for.
inline void load_values(const bfloat16* v, int64_t j, Tile tile, int d, __m512i r[2]) {
    const __mmask16 lanes = first_lanes((HEAD_SIZE - d) / 2);
    const bfloat16 *even = v + 2 * j * HEAD_SIZE + d, *odd = v + std::min(2 * j + 1, tile.count - 1) * HEAD_SIZE + d;
    const __m512i a = _mm512_maskz_loadu_epi32(lanes, even), b = _mm512_maskz_loadu_epi32(lanes, odd);
    _mm_prefetch((const char*)(even + tile.ahead), _MM_HINT_T0);
    _mm_prefetch((const char*)(odd + tile.ahead), _MM_HINT_T0);
    r[0] = _mm512_unpacklo_epi16(a, b);
    r[1] = _mm512_unpackhi_epi16(a, b);
}

inline void pack_keys(const bfloat16* k, Tile tile, uint32_t* out) {
    for (int64_t j = 0; j < tile.count; j += 16)
        for (int pair = 0; pair < PAIRS; pair += 16) {
            __m512i r[16];
            load_keys(k, j, tile, pair, r);
            for (int i = 0; i < std::min(16, PAIRS - pair); ++i)
                _mm512_store_si512(out + (pair + i) * TILE + j, r[i]);
        }
}

inline void pack_values(const bfloat16* v, Tile tile, uint32_t* out) {
    for (int64_t j = 0; j < (tile.count + 1) / 2; ++j)
        for (int d = 0; d < PADDED; d += 32) {
            __m512i r[2];
            load_values(v, j, tile, d, r);
            _mm512_store_si512(out + j * PADDED + d, r[0]);
            _mm512_store_si512(out + j * PADDED + d + 16, r[1]);
        }
}

template <int N>
inline void score_fused(const uint32_t* q, const bfloat16* k, Tile tile, float* scores) {
    for (int64_t j = 0; j < tile.count; j += 16) {
        __m512 s[N] = {};
        for (int pair = 0; pair < PAIRS; pair += 16) {
            __m512i r[16];
            load_keys(k, j, tile, pair, r);
            for (int i = 0; i < std::min(16, PAIRS - pair); ++i)
                for (int n = 0; n < N; ++n)
                    s[n] = _mm512_dpbf16_ps(s[n], (__m512bh)_mm512_set1_epi32(int(q[n * PAIRS + pair + i])), (__m512bh)r[i]);
        }
        for (int n = 0; n < N; ++n) _mm512_store_ps(scores + n * TILE + j, s[n]);
    }
}

// Dimensions d .. d + 16 C - 1 of the weighted sum of a tile's values.
template <int N, int C>
inline void weigh_part_fused(const uint32_t* weights, const bfloat16* v, Tile tile, int d, const float* scale,
                             float* acc) {
    __m512 a[N][C];
    for (int n = 0; n < N; ++n)
        for (int i = 0; i < C; ++i)
            a[n][i] = _mm512_mul_ps(_mm512_load_ps(acc + n * PADDED + d + 16 * i), _mm512_set1_ps(scale[n]));
    for (int64_t j = 0; j < (tile.count + 1) / 2; ++j)
        for (int i = 0; i < C; i += 2) {
            __m512i r[2];
            load_values(v, j, tile, d + 16 * i, r);
            for (int n = 0; n < N; ++n) {
                const __m512bh w = (__m512bh)_mm512_set1_epi32(int(weights[n * TILE / 2 + j]));
                a[n][i] = _mm512_dpbf16_ps(a[n][i], w, (__m512bh)r[0]);
                a[n][i + 1] = _mm512_dpbf16_ps(a[n][i + 1], w, (__m512bh)r[1]);
            }
        }
    for (int n = 0; n < N; ++n)
        for (int i = 0; i < C; ++i) _mm512_store_ps(acc + n * PADDED + d + 16 * i, a[n][i]);
}

template <int N>
inline void weigh_fused(const uint32_t* weights, const bfloat16* v, Tile tile, const float* scale, float* acc) {
    int d = 0;
    for (; d + 64 <= PADDED; d += 64) weigh_part_fused<N, 4>(weights, v, tile, d, scale, acc);
    if (d < PADDED) weigh_part_fused<N, 2>(weights, v, tile, d, scale, acc);
}

// Calls body.operator()<C>() where 16 C keys hold `count` of them.
template <typename Body>
inline void by_vectors(int64_t count, Body body) {
    switch ((count + 15) / 16) {
        case 1: body.template operator()<1>(); break;
        case 2: body.template operator()<2>(); break;
        case 3: body.template operator()<3>(); break;
        default: body.template operator()<4>(); break;
    }
}

template <int N, int C>
inline void score_queries(const uint32_t* q, const uint32_t* keys, float* scores) {
    __m512 s[N][C] = {};
    multiply<N, C>(q, PAIRS, keys, TILE, PAIRS, s);
    for (int n = 0; n < N; ++n)
        for (int i = 0; i < C; ++i) _mm512_store_ps(scores + n * TILE + 16 * i, s[n][i]);
}

template <int N, int C>
inline void weigh_part(const uint32_t* weights, const uint32_t* values, int64_t pairs, const float* scale, float* acc) {
    __m512 a[N][C];
    for (int n = 0; n < N; ++n)
        for (int i = 0; i < C; ++i)
            a[n][i] = _mm512_mul_ps(_mm512_load_ps(acc + n * PADDED + 16 * i), _mm512_set1_ps(scale[n]));
    multiply<N, C>(weights, TILE / 2, values, PADDED, pairs, a);
    for (int n = 0; n < N; ++n)
        for (int i = 0; i < C; ++i) _mm512_store_ps(acc + n * PADDED + 16 * i, a[n][i]);
}

template <int N>
inline void weigh_queries(const uint32_t* weights, const uint32_t* values, int64_t pairs, const float* scale, float* acc) {
    int d = 0;
    for (; d + 64 <= PADDED; d += 64) weigh_part<N, 4>(weights, values + d, pairs, scale, acc + d);
    if (d < PADDED) weigh_part<N, 2>(weights, values + d, pairs, scale, acc + d);
}

// 2^x for x <= 0: a polynomial (Taylor of 2^f on [-1/2, 1/2], 2e-7 relative) and an exponent.
inline __m512 exp2_negative(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, n);
    __m512 y = _mm512_set1_ps(1.5403530e-4f);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.3333558e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.6181291e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.5504109e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022651e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314718e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, n);
}

// Scores of one query on 16 C keys to weights `w`, given how many it sees; `maximum` and `total` run on (in base 2).
template <int C>
inline void to_weights(const float* scores, int64_t seen, float factor, float* maximum, float* total, float* scale,
                       uint32_t* weights, __m512 (&w)[4]) {
    __m512 s[C];
    const __m512 hidden = _mm512_set1_ps(HIDDEN);
    __m512 top = hidden;
    for (int i = 0; i < C; ++i) {
        s[i] = _mm512_mask_mul_ps(hidden, first_lanes(seen - 16 * i), _mm512_load_ps(scores + 16 * i), _mm512_set1_ps(factor));
        top = _mm512_max_ps(top, s[i]);
    }
    const float highest = std::max(*maximum, _mm512_reduce_max_ps(top));
    const __m512 shift = _mm512_set1_ps(highest);
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < C; ++i) {
        w[i] = _mm512_maskz_mov_ps(first_lanes(seen - 16 * i), exp2_negative(_mm512_sub_ps(s[i], shift)));
        sum = _mm512_add_ps(sum, w[i]);
    }
    for (int i = C; i < 4; ++i) w[i] = _mm512_setzero_ps();
    _mm512_store_si512(weights, (__m512i)_mm512_cvtne2ps_pbh(w[1], w[0]));
    if (C > 2) _mm512_store_si512(weights + 16, (__m512i)_mm512_cvtne2ps_pbh(w[3], w[2]));
    *scale = _mm512_cvtss_f32(exp2_negative(_mm512_set1_ps(*maximum - highest)));
    *total = *total * *scale + _mm512_reduce_add_ps(sum);
    *maximum = highest;
}

// The sums of four vectors, in order.
inline __m128 sum_each(const __m512 (&w)[4]) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(w[0], w[1]), _mm512_unpackhi_ps(w[0], w[1]));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(w[2], w[3]), _mm512_unpackhi_ps(w[2], w[3]));
    const __m512 all = _mm512_add_ps(
        (__m512)_mm512_unpacklo_pd((__m512d)ab, (__m512d)cd), (__m512)_mm512_unpackhi_pd((__m512d)ab, (__m512d)cd));
    const __m128 low = _mm_add_ps(_mm512_extractf32x4_ps(all, 0), _mm512_extractf32x4_ps(all, 1));
    return _mm_add_ps(low, _mm_add_ps(_mm512_extractf32x4_ps(all, 2), _mm512_extractf32x4_ps(all, 3)));
}

// Weights of one query on a tile that begins at `position`, to its sums from `met` on.
inline void add_mass(const Mass& mass, int64_t query, int64_t met, int64_t position, int64_t count, float scale,
                     const __m512 (&w)[4]) {
    mass.rescale(query, met, scale);
    if (position % BLOCK == 0) {  // a block is a vector
        _mm_mask_storeu_ps(mass.of(query) + met, __mmask8((1 << (count + 15) / 16) - 1), sum_each(w));
        return;
    }
    alignas(64) float each[TILE];
    for (int i = 0; i < 4; ++i) _mm512_store_ps(each + 16 * i, w[i]);
    mass.add(query, met, position % BLOCK, each, count);
}

// Leaves the state as the merge expects it: maxima to base e, dimensions in order.
inline void finish_bf16(const Bf16Scratch& x, int64_t M, float* maximum, float* out) {
    for (int64_t m = 0; m < M; ++m) {
        maximum[m] *= 0.69314718f;
        for (int d = 0; d < HEAD_SIZE; ++d)  // unpack took four dimensions in turn for the lower and the upper vector
            out[m * HEAD_SIZE + d] = x.acc[m * PADDED + d / 32 * 32 + (d % 8 / 4) * 16 + d % 32 / 8 * 4 + d % 4];
    }
}

// As attend_piece of native_portable.h; q is [queries][PAIRS] bfloat16 pairs, not scaled.
inline int64_t attend_piece_bf16(const Problem& p, const Task& task, const Segment* segments, const bfloat16* k_pool,
                              const bfloat16* v_pool, const uint32_t* q, Bf16Scratch& x, float* maximum, float* total,
                              float* out, const Mass& mass) {
    const int64_t M = task.num_queries, rep = p.group();
    int64_t read = 0, met = 0;  // keys, and blocks of them for `mass`
    const float factor = 1.44269504f / std::sqrt(float(HEAD_SIZE));
    mass.clear(M);
    std::fill(maximum, maximum + M, HIDDEN);
    std::fill(total, total + M, 0.0f);
    std::fill(x.acc, x.acc + M * PADDED, 0.0f);
    for (int64_t i = task.segment_begin; i < task.segment_end; ++i) {
        const Segment& segment = segments[i];
        const int64_t base = (segment.slot + task.head * p.block_size) * HEAD_SIZE;
        for (int64_t at = 0, count; at < segment.count; at += count) {
            const int64_t position = segment.first + at;
            count = std::min(tile_end(position) - segment.first, segment.count) - at;
            const int64_t past = position - p.seq_lens[task.row];  // key j is new token past + j
            if (past > (task.first_query + M - 1) / rep) break;    // and so are all that follow
            read += count;
            const bfloat16 *k = k_pool + base + at * HEAD_SIZE, *v = v_pool + base + at * HEAD_SIZE;
            const bool jumps = at + count == segment.count && i + 1 < task.segment_end;
            const Tile tile{count, HEAD_SIZE * (jumps ? segments[i + 1].slot - segment.slot - at : TILE)};
            if (M <= FUSED) {
                in_blocks(M, [&]<int N>(int64_t) { score_fused<N>(q, k, tile, x.scores); });
            } else {
                pack_keys(k, tile, x.keys);
                by_vectors(count, [&]<int C>() {
                    in_blocks(M, [&]<int N>(int64_t m) { score_queries<N, C>(q + m * PAIRS, x.keys, x.scores + m * TILE); });
                });
            }
            by_vectors(count, [&]<int C>() {
                for (int64_t m = 0; m < M; ++m) {
                    const int64_t seen = std::clamp<int64_t>((task.first_query + m) / rep + 1 - past, 0, count);
                    __m512 w[4];
                    to_weights<C>(x.scores + m * TILE, seen, factor, maximum + m, total + m, x.scale + m,
                                  x.weights + m * TILE / 2, w);
                    if (mass.data) add_mass(mass, m, met, position, count, x.scale[m], w);
                }
            });
            met += blocks_touched(position, count);
            if (M <= FUSED) {
                in_blocks(M, [&]<int N>(int64_t) { weigh_fused<N>(x.weights, v, tile, x.scale, x.acc); });
            } else {
                pack_values(v, tile, x.values);
                in_blocks(M, [&]<int N>(int64_t m) {
                    weigh_queries<N>(x.weights + m * TILE / 2, x.values, (count + 1) / 2, x.scale + m, x.acc + m * PADDED);
                });
            }
        }
    }
    finish_bf16(x, M, maximum, out);
    return read;
}

struct Bf16 {
    using Query = uint32_t;
    static constexpr int QUERY_SIZE = PAIRS;
    using Scratch = Bf16Scratch;
    static void stage(const bfloat16* from, Query* to) { std::memcpy(to, from, HEAD_SIZE * sizeof(bfloat16)); }
    static int64_t attend(const Problem& p, const Task& task, const Segment* segments, const bfloat16* k_pool,
                       const bfloat16* v_pool, const Query* q, Scratch& scratch, float* maximum, float* total, float* acc,
                       const Mass& mass) {
        return attend_piece_bf16(p, task, segments, k_pool, v_pool, q, scratch, maximum, total, acc, mass);
    }
};
