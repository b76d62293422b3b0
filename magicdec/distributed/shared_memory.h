// All-reduce and all-gather between the CPU ranks of one host, through a segment of shared memory.
//
// Each rank has two slots, which it uses alternately, and a counter on its own cache line. In an exchange a rank
// copies its data into the slot of this turn, increments its counter, waits until every rank's counter has reached the
// same value, and reads all slots. A slot is reused two exchanges later. By then every rank has posted the exchange in
// between, so no rank still reads the slot, and one wait per exchange is enough.
#pragma once
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <cstring>

namespace shared_memory {

constexpr int LINE = 64;
struct alignas(LINE) Counter { std::atomic<uint64_t> posted; };

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// The segment as one rank of `size` uses it, in its exchange number `turn` (1, 2, ...).
struct Segment {
    char* base;
    int64_t rank, size, slot_bytes;
    uint64_t turn;

    static int64_t bytes(int64_t size, int64_t slot_bytes) { return size * (LINE + 2 * slot_bytes); }
    char* slot(int64_t of) const { return base + size * LINE + (of * 2 + int64_t(turn & 1)) * slot_bytes; }

    // Copy `count` bytes of x into this rank's slot and publish them with the counter.
    void post(const void* x, int64_t count) const {
        std::memcpy(slot(rank), x, count);
        reinterpret_cast<Counter*>(base)[rank].posted.store(turn, std::memory_order_release);
    }

    // Wait until every rank has posted, then return -1. After about `patience` yields, return the first rank that has
    // not posted.
    int64_t wait(int64_t patience) const {
        Counter* counters = reinterpret_cast<Counter*>(base);
        for (int64_t of = 0; of < size; ++of) {
            auto there = [&] { return counters[of].posted.load(std::memory_order_acquire) >= turn; };
            for (int spin = 0; spin < 2000 && !there(); ++spin) relax();
            for (int64_t i = 0; !there(); ++i) {
                if (i == patience) return of;
                sched_yield();
            }
        }
        return -1;
    }

    // x = sum over ranks, added in rank order, so that every rank computes the same bits.
    template <typename Real>
    void sum(Real* x, int64_t count) const {
        std::memcpy(x, slot(0), count * sizeof(Real));
        for (int64_t of = 1; of < size; ++of) {
            const Real* from = reinterpret_cast<const Real*>(slot(of));
            for (int64_t i = 0; i < count; ++i) x[i] += from[i];
        }
    }

    // The same for bfloat16, which is added in float32 and rounded once.
    void sum_bfloat16(uint16_t* x, int64_t count) const {
        for (int64_t i = 0; i < count; ++i) {
            float total = 0;
            for (int64_t of = 0; of < size; ++of) total += widen(reinterpret_cast<const uint16_t*>(slot(of))[i]);
            x[i] = narrow(total);
        }
    }

    // out = the `count` bytes of every rank, in rank order.
    void collect(char* out, int64_t count) const {
        for (int64_t of = 0; of < size; ++of) std::memcpy(out + of * count, slot(of), count);
    }

private:
    static float widen(uint16_t x) {
        const uint32_t wide = uint32_t(x) << 16;
        float out;
        std::memcpy(&out, &wide, 4);
        return out;
    }
    static uint16_t narrow(float x) {
        uint32_t wide;
        std::memcpy(&wide, &x, 4);
        return uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
    }
};

}  // namespace shared_memory
