// Scores of a tile's keys to weights: the online softmax of one query, or of four at once, in vectors of any CPU. All exponents
// are to base 2.

// Whether a query sees all lanes, which mostly is the case.
inline bool is_whole(int64_t from, int64_t to) { return from <= 0 && to >= TILE; }

// Softmax of one query's scores for V vectors of keys: weights of the visible lanes [from, to), relative to the running
// `maximum`, and zeros in the others. Updates `maximum` and `total`; `scale` is the factor for earlier sums, and `sums` get the
// weights' sums by LANES keys, or are null. Returns the largest weight. `IS_WHOLE`: all lanes are visible.
template <bool IS_WHOLE, int V = TILE / W>
inline float soften(const float* scores, int64_t from, int64_t to, float factor, float* maximum, float* total,
                    float* scale, float* sums, vec (&weights)[TILE / W]) {
    typedef int32_t lanes __attribute__((vector_size(W * 4)));
    vec top = broadcast(HIDDEN), sum = {};
    lanes lane, seen[V];
    for (int i = 0; i < W; ++i) lane[i] = i;
    for (int i = 0; i < V; ++i) {
        weights[i] = load(scores + W * i) * factor;
        if (!IS_WHOLE) {
            seen[i] = (lane + W * i >= int(from)) & (lane + W * i < int(to));
            weights[i] = seen[i] ? weights[i] : broadcast(HIDDEN);
        }
        top = larger(top, weights[i]);
    }
    const float here = max_across(top), highest = std::max(*maximum, here);
    for (int i = 0; i < V; ++i) {
        weights[i] = exp2_wide(weights[i] - highest);
        if (!IS_WHOLE) weights[i] = seen[i] ? weights[i] : vec{};
        sum += weights[i];  // vectors that are not seen change no bit
    }
    for (int i = V; i < TILE / W; ++i) weights[i] = vec{};
    // Mostly the maximum stays. Then the factor is exactly 1.
    vec edges = broadcast(*maximum - highest);
    edges[1] = here - highest;
    edges = exp2_wide(edges);
    *scale = edges[0];
    *total = *total * *scale + sum_across(sum);
    // Vectors drop NaN. A query that has one, or an infinity, has no finite score.
    if (from < to && !is_finite(scores[std::max(from, int64_t(0))])) *total = not_a_number();
    *maximum = highest;
    if (sums)
        for (int i = 0; i < TILE / LANES && LANES * i < to; ++i) {
            vec part = weights[i * LANES / W];
            for (int j = 1; j < LANES / W; ++j) part += weights[i * LANES / W + j];
            sums[i] = sum_across(part);
        }
    return edges[1];
}

#if defined(__AVX512F__)
// Of four queries' numbers, that of query n in lanes 4 n .. 4 n + 3; and one of these parts in all lanes.
inline vec load_each(const float* p) {
    const __m512i places = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return (vec)_mm512_permutexvar_ps(places, _mm512_castps128_ps512(_mm_loadu_ps(p)));
}
inline void store_each(float* p, vec x) {
    const __m512i places = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    _mm_storeu_ps(p, _mm512_castps512_ps128(_mm512_permutexvar_ps(places, (__m512)x)));
}
template <int n>
inline vec in_all_lanes(vec x) { return (vec)_mm512_shuffle_f32x4((__m512)x, (__m512)x, n * 0b01010101); }
template <int place>
inline vec of_each_part(vec x) { return (vec)_mm512_permute_ps((__m512)x, place); }

// What `across` finds in each of four vectors, combined in the same order.
template <typename Combine>
inline vec across_each(const vec (&x)[4], Combine combine) {
    const auto join = [&]<int first, int second>(vec a, vec b) {
        return combine((vec)_mm512_shuffle_f32x4((__m512)a, (__m512)b, first),
                       (vec)_mm512_shuffle_f32x4((__m512)a, (__m512)b, second));
    };
    const vec halves[] = {join.template operator()<0x44, 0xee>(x[0], x[1]), join.template operator()<0x44, 0xee>(x[2], x[3])};
    const vec quarters = join.template operator()<0x88, 0xdd>(halves[0], halves[1]);
    const vec pairs = combine(quarters, of_each_part<0b01001110>(quarters));
    return combine(pairs, of_each_part<0b10110001>(pairs));
}

// `soften` of four adjacent queries that see all lanes, with the same bits, in two steps: chains of several queries then do not
// wait for each other. A query that has NaN has it in all scores, and in its total: `exp2_each` does not drop it here.
//
// The first step raises each `maximum` and sets `scale`. Returns the largest weight of query n in lanes 4 n .. 4 n + 3.
inline vec raise_four(const float* scores, float factor, float* maximum, float* scale) {
    vec tops[4];
    for (int n = 0; n < 4; ++n) {
        tops[n] = load(scores + n * TILE);
        for (int i = W; i < TILE; i += W) tops[n] = larger(tops[n], load(scores + n * TILE + i));
    }
    const vec top = across_each(tops, [](vec a, vec b) { return larger(a, b); });
    const vec before = load_each(maximum), here = larger(top * factor, broadcast(HIDDEN)), highest = larger(before, here);
    // Place 0 of each part is the factor of earlier sums, and place 1 the largest weight.
    const vec edges = exp2_wide((vec)_mm512_mask_sub_ps((__m512)(before - highest), 0x2222, (__m512)here, (__m512)highest));
    store_each(maximum, highest);
    store_each(scale, edges);
    return of_each_part<0b01010101>(edges);
}

// The second step updates `total`, and calls take.operator()<n>(weights) with those of query n.
template <typename Take>
ALWAYS_INLINE void weigh_four(const float* scores, float factor, const float* maximum, float* total, const float* scale,
                              Take take) {
    constexpr int V = TILE / W;
    vec sums[4];
    unrolled<2>([&]<int pair>() {
        vec weights[2 * V];
        for (int i = 0; i < 2 * V; ++i)
            weights[i] = load(scores + 2 * pair * TILE + W * i) * factor - maximum[2 * pair + i / V];
        exp2_each(weights);
        unrolled<2>([&]<int odd>() {
            vec& sum = sums[2 * pair + odd];
            sum = weights[odd * V];
            for (int i = 1; i < V; ++i) sum += weights[odd * V + i];
            take.template operator()<2 * pair + odd>(weights + odd * V);
        });
    });
    const vec added = across_each(sums, [](vec a, vec b) { return a + b; });
    store_each(total, load_each(total) * load_each(scale) + added);
}

// Both steps of `count` queries, a multiple of four. Calls take(m, weights) with those of query m.
template <typename Take>
inline void soften_fours(const float* scores, int64_t count, float factor, float* maximum, float* total, float* scale,
                         Take take) {
    for (int64_t m = 0; m < count; m += 4) raise_four(scores + m * TILE, factor, maximum + m, scale + m);
    for (int64_t m = 0; m < count; m += 4)
        weigh_four(scores + m * TILE, factor, maximum + m, total + m, scale + m,
                   [&]<int n>(const vec* weights) { take(m + n, weights); });
}
#endif

#if defined(__AVX512BF16__)
// Store the weights of C vectors of keys as bfloat16 pairs.
template <int C = 4, typename Vector>
inline void store_weights(const Vector* w, uint32_t* weights) {
    _mm512_store_si512(weights, (__m512i)_mm512_cvtne2ps_pbh((__m512)w[1], (__m512)w[0]));
    if (C > 2) _mm512_store_si512(weights + 16, (__m512i)_mm512_cvtne2ps_pbh((__m512)w[3], (__m512)w[2]));
}

// `soften` of C vectors of keys, to bfloat16 pairs.
template <int C>
inline void soften_to_pairs(const float* scores, int64_t from, int64_t to, float factor, float* maximum, float* total,
                            float* scale, uint32_t* weights, float* sums) {
    vec w[4];
    if (C == 4 && is_whole(from, to))
        soften<true>(scores, from, to, factor, maximum, total, scale, sums, w);
    else
        soften<false, C>(scores, from, to, factor, maximum, total, scale, sums, w);
    store_weights<C>(w, weights);
}
#endif
