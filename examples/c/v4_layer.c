/* v4_layer.c: a whole layer of DeepSeek V4, from hidden states to hidden states. It has compress
 * ratio 4 and an indexer: a token sees a window of the last tokens, and those groups of four tokens
 * that the indexer chooses. run_layer is the list of calls. Dense projections belong to the caller;
 * here they are plain loops.
 *
 * A request runs twice: a prompt and then token by token, and all at once. Both must give the same
 * bits. Attention is compared with the formula. v4.c has the builder's fields in detail.
 */
#include "common.h"

enum {
    HIDDEN = 32,
    Q_LORA = 64,
    HEADS = 4,
    O_GROUPS = 2, /* groups of heads, each with a projection of its own */
    RANK = 16,
    INDEX_HEADS = 4,
    RATIO = SMLA_V4_INDEXED_RATIO,
    WINDOW = 16,
    TOPK = 4,
    BLOCK = 8, /* rows per page of every cache */
    PROMPT = 40,
    TOKENS = 43,
    PAGES = 6,
    GROUP_PAGES = 2, /* a row of these pages is a group of four tokens */
    O_SIZE = HEADS / O_GROUPS * 512,
};

/* The engine's pages, and what is cached in them. One table serves the window and the states, which
 * all have a row per token; the other one serves the groups and their keys for the indexer. */
static int32_t pages[PAGES] = {2, 0, 5, 4, 1, 3}, group_pages[GROUP_PAGES] = {1, 0};
static struct {
    _Alignas(8) uint8_t window[PAGES][BLOCK][584], groups[GROUP_PAGES][BLOCK][584];
    _Alignas(8) uint8_t index[GROUP_PAGES][BLOCK][132]; /* the indexer's keys */
    float states[PAGES][BLOCK][2 * 1024], index_states[PAGES][BLOCK][2 * 256];
} cached;

/* The model's weights. */
static struct {
    uint16_t wq_a[HIDDEN][Q_LORA], wkv[HIDDEN][512], wq_b[Q_LORA][HEADS * 512];
    uint16_t gate_kv[HIDDEN][1024], gate_score[HIDDEN][1024];
    uint16_t index_kv[HIDDEN][256], index_score[HIDDEN][256];
    uint16_t index_wq_b[Q_LORA][INDEX_HEADS * 128], index_weights_proj[HIDDEN][INDEX_HEADS];
    uint16_t wo_a[O_GROUPS][RANK][O_SIZE], wo_b[O_GROUPS * RANK][HIDDEN];
} w;
static uint8_t wo_a_e4m3[O_GROUPS][RANK][O_SIZE];
static float wo_a_scale[O_GROUPS][1][O_SIZE / 128]; /* one per 128 x 128 weights */
static uint16_t ones[512];                          /* the weights of all norms */
static float ape[RATIO][1024], index_ape[RATIO][256], rope_table[TOKENS][64];
static float sinks[HEADS] = {-1, 0, 4, 2.5f};

static int32_t slots[TOKENS]; /* where the step's tokens have their rows of the window's cache */

/* What lies between the calls. */
static uint16_t qr[TOKENS][Q_LORA], kv[TOKENS][512], q[TOKENS][HEADS][512];
static float gate_kv[TOKENS][1024], gate_score[TOKENS][1024];
static float index_kv[TOKENS][256], index_score[TOKENS][256];
static uint16_t index_q[TOKENS][INDEX_HEADS][128], index_weights[TOKENS][INDEX_HEADS];
static uint8_t index_q_e4m3[TOKENS][INDEX_HEADS][128];
static float head_weights[TOKENS][INDEX_HEADS];
static int32_t topk[TOKENS][TOPK], chosen_slots[TOKENS][TOPK], lens[TOKENS];
static uint16_t out[TOKENS][HEADS][512], z[TOKENS][O_GROUPS * RANK];
static float lse[TOKENS][HEADS], o_scale[TOKENS + 3][O_GROUPS][O_SIZE / 128];
static uint8_t o_e4m3[TOKENS][O_GROUPS][O_SIZE];
static uint16_t x[TOKENS][HIDDEN], y[2][TOKENS][HIDDEN];

/* The place of row i of the request: a page of its table, and a row of the page. */
static int32_t
slot_of(const int32_t *table, int i)
{
    return table[i / BLOCK] * BLOCK + i % BLOCK;
}

static uint16_t
to_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); /* to nearest, ties to even */
}

/* to = from . weight, [T, n] . [n, m], as bf16 or, for the compressors, as fp32. */
static void
project(const void *from, const void *weight, int num_tokens, int n, int m, void *to, int is_fp32)
{
    for (int t = 0; t < num_tokens; t++) {
        for (int j = 0; j < m; j++) {
            float sum = 0;
            for (int i = 0; i < n; i++) {
                sum += from_bf16(((const uint16_t *)from)[t * n + i]) *
                       from_bf16(((const uint16_t *)weight)[i * m + j]);
            }
            sum /= sqrtf((float)n); /* keeps random values as large as they are */
            if (is_fp32) {
                ((float *)to)[t * m + j] = sum;
            } else {
                ((uint16_t *)to)[t * m + j] = to_bf16(sum);
            }
        }
    }
}

/* One layer of the step that was built last. */
static void
run_layer(smla_v4_builder *builder, const smla_v4_metadata *plan, uint16_t (*from)[HIDDEN],
          uint16_t (*to)[HIDDEN])
{
    smla_error error;
    const int T = (int)plan->num_actual_tokens;
    const double eps = 1e-6;
    const smla_v4_group *const groups = &plan->groups[0], *const index_groups = &plan->groups[1];
    const DLTensor *const positions = ARRAY((void *)plan->positions, i32, T);
    const DLTensor *const requests = ARRAY((void *)plan->req_id_per_token, i32, T);
    const DLTensor *const angles = ARRAY(rope_table, fp32, TOKENS, 64);

    /* 1. The latent queries and the keys: norm.h. */
    project(from, w.wq_a, T, HIDDEN, Q_LORA, qr, 0);
    project(from, w.wkv, T, HIDDEN, 512, kv, 0);
    const smla_fused_q_kv_rmsnorm_args norm = {.struct_size = sizeof norm,
                                               .q = ARRAY(qr, bf16, T, Q_LORA),
                                               .kv = ARRAY(kv, bf16, T, 512),
                                               .q_weight = ARRAY(ones, bf16, Q_LORA),
                                               .kv_weight = ARRAY(ones, bf16, 512),
                                               .q_out = ARRAY(qr, bf16, T, Q_LORA),
                                               .kv_out = ARRAY(kv, bf16, T, 512),
                                               .eps = eps};
    check(smla_fused_q_kv_rmsnorm(&norm, &error), &error);

    /* 2. Queries, in place, and the keys' rows of the window's cache: norm.h. */
    project(qr, w.wq_b, T, Q_LORA, HEADS * 512, q, 0);
    const smla_qnorm_insert_args insert = {.struct_size = sizeof insert,
                                           .q = ARRAY(q, bf16, T, HEADS, 512),
                                           .kv = ARRAY(kv, bf16, T, 512),
                                           .positions = positions,
                                           .rope_table = angles,
                                           .kv_cache = ARRAY(cached.window, u8, PAGES, BLOCK, 584),
                                           .slot_mapping = ARRAY(slots, i32, T),
                                           .eps = eps};
    check(smla_fused_qnorm_rope_kv_insert(&insert, &error), &error);

    /* 3. The compressor: the tokens' states, and a row for each group that they complete:
     * compressor.h. */
    project(from, w.gate_kv, T, HIDDEN, 1024, gate_kv, 1);
    project(from, w.gate_score, T, HIDDEN, 1024, gate_score, 1);
    const smla_compress_args compress = {
        .struct_size = sizeof compress,
        .state = ARRAY(cached.states, fp32, PAGES, BLOCK, 2 * 1024),
        .block_table = ARRAY(pages, i32, 1, PAGES),
        .req_id_per_token = requests,
        .positions = positions,
        .slot_mapping = ARRAY((void *)groups->state_slot_mapping, i32, T),
        .kv_cache = ARRAY(cached.groups, u8, GROUP_PAGES, BLOCK, 584),
        .kv_slot_mapping = ARRAY((void *)groups->slot_mapping, i32, T),
        .norm_weight = ARRAY(ones, bf16, 512),
        .rope_table = angles,
        .eps = eps,
        .ratio = RATIO,
        .kv = ARRAY(gate_kv, fp32, T, 1024),
        .score = ARRAY(gate_score, fp32, T, 1024),
        .ape = ARRAY(ape, fp32, RATIO, 1024)};
    check(smla_compress_norm_rope_store(&compress, &error), &error);

    /* 4. The indexer's compressor, which is the same with rows of 128 values. */
    project(from, w.index_kv, T, HIDDEN, 256, index_kv, 1);
    project(from, w.index_score, T, HIDDEN, 256, index_score, 1);
    smla_compress_args index_compress = compress;
    index_compress.state = ARRAY(cached.index_states, fp32, PAGES, BLOCK, 2 * 256);
    index_compress.slot_mapping = ARRAY((void *)index_groups->state_slot_mapping, i32, T);
    index_compress.kv_cache = ARRAY(cached.index, u8, GROUP_PAGES, BLOCK, 132);
    index_compress.kv_slot_mapping = ARRAY((void *)index_groups->slot_mapping, i32, T);
    index_compress.norm_weight = ARRAY(ones, bf16, 128);
    index_compress.kv = ARRAY(index_kv, fp32, T, 256);
    index_compress.score = ARRAY(index_score, fp32, T, 256);
    index_compress.ape = ARRAY(index_ape, fp32, RATIO, 256);
    check(smla_compress_norm_rope_store(&index_compress, &error), &error);

    /* 5. The indexer's queries: indexer.h. */
    project(qr, w.index_wq_b, T, Q_LORA, INDEX_HEADS * 128, index_q, 0);
    project(from, w.index_weights_proj, T, HIDDEN, INDEX_HEADS, index_weights, 0);
    const smla_index_query_args query = {.struct_size = sizeof query,
                                         .q = ARRAY(index_q, bf16, T, INDEX_HEADS, 128),
                                         .weights = ARRAY(index_weights, bf16, T, INDEX_HEADS),
                                         .positions = positions,
                                         .rope_table = angles,
                                         .out = ARRAY(index_q_e4m3, u8, T, INDEX_HEADS, 128),
                                         .out_weights = ARRAY(head_weights, fp32, T, INDEX_HEADS),
                                         .softmax_scale = 1 / sqrt(128),
                                         .head_scale = 1 / sqrt(INDEX_HEADS)};
    check(smla_fused_indexer_q_rope_quant(&query, &error), &error);

    /* 6. The choice of groups, by number and as slots of the compressed cache: indexer.h. */
    int64_t bytes;
    const smla_lightning_workspace_args size = {.struct_size = sizeof size,
                                                .num_tokens = T,
                                                .max_context = GROUP_PAGES * BLOCK,
                                                .k = TOPK,
                                                .max_logits_bytes = 1 << 29,
                                                .device = {kDLCPU, 0}};
    check(smla_lightning_indexer_workspace_size(&size, &bytes, &error), &error);
    void *const workspace = allocate(bytes);
    const smla_lightning_indexer_args choose = {
        .struct_size = sizeof choose,
        .q = query.out,
        .weights = query.out_weights,
        .k_cache = index_compress.kv_cache,
        .context_lens = ARRAY((void *)index_groups->context_lens, i32, T),
        .k = TOPK,
        .block_table = ARRAY(group_pages, i32, 1, GROUP_PAGES),
        .req_id_per_token = requests,
        .slots_block_table = ARRAY(group_pages, i32, 1, GROUP_PAGES),
        .slots_block_size = BLOCK,
        .is_valid = ARRAY((void *)plan->is_valid, u8, T),
        .out = ARRAY(topk, i32, T, TOPK),
        .slots = ARRAY(chosen_slots, i32, T, TOPK),
        .lens = ARRAY(lens, i32, T),
        .max_logits_bytes = size.max_logits_bytes,
        .workspace = ARRAY(workspace, u8, bytes)};
    check(smla_lightning_indexer(&choose, &error), &error);
    free(workspace);

    /* 7. Attention to the window and to the chosen groups: v4_step.h. */
    const smla_v4_attend_args attend = {.struct_size = sizeof attend,
                                        .builder = builder,
                                        .compress_ratio = RATIO,
                                        .q = insert.q,
                                        .swa_kv_cache = insert.kv_cache,
                                        .compressed_kv_cache = compress.kv_cache,
                                        .attn_sink = ARRAY(sinks, fp32, HEADS),
                                        .out = ARRAY(out, bf16, T, HEADS, 512),
                                        .lse = ARRAY(lse, fp32, T, HEADS),
                                        .slots = choose.slots,
                                        .lens = choose.lens};
    check(smla_v4_attend(&attend, &error), &error);

    /* 8. Values carry RoPE, so the output is turned back, and quantised for 9: rope.h. */
    const smla_fused_inv_rope_fp8_quant_args turn = {.struct_size = sizeof turn,
                                                     .o = attend.out,
                                                     .positions = positions,
                                                     .rope_table = angles,
                                                     .out = ARRAY(o_e4m3, u8, T, O_GROUPS, O_SIZE),
                                                     .out_scale =
                                                         ARRAY(o_scale, fp32, (T + 3) / 4 * 4,
                                                               O_GROUPS, O_SIZE / 128),
                                                     .groups = O_GROUPS};
    check(smla_fused_inv_rope_fp8_quant(&turn, &error), &error);

    /* 9. The output projection, by groups of heads, then the last one: projection.h. */
    const smla_grouped_output_projection_args project_out = {
        .struct_size = sizeof project_out,
        .o = turn.out,
        .o_scale = turn.out_scale,
        .weight = ARRAY(wo_a_e4m3, u8, O_GROUPS, RANK, O_SIZE),
        .weight_scale = ARRAY(wo_a_scale, fp32, O_GROUPS, 1, O_SIZE / 128),
        .out = ARRAY(z, bf16, T, O_GROUPS, RANK)};
    check(smla_grouped_output_projection(&project_out, &error), &error);
    project(z, w.wo_b, T, O_GROUPS * RANK, HIDDEN, to, 0);
}

/* Compares the attention of the step's last token, at this position, with the formula. */
static int
count_wrong_heads(const smla_v4_metadata *plan, int position)
{
    smla_error error;
    static float keys[(PAGES + GROUP_PAGES) * BLOCK][512];
    const smla_dequantize_kv_cache_args window = {.struct_size = sizeof window,
                                                  .kv_cache =
                                                      ARRAY(cached.window, u8, PAGES, BLOCK, 584),
                                                  .out = ARRAY(keys, fp32, PAGES, BLOCK, 512)};
    check(smla_dequantize_kv_cache(&window, &error), &error);
    const smla_dequantize_kv_cache_args rows = {.struct_size = sizeof rows,
                                                .kv_cache = ARRAY(cached.groups, u8, GROUP_PAGES,
                                                                  BLOCK, 584),
                                                .out = ARRAY(keys[PAGES * BLOCK], fp32, GROUP_PAGES,
                                                             BLOCK, 512)};
    check(smla_dequantize_kv_cache(&rows, &error), &error);

    const int t = (int)plan->num_actual_tokens - 1;
    int32_t seen[WINDOW + TOPK];
    for (int i = 0; i < WINDOW; i++) {
        seen[i] = slot_of(pages, position - WINDOW + 1 + i);
    }
    printf("position %d sees groups", position);
    for (int i = 0; i < TOPK; i++) {
        printf(" %d", topk[t][i]);
        seen[WINDOW + i] = PAGES * BLOCK + slot_of(group_pages, topk[t][i]);
    }
    printf(" of %d\n", (position + 1) / RATIO);
    int wrong = 0;
    for (int h = 0; h < HEADS; h++) {
        wrong += count_wrong(out[t][h], q[t][h], keys[0], 512, seen, WINDOW + TOPK, 1 / sqrt(512),
                             exp(sinks[h]), 1.0 / 256);
    }
    return wrong;
}

/* Runs some tokens of the request: a step with one layer. */
static int
run_step(smla_v4_builder *builder, int first, int count, uint16_t (*to)[HIDDEN])
{
    smla_error error;
    const smla_v4_metadata *plan;
    const int32_t starts[] = {0, count}, seq_lens[] = {first + count};
    for (int i = 0; i < count; i++) {
        slots[i] = slot_of(pages, first + i);
    }
    const smla_v4_build_args build = {.struct_size = sizeof build,
                                      .num_reqs = 1,
                                      .num_actual_tokens = count,
                                      .max_seq_len = TOKENS,
                                      .query_start_loc_cpu = starts,
                                      .seq_lens_cpu = seq_lens,
                                      .slot_mapping = ARRAY(slots, i32, count),
                                      .block_table = ARRAY(pages, i32, 1, PAGES),
                                      .compressed_tables = {ARRAY(group_pages, i32, 1,
                                                                  GROUP_PAGES)},
                                      .state_tables = {ARRAY(pages, i32, 1, PAGES)}};
    check(smla_v4_builder_build(builder, &build, &plan, &error), &error);
    run_layer(builder, plan, x + first, to + first);
    return count_wrong_heads(plan, first + count - 1);
}

static void
make_model(void)
{
    smla_error error;
    fill_bf16(x, sizeof x);
    fill_bf16(&w, sizeof w);
    for (int i = 0; i < 512; i++) {
        ones[i] = to_bf16(1);
    }
    for (int p = 0; p < RATIO; p++) {
        for (int i = 0; i < 1024; i++) {
            ape[p][i] = index_ape[p][i % 256] = 0.25f * (float)(p - i % 3);
        }
    }
    for (int p = 0; p < TOKENS; p++) {
        for (int i = 0; i < 32; i++) {
            const double angle = p * pow(10000, -i / 32.0);
            rope_table[p][i] = (float)cos(angle);
            rope_table[p][32 + i] = (float)sin(angle);
        }
    }
    float scale;
    const smla_dynamic_per_tensor_quant_args quantise = {.struct_size = sizeof quantise,
                                                         .x = ARRAY(w.wo_a, bf16, O_GROUPS, RANK,
                                                                    O_SIZE),
                                                         .out = ARRAY(wo_a_e4m3, u8, O_GROUPS, RANK,
                                                                      O_SIZE),
                                                         .scale = ARRAY(&scale, fp32, 1)};
    check(smla_dynamic_per_tensor_quant(&quantise, &error), &error);
    for (int g = 0; g < O_GROUPS; g++) {
        for (int i = 0; i < O_SIZE / 128; i++) {
            wo_a_scale[g][0][i] = scale; /* a checkpoint has a scale for every block */
        }
    }
}

int
main(void)
{
    smla_error error;
    make_model();
    smla_v4_builder *builder;
    const smla_v4_config config = {.struct_size = sizeof config,
                                   .num_heads = HEADS,
                                   .window = WINDOW,
                                   .topk_tokens = TOPK,
                                   .block_size = RATIO * BLOCK,
                                   .swa_block_size = BLOCK,
                                   .max_num_seqs = 1,
                                   .max_num_batched_tokens = TOKENS,
                                   .max_model_len = TOKENS,
                                   .num_ratios = 1,
                                   .compress_ratios = {RATIO},
                                   .state_block_sizes = {BLOCK},
                                   .softmax_scale = 1 / sqrt(512),
                                   .kv_format = SMLA_KV_FP8_V4,
                                   .compressed_kv_format = SMLA_KV_FP8_V4,
                                   .device = {kDLCPU, 0}};
    check(smla_v4_builder_create(&config, &builder, &error), &error);

    memset(&cached, 0xFF, sizeof cached); /* NaN in every format: it must not be read */
    int wrong = run_step(builder, 0, PROMPT, y[0]);
    for (int position = PROMPT; position < TOKENS; position++) {
        wrong += run_step(builder, position, 1, y[0]);
    }
    memset(&cached, 0xFF, sizeof cached);
    wrong += run_step(builder, 0, TOKENS, y[1]);
    smla_v4_builder_destroy(builder);
    for (int t = 0; t < TOKENS; t++) {
        for (int i = 0; i < HIDDEN; i++) {
            wrong += y[0][t][i] != y[1][t][i];
        }
    }
    printf("y[%d][0] = %.4f\n", TOKENS - 1, from_bf16(y[0][TOKENS - 1][0]));
    return verdict(wrong);
}
