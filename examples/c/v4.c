/* v4.c: a step of DeepSeek V4 with one decoded token, and a layer of it. The token sees the last
 * 128 tokens (a sliding window) and some compressed rows, each of which stands for a group of four
 * tokens. Both caches hold 584 bytes per row (fp8_v4), and a sink per head takes a part of the
 * softmax. The builder plans the step once; every layer then runs it with its own q and caches.
 *
 *   make lib && export PKG_CONFIG_PATH=build/lib/pkgconfig
 *   cc -std=c11 examples/c/v4.c $(pkg-config --cflags --libs sparse_mla) \
 *       -Wl,-rpath,$PWD/build/lib -lm -o v4 && ./v4
 */
#include "common.h"

enum {
    TOKENS = 300,
    GROUPS = TOKENS / 4, /* complete groups, which are the compressed rows */
    WINDOW = 128,
    TOPK = 16, /* compressed rows that the token sees */
    HEADS = 4,
    BLOCK = 64,
    PAGES = 5,       /* pages of the window's cache, which keeps all tokens here */
    GROUP_PAGES = 2, /* pages of the compressed cache */
};

static uint16_t rows[TOKENS][512], compressed[GROUPS][512], q[HEADS][512], out[HEADS][512];
static _Alignas(8) uint8_t window_cache[PAGES][BLOCK][584];
static _Alignas(8) uint8_t compressed_cache[GROUP_PAGES][BLOCK][584];
static int32_t pages[PAGES] = {2, 0, 4, 1, 3}, group_pages[GROUP_PAGES] = {1, 0};
static float lse[HEADS], keys[(PAGES + GROUP_PAGES) * BLOCK][512];

/* The place of row i in a cache: a page of the request's table, and a row of the page. */
static int32_t
slot_of(const int32_t *table, int i)
{
    return table[i / BLOCK] * BLOCK + i % BLOCK;
}

/* Writes rows to the slots of a cache: data to their place among the page's first 64 * 576 bytes,
 * the scales behind them. */
static void
insert_rows(uint16_t *source, int count, const int32_t *table, const DLTensor *cache)
{
    int64_t slots[TOKENS];
    for (int i = 0; i < count; i++) {
        slots[i] = slot_of(table, i);
    }
    smla_error error;
    const DLDataType i64 = {kDLInt, 64, 1};
    const smla_insert_k_cache_args insert = {.struct_size = sizeof insert,
                                             .k = ARRAY(source, bf16, count, 512),
                                             .k_cache = cache,
                                             .slot_mapping = ARRAY(slots, i64, count)};
    check(smla_quantize_and_insert_k_cache(&insert, &error), &error);
}

/* The values that a cache stands for. */
static void
read_keys(const DLTensor *cache, int count, float (*to)[512])
{
    smla_error error;
    const smla_dequantize_kv_cache_args dequantize = {.struct_size = sizeof dequantize,
                                                      .kv_cache = cache,
                                                      .out = ARRAY(to, fp32, count, BLOCK, 512)};
    check(smla_dequantize_kv_cache(&dequantize, &error), &error);
}

int
main(void)
{
    smla_error error;
    const double scale = 1 / sqrt(512);
    fill_bf16(rows, sizeof rows);
    fill_bf16(compressed, sizeof compressed); /* the layer's compressor would make these */
    fill_bf16(q, sizeof q);
    const DLTensor *const window = ARRAY(window_cache, u8, PAGES, BLOCK, 584);
    const DLTensor *const groups = ARRAY(compressed_cache, u8, GROUP_PAGES, BLOCK, 584);
    insert_rows(rows[0], TOKENS, pages, window);
    insert_rows(compressed[0], GROUPS, group_pages, groups);

    /* Once, with the limits of all steps to come. */
    smla_v4_builder *builder;
    const smla_v4_config config = {.struct_size = sizeof config,
                                   .num_heads = HEADS,
                                   .window = WINDOW,
                                   .topk_tokens = TOPK,
                                   .block_size = 4 * BLOCK,
                                   .swa_block_size = BLOCK,
                                   .max_num_seqs = 1,
                                   .max_num_batched_tokens = 1,
                                   .max_model_len = TOKENS,
                                   .num_ratios = 1,
                                   .compress_ratios = {SMLA_V4_INDEXED_RATIO},
                                   .state_block_sizes = {4},
                                   .softmax_scale = scale,
                                   .kv_format = SMLA_KV_FP8_V4,
                                   .compressed_kv_format = SMLA_KV_FP8_V4,
                                   .device = {kDLCPU, 0}};
    check(smla_v4_builder_create(&config, &builder, &error), &error);

    /* Once per step. */
    const smla_v4_metadata *plan;
    const int32_t query_starts[] = {0, 1}, seq_lens[] = {TOKENS};
    int32_t slot[] = {slot_of(pages, TOKENS - 1)};
    const smla_v4_build_args build = {.struct_size = sizeof build,
                                      .num_reqs = 1,
                                      .num_actual_tokens = 1,
                                      .max_seq_len = TOKENS,
                                      .query_start_loc_cpu = query_starts,
                                      .seq_lens_cpu = seq_lens,
                                      .slot_mapping = ARRAY(slot, i32, 1),
                                      .block_table = ARRAY(pages, i32, 1, PAGES),
                                      .compressed_tables = {
                                          ARRAY(group_pages, i32, 1, GROUP_PAGES)}};
    check(smla_v4_builder_build(builder, &build, &plan, &error), &error);
    printf("position %d sees %d tokens and up to %d compressed rows\n", plan->positions[0],
           plan->swa_lens[0], plan->groups[0].context_lens[0]);

    /* Once per layer of the step. An indexer chooses compressed rows, by their numbers. */
    int32_t chosen[TOPK];
    for (int i = 0; i < TOPK; i++) {
        chosen[i] = (i * 29 + 3) % GROUPS;
    }
    float sinks[HEADS] = {-1, 0, 4, 2.5f};
    const smla_v4_attend_args attend = {.struct_size = sizeof attend,
                                        .builder = builder,
                                        .compress_ratio = SMLA_V4_INDEXED_RATIO,
                                        .q = ARRAY(q, bf16, 1, HEADS, 512),
                                        .swa_kv_cache = window,
                                        .compressed_kv_cache = groups,
                                        .topk_indices = ARRAY(chosen, i32, 1, TOPK),
                                        .attn_sink = ARRAY(sinks, fp32, HEADS),
                                        .out = ARRAY(out, bf16, 1, HEADS, 512),
                                        .lse = ARRAY(lse, fp32, 1, HEADS)};
    check(smla_v4_attend(&attend, &error), &error);
    smla_v4_builder_destroy(builder);
    printf("out[0][0] = %.4f, lse[0] = %.4f\n", from_bf16(out[0][0]), lse[0]);

    /* Compare with the formula over the rows of both caches, one behind the other. */
    int32_t seen[WINDOW + TOPK];
    for (int i = 0; i < WINDOW; i++) {
        seen[i] = slot_of(pages, TOKENS - WINDOW + i);
    }
    for (int i = 0; i < TOPK; i++) {
        seen[WINDOW + i] = PAGES * BLOCK + slot_of(group_pages, chosen[i]);
    }
    read_keys(window, PAGES, keys);
    read_keys(groups, GROUP_PAGES, keys + PAGES * BLOCK);
    int wrong = 0;
    for (int h = 0; h < HEADS; h++) {
        wrong += count_wrong(out[h], q[h], keys[0], 512, seen, WINDOW + TOPK, scale, exp(sinks[h]),
                             1.0 / 256);
    }
    return verdict(wrong);
}
