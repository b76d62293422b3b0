// Tiles of the matrix unit AMX, shared by attention and linear layers.
//
// A tile register holds up to 16 rows of 64 bytes. One product adds to a tile of sums [rows][16 columns] a left tile
// [rows][16 entries] times a right tile [16 entries][16 columns]. An entry holds two bfloat16 numbers, elements 2k and 2k + 1
// of a column, or four bytes. The 32 products of an output in bfloat16 are added in an order of their own, and then to the
// sum. A row of sums does not depend on the other rows, so the bits of an output do not depend on what else is computed in
// the same call.
//
// With EMULATED_TILES, instructions are computed number by number, as Intel's manual defines them, so that tests show on
// any CPU whether what is made of them is right. It says nothing of time.
#pragma once
#include <cstdint>

namespace {
// A matrix of so many bytes, or so many of keys and values in a layer, are far: they are probably read from memory, and are
// prefetched into the L2 cache, since L1 has too few buffers for what is under way. What is near is prefetched into L1.
constexpr int64_t FAR_BYTES = 12 << 20;
}  // namespace

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AMX_TILE__) && defined(__linux__)
#define HAS_TILES 1
#elif defined(__AVX512BF16__) && defined(EMULATED_TILES)
#define HAS_TILES 1
#endif

#if defined(HAS_TILES)
#include <cstring>
#include <utility>

#include <immintrin.h>
#if !defined(EMULATED_TILES)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// Whether this process may use tiles. Linux gives them on request, since they enlarge what it saves of a thread.
inline bool may_use_tiles() {
#if defined(EMULATED_TILES)
    return true;
#else
    constexpr int request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool granted = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
    return granted;
#endif
}

}  // namespace

namespace amx {

constexpr int64_t STEP = 16;  // entries per product: rows of a right tile
constexpr int64_t ROWS = 16;  // most rows of a tile

// Registers: 0 to 3 sums, 4 and 5 the left operand, 6 and 7 the right one. One block of rows takes four columns of sums,
// 0 to 3; two blocks take two each, the first 0 and 1 with 4, the second 2 and 3 with 5.
constexpr int LEFT = 4, RIGHT = 6;

struct Layout {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

#if defined(EMULATED_TILES)
struct Emulated {
    Layout layout;
    uint8_t data[8][16][64];
};
inline thread_local Emulated emulated = {};

inline void configure(const Layout& layout) { emulated = {layout, {}}; }
inline void release() { emulated = {}; }

template <int R>
inline void zero() {
    std::memset(emulated.data[R], 0, sizeof(emulated.data[R]));
}
template <int R>
inline void load(const void* from, int64_t stride) {
    zero<R>();
    for (int r = 0; r < emulated.layout.rows[R]; ++r)
        std::memcpy(emulated.data[R][r], static_cast<const char*>(from) + r * stride, emulated.layout.bytes[R]);
}
template <int R>
inline void store(void* to, int64_t stride) {
    for (int r = 0; r < emulated.layout.rows[R]; ++r)
        std::memcpy(static_cast<char*>(to) + r * stride, emulated.data[R][r], emulated.layout.bytes[R]);
}

// `add` is called with a sum and the entries of both factors.
template <int SUMS, int A, int B, typename Sum, typename Add>
inline void multiply_entries(Add add) {
    for (int r = 0; r < emulated.layout.rows[SUMS]; ++r)
        for (int k = 0; k < emulated.layout.bytes[A] / 4; ++k)
            for (int i = 0; i < emulated.layout.bytes[SUMS] / 4; ++i) {
                Sum sum;
                std::memcpy(&sum, emulated.data[SUMS][r] + 4 * i, 4);
                add(sum, emulated.data[A][r] + 4 * k, emulated.data[B][k] + 4 * i);
                std::memcpy(emulated.data[SUMS][r] + 4 * i, &sum, 4);
            }
}
template <int SUMS, int A, int B>
inline void multiply_pairs() {
    const auto number = [](const uint8_t* from) {
        const uint32_t bits = uint32_t(from[0]) << 16 | uint32_t(from[1]) << 24;
        float number;
        std::memcpy(&number, &bits, 4);
        return number;
    };
    multiply_entries<SUMS, A, B, float>([&](float& sum, const uint8_t* a, const uint8_t* b) {
        for (int i = 0; i < 4; i += 2) sum += number(a + i) * number(b + i);
    });
}
template <int SUMS, int A, int B>
inline void multiply_signed_bytes() {
    multiply_entries<SUMS, A, B, int32_t>([](int32_t& sum, const uint8_t* a, const uint8_t* b) {
        for (int i = 0; i < 4; ++i) sum += int32_t(int8_t(a[i])) * int8_t(b[i]);
    });
}
template <int SUMS, int A, int B>
inline void multiply_unsigned_bytes() {
    multiply_entries<SUMS, A, B, int32_t>([](int32_t& sum, const uint8_t* a, const uint8_t* b) {
        for (int i = 0; i < 4; ++i) sum += int32_t(a[i]) * int8_t(b[i]);
    });
}
#else
inline void configure(const Layout& layout) { asm volatile("ldtilecfg %0" ::"m"(layout) : "memory"); }
inline void release() { asm volatile("tilerelease" ::: "memory"); }

template <int R>
inline void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(R));
}

// Rows from `from` on, `stride` bytes apart.
template <int R>
inline void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(R) : "memory");
}

template <int R>
inline void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(R) : "memory");
}

template <int SUMS, int A, int B>
inline void multiply_pairs() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
}

// The left operand's bytes are signed, or unsigned; the right one's are signed.
template <int SUMS, int A, int B>
inline void multiply_signed_bytes() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
}
template <int SUMS, int A, int B>
inline void multiply_unsigned_bytes() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
}
#endif

// Owns the registers of the calling thread: none before `load`, and none any more when the object goes.
class Registers {
public:
    Registers() = default;
    ~Registers() {
        if (rows[0]) release();
    }
    Registers(const Registers&) = delete;

    // For two blocks of rows, with `first` and `second` rows of left operand and sums.
    void load(int64_t first, int64_t second) {
        if (first == rows[0] && second == rows[1]) return;
        rows[0] = first, rows[1] = second;
        Layout layout = {};
        layout.palette = 1;
        for (int i = 0; i < 8; ++i) {
            layout.bytes[i] = 64;
            layout.rows[i] = i >= RIGHT ? uint8_t(STEP) : uint8_t(i == 2 || i == 3 || i == LEFT + 1 ? second : first);
        }
        configure(layout);
    }

    // For one block of rows, whose sums are in 0 to 3.
    void load(int64_t count) { load(count, count); }

private:
    int64_t rows[2] = {0, 0};
};

// Calls body.operator()<i>() for i = 0 .. N - 1.
template <int N, typename Body>
inline void unrolled(Body body) {
    [&]<int... i>(std::integer_sequence<int, i...>) { (body.template operator()<i>(), ...); }
    (std::make_integer_sequence<int, N>{});
}

// An operand in memory: its first entry, and the bytes from one row of a tile to the next.
struct Left { const uint32_t* data; int64_t stride, block = 0; };  // `block`: entries to the second block of rows
struct Right { const uint32_t* data; int64_t stride; };

// Prefetches memory in the order of its addresses and passes over `lines` for each tile that is loaded. `is_half`: only the
// first two of every four cache lines are prefetched.
struct Ahead {
    const uint32_t* at = nullptr;
    int64_t lines = 0;
    bool is_far = true, is_half = false;
    void operator()() { is_far ? prefetch<_MM_HINT_T1>() : prefetch<_MM_HINT_T0>(); }

private:
    template <auto HINT>
    void prefetch() {
        for (const uint32_t* end = at + 16 * lines; at < end; at += 64) {
            _mm_prefetch(at, HINT);
            _mm_prefetch(at + 16, HINT);
            if (is_half) continue;
            _mm_prefetch(at + 32, HINT);
            _mm_prefetch(at + 48, HINT);
        }
    }
};

// Products of bfloat16 pairs.
struct Pairs {
    template <int SUMS, int A, int B>
    static void multiply() {
        multiply_pairs<SUMS, A, B>();
    }
};
// Products of bytes: the first block of rows has signed ones, the second one unsigned ones.
struct Bytes {
    template <int SUMS, int A, int B>
    static void multiply() {
        if constexpr (A == LEFT) multiply_signed_bytes<SUMS, A, B>();
        else multiply_unsigned_bytes<SUMS, A, B>();
    }
};

// Adds to BLOCKS x COLUMNS sums the product of `steps` left tiles, which follow each other in a row, and right tiles, which
// follow each other in a column.
template <int BLOCKS, int COLUMNS, typename Product = Pairs>
inline void add_products(Left left, Right right, int64_t steps, Ahead& prefetch) {
    for (int64_t step = 0; step < steps; ++step) {
        unrolled<BLOCKS>([&]<int b>() { load<LEFT + b>(left.data + b * left.block + step * STEP, left.stride); });
        const uint32_t* rows = right.data + step * STEP * (right.stride / 4);
        unrolled<COLUMNS>([&]<int i>() {
            load<RIGHT + i % 2>(rows + 16 * i, right.stride);
            prefetch();
            unrolled<BLOCKS>([&]<int b>() {
                Product::template multiply<b * COLUMNS + i, LEFT + b, RIGHT + i % 2>();
            });
        });
    }
}

template <int COUNT>
inline void zero_sums() {
    unrolled<COUNT>([&]<int i>() { zero<i>(); });
}

// Load or store sums from `data` on, in rows `stride` bytes apart; the second block begins `block` sums further on.
template <int BLOCKS, int COLUMNS>
inline void load_sums(const float* data, int64_t stride, int64_t block = 0) {
    unrolled<BLOCKS * COLUMNS>([&]<int i>() { load<i>(data + i / COLUMNS * block + i % COLUMNS * 16, stride); });
}
template <int BLOCKS, int COLUMNS, typename Sum>
inline void store_sums(Sum* data, int64_t stride, int64_t block = 0) {
    unrolled<BLOCKS * COLUMNS>([&]<int i>() { store<i>(data + i / COLUMNS * block + i % COLUMNS * 16, stride); });
}

}  // namespace amx
#else
namespace {
inline bool may_use_tiles() { return false; }
}  // namespace
namespace amx {
struct Registers { void load(int64_t) {} };
}  // namespace amx
#endif
