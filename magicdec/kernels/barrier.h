// How the threads of one parallel region wait for each other between its loops.
//
// OpenMP's barrier has one bound for how long a thread spins before it sleeps, and the threads that wait for the next region
// have the same. Between the loops of a forward it should be short: beside other work, a thread that is late has lost its
// core, and the others must sleep for the scheduler to give it one. Between two forwards it should be longer than what the
// caller does there, since waking a thread takes some tens of microseconds.
#pragma once
#include <atomic>
#include <cstdint>

#include <omp.h>

namespace {

class Barrier {
public:
    // Makes `barrier` the one at which this thread waits, as long as the object lives.
    class Member {
    public:
        explicit Member(Barrier& barrier) { current = &barrier; }
        ~Member() { current = nullptr; }
    };
    static Barrier* of_thread() { return current; }

    void wait() {
        const uint32_t turn = this->turn.load(std::memory_order_acquire);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == omp_get_num_threads()) {
            arrived.store(0, std::memory_order_relaxed);
            this->turn.store(turn + 1, std::memory_order_seq_cst);
            if (num_asleep.load(std::memory_order_seq_cst)) this->turn.notify_all();
            return;
        }
        for (int spin = 0; spin < SPINS; ++spin) {
            if (this->turn.load(std::memory_order_acquire) != turn) return;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
        num_asleep.fetch_add(1, std::memory_order_seq_cst);
        this->turn.wait(turn, std::memory_order_seq_cst);
        num_asleep.fetch_sub(1, std::memory_order_relaxed);
    }

private:
    static constexpr int SPINS = 3000;
    static inline thread_local Barrier* current = nullptr;
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<uint32_t> turn{0};
    std::atomic<int> num_asleep{0};
};

// Called by all threads of a parallel region: each goes on when all are here.
inline void wait_for_threads() {
    if (Barrier* barrier = Barrier::of_thread()) return barrier->wait();
#pragma omp barrier
}

}  // namespace
