// How one forward's attention is divided into tasks.
#pragma once
#include "native_problem.h"

namespace {

// The visible tokens of one forward as segments that are adjacent in the pool, grouped into pieces of about equal work.
struct Piece { int64_t segment_begin, segment_end, num_keys, num_blocks, mass; };  // mass: index of its first sum
struct Plan {
    std::vector<Segment> segments;
    std::vector<Piece> pieces;        // those of one row and head are adjacent
    std::vector<int64_t> first_piece;  // by row and head, then the end
    std::vector<Task> tasks;
    int64_t query_block, mass_size, most_blocks;  // most_blocks: of a piece
};

struct Table {
    const int64_t *blocks, *rows;
    int64_t stride;
    int64_t slot(const Problem& p, int64_t b, int64_t position) const {
        return blocks[rows[b] * stride + position / p.block_size] * p.G * p.block_size + position % p.block_size;
    }
};

struct Ranges {
    const int64_t* data;  // [B, heads, count, 2]
    int64_t count, heads;
    const int64_t* of(int64_t b, int64_t g) const { return data + (b * heads + (heads > 1 ? g : 0)) * count * 2; }
};

// Segments and pieces of one row and head.
void add_pieces(const Problem& p, const Table& table, const int64_t* ranges, int64_t num_ranges, int64_t b, bool cut,
                Plan& plan) {
    bool fresh = true;
    auto begin_of = [&](int64_t r) { return ranges[2 * r]; };
    auto end_of = [&](int64_t r) { return ranges[2 * r + 1]; };
    for (int64_t r = 0; r < num_ranges;) {
        int64_t at = begin_of(r), stop = end_of(r);
        for (++r; r < num_ranges && (begin_of(r) == stop || at == stop); ++r) {  // merge adjacent ranges, skip empty ones
            if (at == stop) at = begin_of(r);
            stop = end_of(r);
        }
        while (at < stop) {
            // Scattered ranges rarely contain a multiple of SHARE, so they are also divided by their number of keys.
            if (fresh || (cut && (at % SHARE == 0 || plan.pieces.back().num_keys >= SHARE)))
                plan.pieces.push_back({int64_t(plan.segments.size()), 0, 0, 0, 0});
            fresh = false;
            const int64_t count = std::min({stop - at, p.block_size - at % p.block_size,
                                            cut ? SHARE - at % SHARE : stop - at});
            plan.segments.push_back({b, at, count, table.slot(p, b, at)});
            Piece& piece = plan.pieces.back();
            piece.segment_end = int64_t(plan.segments.size());
            piece.num_keys += count;
            piece.num_blocks += blocks_touched(at, count);
            at += count;
        }
    }
}

// Queries of a task of a prefill: at most `most`, and so few that all threads have several tasks. Results are the same.
inline int64_t queries_of_chunk(const Problem& p, int64_t most) {
    const int64_t wanted = 4 * omp_get_max_threads();
    while (most > MAX_QUERIES && p.B * p.G * ((p.num_queries() + most - 1) / most) < wanted) most = (most / 2 + 31) / 32 * 32;
    return most;
}

// `query_block`: queries of a task, where there are more than MAX_QUERIES.
void make_plan(const Problem& p, const Table& table, const Ranges& ranges, int64_t query_block, Plan& plan) {
    const int64_t M = p.num_queries();
    plan.query_block = M <= MAX_QUERIES ? M : query_block;
    // In decoding and verification a row is always divided at positions that are multiples of SHARE, and in a prefill
    // never. Therefore a query has the same result, to the bit, whatever other queries are computed with it: a prompt has
    // the same keys and values however it is cut into chunks, and after any part that a prefix cache had. Threads idle in
    // a short chunk of a prompt with few KV heads, which is the price.
    const bool cut = !p.is_prefill();
    plan.segments.clear();
    plan.pieces.clear();
    plan.first_piece.clear();
    plan.tasks.clear();
    plan.mass_size = plan.most_blocks = 0;
    // Pieces of one head are adjacent. A thread that takes several of them reads memory sequentially, and its prefetches
    // beyond the end of one piece fall into the next.
    for (int64_t b = 0; b < p.B; ++b)
        for (int64_t g = 0; g < p.G; ++g) {
            const int64_t begin = int64_t(plan.pieces.size());
            if (g == 0 || ranges.heads > 1) {
                add_pieces(p, table, ranges.of(b, g), ranges.count, b, cut, plan);
            } else {  // the same segments as for the previous head
                for (int64_t i = plan.first_piece.back(); i < begin; ++i) plan.pieces.push_back(Piece(plan.pieces[i]));
            }
            plan.first_piece.push_back(begin);
            for (int64_t i = begin; i < int64_t(plan.pieces.size()); ++i) {
                Piece& piece = plan.pieces[i];
                piece.mass = plan.mass_size;
                plan.mass_size += M * piece.num_blocks;
                for (int64_t m = 0; m < M; m += plan.query_block)
                    plan.tasks.push_back({b, g, m, std::min(plan.query_block, M - m), piece.segment_begin,
                                          piece.segment_end, i, 0, 0, false});
            }
        }
    plan.first_piece.push_back(int64_t(plan.pieces.size()));
    int64_t num_keys = 0;
    for (const Piece& piece : plan.pieces) {
        num_keys += piece.num_keys;
        plan.most_blocks = std::max(plan.most_blocks, piece.num_blocks);
    }
    for (size_t i = 0; i < plan.tasks.size(); ++i) {
        const Task& next = plan.tasks[std::min(i + 1, plan.tasks.size() - 1)];
        const Segment& segment = plan.segments[next.segment_begin];
        plan.tasks[i].next = segment.slot + next.head * p.block_size;
        plan.tasks[i].next_count = segment.count;
        plan.tasks[i].is_far = num_keys * HEAD_SIZE * 4 >= FAR_BYTES;
    }
}

}  // namespace
