// Scores of a query to weights as integers, for native_codes.h.

// The lower 16 bits of 2 W integers of tokens as pairs, in the order in which an entry has four tokens.
inline void store_weights(bits first, bits second, uint32_t* to) {
#if defined(__AVX512BW__)
    alignas(64) static constexpr struct Order {
        uint16_t words[32];
        constexpr Order() : words() {
            for (int i = 0; i < 32; ++i) words[i] = uint16_t(2 * (i / 4 * 4 + i % 2 * 2 + i % 4 / 2));
        }
    } order;
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16((__m512i)first, _mm512_load_si512(order.words), (__m512i)second));
#elif defined(__AVX2__)
    const __m256i order = _mm256_setr_epi8(0, 1, 8, 9, 4, 5, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                           0, 1, 8, 9, 4, 5, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256i both = _mm256_unpacklo_epi64(_mm256_shuffle_epi8((__m256i)first, order),
                                               _mm256_shuffle_epi8((__m256i)second, order));
    _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(both, 0b11011000));
#else
    uint32_t each[2 * W];
    std::memcpy(each, &first, sizeof(first));
    std::memcpy(each + W, &second, sizeof(second));
    for (int i = 0; i < 2 * W; i += 4)
        for (int odd = 0; odd < 2; ++odd) to[i / 2 + odd] = (each[i + odd] & 0xffff) | each[i + 2 + odd] << 16;
#endif
}

// A query's weights of a tile, times the scales of values: by group of dimensions, pairs times `steps`.
template <typename Form>
struct CodedWeights {
    alignas(64) uint32_t pairs[TERMS][Form::NUM_SCALES][TILE / 2];
    float steps[Form::NUM_SCALES];
};

// The scales of the values of a tile that a query sees, [from, to), by group of dimensions: shares of the largest.
template <typename Form>
struct ValueScales {
    const void* tile = nullptr;
    int64_t from, to;
    float most[Form::NUM_SCALES];
    alignas(64) float shares[Form::NUM_SCALES][TILE];

    // Queries of a tile mostly see the same.
    void find(const typename Form::Tile& of, int64_t first, int64_t end) {
        if (tile == of.values && from == first && to == end) return;
        tile = of.values, from = first, to = end;
        for (int g = 0; g < Form::NUM_SCALES; ++g) find_group(of.value_scales + g * TILE, g);
    }

private:
    // Not inlined, as `soften_wide`.
    template <typename Scale>
    __attribute__((noinline)) void find_group(const Scale* scales, int g) {
        typedef int32_t lanes __attribute__((vector_size(W * 4)));
        vec x[TILE / W], top = broadcast(LEAST_MOST);
        lanes lane;
        for (int i = 0; i < W; ++i) lane[i] = i;
        for (int i = 0; i < TILE / W; ++i) {
            x[i] = W * i < to ? load_scales(scales + W * i) : vec{};
            x[i] = (lane + W * i >= int(from)) & (lane + W * i < int(to)) ? x[i] : vec{};
            top = larger(top, larger(x[i], -x[i]));
        }
        most[g] = max_across(top);
        const float inverse = 1 / most[g];
        for (int i = 0; i < TILE / W; ++i) store(shares[g] + W * i, x[i] * inverse);
    }
};

// Weights times the shares of values, as integers.
template <typename Form>
inline void round_weights(const vec* weights, const ValueScales<Form>& scales, CodedWeights<Form>* to_weights) {
    for (int g = 0; g < Form::NUM_SCALES; ++g) {
        const float* shares = scales.shares[g];
        for (int i = 0; i < TILE / W; i += 2) {
            vec steps[2];
            for (int j = 0; j < 2; ++j) steps[j] = fused(weights[i + j], load(shares + W * (i + j)), broadcast(ROUNDER));
            store_weights((bits)steps[0], (bits)steps[1], to_weights->pairs[0][g] + W / 2 * i);
            if (TERMS == 1) continue;
            for (int j = 0; j < 2; ++j) {
                const vec rest = fused(weights[i + j], load(shares + W * (i + j)), ROUNDER - steps[j]);
                steps[j] = rest * FINER + ROUNDER;
            }
            store_weights((bits)steps[0], (bits)steps[1], to_weights->pairs[TERMS - 1][g] + W / 2 * i);
        }
    }
}

// As `soften`, with weights as integers.
template <bool IS_WHOLE, typename Form>
inline void soften_and_round(const float* scores, int64_t from, int64_t to, float factor, float* maximum, float* total,
                             float* scale, const ValueScales<Form>& scales, CodedWeights<Form>* to_weights, float* sums) {
    vec weights[TILE / W];
    const float largest = soften<IS_WHOLE>(scores, from, to, factor, maximum, total, scale, sums, weights);
    const float most = std::max(largest, LEAST_MOST), inverse = MOST_STEPS / most;
    for (int i = 0; i < TILE / W; ++i) weights[i] *= inverse;
    round_weights(weights, scales, to_weights);
    for (int g = 0; g < Form::NUM_SCALES; ++g) to_weights->steps[g] = most * (1.0f / MOST_STEPS) * scales.most[g];
}

// Not inlined, as `soften_wide`.
template <typename Form>
__attribute__((noinline)) void soften_codes(const float* scores, int64_t from, int64_t to, float factor, float* maximum,
                                            float* total, float* scale, const ValueScales<Form>& scales,
                                            CodedWeights<Form>* to_weights, float* sums) {
    if (is_whole(from, to))
        soften_and_round<true>(scores, from, to, factor, maximum, total, scale, scales, to_weights, sums);
    else
        soften_and_round<false>(scores, from, to, factor, maximum, total, scale, scales, to_weights, sums);
}

#if defined(__AVX512F__)
// As `soften_codes`, with the same bits, for `count` adjacent queries that see all lanes, a multiple of four.
template <typename Form>
inline void soften_fours_codes(const float* scores, int64_t count, float factor, float* maximum, float* total, float* scale,
                               const ValueScales<Form>& scales, CodedWeights<Form>* to_weights) {
    vec largest[MAX_QUERIES / 4];
    for (int64_t m = 0; m < count; m += 4)
        largest[m / 4] = larger(raise_four(scores + m * TILE, factor, maximum + m, scale + m), broadcast(LEAST_MOST));
    for (int64_t m = 0; m < count; m += 4) {
        const vec most = largest[m / 4], inverse = broadcast(MOST_STEPS) / most;
        weigh_four(scores + m * TILE, factor, maximum + m, total + m, scale + m, [&]<int n>(vec* weights) {
            for (int i = 0; i < TILE / W; ++i) weights[i] *= in_all_lanes<n>(inverse);
            round_weights(weights, scales, to_weights + m + n);
        });
        for (int g = 0; g < Form::NUM_SCALES; ++g) {
            float steps[4];
            store_each(steps, most * (1.0f / MOST_STEPS) * scales.most[g]);
            for (int n = 0; n < 4; ++n) to_weights[m + n].steps[g] = steps[n];
        }
    }
}
#endif
