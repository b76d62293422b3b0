// The order in which a product is computed, chunk of rows by block of output channels.
#pragma once
#include <algorithm>
#include <cstdint>

// Some chunks are multiplied by all blocks, then the next ones, so that their rows stay in the cache in the meantime.
constexpr int64_t ROWS_IN_CACHE = 4 << 20;  // bytes
struct BlockOrder {
    int64_t blocks, chunks, together;
    BlockOrder(int64_t blocks, int64_t chunks, int64_t chunk_bytes)
        : blocks(blocks), chunks(chunks), together(std::max<int64_t>(1, ROWS_IN_CACHE / chunk_bytes)) {}
    int64_t count() const { return blocks * chunks; }
    struct Part { int64_t block, chunk; };
    Part operator[](int64_t i) const {
        if (chunks == 1) return {i, 0};  // divisions take a few percent of a step with few rows
        const int64_t first = i / (together * blocks) * together, here = std::min(together, chunks - first);
        const int64_t rest = i - first * blocks;
        return {rest / here, first + rest % here};
    }
};
