// Linear layers and attention of the numbers on standard input, for tests of a CPU that this machine emulates.
#include <cstdio>
#include <vector>

#include "../../magicdec/attention/cpp/native.cpp"
#include "../../magicdec/model/linear/packed.cpp"

template <typename T>
std::vector<T> read(size_t count) {
    std::vector<T> numbers(count);
    if (std::fread(numbers.data(), sizeof(T), count, stdin) != count) std::abort();
    return numbers;
}
template <typename T>
void write(const std::vector<T>& numbers) { std::fwrite(numbers.data(), sizeof(T), numbers.size(), stdout); }

int main() {
    // R, N, K; x, weight and bias in bfloat16; numbers of K / 128 * 128 inputs in groups, and scales, in int4 and int8.
    const auto size = read<int64_t>(3);
    const int64_t R = size[0], N = size[1], K = size[2], blocks = (N + 63) / 64;
    auto x = read<uint16_t>(R * K), weight = read<uint16_t>(N * K), bias = read<uint16_t>(N);
    auto room = std::vector<float>(R * K);
    std::vector<uint32_t> packed(blocks * 64 * K / 2);
    std::vector<uint16_t> out(R * N);
    magicdec_pack(weight.data(), N, K, packed.data());
    magicdec_linear(x.data(), R, packed.data(), N, K, bias.data(), room.data(), out.data());
    write(out);
    const int64_t whole = K / 128 * 128;
    for (const groups::Format& format : {groups::Format{4, 32, groups::BFLOAT16, 0, -8}, {8, 128, groups::BFLOAT16, 0, -128}}) {
        auto numbers = read<int8_t>(N * whole);
        auto scales = read<uint16_t>(N * whole / format.group);
        std::vector<uint32_t> packed_groups(blocks * whole / format.group * format.words());
        const groups::Weights w{packed_groups.data(), format};
        magicdec_pack_groups(numbers.data(), scales.data(), nullptr, N, whole, &w.format, packed_groups.data());
        for (int64_t rounds : {1, 0}) {
            magicdec_linear_groups(x.data(), R, &w, N, whole, rounds, bias.data(), room.data(), out.data());
            write(out);
        }
    }
    // S tokens of one row, H query and G KV heads: q, k, v in bfloat16, which are appended to an empty cache.
    const auto heads = read<int64_t>(3);
    const int64_t S = heads[0], H = heads[1], G = heads[2], D = HEAD_SIZE, block = (S + 63) / 64 * 64;
    auto q = read<uint16_t>(S * H * D), k = read<uint16_t>(S * G * D), v = read<uint16_t>(S * G * D);
    std::vector<uint16_t> k_pool(G * block * D), v_pool(G * block * D), mixed(S * H * D);
    std::vector<float> lse(S * H);
    const int64_t table[1] = {0}, rows[1] = {0}, ranges[2] = {0, S};
    for (int64_t at = 0, count; at < S; at += count) {  // a prefill, then some tokens at a time
        count = std::min<int64_t>(at ? 5 : S / 2, S - at);
        const int64_t seen[2] = {0, at + count}, lengths[1] = {at};
        const int64_t shape[18] = {1, count, H, G, D, block, 1, 1, 0, H * D, 0, G * D, 0, G * D, 1, 0, 0, 0};
        if (magicdec_attention(BFLOAT16, 0, shape, &q[at * H * D], &k[at * G * D], &v[at * G * D], k_pool.data(),
                               v_pool.data(), table, rows, lengths, seen, nullptr, nullptr,
                               &mixed[at * H * D], &lse[at * H], nullptr))
            return 1;
    }
    write(mixed);
    return ranges[0];
}
