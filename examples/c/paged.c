/* paged.c: a decode over pages of keys and values, captured once and run again as requests grow.
 *
 * The builder writes which keys each request has into arrays that never move. With is_fixed their
 * sizes fit the longest request, so a step that ran with short ones serves them all: write the new
 * lengths into seq_lens and run it again. Nothing else changes. On the CPU no graph is captured,
 * but arrays and calls are the same.
 */
#include "common.h"

enum { REQUESTS = 3, HEADS = 4, KV_HEADS = 2, DIM = 64, PAGE = 16, WIDTH = 6, STEPS = 4 };
enum { CONTEXT = WIDTH * PAGE, PAGES = REQUESTS * WIDTH };

typedef struct {
    uint16_t out[REQUESTS][HEADS][DIM];
    float lse[REQUESTS][HEADS];
} result;

static uint16_t k_cache[PAGES][PAGE][KV_HEADS][DIM], v_cache[PAGES][PAGE][KV_HEADS][DIM];
static uint16_t q[REQUESTS][HEADS][DIM];
static int32_t req_to_token[REQUESTS][CONTEXT]; /* the slot of each position of a request */
static int32_t seq_lens[REQUESTS], rows[REQUESTS] = {2, 0, 1}; /* each request's row of it */
static const int32_t lengths[STEPS][REQUESTS] = {
    {1, 1, 1}, {17, 40, 3}, {CONTEXT, 41, 0}, {5, CONTEXT, 64}}; /* 0: a place without a request */
static const double scale = 0.125;

/* One step: its metadata, then a layer. A graph of CUDA begins here (cudaStreamBeginCapture on the
 * stream of both calls) and ends behind the last layer (cudaStreamEndCapture). From then on
 * cudaGraphLaunch stands where this function is called. */
static const smla_paged_metadata *
run_step(smla_paged_builder *builder, const smla_paged_build_args *build, result *to)
{
    smla_error error;
    const smla_paged_metadata *step;
    check(smla_paged_builder_build(builder, build, &step, &error), &error);
    const smla_paged_part *const keys = &step->requests;
    DLTensor *const pages = ARRAY((void *)keys->entries, i32, REQUESTS, keys->columns);
    pages->strides = SHAPE(keys->entries_stride, 1);
    const smla_paged_attention_args attend = {
        .struct_size = sizeof attend,
        .q = ARRAY(q, bf16, REQUESTS, HEADS, DIM),
        .k_cache = ARRAY(k_cache, bf16, PAGES, PAGE, KV_HEADS, DIM),
        .v_cache = ARRAY(v_cache, bf16, PAGES, PAGE, KV_HEADS, DIM),
        .block_table = pages,
        .cache_seqlens = ARRAY((void *)keys->cache_seqlens, i32, REQUESTS),
        .out = ARRAY(to->out, bf16, REQUESTS, HEADS, DIM),
        .lse = ARRAY(to->lse, fp32, REQUESTS, HEADS),
        .softmax_scale = scale,
        .max_seqlen_k = keys->max_seq_len_k,
        .is_causal = 1};
    check(smla_paged_attention(&attend, &error), &error);
    return step;
}

int
main(void)
{
    smla_error error;
    fill_bf16(k_cache, sizeof k_cache);
    fill_bf16(v_cache, sizeof v_cache);
    fill_bf16(q, sizeof q);
    for (int i = 0; i < REQUESTS * CONTEXT; i++) { /* the pages of a row are REQUESTS apart */
        const int row = i / CONTEXT, position = i % CONTEXT;
        req_to_token[row][position] = (position / PAGE * REQUESTS + row) * PAGE + position % PAGE;
    }
    smla_paged_builder *captured, *fresh;
    const smla_paged_config config = {.struct_size = sizeof config,
                                      .max_bs = REQUESTS,
                                      .max_num_tokens = REQUESTS,
                                      .max_context_len = CONTEXT,
                                      .page_size = PAGE,
                                      .device = {kDLCPU, 0}};
    check(smla_paged_builder_create(&config, &captured, &error), &error);
    check(smla_paged_builder_create(&config, &fresh, &error), &error);
    smla_paged_build_args eager = {.struct_size = sizeof eager,
                                   .seq_lens = ARRAY(seq_lens, i32, REQUESTS),
                                   .req_pool_indices = ARRAY(rows, i32, REQUESTS),
                                   .req_to_token = ARRAY(req_to_token, i32, REQUESTS, CONTEXT),
                                   .num_reqs = REQUESTS,
                                   .mode = SMLA_MODE_DECODE};
    smla_paged_build_args fixed = eager;
    fixed.is_fixed = 1;
    fixed.num_tokens = REQUESTS;

    const int32_t *pages = NULL; /* where the first step has its table */
    int wrong = 0;
    for (int s = 0; s < STEPS; s++) {
        result got, want;
        memcpy(seq_lens, lengths[s], sizeof seq_lens);
        const smla_paged_metadata *const step = run_step(captured, &fixed, &got);
        pages = pages == NULL ? step->requests.entries : pages;
        wrong += step->requests.entries != pages || step->requests.columns != WIDTH;
        run_step(fresh, &eager, &want);
        wrong += memcmp(&got, &want, sizeof got) != 0; /* every bit */
        printf("lengths %2d %2d %2d: lse %.4f %.4f %.4f\n", seq_lens[0], seq_lens[1], seq_lens[2],
               got.lse[0][0], got.lse[1][0], got.lse[2][0]);
    }
    smla_paged_builder_destroy(captured);
    smla_paged_builder_destroy(fresh);
    return verdict(wrong);
}
