// One directed edge between two CPU ranks of one host: a ring buffer of bytes in shared memory with one writer and one
// reader. A side that cannot go on spins for a few microseconds and then sleeps on a futex, so that a waiting rank
// leaves its core to others.
#include <algorithm>

#include "../shared_memory.h"

namespace {

using shared_memory::LINE;
constexpr int SPINS = 300;  // fewer than ranks that compute together: stages wait for each other for long

// Bytes that one side has moved, and what the other side waits on while it needs more of them.
struct alignas(LINE) Counter {
    std::atomic<uint64_t> bytes;
    std::atomic<uint32_t> changes;
    std::atomic<uint32_t> waiting;
};

struct Ring {
    Counter written, read;
    char* data() { return reinterpret_cast<char*>(this) + 2 * LINE; }
};

void add(Counter& counter, int64_t count) {
    counter.bytes.fetch_add(count);
    counter.changes.fetch_add(1);
    if (counter.waiting.load()) shared_memory::wake(&counter.changes, 1);
}

// Wait until `ready` holds, which depends on the counter. False after about `timeout_ms`.
template <typename Ready>
bool wait(Counter& counter, int64_t timeout_ms, Ready ready) {
    for (int spin = 0; spin < SPINS; ++spin) {
        if (ready()) return true;
        shared_memory::relax();
    }
    const uint32_t seen = counter.changes.load();
    counter.waiting.store(1);
    if (!ready()) shared_memory::sleep_on(&counter.changes, seen, timeout_ms);
    counter.waiting.store(0);
    return ready();
}

// Move `count` bytes between `outside` and the ring at position `at`, in two parts where the ring begins again.
template <typename Copy>
void move(Ring* ring, int64_t capacity, uint64_t at, int64_t count, Copy copy) {
    const int64_t place = at % capacity, first = std::min(count, capacity - place);
    copy(ring->data() + place, 0, first);
    if (count > first) copy(ring->data(), first, count - first);
}

}  // namespace

extern "C" {

int64_t magicdec_ring_bytes(int64_t capacity) { return 2 * LINE + capacity; }

// Write bytes `done` to `count` - 1 of `from`. Returns how many of the `count` bytes are written; all of them unless
// the reader made no room for `timeout_ms`.
int64_t magicdec_ring_write(
    Ring* ring, int64_t capacity, const char* from, int64_t done, int64_t count, int64_t timeout_ms
) {
    while (done < count) {
        const uint64_t at = ring->written.bytes.load();
        auto room = [&] { return capacity - int64_t(at - ring->read.bytes.load()); };
        if (!wait(ring->read, timeout_ms, [&] { return room() > 0; })) break;
        const int64_t part = std::min(room(), count - done);
        move(ring, capacity, at, part, [&](char* to, int64_t skip, int64_t size) {
            std::memcpy(to, from + done + skip, size);
        });
        add(ring->written, part);
        done += part;
    }
    return done;
}

// Read into bytes `done` to `count` - 1 of `to`. Returns how many of the `count` bytes are read; all of them unless the
// writer sent nothing for `timeout_ms`.
int64_t magicdec_ring_read(
    Ring* ring, int64_t capacity, char* to, int64_t done, int64_t count, int64_t timeout_ms
) {
    while (done < count) {
        const uint64_t at = ring->read.bytes.load();
        auto there = [&] { return int64_t(ring->written.bytes.load() - at); };
        if (!wait(ring->written, timeout_ms, [&] { return there() > 0; })) break;
        const int64_t part = std::min(there(), count - done);
        move(ring, capacity, at, part, [&](char* from, int64_t skip, int64_t size) {
            std::memcpy(to + done + skip, from, size);
        });
        add(ring->read, part);
        done += part;
    }
    return done;
}

// Whether there is something to read. Waits for it, for about `timeout_ms` at most.
int magicdec_ring_has_bytes(Ring* ring, int64_t timeout_ms) {
    const uint64_t at = ring->read.bytes.load();
    return wait(ring->written, timeout_ms, [&] { return ring->written.bytes.load() > at; });
}

}  // extern "C"
