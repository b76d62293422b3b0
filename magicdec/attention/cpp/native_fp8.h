// The FP8 storage of the KV pools (e4m3, without scales, as other programs store it), and attention over it. Every such number is
// a bfloat16 number: tiles are widened to pairs (native_tile.h) in the L1 cache, once for all queries of a task, and are
// multiplied as those of bfloat16 pools are, with the same bits.
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

// Codes in the upper halves of 16 bits as bfloat16 numbers: exponents get another bias, and what has none, one of eight numbers.
constexpr int16_t FP8_SIGN_AND_REST = int16_t(0x87f0), FP8_BIAS = (127 - 7) << 7, FP8_EXPONENT = 0x7800;
alignas(64) static constexpr uint16_t FP8_LEAST[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};

// The first two codes of each entry as pairs of bfloat16, or the last two.
template <int HALF>
inline bits pairs_of_fp8(bits quads) {
#if defined(__AVX512BW__)
    alignas(16) static constexpr int8_t order[16] = {-1, 2 * HALF, -1, 2 * HALF + 1, -1, 2 * HALF + 4, -1, 2 * HALF + 5,
                                                     -1, 2 * HALF + 8, -1, 2 * HALF + 9, -1, 2 * HALF + 12, -1, 2 * HALF + 13};
    const __m512i places = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(order)));
    const __m512i upper = _mm512_shuffle_epi8((__m512i)quads, places);
    const __m512i rest = _mm512_and_si512(_mm512_srai_epi16(upper, 4), _mm512_set1_epi16(FP8_SIGN_AND_REST));
    const __mmask32 is_least = _mm512_testn_epi16_mask(upper, _mm512_set1_epi16(FP8_EXPONENT));
    const __m512i biased = _mm512_add_epi16(rest, _mm512_set1_epi16(FP8_BIAS));
    const __m512i least = _mm512_mask_permutexvar_epi16(biased, is_least, _mm512_srli_epi16(upper, 8), _mm512_load_si512(FP8_LEAST));
    return (bits)_mm512_or_si512(least, _mm512_and_si512(upper, _mm512_set1_epi16(int16_t(0x8000))));
#else
    typedef int16_t signed_halves __attribute__((vector_size(W * 4)));
    const bits two = HALF ? quads >> 16 : quads;
    const signed_halves upper = (signed_halves)((two << 8 & 0xff00) | (two << 16 & 0xff000000u));
    const signed_halves rest = (upper >> 4) & FP8_SIGN_AND_REST, last = (upper >> 8) & 7;
    // Of the eight numbers, 2^-9 times `last`: one for each exponent that they have.
    signed_halves least = (last >= 4) & (int16_t(0x3c00) + ((last - 4) << 5));
    least |= ((last >= 2) & (last < 4)) & (int16_t(0x3b80) + ((last - 2) << 6));
    least |= (last == 1) & int16_t(0x3b00);
    const signed_halves is_least = (upper & FP8_EXPONENT) == 0;
    const signed_halves number = (is_least & least) | (~is_least & (rest + FP8_BIAS));
    return (bits)(number | (upper & int16_t(0x8000)));
#endif
}

// Rows of entries [count][WIDTH] as rows of pairs [2 * count][WIDTH], of the first `num_vectors` vectors. What follows is
// prefetched in the order of its addresses.
template <int WIDTH>
inline void widen_fp8(const uint32_t* from, int64_t count, int64_t num_vectors, const uint32_t* following, uint32_t* to) {
    auto next = reinterpret_cast<const char*>(following);
    for (int64_t row = 0; row < count; ++row, from += WIDTH, to += 2 * WIDTH)
        for (int64_t i = 0; i < num_vectors; ++i) {
            const bits quads = load_bits(from + W * i), first = pairs_of_fp8<0>(quads), last = pairs_of_fp8<1>(quads);
            if (W == 16 || i % 2 == 0) InOrder{next}(nullptr);
            std::memcpy(to + W * i, &first, sizeof(bits));
            std::memcpy(to + WIDTH + W * i, &last, sizeof(bits));
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
};

// Tiles of codes, multiplied as `Pairs` multiply theirs (Bf16Tiles, WidePairs).
template <typename Pairs>
struct Fp8Tiles : Fp8Pools {
    using Left = typename Pairs::Left;
    static constexpr int MOST_ROWS = Pairs::MOST_ROWS;
    static constexpr bool has_registers = Pairs::has_registers;
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
    void begin_keys(const Tile& tile, int64_t, int64_t ahead) const {
        widen_fp8<TILE>(tile.keys, HEAD_SIZE / 4, (tile.high + W - 1) / W, tile.keys + ahead, widened->keys);
    }
    void begin_values(const Tile& tile, int64_t ahead) const {
        widen_fp8<HEAD_SIZE>(tile.values, tile.num_groups, HEAD_SIZE / W, tile.values + ahead, widened->values);
    }
    template <int N, int C>
    void score(const Left* q, const Tile& tile, int64_t, float* scores) const {
        Pairs{}.template score<N, C>(q, pairs_of(tile), 0, scores);
    }
    template <int C, typename Weights>
    void soften(const Tile& tile, float* scores, int64_t from, int64_t to, float factor, float* maximum, float* total,
                float* scale, Weights* weights, float* sums) const {
        Pairs{}.template soften<C>(pairs_of(tile), scores, from, to, factor, maximum, total, scale, weights, sums);
    }
    template <int N, typename Weights>
    void weigh(const Weights* weights, const Tile& tile, int64_t, const float* scale, float* acc) const {
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
