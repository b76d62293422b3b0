// Products of bfloat16 tiles (AMX-BF16), for forwards of many tokens. A tile register holds 16 rows of 64 bytes: 16 x 32
// elements of the left operand, 16 pairs x 16 columns of the right one (the pairs of bf16.h), or 16 x 16 sums.
//
// The sums are rounded in another order than by the dot products of bf16.h. Prefill uses tiles; decoding and verification,
// whose bits must agree with each other, do not.
#pragma once
#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#define HAS_TILES 1
#include <cstdint>

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// Whether this process may use tiles. Linux gives them on request, since they enlarge what it saves of a thread.
inline bool may_use_tiles() {
    constexpr int request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool granted = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
    return granted;
}

// Gives the calling thread its tile registers, all of full size, for as long as it lives.
struct TileRegisters {
    TileRegisters() {
        struct alignas(64) { uint8_t palette = 1, start_row = 0, reserved[14] = {}; uint16_t bytes[16] = {}; uint8_t rows[16] = {}; } shape;
        for (int i = 0; i < 8; ++i) shape.bytes[i] = 64, shape.rows[i] = 16;
        _tile_loadconfig(&shape);
    }
    ~TileRegisters() { _tile_release(); }
    TileRegisters(const TileRegisters&) = delete;
    TileRegisters& operator=(const TileRegisters&) = delete;
};

}  // namespace
#else
namespace {
inline bool may_use_tiles() { return false; }
struct TileRegisters {};
}  // namespace
#endif
