// Loops that a team of threads shares, as a forward's do: each reads what the one before wrote, and memory is used again. Threads
// sleep at random, so that others are ahead of them by many loops.
#define TEAM_TRIAL
#include "../../magicdec/kernels/team.h"

#include <chrono>
#include <random>
#include <thread>
#include <vector>

static thread_local std::minstd_rand random_of_thread;
static int64_t percent, most_us;

void team_trial(int64_t) {
    if (int64_t(random_of_thread() % 1000) < 10 * percent)
        std::this_thread::sleep_for(std::chrono::microseconds(random_of_thread() % most_us));
}

// Numbers [width] after `steps` steps of `loops` loops each, as one thread computes them.
static uint64_t mixed(uint64_t x, uint64_t y) { return (x ^ y * 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u + (x >> 29); }
static void expected(int64_t width, int64_t steps, int64_t loops, std::vector<uint64_t>& x) {
    std::vector<uint64_t> y(width);
    for (int64_t step = 0; step < steps; ++step) {
        x[step % width] += step;
        for (int64_t loop = 0; loop < loops; ++loop) {
            for (int64_t i = 0; i < width; ++i) y[i] = mixed(x[i], x[(i + loop) % width]);
            for (int64_t i = 0; i < width; ++i) x[i] = y[i] + x[i];
            x[loop % width] ^= loop;
            x[0] += 7;
        }
    }
}

// Returns the number of `rounds` whose numbers were wrong. `repeated`: parts that were computed more than once.
extern "C" int64_t try_team(int64_t threads, int64_t width, int64_t steps, int64_t loops, int64_t rounds, int64_t seed,
                            int64_t share_of_sleeps, int64_t longest_us, int64_t* repeated) {
    percent = share_of_sleeps, most_us = longest_us;
    omp_set_num_threads(int(threads));
    int64_t wrong = 0;
    std::atomic<int64_t> computed{0}, committed{0};
    Team team;
    for (int64_t round = 0; round < rounds; ++round) {
        std::vector<uint64_t> x(width, round), y(width), right(x);
        team.run([&] {
            random_of_thread.seed(uint32_t(seed + 1000 * round + omp_get_thread_num()));
            for (int64_t step = 0; step < steps; ++step) {
                team.meet();
                team.by_one([&] { x[step % width] += step; });
                for (int64_t loop = 0; loop < loops; ++loop) {
                    uint64_t found = 0;
                    share(
                        width,
                        [&](int64_t i) {
                            ++computed;
                            found = mixed(x[i], x[(i + loop) % width]);
                        },
                        [&](int64_t i) {
                            ++committed;
                            y[i] = found;
                        });
                    share(width, [&](int64_t i) { x[i] += y[i]; });
                    team.by_one([&] { x[loop % width] ^= loop; });
                    team.by_first([&] { x[0] += 7; });
                }
            }
        });
        expected(width, steps, loops, right);
        wrong += x != right;
    }
    *repeated = computed - committed;
    return wrong;
}
