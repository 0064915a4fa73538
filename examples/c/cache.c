/* cache.c: the tokens of two requests, written into pages and gathered back.
 *
 * A bf16 cache gives back exactly what was written. An FP8 cache takes 656 bytes per token instead
 * of 1152 and rounds the first 512 values. The calls are the same: the cache's dtype and last
 * dimension say which format it has.
 */
#include "common.h"

enum { REQUESTS = 2, TOKENS = 65, PAGES = 8, BLOCK = 16, WIDTH = 3 };

static int32_t seq_lens[REQUESTS] = {40, 25};
static int32_t starts[REQUESTS] = {0, 40}; /* the first row of each request */

/* The pages of each request, in the order of its tokens. An engine takes any that are free. */
static int32_t block_table[REQUESTS][WIDTH] = {{6, 1, 3}, {4, 0, -1}};

static uint16_t kv_c[TOKENS][512], k_pe[TOKENS][64], gathered[TOKENS][576];
static uint16_t bf16_cache[PAGES][BLOCK][576];
static _Alignas(16) uint8_t fp8_cache[PAGES][BLOCK][656]; /* FP8 rows need this alignment */

/* Returns how many values differ by more than `allowed` from what was written. */
static int
round_trip(const DLTensor *kv_cache, double allowed)
{
    smla_error error;
    int32_t slots[TOKENS]; /* where each token goes: page * BLOCK + row */
    for (int r = 0; r < REQUESTS; r++) {
        for (int p = 0; p < seq_lens[r]; p++) {
            slots[starts[r] + p] = block_table[r][p / BLOCK] * BLOCK + p % BLOCK;
        }
    }
    const smla_concat_and_cache_mla_args write = {.struct_size = sizeof write,
                                                  .kv_c = ARRAY(kv_c, bf16, TOKENS, 512),
                                                  .k_pe = ARRAY(k_pe, bf16, TOKENS, 64),
                                                  .kv_cache = kv_cache,
                                                  .slot_mapping = ARRAY(slots, i32, TOKENS)};
    check(smla_concat_and_cache_mla(&write, &error), &error);

    const smla_gather_kv_cache_args gather = {.struct_size = sizeof gather,
                                              .kv_cache = kv_cache,
                                              .block_table =
                                                  ARRAY(block_table, i32, REQUESTS, WIDTH),
                                              .seq_lens = ARRAY(seq_lens, i32, REQUESTS),
                                              .workspace_starts = ARRAY(starts, i32, REQUESTS),
                                              .out = ARRAY(gathered, bf16, TOKENS, 576)};
    check(smla_gather_kv_cache(&gather, &error), &error);

    int wrong = 0;
    for (int t = 0; t < TOKENS; t++) {
        for (int i = 0; i < 576; i++) {
            const uint16_t written = i < 512 ? kv_c[t][i] : k_pe[t][i - 512];
            wrong += !(fabs(from_bf16(gathered[t][i]) - from_bf16(written)) <= allowed);
        }
    }
    printf("%d values of %d differ by more than %g\n", wrong, TOKENS * 576, allowed);
    return wrong;
}

int
main(void)
{
    fill_bf16(kv_c, sizeof kv_c);
    fill_bf16(k_pe, sizeof k_pe);
    int wrong = round_trip(ARRAY(bf16_cache, bf16, PAGES, BLOCK, 576), 0);
    /* Inputs are at most 1 in magnitude. The widest gap between two FP8 values is 1/14 of the
     * largest, half of which may be lost, and rounding to bf16 loses 1/512 more. */
    wrong += round_trip(ARRAY(fp8_cache, u8, PAGES, BLOCK, 656), 1.0 / 28 + 1.0 / 512);
    return verdict(wrong);
}
