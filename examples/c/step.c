/* step.c: one layer's step of an engine, over a batch of two decodes and one prefill.
 *
 * The builder plans the step once; every layer then runs it with its own q and cache. The indices
 * are positions inside each request, as an indexer gives them, and the step finds their slots. The
 * builder owns the scratch memory. An FP8 cache has another kv_format and rows of 656 bytes.
 */
#include "common.h"

enum { HEADS = 4, TOPK = 8, BLOCK = 16, PAGES = 12, REQUESTS = 3, WIDTH = 5, NEW = 8 };

static int32_t seq_lens[REQUESTS] = {70, 5, 40};          /* tokens, with the new ones */
static int32_t query_starts[REQUESTS + 1] = {0, 1, 2, 8}; /* new tokens: 1, 1 and 6 */
static int32_t block_table[REQUESTS][WIDTH] = {{9, 2, 11, 0, 7},
                                               {4, -1, -1, -1, -1},
                                               {1, 8, 5, -1, -1}}; /* pages, -1: none */

static uint16_t kv_cache[PAGES][BLOCK][576], q[NEW][HEADS][576], out[NEW][HEADS][512];
static float lse[NEW][HEADS], keys[PAGES * BLOCK][576];
static int32_t positions[NEW][TOPK], slots[NEW][TOPK];

static int32_t
slot_of(int request, int position)
{
    return block_table[request][position / BLOCK] * BLOCK + position % BLOCK;
}

int
main(void)
{
    smla_error error;
    const double scale = 1 / sqrt(192);
    fill_bf16(kv_cache, sizeof kv_cache); /* cache.c shows how tokens are written */
    fill_bf16(q, sizeof q);
    for (int r = 0; r < REQUESTS; r++) {
        for (int t = query_starts[r]; t < query_starts[r + 1]; t++) {
            const int visible = seq_lens[r] - (query_starts[r + 1] - 1 - t); /* itself included */
            for (int k = 0; k < TOPK; k++) {
                positions[t][k] = (k * 7 + t) % visible;
                slots[t][k] = slot_of(r, positions[t][k]);
            }
        }
    }
    const DLTensor *const cache = ARRAY(kv_cache, bf16, PAGES, BLOCK, 576);

    /* Once, with the limits of all steps to come. */
    smla_builder *builder;
    const smla_builder_config config = {.struct_size = sizeof config,
                                        .num_heads = HEADS,
                                        .block_size = BLOCK,
                                        .topk_tokens = TOPK,
                                        .max_num_seqs = REQUESTS,
                                        .max_num_batched_tokens = NEW,
                                        .max_model_len = WIDTH * BLOCK,
                                        .kv_format = SMLA_KV_BFLOAT16,
                                        .device = {kDLCPU, 0}};
    check(smla_builder_create(&config, &builder, &error), &error);

    /* Once per step. */
    const smla_metadata *plan;
    const smla_build_args build = {.struct_size = sizeof build,
                                   .query_start_loc_cpu = query_starts,
                                   .seq_lens_cpu = seq_lens,
                                   .block_table = ARRAY(block_table, i32, REQUESTS, WIDTH),
                                   .num_reqs = REQUESTS,
                                   .num_actual_tokens = NEW};
    check(smla_builder_build(builder, &build, &plan, &error), &error);
    printf("path %s, %lld decodes, %lld prefills\n", smla_path_name(plan->path),
           (long long)plan->split.num_decodes, (long long)plan->split.num_prefills);

    /* Once per layer of the step. */
    const smla_forward_args forward = {.struct_size = sizeof forward,
                                       .builder = builder,
                                       .q = ARRAY(q, bf16, NEW, HEADS, 576),
                                       .kv_cache = cache,
                                       .topk_indices = ARRAY(positions, i32, NEW, TOPK),
                                       .out = ARRAY(out, bf16, NEW, HEADS, 512),
                                       .lse = ARRAY(lse, fp32, NEW, HEADS),
                                       .softmax_scale = scale};
    check(smla_forward(&forward, &error), &error);
    smla_builder_destroy(builder);

    /* Compare one head of every token with the formula over the values of the cache. */
    const smla_dequantize_kv_cache_args dequantize = {.struct_size = sizeof dequantize,
                                                      .kv_cache = cache,
                                                      .out = ARRAY(keys, fp32, PAGES, BLOCK, 576)};
    check(smla_dequantize_kv_cache(&dequantize, &error), &error);
    int wrong = 0;
    for (int t = 0; t < NEW; t++) {
        wrong += count_wrong(out[t][0], q[t][0], keys[0], 576, slots[t], TOPK, scale, 0, 1.0 / 256);
    }
    return verdict(wrong);
}
