// All-reduce and all-gather between the CPU ranks of one host, through a segment of shared memory.
//
// Each rank has two slots, which it uses alternately, and a counter on its own cache line. In an exchange a rank
// copies its data into the slot of this turn, increments its counter, waits until every rank's counter has reached the
// same value, and reads all slots. A slot is reused two exchanges later. By then every rank has posted the exchange in
// between, so no rank still reads the slot, and one wait per exchange is enough.
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <cstring>

namespace {

constexpr int LINE = 64;
struct alignas(LINE) Counter { std::atomic<uint64_t> posted; };

inline char* slot(char* segment, int64_t size, int64_t slot_bytes, int64_t rank, uint64_t turn) {
    return segment + size * LINE + (rank * 2 + int64_t(turn & 1)) * slot_bytes;
}
inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}
inline float widen(uint16_t x) {
    uint32_t wide = uint32_t(x) << 16;
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
}
inline uint16_t narrow(float x) {
    uint32_t wide;
    std::memcpy(&wide, &x, 4);
    return uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

}  // namespace

extern "C" {

int64_t magicdec_segment_bytes(int64_t size, int64_t slot_bytes) { return size * (LINE + 2 * slot_bytes); }

// Copy `bytes` of x into this rank's slot for `turn` (1, 2, ...) and publish it with the counter.
void magicdec_post(char* segment, int64_t rank, int64_t size, int64_t slot_bytes, uint64_t turn, const void* x,
                   int64_t bytes) {
    std::memcpy(slot(segment, size, slot_bytes, rank, turn), x, bytes);
    reinterpret_cast<Counter*>(segment)[rank].posted.store(turn, std::memory_order_release);
}

// Wait until every rank has posted `turn`, then return -1. After about `patience` yields, return the first rank that
// has not posted.
int64_t magicdec_wait(char* segment, int64_t size, uint64_t turn, int64_t patience) {
    Counter* counters = reinterpret_cast<Counter*>(segment);
    for (int64_t rank = 0; rank < size; ++rank) {
        auto there = [&] { return counters[rank].posted.load(std::memory_order_acquire) >= turn; };
        for (int spin = 0; spin < 2000 && !there(); ++spin) relax();
        for (int64_t i = 0; !there(); ++i) {
            if (i == patience) return rank;
            sched_yield();
        }
    }
    return -1;
}

// x = sum over ranks, added in rank order, so that every rank computes the same bits.
void magicdec_sum_float32(char* segment, int64_t size, int64_t slot_bytes, uint64_t turn, float* x, int64_t count) {
    std::memcpy(x, slot(segment, size, slot_bytes, 0, turn), count * 4);
    for (int64_t rank = 1; rank < size; ++rank) {
        const float* from = reinterpret_cast<const float*>(slot(segment, size, slot_bytes, rank, turn));
        for (int64_t i = 0; i < count; ++i) x[i] += from[i];
    }
}

void magicdec_sum_float64(char* segment, int64_t size, int64_t slot_bytes, uint64_t turn, double* x, int64_t count) {
    std::memcpy(x, slot(segment, size, slot_bytes, 0, turn), count * 8);
    for (int64_t rank = 1; rank < size; ++rank) {
        const double* from = reinterpret_cast<const double*>(slot(segment, size, slot_bytes, rank, turn));
        for (int64_t i = 0; i < count; ++i) x[i] += from[i];
    }
}

void magicdec_sum_bfloat16(char* segment, int64_t size, int64_t slot_bytes, uint64_t turn, uint16_t* x,
                           int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        float total = 0;
        for (int64_t rank = 0; rank < size; ++rank)
            total += widen(reinterpret_cast<const uint16_t*>(slot(segment, size, slot_bytes, rank, turn))[i]);
        x[i] = narrow(total);
    }
}

// out = the `bytes` of every rank, in rank order.
void magicdec_collect(char* segment, int64_t size, int64_t slot_bytes, uint64_t turn, char* out, int64_t bytes) {
    for (int64_t rank = 0; rank < size; ++rank)
        std::memcpy(out + rank * bytes, slot(segment, size, slot_bytes, rank, turn), bytes);
}

}  // extern "C"
