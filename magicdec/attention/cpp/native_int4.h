// The int4 storage of the KV pools, with 4.5 bits a number where bfloat16 has 16. Each token of a head has a bfloat16 scale
// for each GROUP_SIZE dimensions of its key and of its value, so that appending or removing a token changes no other.
//
// A key is stored as sums and differences of its dimensions, of each MIXED a Walsh-Hadamard transform: what a few dimensions
// have of large numbers is spread over all, so that the others keep more of their bits. Scores are those of queries that are
// transformed likewise and divided by MIXED.
//
// A tile of TILE tokens of a head (Int4 of kv/layout.py) has TILE * TOKEN_BYTES bytes of codes, then the scales
// [GROUPS][TILE]. Byte i of a group has dimension i in its low half and HALF + i in its high one. An entry holds four bytes
// of a key, [four bytes][token], or a byte of four values, [four tokens][byte].
constexpr int GROUP_SIZE = 32, HALF = GROUP_SIZE / 2, GROUPS = (HEAD_SIZE + GROUP_SIZE - 1) / GROUP_SIZE;
constexpr int TOKEN_BYTES = GROUPS * HALF;
constexpr int MIXED = 16;
static_assert(HEAD_SIZE % MIXED == 0);
constexpr int64_t INT4_CODES = TILE * TOKEN_BYTES, INT4_TILE = INT4_CODES + 2 * TILE * GROUPS;
// Whether the bytes of a group have two dimensions: the last group of a head may be half as long.
constexpr bool has_high(int group) { return HEAD_SIZE % GROUP_SIZE == 0 || group + 1 < GROUPS; }

using NibbleTile = CodedTile<bfloat16>;

// The codes of HEAD_SIZE numbers as TOKEN_BYTES bytes, and the scales that map each group's number of the largest magnitude
// to -8.
template <typename S>
inline void to_nibbles(const S* from, uint8_t* bytes, bfloat16* scales) {
    for (int g = 0; g < GROUPS; ++g) {
        const int count = has_high(g) ? GROUP_SIZE : HALF;
        float numbers[GROUP_SIZE] = {}, largest = 0;
        for (int d = 0; d < count; ++d) {
            numbers[d] = to_float(from[g * GROUP_SIZE + d]);
            if (std::fabs(numbers[d]) > std::fabs(largest)) largest = numbers[d];
        }
        store(scales + g, largest / -8);
        // Rounded to float32 the products are quotients, so that of bfloat16 numbers halves are found exactly.
        const double scale = to_float(scales[g]), inverse = scale != 0 ? 1 / scale : 0;
        auto code = [&](int d) { return std::clamp<int>(std::lrint(float(numbers[d] * inverse)), -8, 7) & 15; };
        for (int i = 0; i < HALF; ++i) bytes[g * HALF + i] = uint8_t(code(i) | code(HALF + i) << 4);
    }
}

// In place, in the order of Int4, whose sums have the same bits.
inline void mix(float* numbers) {
    for (int half = 1; half < MIXED; half *= 2)
        for (int from = 0; from < HEAD_SIZE; from += 2 * half)
            for (int i = from; i < from + half; ++i) {
                const float a = numbers[i], b = numbers[i + half];
                numbers[i] = a + b, numbers[i + half] = a - b;
            }
}

struct NibblePools {
    using Pool = uint8_t;
    using Tile = NibbleTile;
    static constexpr int NUM_SCALES = GROUPS, SCALED = GROUP_SIZE, SCALED_BYTES = HALF, HALVES = 2;  // as in QuadPools
    static bits pairs(bits entries, int part) { return pairs_of_octet(entries, part); }
    static void mix_query(float* q) {
        mix(q);
        for (int d = 0; d < HEAD_SIZE; ++d) q[d] *= 1.0f / MIXED;
    }
    static NibbleTile at(const Pool* k_pool, const Pool* v_pool, int64_t slot, int64_t count) {
        const Pool *keys = k_pool + slot / TILE * INT4_TILE, *values = v_pool + slot / TILE * INT4_TILE;
        const int64_t lane = slot % TILE, vector = lane / LANES * LANES, low = lane - vector, high = low + count;
        return {reinterpret_cast<const uint32_t*>(keys) + vector,
                reinterpret_cast<const uint32_t*>(values) + lane / 4 * TOKEN_BYTES,
                reinterpret_cast<const bfloat16*>(keys + INT4_CODES) + vector,
                reinterpret_cast<const bfloat16*>(values + INT4_CODES) + vector,
                vector, low, high, low / 4, (high + 3) / 4 - low / 4};
    }
    template <typename S>
    static void append(const S* k, const S* v, int64_t slot, Pool* k_pool, Pool* v_pool) {
        const int64_t tile = slot / TILE * INT4_TILE, lane = slot % TILE;
        uint8_t bytes[TOKEN_BYTES];
        bfloat16 scales[GROUPS];
        float key[HEAD_SIZE];
        for (int d = 0; d < HEAD_SIZE; ++d) key[d] = to_float(k[d]);
        mix(key);
        to_nibbles(key, bytes, scales);
        for (int i = 0; i < TOKEN_BYTES; i += 4) std::memcpy(k_pool + tile + i * TILE + lane * 4, bytes + i, 4);
        put_scales(scales, k_pool + tile, lane);
        to_nibbles(v, bytes, scales);
        for (int i = 0; i < TOKEN_BYTES; ++i) v_pool[tile + (lane / 4 * TOKEN_BYTES + i) * 4 + lane % 4] = bytes[i];
        put_scales(scales, v_pool + tile, lane);
    }

private:
    static void put_scales(const bfloat16* scales, Pool* tile, int64_t lane) {
        for (int g = 0; g < GROUPS; ++g) std::memcpy(tile + INT4_CODES + 2 * (g * TILE + lane), scales + g, 2);
    }
};
