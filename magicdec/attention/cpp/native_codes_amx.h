// The products of native_codes.h in tile registers of bytes (AMX-INT8), for several queries. Their sums are the same integers, so
// that a query has the same bits as without them.
//
// A 16-bit integer of a query or of its weights is 256 times its upper byte, which is signed, plus its lower one, which is not:
// each is a block of rows of its own. Codes of 8 bits are multiplied where they lie; those of 4 bits are unpacked to bytes that
// are 16 times as large.
#if defined(HAS_TILES) && !defined(CODES_OF_FLOAT32) && HEAD_SIZE % 64 == 0
#define HAS_CODE_REGISTERS 1
// Fewer queries are multiplied by vectors: a product of tiles takes about the same time for one as for 16.
constexpr int64_t LEAST_FOR_REGISTERS = 4;

// Upper and lower bytes of 64 TILES integers: a row of left tiles.
template <int TILES>
struct SplitIntegers {
    alignas(64) uint8_t high[64 * TILES], low[64 * TILES];
};

// Of 64 integers, in the order in which entries have the bytes that they are multiplied by. `pairs` are those of the even and of
// the odd bytes of an entry; if bytes have two numbers, of the low and high halves of the even ones, then of the odd ones.
template <int HALVES>
inline void split_integers(const void* pairs, uint8_t* high, uint8_t* low) {
    alignas(16) static constexpr int8_t order[2][16] = {{0, 4, 2, 6, 8, 12, 10, 14, 1, 5, 3, 7, 9, 13, 11, 15},
                                                        {0, 8, 2, 10, 4, 12, 6, 14, 1, 9, 3, 11, 5, 13, 7, 15}};
    const __m512i places = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(order[HALVES - 1])));
    const __m512i first = _mm512_shuffle_epi8(_mm512_loadu_si512(pairs), places);
    const __m512i second = _mm512_shuffle_epi8(_mm512_loadu_si512(static_cast<const char*>(pairs) + 64), places);
    _mm512_storeu_si512(low, _mm512_permutex2var_epi64(first, _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14), second));
    _mm512_storeu_si512(high, _mm512_permutex2var_epi64(first, _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15), second));
}

// Per thread.
template <typename Form>
class CodeRegisters {
    static constexpr bool IS_PACKED = Form::HALVES == 2;
    // Left tiles of a query for each scale: all dimensions, or 64, of which those with another scale are 0.
    static constexpr int STEPS = IS_PACKED ? 1 : HEAD_SIZE / 64;
    static constexpr int VALUE_ENTRIES = Form::NUM_SCALES * Form::SCALED_BYTES;  // of four tokens

public:
    // For a task, whose queries are split if it `is_served`.
    void begin(const Task& task, const CodedQuery<Form>* q) {
        num_queries = task.num_queries, is_far = task.is_far;
        is_used = num_queries >= LEAST_FOR_REGISTERS && may_use_tiles();
        if (!is_used) return;
        blocks = (num_queries + amx::ROWS - 1) / amx::ROWS, rows = (num_queries + blocks - 1) / blocks;
        registers.load(rows);
        for (int64_t m = 0; m < num_queries; ++m) split_query(q[m].pairs[0], queries[m]);
    }

    bool is_used = false;

    // Scores of all queries for C vectors of keys.
    template <int C>
    void score(const CodedQuery<Form>* q, const typename Form::Tile& tile, int64_t ahead, float* scores) {
        auto next = reinterpret_cast<const char*>(tile.keys + ahead);
        const uint32_t* keys = tile.keys;
        if constexpr (IS_PACKED) keys = unpack_keys<C>(keys, NextCodes{next});
        amx::Ahead following{reinterpret_cast<const uint32_t*>(next), IS_PACKED ? 0 : TILE / C, is_far};
        for (int64_t b = 0; b < blocks; ++b, following.lines = 0)
            for (int g = 0; g < Form::NUM_SCALES; ++g)
                in_some_vectors<2>(C, [&]<int V>(int i) {
                    const uint32_t* right = keys + g * Form::SCALED / 64 * amx::STEP * TILE + 16 * i;
                    multiply<V>(queries[b * rows][g], sizeof(queries[0]), {right, TILE * 4}, following);
                    for_queries(b, [&](int64_t m, const int32_t* of) {
                        for (int v = 0; v < V; ++v) {
                            float* to = scores + m * TILE + 16 * (i + v);
                            const vec before = g > 0 ? load(to) : vec{};
                            const vec sum = fused(joined(of + 16 * v), load_scales(tile.key_scales + g * TILE + 16 * (i + v)), before);
                            store(to, g + 1 == Form::NUM_SCALES ? sum * q[m].step : sum);
                        }
                    });
                });
        prefetch_scales(following.at);
    }

    // Adds the weighted values of a tile to those of all queries.
    void weigh(const CodedWeights<Form>* of, const typename Form::Tile& tile, int64_t ahead, const float* scale, float* acc) {
        for (int64_t m = 0; m < num_queries; ++m) split_weights(of[m], tile.vector, weights[m]);
        auto next = reinterpret_cast<const char*>(tile.values + ahead);
        const uint32_t* values = tile.values - (tile.vector / 4 + tile.first_group) * VALUE_ENTRIES;
        if constexpr (IS_PACKED) values = unpack_values(values, NextCodes{next});
        amx::Ahead following{reinterpret_cast<const uint32_t*>(next), IS_PACKED ? 0 : 16, is_far};
        for (int64_t b = 0; b < blocks; ++b, following.lines = 0)
            for (int g = 0; g < Form::NUM_SCALES; ++g)
                in_some_vectors<2>(Form::SCALED / 16, [&]<int V>(int i) {
                    const int d = g * Form::SCALED + 16 * i;
                    multiply<V>(weights[b * rows][g], sizeof(weights[0]), {values + d, HEAD_SIZE * 4}, following);
                    for_queries(b, [&](int64_t m, const int32_t* sums) {
                        for (int v = 0; v < V; ++v) {
                            float* to = acc + m * HEAD_SIZE + d + 16 * v;
                            const vec before = load(to) * scale[m];
                            store(to, fused(joined(sums + 16 * v), broadcast(of[m].steps[g]), before));
                        }
                    });
                });
        prefetch_scales(following.at);
    }

private:
    static void split_query(const void* pairs, SplitIntegers<STEPS> (&to)[Form::NUM_SCALES]) {
        for (int i = 0; i < HEAD_SIZE / 64; ++i) {
            const void* from = static_cast<const char*>(pairs) + 128 * i;
            if constexpr (!IS_PACKED) {
                split_integers<1>(from, to[0].high + 64 * i, to[0].low + 64 * i);
            } else {
                SplitIntegers<1> both;
                split_integers<2>(from, both.high, both.low);
                for (int half = 0; half < 2; ++half) {
                    SplitIntegers<1>& one = to[2 * i + half] = {};
                    std::copy_n(both.high + 32 * half, 32, one.high + 32 * half);
                    std::copy_n(both.low + 32 * half, 32, one.low + 32 * half);
                }
            }
        }
    }

    // A row of a left tile begins at a tile's first token, and weights at `vector`.
    static void split_weights(const CodedWeights<Form>& from, int64_t vector, SplitIntegers<1> (&to)[Form::NUM_SCALES]) {
        for (int g = 0; g < Form::NUM_SCALES; ++g) {
            split_integers<1>(from.pairs[0][g], to[g].high, to[g].low);
            if (vector == 0) continue;
            for (uint8_t* bytes : {to[g].high, to[g].low}) {
                std::copy_backward(bytes, bytes + 64 - vector, bytes + 64);
                std::fill_n(bytes, vector, 0);
            }
        }
    }

    // Entries of bytes that are 16 times the low halves, or the high ones.
    static bits bytes_of(bits nibbles, int half) { return (half ? nibbles : nibbles << 4) & 0xf0f0f0f0u; }

    template <int C>
    const uint32_t* unpack_keys(const uint32_t* from, NextCodes ahead) {
        for (int row = 0; row < HEAD_SIZE / 8; ++row)
            for (int i = 0; i < C; ++i) {
                const bits nibbles = load_bits(from + row * TILE + 16 * i);
                ahead(nullptr);
                for (int half = 0; half < 2; ++half) keep(bytes_of(nibbles, half), codes + (2 * row + half) * TILE + 16 * i);
            }
        return codes;
    }

    const uint32_t* unpack_values(const uint32_t* from, NextCodes ahead) {
        for (int i = 0; i < TILE / 4 * VALUE_ENTRIES; i += 16) {
            const bits nibbles = load_bits(from + i);
            ahead(nullptr);
            for (int half = 0; half < 2; ++half) keep(bytes_of(nibbles, half), codes + 2 * i + 16 * half);
        }
        return codes;
    }

    static void keep(bits x, uint32_t* to) { std::memcpy(to, &x, sizeof(x)); }

    // Sums of a block of queries and V vectors of columns.
    template <int V, int TILES>
    void multiply(const SplitIntegers<TILES>& left, int64_t stride, amx::Right right, amx::Ahead& ahead) {
        amx::zero_sums<2 * V>();
        amx::add_products<2, V, amx::Bytes>({reinterpret_cast<const uint32_t*>(left.high), stride, 16 * TILES}, right, TILES, ahead);
        amx::store_sums<2, V>(sums, 4 * 32, LOW_SUMS);
    }

    template <typename Body>
    void for_queries(int64_t block, Body body) const {
        const int64_t first = block * rows, count = std::min(rows, num_queries - first);
        for (int64_t m = 0; m < count; ++m) body(first + m, sums + 32 * m);
    }

    static vec joined(const int32_t* of) {
        integers high, low;
        std::memcpy(&high, of, sizeof(high));
        std::memcpy(&low, of + LOW_SUMS, sizeof(low));
        const integers sum = (high << 8) + low;
        return __builtin_convertvector(IS_PACKED ? sum >> 4 : sum, vec);
    }

    // Of the next tile, which follow its codes.
    static void prefetch_scales(const void* at) {
        constexpr int lines = sizeof(*Form::Tile::key_scales) * Form::NUM_SCALES * TILE / 64;
        auto next = static_cast<const char*>(at);
        for (int i = 0; i < lines; ++i) NextCodes{next}(nullptr);
    }

    static constexpr int LOW_SUMS = 32 * amx::ROWS;
    SplitIntegers<STEPS> queries[MAX_QUERIES][Form::NUM_SCALES];
    SplitIntegers<1> weights[MAX_QUERIES][Form::NUM_SCALES];
    alignas(64) uint32_t codes[IS_PACKED ? TILE * HEAD_SIZE / 4 : 1];  // unpacked, of keys, then of values
    alignas(64) int32_t sums[2 * LOW_SUMS];
    int64_t num_queries, blocks, rows;
    bool is_far;
    amx::Registers registers;
};
#endif
