// The int8 KV storage of native.cpp, with half the bytes. Each token of a head has one scale for its key and one for its
// value. Keys and values are widened in registers and multiplied as bfloat16 is. The key's scale multiplies its score; the
// value's scale multiplies its weight. Queries and sums are never quantised.
//
// A tile of TILE tokens of a head (Int8Tiled of kv/layout.py) has TILE * HEAD_SIZE bytes, then TILE float32 scales.
// 64 bytes hold two pairs for each of 16 columns, which `Widen` and `widen` separate: keys are stored as
// [four dimensions][token], values as [four tokens][dimension].
constexpr int64_t TILE_NUMBERS = TILE * HEAD_SIZE, TILE_BYTES = TILE_NUMBERS + 4 * TILE;

// Like Tile; scales are counted from the first vector's first lane.
struct Int8Tile {
    const uint8_t *keys, *values;
    const float *key_scales, *value_scales;
    int64_t low, high, first_pair, num_pairs;
};

// The scale that maps a token's largest magnitude to 127.
inline float int8_scale(const bfloat16* from) {
    float most = 0;
    for (int d = 0; d < HEAD_SIZE; ++d) most = std::max(most, std::fabs(to_float(from[d])));
    return most / 127;
}

// Values divided by the scale, rounded, as sign and magnitude.
inline void to_int8(const bfloat16* from, float scale, uint8_t* to) {
    const float inverse = scale > 0 ? 1 / scale : 0;
    for (int d = 0; d < HEAD_SIZE; ++d) {
        const float value = to_float(from[d]) * inverse;
        to[d] = uint8_t(int32_t(std::fabs(value) + 0.5f) | (value < 0 ? 0x80 : 0));
    }
}

struct Int8Pools {
    using Pool = uint8_t;
    static Int8Tile at(const Pool* k_pool, const Pool* v_pool, int64_t slot, int64_t count) {
        const Pool *keys = k_pool + slot / TILE * TILE_BYTES, *values = v_pool + slot / TILE * TILE_BYTES;
        const int64_t lane = slot % TILE, vector = lane / LANES * LANES, low = lane - vector, high = low + count;
        return {keys + 4 * vector, values + lane / 4 * 4 * HEAD_SIZE,
                reinterpret_cast<const float*>(keys + TILE_NUMBERS) + vector,
                reinterpret_cast<const float*>(values + TILE_NUMBERS) + vector,
                low, high, low / 4 * 2, ((high + 3) / 4 - low / 4) * 2};
    }

    static void append(const bfloat16* k, const bfloat16* v, int64_t slot, Pool* k_pool, Pool* v_pool) {
        const float key_scale = int8_scale(k), value_scale = int8_scale(v);
        uint8_t key_bytes[HEAD_SIZE], value_bytes[HEAD_SIZE];
        to_int8(k, key_scale, key_bytes);
        to_int8(v, value_scale, value_bytes);
        for (int d = 0; d < HEAD_SIZE; d += 2) std::memcpy(k_pool + key_at(slot, d), key_bytes + d, 2);
        for (int d = 0; d < HEAD_SIZE; ++d) v_pool[value_at(slot, d)] = value_bytes[d];
        std::memcpy(k_pool + scale_at(slot), &key_scale, 4);
        std::memcpy(v_pool + scale_at(slot), &value_scale, 4);
    }
    static void copy(const Pool* k_pool, const Pool* v_pool, int64_t slot, int64_t to, Pool* keys, Pool* values) {
        for (int d = 0; d < HEAD_SIZE; d += 2) std::memcpy(keys + key_at(to, d), k_pool + key_at(slot, d), 2);
        for (int d = 0; d < HEAD_SIZE; ++d) values[value_at(to, d)] = v_pool[value_at(slot, d)];
        std::memcpy(keys + scale_at(to), k_pool + scale_at(slot), 4);
        std::memcpy(values + scale_at(to), v_pool + scale_at(slot), 4);
    }

private:
    // Where the numbers d and d + 1 of a key, number d of a value, and the scale of either are in a pool, in bytes.
    static int64_t key_at(int64_t slot, int d) {
        const int64_t lane = slot % TILE;
        return slot / TILE * TILE_BYTES + lane / 16 * 64 + place(lane % 16, 0) + d / 4 * 4 * TILE + d % 4 / 2 * 8;
    }
    static int64_t value_at(int64_t slot, int d) {
        const int64_t lane = slot % TILE;
        return slot / TILE * TILE_BYTES + lane / 4 * 4 * HEAD_SIZE + lane % 2 + d / 16 * 64 + place(d % 16, lane % 4 / 2);
    }
    static int64_t scale_at(int64_t slot) { return slot / TILE * TILE_BYTES + TILE_NUMBERS + slot % TILE * 4; }
    // Byte offset of a pair's first element in the 64 bytes that hold two pairs for each of 16 columns.
    static int64_t place(int64_t column, int64_t pair) { return column / 4 * 16 + pair * 8 + column % 4 * 2; }
};

inline void ask_for(const void* at) { __builtin_prefetch(at); }

#if defined(__AVX512BF16__)
struct Int8Scratch : TileScratch<uint8_t, HEAD_SIZE + 4> {
    Widen widen;
};

// Like `multiply`, but with two pairs per step; steps are `row` bytes apart.
template <int N, int C>
inline void multiply_int8(const Widen& widen, const uint32_t* left, int64_t left_stride, const uint8_t* right, int64_t row,
                          int64_t steps, int64_t ahead, __m512 (&out)[N][C]) {
    for (int64_t step = 0; step < steps; ++step)
        for (int i = 0; i < C; ++i) {
            const uint8_t* at = right + step * row + 64 * i;
            __m512bh x[2];
            widen(at, x);
            ask_for(at + ahead);
            for (int n = 0; n < N; ++n)
                for (int pair = 0; pair < 2; ++pair) {
                    const __m512bh y = (__m512bh)_mm512_set1_epi32(int(left[n * left_stride + 2 * step + pair]));
                    out[n][i] = _mm512_dpbf16_ps(out[n][i], y, x[pair]);
                }
        }
}

struct Int8Tiles : Int8Pools {
    using Left = uint32_t;
    static constexpr bool has_registers = false;
    const Widen& widen;

    template <int N, int C>
    void score(const uint32_t* q, const Int8Tile& tile, int64_t ahead, float* scores) const {
        __m512 s[N][C] = {};
        multiply_int8<N, C>(widen, q, PAIRS, tile.keys, 4 * TILE, PAIRS / 2, ahead, s);
        for (int i = 0; i < C; ++i) {
            const __m512 scale = _mm512_load_ps(tile.key_scales + LANES * i);
            ask_for(reinterpret_cast<const uint8_t*>(tile.key_scales + LANES * i) + ahead);
            for (int n = 0; n < N; ++n)
                _mm512_store_ps(scores + n * TILE + LANES * i, _mm512_mul_ps(s[n][i], scale));
        }
    }

    template <int C>
    void soften(const Int8Tile& tile, const float* scores, int64_t from, int64_t to, float factor, float* maximum,
                float* total, float* scale, uint32_t* weights, float* sums) const {
        __m512 w[4];  // those past C are zeros
        to_weights<C>(scores, from, to, factor, maximum, total, scale, w);
        if (sums) store_sums<C>(w, sums);
        for (int i = 0; i < C; ++i) w[i] = _mm512_mul_ps(w[i], _mm512_load_ps(tile.value_scales + LANES * i));
        store_weights<C>(w, weights);
    }

    // 16 C dimensions of the weighted sum of values.
    template <int N, int C>
    void weigh_part(const uint32_t* weights, const uint8_t* values, int64_t pairs, int64_t ahead, const float* scale,
                    float* acc) const {
        __m512 a[N][C];
        for (int n = 0; n < N; ++n)
            for (int i = 0; i < C; ++i)
                a[n][i] = _mm512_mul_ps(_mm512_loadu_ps(acc + n * HEAD_SIZE + 16 * i), _mm512_set1_ps(scale[n]));
        multiply_int8<N, C>(widen, weights, TILE / 2, values, 4 * HEAD_SIZE, pairs / 2, ahead, a);
        for (int n = 0; n < N; ++n)
            for (int i = 0; i < C; ++i) _mm512_storeu_ps(acc + n * HEAD_SIZE + 16 * i, a[n][i]);
    }

    template <int N>
    void weigh(const uint32_t* weights, const Int8Tile& tile, int64_t ahead, const float* scale, float* acc) const {
        constexpr int REST = HEAD_SIZE % 64 / 16, last = HEAD_SIZE - 16 * REST;
        for (int i = 0; i < TILE && ahead; i += LANES)
            ask_for(reinterpret_cast<const uint8_t*>(tile.value_scales + i) + ahead);
        weights += tile.first_pair;
        for (int d = 0; d < last; d += 64)
            weigh_part<N, 4>(weights, tile.values + 4 * d, tile.num_pairs, ahead, scale, acc + d);
        if constexpr (REST > 0)
            weigh_part<N, REST>(weights, tile.values + 4 * last, tile.num_pairs, ahead, scale, acc + last);
    }
};

struct Int8 : Int8Pools {
    using Query = uint32_t;
    static constexpr int QUERY_SIZE = PAIRS;
    static constexpr int64_t QUERY_BLOCK = MAX_QUERIES / 2;
    using Scratch = Int8Scratch;
    static void stage(const bfloat16* from, Query* to) { Bf16::stage(from, to); }
    static int64_t attend(const Problem& p, const Task& task, const Segment* segments, const Pool* k_pool,
                          const Pool* v_pool, const Query* q, Scratch& scratch, float* maximum, float* total, float* acc,
                          const Mass& mass) {
        return attend_tiles<Int8>(Int8Tiles{{}, scratch.widen}, p, task, segments, k_pool, v_pool, q, scratch, maximum,
                                  total, acc, mass);
    }
};
#endif
