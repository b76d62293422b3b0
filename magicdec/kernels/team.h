// The threads of one parallel region, and how they share its loops.
//
// All threads call the same loops in the same order. A loop is over when all of its parts are done, not when all threads have
// come to it: beside other work, a thread that has lost its core is late by a time slice, which may be as long as a whole
// forward, and the others do its parts meanwhile. It finds the loops over when it comes back, and catches up.
//
// Each thread begins with parts of its own, the same ones in each call, and then takes from the ends of the others'. A part
// that a late thread has begun is computed again by one that has nothing else to do; the first one to finish writes what it
// found. Which thread computes a part never changes its bits.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include <omp.h>

#if defined(TEAM_TRIAL)
void team_trial(int64_t);  // of a test: called where a thread may lose its core
#endif

namespace {

inline void pause_thread() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

inline void may_lose_core([[maybe_unused]] int64_t place) {
#if defined(TEAM_TRIAL)
    team_trial(place);
#endif
}

class Team {
public:
    static constexpr int64_t MOST = 1 << 16;  // parts of a loop

    // Calls body() on all threads of a parallel region, in which they are a team.
    template <typename Body>
    void run(Body body) {
        const int most = omp_get_max_threads();
        if (most > room) seats = std::make_unique<Seat[]>(room = most);
        for (int i = 0; i < most; ++i) seats[i].word = 0, seats[i].done = 0;
        progress = 0, turn = 0;
#pragma omp parallel
        {
            const Member member(*this);
            body();
            meet();  // OpenMP's own threads would spin for longer while one is late, and keep a core from it
        }
    }

    // Parts 0 .. count - 1: `compute(part)` changes nothing that another thread sees, and `commit(part)` is called after it,
    // once for each part, by the thread whose result is taken. A late thread may compute a part of a loop that is over: what it
    // reads must stay in place, though not keep its numbers, until all threads meet.
    template <typename Compute, typename Commit>
    void share(int64_t count, Compute compute, Commit commit) {
        share_parts(count, Parts(compute), Parts(commit));
    }

    // The same for parts that are short: nobody repeats them. `body(part)` does all of it.
    template <typename Body>
    void share(int64_t count, Body body) {
        share_short_parts(count, Parts(body));
    }

    // One thread calls body(), and the others wait.
    template <typename Body>
    void by_one(Body body) {
        share(1, [&](int64_t) { body(); });
    }

    // The thread that opened the parallel region calls body(), and the others wait.
    template <typename Body>
    void by_first(Body body) {
        Member& me = *Member::current;
        const uint64_t loop = me.loops++;
        if (me.id == 0) {
            body();
            open(loop + 1);
        }
        wait_for(loop);
    }

    // All threads wait until all are here. Needed before memory is changed in which a late thread may still read an index.
    void meet() {
        Member& me = *Member::current;
        const uint64_t loop = me.loops++;
        add_done(1, loop, me.num_threads);
        wait_for(loop);
    }

    // The team of this thread.
    static Team& of_thread() { return Member::current->team; }

    // Makes the team that of this thread in another library, which has its own thread-locals, as long as the object lives.
    class Guest;

private:
    class Member {
    public:
        explicit Member(Team& team) : team(team) { current = team.seats[id].member = this; }
        ~Member() { current = nullptr; }
        Team& team;
        const int id = omp_get_thread_num(), num_threads = omp_get_num_threads();
        uint64_t loops = 1;
        static inline thread_local Member* current = nullptr;
    };

    // What is done for parts of a loop, without its type: a library has many loops, and for each compilers would compile anew
    // how threads share it.
    class Parts {
    public:
        template <typename Body>
        explicit Parts(Body& body) : body(&body), call(call_all<Body>) {}
        void operator()(int64_t first, int64_t end) const { call(body, first, end); }

    private:
        template <typename Body>
        static void call_all(void* body, int64_t first, int64_t end) {
            for (int64_t part = first; part < end; ++part) (*static_cast<Body*>(body))(part);
        }
        void* body;
        void (*call)(void*, int64_t, int64_t);
    };

    // What is left of a thread's parts of a loop: the loop, the next part, the end, and what happens to the part before the next.
    enum State : uint64_t { IDLE, BEGUN, WRITES };
    static constexpr int PART_BITS = 20, DONE_BITS = 32;
    static constexpr uint64_t PART = (uint64_t(1) << PART_BITS) - 1, STATE = 3;
    static uint64_t make(uint64_t loop, uint64_t next, uint64_t end, State state) {
        return loop << (2 * PART_BITS + 2) | next << (PART_BITS + 2) | end << 2 | state;
    }
    static uint64_t loop_of(uint64_t word) { return word >> (2 * PART_BITS + 2); }
    static uint64_t next_of(uint64_t word) { return word >> (PART_BITS + 2) & PART; }
    static uint64_t end_of(uint64_t word) { return word >> 2 & PART; }
    static State state_of(uint64_t word) { return State(word & STATE); }

    struct alignas(128) Seat {
        std::atomic<uint64_t> word{0};
        std::atomic<uint64_t> done{0};  // the loop, and parts that were committed but not added to `progress`
        Member* member = nullptr;
    };
    struct Range { uint64_t begin, end; };

    Range range(int64_t count, int id) const {
        const int64_t threads = Member::current->num_threads;
        return {uint64_t(count * id / threads), uint64_t(count * (id + 1) / threads)};
    }

    bool is_over(uint64_t loop) const { return turn.load(std::memory_order_acquire) > loop; }

    // Marks the seat of a thread that may not have come yet as being in this loop. Fails if another thread was faster.
    static void take_seat(Seat& seat, uint64_t word, uint64_t loop, Range parts) {
        seat.word.compare_exchange_strong(word, make(loop, parts.begin, parts.end, IDLE), std::memory_order_acq_rel);
    }

    // Writes the result of a part that this thread has computed, unless another one did so.
    static void finish(Seat& seat, uint64_t begun, int64_t part, Parts commit) {
        uint64_t word = begun;
        // Others may take parts from the end meanwhile.
        while (!seat.word.compare_exchange_weak(word, (word & ~STATE) | WRITES, std::memory_order_acq_rel))
            if (loop_of(word) != loop_of(begun) || next_of(word) != next_of(begun) || state_of(word) != BEGUN) return;
        commit(part, part + 1);
        seat.word.store((word & ~STATE) | IDLE, std::memory_order_release);  // before the loop can end
        const uint64_t none = loop_of(begun) << DONE_BITS;
        uint64_t done = seat.done.load(std::memory_order_relaxed);
        while (!seat.done.compare_exchange_weak(done, (done >> DONE_BITS == loop_of(begun) ? done : none) + 1,
                                                std::memory_order_acq_rel)) {}
    }

    // Adds what was committed of a seat's parts to the progress of all.
    void hand_in(Seat& seat, uint64_t loop, int64_t count) {
        uint64_t done = seat.done.load(std::memory_order_acquire);
        const uint64_t none = loop << DONE_BITS;
        while (done >> DONE_BITS == loop && done != none)
            if (seat.done.compare_exchange_weak(done, none, std::memory_order_acq_rel)) return add_done(done - none, loop, count);
    }

    void add_done(uint64_t done, uint64_t loop, int64_t count) {
        if (progress.fetch_add(done, std::memory_order_acq_rel) + done == uint64_t(count)) open(loop + 1);
    }

    void open(uint64_t loop) {
        progress.store(0, std::memory_order_relaxed);
        turn.store(uint32_t(loop), std::memory_order_seq_cst);
        if (num_asleep.load(std::memory_order_seq_cst)) turn.notify_all();
    }

    // Moves half of the parts that another thread has not begun to the seat of this one, which has none.
    bool take_from_others(const Member& me, uint64_t loop, int64_t count) {
        for (int i = 1; i < me.num_threads && !is_over(loop); ++i) {
            const int id = (me.id + i) % me.num_threads;
            Seat& seat = seats[id];
            const Range parts = range(count, id);
            if (parts.begin == parts.end) continue;
            uint64_t word = seat.word.load(std::memory_order_acquire);
            if (loop_of(word) < loop) {
                take_seat(seat, word, loop, parts);
                word = seat.word.load(std::memory_order_acquire);
            }
            const uint64_t next = next_of(word), end = end_of(word), middle = (next + end) / 2;
            if (loop_of(word) != loop || state_of(word) == WRITES || next == end) continue;
            const uint64_t rest = make(loop, next, middle, state_of(word));
            if (!seat.word.compare_exchange_strong(word, rest, std::memory_order_acq_rel)) continue;
            seats[me.id].word.store(make(loop, middle, end, IDLE), std::memory_order_release);
            return true;
        }
        return false;
    }

    void share_parts(int64_t count, Parts compute, Parts commit) {
        if (count <= 0) return;
        Member& me = *Member::current;
        const uint64_t loop = me.loops++;
        Seat& seat = seats[me.id];
        const Range own = range(count, me.id);
        for (int spin = 0; !is_over(loop);) {
            uint64_t word = seat.word.load(std::memory_order_acquire);
            if (loop_of(word) > loop) return;
            if (loop_of(word) < loop) {
                take_seat(seat, word, loop, own);
                continue;
            }
            const uint64_t next = next_of(word), end = end_of(word);
            if (next < end && state_of(word) == IDLE) {
                const uint64_t begun = make(loop, next + 1, end, BEGUN);
                if (!seat.word.compare_exchange_weak(word, begun, std::memory_order_acq_rel)) continue;
                may_lose_core(loop);
                compute(int64_t(next), int64_t(next) + 1);
                may_lose_core(loop);
                finish(seat, begun, int64_t(next), commit);
                spin = 0;
                continue;
            }
            if (!spin && next == end) hand_in(seat, loop, count);
            pause_thread();
            ++spin;
            if (spin % LOOK_EVERY || state_of(word) != IDLE) continue;
            if (take_from_others(me, loop, count)) continue;
            if (spin >= REPEAT_AFTER) repeat_for_others(me, loop, count, compute, commit);
            if (spin >= SPINS) sleep(loop);
        }
    }

    void share_short_parts(int64_t count, Parts body) {
        if (count <= 0) return;
        Member& me = *Member::current;
        const uint64_t loop = me.loops++;
        for (int i = 0; i < me.num_threads && !is_over(loop); ++i) {
            const int id = (me.id + i) % me.num_threads;
            Seat& seat = seats[id];
            const Range of_seat = range(count, id);
            for (;;) {
                uint64_t word = seat.word.load(std::memory_order_acquire);
                if (is_over(loop)) break;
                if (loop_of(word) < loop) {
                    take_seat(seat, word, loop, of_seat);
                    continue;
                }
                const uint64_t next = next_of(word), end = end_of(word);
                if (next == end) break;
                // Half of its own parts, or one of another's.
                const uint64_t taken = i ? 1 : (end - next + 1) / 2;
                const uint64_t rest = i ? make(loop, next, end - taken, IDLE) : make(loop, next + taken, end, IDLE);
                if (!seat.word.compare_exchange_weak(word, rest, std::memory_order_acq_rel)) continue;
                const uint64_t first = i ? end - taken : next;
                may_lose_core(loop);
                body(int64_t(first), int64_t(first + taken));
                may_lose_core(loop);
                add_done(taken, loop, count);
            }
        }
        wait_for(loop);
    }

    // Computes once more what other threads have begun.
    void repeat_for_others(const Member& me, uint64_t loop, int64_t count, Parts compute, Parts commit) {
        for (int i = 1; i < me.num_threads && !is_over(loop); ++i) {
            Seat& seat = seats[(me.id + i) % me.num_threads];
            hand_in(seat, loop, count);
            const uint64_t word = seat.word.load(std::memory_order_acquire);
            if (loop_of(word) != loop || state_of(word) != BEGUN) continue;
            const int64_t part = int64_t(next_of(word)) - 1;
            compute(part, part + 1);
            may_lose_core(loop);
            finish(seat, word, part, commit);
            hand_in(seat, loop, count);
        }
    }

    void wait_for(uint64_t loop) {
        for (int spin = 0; !is_over(loop); ++spin) {
            pause_thread();
            if (spin >= SPINS) sleep(loop);
        }
    }

    void sleep(uint64_t loop) {
        num_asleep.fetch_add(1, std::memory_order_seq_cst);
        const uint32_t seen = turn.load(std::memory_order_seq_cst);
        if (seen <= loop) turn.wait(seen, std::memory_order_seq_cst);
        num_asleep.fetch_sub(1, std::memory_order_relaxed);
    }

    static constexpr int LOOK_EVERY = 8, REPEAT_AFTER = 200, SPINS = 1000;  // pauses of some 20 to 60 ns
    alignas(128) std::atomic<uint64_t> progress{0};  // parts of the loop that are done
    alignas(128) std::atomic<uint32_t> turn{0};      // the loop
    std::atomic<int> num_asleep{0};
    std::unique_ptr<Seat[]> seats;
    int room = 0;
};

class Team::Guest {
public:
    explicit Guest(Team& team) { Member::current = team.seats[omp_get_thread_num()].member; }
    ~Guest() { Member::current = nullptr; }
};

// See Team::run; the team is this thread's.
template <typename Body>
inline void in_team(Body body) {
    static thread_local Team own;
    own.run(body);
}

// See Team::share, of the team of this thread.
template <typename... Bodies>
inline void share(int64_t count, Bodies... bodies) {
    Team& team = Team::of_thread();
    for (int64_t first = 0; first < count; first += Team::MOST)
        team.share(std::min(Team::MOST, count - first), [&](int64_t part) { bodies(first + part); }...);
}

}  // namespace
