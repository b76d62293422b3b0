// The int8 storage of the KV pools, with about half the bytes of bfloat16. Each token of a head has a scale for its key and
// one for its value, so that appending or removing a token changes no other. A key's scale multiplies its score, and a
// value's its weight.
//
// A tile of TILE tokens of a head (Int8 of kv/layout.py) has TILE * HEAD_SIZE codes, then TILE float32 scales. An entry
// holds four codes: keys are stored as [four dimensions][token], values as [four tokens][dimension].
constexpr int64_t TILE_CODES = TILE * HEAD_SIZE, TILE_BYTES = TILE_CODES + 4 * TILE;
constexpr float MOST_CODE = 127;

// Like Tile of native_tile.h, in groups of four tokens; scales are counted from the first vector's first lane, which is `vector`.
template <typename Scale>
struct CodedTile {
    const uint32_t *keys, *values;
    const Scale *key_scales, *value_scales;
    int64_t vector, low, high, first_group, num_groups;
};
using QuadTile = CodedTile<float>;

// The codes of HEAD_SIZE numbers, and the scale that maps the largest magnitude to MOST_CODE.
template <typename S>
inline float to_codes(const S* from, int8_t* codes) {
    float most = 0;
    for (int d = 0; d < HEAD_SIZE; ++d) most = std::max(most, std::fabs(to_float(from[d])));
    const float inverse = most > 0 ? MOST_CODE / most : 0;
    for (int d = 0; d < HEAD_SIZE; ++d) codes[d] = int8_t(std::lrint(to_float(from[d]) * inverse));
    return most / MOST_CODE;
}

struct QuadPools {
    using Pool = int8_t;
    using Tile = QuadTile;
    // Of native_codes.h: dimensions that share a scale, bytes of them, and numbers in a byte.
    static constexpr int NUM_SCALES = 1, SCALED = HEAD_SIZE, SCALED_BYTES = HEAD_SIZE, HALVES = 1;
    static bits pairs(bits entries, int part) { return pairs_of_quad(entries, part); }
    static void mix_query(float*) {}  // keys are stored as they are
    static QuadTile at(const Pool* k_pool, const Pool* v_pool, int64_t slot, int64_t count) {
        const Pool *keys = k_pool + slot / TILE * TILE_BYTES, *values = v_pool + slot / TILE * TILE_BYTES;
        const int64_t lane = slot % TILE, vector = lane / LANES * LANES, low = lane - vector, high = low + count;
        return {reinterpret_cast<const uint32_t*>(keys) + vector,
                reinterpret_cast<const uint32_t*>(values) + lane / 4 * HEAD_SIZE,
                reinterpret_cast<const float*>(keys + TILE_CODES) + vector,
                reinterpret_cast<const float*>(values + TILE_CODES) + vector,
                vector, low, high, low / 4, (high + 3) / 4 - low / 4};
    }
    template <typename S>
    static void append(const S* k, const S* v, int64_t slot, Pool* k_pool, Pool* v_pool) {
        const int64_t tile = slot / TILE * TILE_BYTES, lane = slot % TILE;
        int8_t codes[HEAD_SIZE];
        const float key_scale = to_codes(k, codes);
        for (int d = 0; d < HEAD_SIZE; d += 4) std::memcpy(k_pool + tile + d * TILE + lane * 4, codes + d, 4);
        std::memcpy(k_pool + tile + TILE_CODES + 4 * lane, &key_scale, 4);
        const float value_scale = to_codes(v, codes);
        for (int d = 0; d < HEAD_SIZE; ++d) v_pool[tile + (lane / 4 * HEAD_SIZE + d) * 4 + lane % 4] = codes[d];
        std::memcpy(v_pool + tile + TILE_CODES + 4 * lane, &value_scale, 4);
    }
};
