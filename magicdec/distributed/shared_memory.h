// All-reduce and all-gather between the CPU ranks of one host, through a segment of shared memory.
//
// Each rank has two slots, which it uses alternately, and a counter on its own cache line. In an exchange a rank
// copies its data into the slot of this turn, increments its counter, waits until every rank's counter has reached the
// same value, and reads all slots. A slot is reused two exchanges later. By then every rank has posted the exchange in
// between, so no rank still reads the slot, and one wait per exchange is enough.
//
// A rank that waits spins for a fraction of a millisecond and then sleeps, so that it leaves its core to others: perhaps to the
// rank that it waits for. Waking takes longer than most waits.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>

namespace shared_memory {

constexpr int LINE = 64;
constexpr int SPINS = 5000;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Sleep while `word` is `seen`, until it is woken or for `timeout_ms`.
inline void sleep_on(std::atomic<uint32_t>* word, uint32_t seen, int64_t timeout_ms) {
    const timespec timeout{timeout_ms / 1000, timeout_ms % 1000 * 1000000};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}
inline void wake(std::atomic<uint32_t>* word, int count) { syscall(SYS_futex, word, FUTEX_WAKE, count, nullptr, nullptr, 0); }

// The last exchange that a rank has posted, and how many ranks sleep until it posts the next. `turn` wraps around.
struct alignas(LINE) Counter {
    std::atomic<uint32_t> turn, sleeping;
    bool has_reached(uint32_t other) const { return int32_t(turn.load() - other) >= 0; }
};

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
        Counter& own = reinterpret_cast<Counter*>(base)[rank];
        own.turn.store(uint32_t(turn));
        if (own.sleeping.load()) wake(&own.turn, int(size));
    }

    // Wait until every rank has posted, then return -1. After about `timeout_ms` return the first rank that has not.
    int64_t wait(int64_t timeout_ms) const {
        for (int64_t of = 0; of < size; ++of) {
            Counter& counter = reinterpret_cast<Counter*>(base)[of];
            for (int spin = 0; spin < SPINS && !counter.has_reached(uint32_t(turn)); ++spin) relax();
            if (counter.has_reached(uint32_t(turn))) continue;
            counter.sleeping.fetch_add(1);
            const uint32_t seen = counter.turn.load();
            if (!counter.has_reached(uint32_t(turn))) sleep_on(&counter.turn, seen, timeout_ms);
            counter.sleeping.fetch_sub(1);
            if (!counter.has_reached(uint32_t(turn))) return of;
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

    // out = the `count` bytes of every rank, in rank order and `stride` bytes apart.
    void collect(char* out, int64_t count, int64_t stride) const {
        for (int64_t of = 0; of < size; ++of) std::memcpy(out + of * stride, slot(of), count);
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
