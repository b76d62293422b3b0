// The FP8 storage of the KV pools (e4m3, without scales, as other programs store it), and attention over it. Every such number is
// a bfloat16 number: tiles are widened to pairs (native_tile.h), in registers for a few queries or once for all in the L1
// cache, and are multiplied as those of bfloat16 pools are, with the same bits.
//
// A tile of TILE tokens of a head (Float8 of kv/layout.py) has TILE * HEAD_SIZE codes. An entry holds four: keys are stored as
// [four dimensions][token], values as [four tokens][dimension].
struct fp8 { uint8_t code; };

// Rounded to nearest even; what is larger than the largest number becomes that.
template <typename S>
inline uint8_t to_fp8(S number) {
    constexpr float LEAST_NORMAL = 0x1p-6f, LEAST = 0x1p-9f;
    constexpr uint32_t LARGEST = 0x7e, NOT_A_NUMBER = 0x7f, BIAS = (127 - 7) << 3;
    const float x = to_float(number), magnitude = std::fabs(x);
    uint32_t bits, code;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 24 & 0x80;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return uint8_t(sign | NOT_A_NUMBER);
    if (magnitude < LEAST_NORMAL) code = uint32_t(std::lrint(magnitude * (1 / LEAST)));
    else code = std::min(((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - BIAS, LARGEST);
    return uint8_t(sign | code);
}

constexpr int16_t FP8_NAN = 0x7fc0;  // as bfloat16

// The bfloat16 number of a code without its sign. Those without an exponent are 2^-9 times the rest.
constexpr uint16_t number_of_fp8(int code) {
    const int exponent = code >> 3, rest = code & 7, digits = rest > 3 ? 3 : rest > 1 ? 2 : rest;
    if (code == 0) return 0;
    if (code == 127) return FP8_NAN;
    if (exponent == 0) return uint16_t(((127 - 10 + digits) << 7) + ((rest << (4 - digits) & 7) << 4));
    return uint16_t(((127 - 7 + exponent) << 7) + (rest << 4));
}

// The first two codes of each entry as pairs of bfloat16, and the last two.
#if defined(__AVX512VBMI__)
struct Fp8Bytes {
    alignas(64) uint8_t upper[128], lower[128];
    constexpr Fp8Bytes() : upper(), lower() {
        for (int code = 0; code < 128; ++code) {
            upper[code] = uint8_t(number_of_fp8(code) >> 8);
            lower[code] = uint8_t(number_of_fp8(code));
        }
    }
};
static constexpr Fp8Bytes FP8_BYTES;

inline void pairs_of_fp8(bits quads, bits& first, bits& last) {
    // The first two bytes of the four entries of 128 bits, then the last two, which are unpacked each into one vector.
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    const __m512i codes = _mm512_shuffle_epi8((__m512i)quads, order);
    const auto look_up = [&](const uint8_t* bytes) {  // the highest bit of an index is not looked at
        return _mm512_permutex2var_epi8(_mm512_load_si512(bytes), codes, _mm512_load_si512(bytes + 64));
    };
    const __m512i signs = _mm512_and_si512(codes, _mm512_set1_epi8(int8_t(0x80)));
    const __m512i upper = _mm512_or_si512(look_up(FP8_BYTES.upper), signs), lower = look_up(FP8_BYTES.lower);
    first = (bits)_mm512_unpacklo_epi8(lower, upper);
    last = (bits)_mm512_unpackhi_epi8(lower, upper);
}
#elif defined(__AVX512BW__)
struct Fp8Least {
    alignas(64) uint16_t numbers[32];
    constexpr Fp8Least() : numbers() {
        for (int rest = 0; rest < 8; ++rest) numbers[rest] = number_of_fp8(rest);
    }
};
static constexpr Fp8Least FP8_LEAST;

inline void pairs_of_fp8(bits quads, bits& first, bits& last) {
    const auto widen = [&](__m128i order) {
        const __m512i upper = _mm512_shuffle_epi8((__m512i)quads, _mm512_broadcast_i32x4(order));  // codes, each above a byte of 0
        const __m512i rest = _mm512_and_si512(_mm512_srai_epi16(upper, 4), _mm512_set1_epi16(int16_t(0x87f0)));
        const __m512i magnitude = _mm512_set1_epi16(0x7f00);
        const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(_mm512_and_si512(upper, magnitude), magnitude);
        const __mmask32 is_least = _mm512_testn_epi16_mask(upper, _mm512_set1_epi16(0x7800));
        __m512i number = _mm512_add_epi16(rest, _mm512_set1_epi16((127 - 7) << 7));
        number = _mm512_mask_mov_epi16(number, is_nan, _mm512_set1_epi16(FP8_NAN));
        const __m512i least = _mm512_load_si512(FP8_LEAST.numbers);
        number = _mm512_mask_permutexvar_epi16(number, is_least, _mm512_srli_epi16(upper, 8), least);
        return (bits)_mm512_or_si512(number, _mm512_and_si512(upper, _mm512_set1_epi16(int16_t(0x8000))));
    };
    first = widen(_mm_setr_epi8(-1, 0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13));
    last = widen(_mm_setr_epi8(-1, 2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15));
}
#else
inline bits pair_of_fp8(bits two) {
    typedef int16_t signed_halves __attribute__((vector_size(W * 4)));
    constexpr int16_t sign_and_rest = int16_t(0x87f0), bias = (127 - 7) << 7, exponent = 0x7800;
    const signed_halves upper = (signed_halves)((two << 8 & 0xff00) | (two << 16 & 0xff000000u));
    const signed_halves rest = (upper >> 4) & sign_and_rest, last = (upper >> 8) & 7;
    // Of the eight numbers without an exponent, 2^-9 times `last`: one for each exponent that they have.
    signed_halves least = (last >= 4) & (int16_t(0x3c00) + ((last - 4) << 5));
    least |= ((last >= 2) & (last < 4)) & (int16_t(0x3b80) + ((last - 2) << 6));
    least |= (last == 1) & int16_t(0x3b00);
    const signed_halves is_least = (upper & exponent) == 0, is_nan = (upper & 0x7f00) == 0x7f00;
    const signed_halves number = (is_least & least) | (~is_least & (rest + bias));
    return (bits)(number | (upper & int16_t(0x8000)) | (is_nan & FP8_NAN));
}
inline void pairs_of_fp8(bits quads, bits& first, bits& last) { first = pair_of_fp8(quads), last = pair_of_fp8(quads >> 16); }
#endif

// Rows of entries [count][WIDTH] as rows of pairs [2 * count][WIDTH], of the first `num_vectors` vectors. What follows is
// prefetched in the order of its addresses.
template <int WIDTH>
inline void widen_fp8(const uint32_t* from, int64_t count, int64_t num_vectors, const uint32_t* following, uint32_t* to) {
    auto next = reinterpret_cast<const char*>(following);
    for (int64_t row = 0; row < count; ++row, from += WIDTH, to += 2 * WIDTH)
        for (int64_t i = 0; i < num_vectors; ++i) {
            bits first, last;
            pairs_of_fp8(load_bits(from + W * i), first, last);
            if (W == 16 || i % 2 == 0) NextCodes{next}(nullptr);
            std::memcpy(to + W * i, &first, sizeof(first));
            std::memcpy(to + WIDTH + W * i, &last, sizeof(last));
        }
}

struct Fp8Pools {
    using Pool = fp8;
    // As CodedTile, in groups of four tokens.
    struct Tile {
        const uint32_t *keys, *values;
        int64_t low, high, first_group, num_groups;
    };
    static Tile at(const Pool* k_pool, const Pool* v_pool, int64_t slot, int64_t count) {
        const int64_t tile = slot / TILE * TILE * HEAD_SIZE / 4, lane = slot % TILE;
        const int64_t vector = lane / LANES * LANES, low = lane - vector, high = low + count;
        return {reinterpret_cast<const uint32_t*>(k_pool) + tile + vector,
                reinterpret_cast<const uint32_t*>(v_pool) + tile + lane / 4 * HEAD_SIZE,
                low, high, low / 4, (high + 3) / 4 - low / 4};
    }
    template <typename S>
    static void append(const S* k, const S* v, int64_t slot, Pool* k_pool, Pool* v_pool) {
        const int64_t tile = slot / TILE * TILE * HEAD_SIZE, lane = slot % TILE;
        for (int d = 0; d < HEAD_SIZE; ++d) {
            k_pool[tile + (d / 4 * TILE + lane) * 4 + d % 4].code = to_fp8(k[d]);
            v_pool[tile + (lane / 4 * HEAD_SIZE + d) * 4 + lane % 4].code = to_fp8(v[d]);
        }
    }
};

struct Fp8Pairs {
    alignas(64) uint32_t keys[PAIRS * TILE], values[TILE / 2 * HEAD_SIZE];
    bool is_used;
};

#if defined(__AVX512BF16__)
// As `multiply` of bf16.h, of `count` rows of entries, each of which is two pairs.
template <int N, int C>
inline void multiply_fp8(const uint32_t* left, int64_t left_stride, const uint32_t* entries, int64_t stride, int64_t count,
                         __m512 (&out)[N][C], NextCodes ahead) {
    for (int64_t row = 0; row < count; ++row, entries += stride, left += 2) {
        bits pairs[2][C];
        for (int i = 0; i < C; ++i) {
            pairs_of_fp8(load_bits(entries + W * i), pairs[0][i], pairs[1][i]);
            ahead(nullptr);
        }
        for (int half = 0; half < 2; ++half)
            for (int n = 0; n < N; ++n) {
                const __m512bh y = (__m512bh)_mm512_set1_epi32(int(left[n * left_stride + half]));
                for (int i = 0; i < C; ++i) out[n][i] = _mm512_dpbf16_ps(out[n][i], y, (__m512bh)pairs[half][i]);
            }
    }
}

// Vectors whose sums for N queries fit into registers beside their pairs.
constexpr int fp8_vectors(int N) { return N > 4 ? 2 : 4; }

// As `score_queries` and `weigh_queries`.
template <int N, int C>
inline void score_fp8(const uint32_t* q, const uint32_t* keys, const uint32_t* following, float* scores) {
    auto next = reinterpret_cast<const char*>(following);
    in_vectors<C, std::min(C, fp8_vectors(N))>([&]<int V>(int i) {
        __m512 s[N][V] = {};
        multiply_fp8<N, V>(q, PAIRS, keys + W * i, TILE, HEAD_SIZE / 4, s, NextCodes{next});
        for (int n = 0; n < N; ++n)
            for (int v = 0; v < V; ++v) _mm512_store_ps(scores + n * TILE + W * (i + v), s[n][v]);
    });
}
template <int N>
inline void weigh_fp8(const uint32_t* weights, const uint32_t* values, int64_t count, const uint32_t* following,
                      const float* scale, float* acc) {
    auto next = reinterpret_cast<const char*>(following);
    in_vectors<HEAD_SIZE / W, std::min(HEAD_SIZE / W, fp8_vectors(N))>([&]<int V>(int i) {
        __m512 a[N][V];
        const auto place = [&](int n, int v) { return acc + n * HEAD_SIZE + W * (i + v); };
        for (int n = 0; n < N; ++n)
            for (int v = 0; v < V; ++v) a[n][v] = _mm512_mul_ps(_mm512_loadu_ps(place(n, v)), _mm512_set1_ps(scale[n]));
        multiply_fp8<N, V>(weights, TILE / 2, values + W * i, HEAD_SIZE, count, a, NextCodes{next});
        for (int n = 0; n < N; ++n)
            for (int v = 0; v < V; ++v) _mm512_storeu_ps(place(n, v), a[n][v]);
    });
}
#endif

// Tiles of codes, multiplied as `Pairs` multiply theirs (Bf16Tiles, WidePairs): widened in registers for a few queries where there
// are enough of them, else in the L1 cache once for all.
template <typename Pairs>
struct Fp8Tiles : Fp8Pools {
    using Left = typename Pairs::Left;
    static constexpr int MOST_ROWS = Pairs::MOST_ROWS;
    static constexpr bool has_registers = Pairs::has_registers, WIDENS_IN_REGISTERS = !std::is_same_v<Pairs, WidePairs>;
    Fp8Pairs* widened;

    ::Tile pairs_of(const Tile& tile) const {
        return {widened->keys, widened->values + tile.low % 4 / 2 * HEAD_SIZE, tile.low, tile.high, tile.low / 2,
                (tile.high + 1) / 2 - tile.low / 2};
    }
    // The pairs of a part of a tile, of which all others are widened as well: those from `lane` on.
    ::Tile whole_pairs(const Tile& tile, int64_t lane, int64_t keys_ahead, int64_t values_ahead) const {
        const uint32_t *keys = tile.keys - lane / LANES * LANES, *values = tile.values - lane / 4 * HEAD_SIZE;
        widen_fp8<TILE>(keys, HEAD_SIZE / 4, TILE / W, tile.keys + keys_ahead, widened->keys);
        widen_fp8<HEAD_SIZE>(values, TILE / 4, HEAD_SIZE / W, tile.values + values_ahead, widened->values);
        return {widened->keys + lane / LANES * LANES, widened->values + lane / 2 * HEAD_SIZE, 0, 0, 0, 0};
    }
    void begin_keys(const Tile& tile, int64_t num_queries, int64_t ahead) const {
        widened->is_used = !WIDENS_IN_REGISTERS || num_queries > MOST_ROWS;
        if (widened->is_used)
            widen_fp8<TILE>(tile.keys, HEAD_SIZE / 4, (tile.high + W - 1) / W, tile.keys + ahead, widened->keys);
    }
    void begin_values(const Tile& tile, int64_t ahead) const {
        if (widened->is_used)
            widen_fp8<HEAD_SIZE>(tile.values, tile.num_groups, HEAD_SIZE / W, tile.values + ahead, widened->values);
    }
    template <int N, int C>
    void score(const Left* q, const Tile& tile, int64_t ahead, float* scores) const {
        if constexpr (WIDENS_IN_REGISTERS)
            if (!widened->is_used) return score_fp8<N, C>(q, tile.keys, tile.keys + ahead, scores);
        Pairs{}.template score<N, C>(q, pairs_of(tile), 0, scores);
    }
    template <int C, typename Weights>
    void soften(const Tile& tile, float* scores, int64_t from, int64_t to, float factor, float* maximum, float* total,
                float* scale, Weights* weights, float* sums) const {
        Pairs{}.template soften<C>(pairs_of(tile), scores, from, to, factor, maximum, total, scale, weights, sums);
    }
#if defined(__AVX512F__)
    template <typename Weights>
    void soften_fours(const Tile& tile, float* scores, int64_t count, float factor, float* maximum, float* total, float* scale,
                      Weights* weights) const {
        Pairs{}.soften_fours(pairs_of(tile), scores, count, factor, maximum, total, scale, weights);
    }
#endif
    template <int N, typename Weights>
    void weigh(const Weights* weights, const Tile& tile, int64_t ahead, const float* scale, float* acc) const {
        if constexpr (WIDENS_IN_REGISTERS)
            if (!widened->is_used)
                return weigh_fp8<N>(weights + 2 * tile.first_group, tile.values, tile.num_groups, tile.values + ahead, scale, acc);
        Pairs{}.template weigh<N>(weights, pairs_of(tile), 0, scale, acc);
    }
};

// As WidenedTile, of codes.
struct Fp8Rows {
    static constexpr int KEY = WidenedTile::KEY, DIMENSION = WidenedTile::DIMENSION;
    static inline const float SCALE = WidenedTile::SCALE;
    WidenedTile& tile;
    Fp8Pairs& pairs;
    const float *keys = nullptr, *values = nullptr;
    void find(const fp8* k_pool, const fp8* v_pool, int64_t slot) {
        const Fp8Tiles<WidePairs> tiles{{}, &pairs};
        const auto whole = tiles.at(k_pool, v_pool, slot / TILE * TILE, TILE);
        tiles.begin_keys(whole, 0, 0);
        tiles.begin_values(whole, 0);
        tile.find(reinterpret_cast<const bfloat16*>(pairs.keys), reinterpret_cast<const bfloat16*>(pairs.values), slot % TILE);
        keys = tile.keys, values = tile.values;
    }
};

// `Kernel` of bfloat16 pairs, and how it multiplies them.
template <typename Kernel, typename Pairs>
struct Fp8Kernel : Fp8Pools {
    using Query = typename Kernel::Query;
    using Tiles = Fp8Tiles<Pairs>;
    static constexpr int QUERY_SIZE = Kernel::QUERY_SIZE;
    static constexpr int64_t QUERY_BLOCK = Kernel::QUERY_BLOCK, CHUNK_BLOCK = Kernel::CHUNK_BLOCK;
    static constexpr bool has_chunks = std::is_same_v<Pairs, WidePairs>;
    struct Scratch : Kernel::Scratch {
        Fp8Pairs widened;
    };
    template <typename S>
    static void stage(const S* from, Query* to) {
        Kernel::stage(from, to);
    }
    static int64_t attend(const Problem& p, const Task& task, const Segment* segments, const Pool* k_pool, const Pool* v_pool,
                          const Query* q, Scratch& scratch, float* maximum, float* total, float* acc, const Mass& mass) {
        if constexpr (has_chunks)
            if (p.is_prefill() && !mass.data) {
                Fp8Rows rows{scratch.tile, scratch.widened};
                return attend_chunk(rows, p, task, segments, k_pool, v_pool, q, scratch.chunk, maximum, total, acc);
            }
        const Tiles tiles{{}, &scratch.widened};
        return attend_tiles<Fp8Kernel>(tiles, p, task, segments, k_pool, v_pool, q, scratch, maximum, total, acc, mass);
    }
};
#if defined(__AVX512BF16__) && !defined(CODES_OF_FLOAT32)
using Fp8 = Fp8Kernel<Bf16, Bf16Tiles>;
#else
using Fp8 = Fp8Kernel<Wide, WidePairs>;
#endif
