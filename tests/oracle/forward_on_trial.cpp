// A native forward whose threads lose their core at random.
#define TEAM_TRIAL
#include "../../magicdec/runner/native_steps/forward.cpp"

#include <chrono>
#include <random>
#include <thread>

void team_trial(int64_t) {
    static thread_local std::minstd_rand random(omp_get_thread_num() + 1);
    if (random() % 500 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
}
