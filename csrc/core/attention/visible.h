/* visible.h: the keys that a query sees, and the one rule by which masks choose them. Whatever the
 * mask of dense attention, a token sees one range of its request's keys. So causal order, windows,
 * chunks, padding and context parallelism become two limits per token, and no kernel knows a mask.
 * Compiles as C and as CUDA.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "core/numeric.h"

/* Context parallelism: of every `interleave * size` positions of a request, rank r has those from
 * r * interleave on, `interleave` of them. size 0: one rank has all. */
typedef struct smla_rank_share {
    int32_t rank;
    int32_t size;
    int32_t interleave;
} smla_rank_share;

typedef struct smla_range_rule {
    int64_t left;  /* keys before the token's position that it sees; -1: all */
    int64_t right; /* keys behind it; -1: all, 0: causal */
    int64_t chunk; /* it sees no key of other chunks of so many positions; 0: no chunks */
    smla_rank_share share;
} smla_range_rule;

/* Keys begin...end - 1. */
typedef struct smla_key_range {
    int64_t begin;
    int64_t end;
} smla_key_range;

SMLA_HOST_DEVICE static inline int64_t
smla_clamp_int64(int64_t x, int64_t least, int64_t most)
{
    return x < least ? least : x > most ? most : x;
}

/* How many of a request's first `count` positions the rank has. */
SMLA_HOST_DEVICE static inline int64_t
smla_count_own(const smla_rank_share *share, int64_t count)
{
    if (share->size == 0) {
        return count;
    }
    const int64_t period = (int64_t)share->size * share->interleave;
    const int64_t rest = count % period - (int64_t)share->rank * share->interleave;
    return count / period * share->interleave + smla_clamp_int64(rest, 0, share->interleave);
}

/* The number of a position >= 0 among the rank's own; -1 if another rank has it. Callers divide,
 * because kernels do it by multiplying: block = position / interleave, round = block / size. */
SMLA_HOST_DEVICE static inline int64_t
smla_own_position(const smla_rank_share *share, int64_t position, int64_t block, int64_t round)
{
    const bool is_own = block - round * share->size == share->rank;
    return is_own ? round * share->interleave + (position - block * share->interleave) : -1;
}

/* n / by, rounded down. */
SMLA_HOST_DEVICE static inline int64_t
smla_floor_divide(int64_t n, int64_t by)
{
    return n / by - (n % by < 0);
}

/* The keys that the token at `position` sees of a request of num_keys keys. With a rank's share,
 * the numbers of the rank's own keys. */
SMLA_HOST_DEVICE static inline smla_key_range
smla_find_key_range(const smla_range_rule *rule, int64_t position, int64_t num_keys)
{
    smla_key_range range = {0, num_keys};
    if (rule->left >= 0) {
        range.begin = position - rule->left;
    }
    if (rule->right >= 0) {
        range.end = position + rule->right + 1;
    }
    if (rule->chunk > 0) {
        const int64_t first = smla_floor_divide(position, rule->chunk) * rule->chunk;
        range.begin = first > range.begin ? first : range.begin;
        range.end = first + rule->chunk < range.end ? first + rule->chunk : range.end;
    }
    range.begin = smla_count_own(&rule->share, smla_clamp_int64(range.begin, 0, num_keys));
    range.end = smla_count_own(&rule->share, smla_clamp_int64(range.end, 0, num_keys));
    return range;
}

/* The requests of a call, whose query tokens lie behind each other. */
typedef struct smla_requests {
    int64_t num_tokens;          /* T */
    int64_t num_reqs;            /* R */
    const int32_t *query_starts; /* [R + 1]; NULL: each request has query_len tokens */
    int64_t query_starts_stride;
    int64_t query_len;
    const int32_t *seq_lens; /* [R]: their keys; unused where keys are ragged (keys.h) */
    int64_t seq_lens_stride;
} smla_requests;

/* The number of the first query token of a request. Numbers on a device are unchecked, so they are
 * clamped. */
SMLA_HOST_DEVICE static inline int64_t
smla_query_start(const smla_requests *reqs, int64_t req)
{
    const int64_t start = reqs->query_starts == NULL
                              ? req * reqs->query_len
                              : reqs->query_starts[req * reqs->query_starts_stride];
    return smla_clamp_int64(start, 0, reqs->num_tokens);
}

/* The keys of a request. */
SMLA_HOST_DEVICE static inline int64_t
smla_seq_len(const smla_requests *reqs, int64_t req)
{
    const int64_t length = reqs->seq_lens[req * reqs->seq_lens_stride];
    return length < 0 ? 0 : length;
}

/* What the queries of all requests see. */
typedef struct smla_visible {
    smla_requests reqs;
    smla_range_rule rule;
    int32_t least_split_columns; /* what a split of a request's keys has at least */
} smla_visible;
