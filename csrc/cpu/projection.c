/* projection.c: absorption. Splits kv_b_proj into W_UK and W_UV, and applies them.
 *
 * Both up projections are out[t,h,n] = sum_k x[t,h,k] w(k,h,n), bf16 in and out, fp32 in between; they
 * differ in which dimension of the weight is summed. The weight is unpacked to fp32 in
 * pieces that stay in L1, so that the inner loop runs along n in contiguous memory.
 */
#include "cpu.h"
#include "numeric.h"

/* The compiler makes the hot loop once per instruction set and picks at load time. */
#if defined(SMLA_HAVE_X86_ISA) && defined(__GNUC__) && !defined(__clang__)
#define SMLA_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SMLA_CLONES
#endif

/* ---- kv_b_proj -> W_UK, W_UV ------------------------------------------------------------------- */

static uint16_t
read_weight(const smla_split_weight_params *p, int64_t latent, int64_t column)
{
    const int64_t at = latent * p->stride_in + column * p->stride_out;
    if (p->type == SMLA_FLOAT_BF16 && p->scale == NULL) {
        return ((const uint16_t *)p->weight)[at];
    }
    float value = smla_cpu_load_float(p->weight, p->type, at);
    if (p->scale != NULL) {
        value *= p->scale[latent / SMLA_SCALE_TILE * p->scale_stride_in +
                          column / SMLA_SCALE_TILE * p->scale_stride_out];
    }
    return smla_float_to_bf16(value);
}

smla_status
smla_cpu_split_kv_b_proj(const smla_split_weight_params *p, smla_error *error)
{
    (void)error;
#pragma omp parallel for schedule(static)
    for (int64_t latent = 0; latent < SMLA_KV_LORA_RANK; latent++) {
        for (int64_t head = 0; head < p->num_heads; head++) {
            const int64_t column = head * (p->nope_dim + p->value_dim);
            uint16_t *w_uk = p->w_uk + latent * p->w_uk_stride_in + head * p->w_uk_stride_head;
            uint16_t *w_uv = p->w_uv + latent * p->w_uv_stride_in + head * p->w_uv_stride_head;
            for (int64_t i = 0; i < p->nope_dim; i++) {
                w_uk[i] = read_weight(p, latent, column + i);
            }
            for (int64_t i = 0; i < p->value_dim; i++) {
                w_uv[i] = read_weight(p, latent, column + p->nope_dim + i);
            }
        }
    }
    return SMLA_OK;
}

/* ---- Up projections ---------------------------------------------------------------------------- */

enum {
    TOKEN_BLOCK = 16, /* tokens that share one pass over the weight */
    OUTER_BLOCK = 64, /* outputs of a token kept in registers or L1 */
    INNER_BLOCK = 64, /* weight rows unpacked at a time: 16 KiB of fp32 */
};

/* sums[token][n] += x[token][k] * w[k][n] over one unpacked piece of the weight. */
SMLA_CLONES static void
accumulate(const float (*restrict x)[INNER_BLOCK], const float (*restrict w)[OUTER_BLOCK],
           float (*restrict sums)[OUTER_BLOCK], int num_tokens, int num_inner)
{
    for (int token = 0; token < num_tokens; token++) {
        float *restrict sum = sums[token];
        for (int k = 0; k < num_inner; k++) {
            const float factor = x[token][k];
            const float *restrict row = w[k];
#pragma omp simd
            for (int n = 0; n < OUTER_BLOCK; n++) {
                sum[n] += factor * row[n];
            }
        }
    }
}

static int
block_size(int64_t total, int64_t start, int block)
{
    return (int)(total - start < block ? total - start : block);
}

static void
unpack_weight(const smla_projection_params *p, int64_t head, int64_t inner, int64_t outer,
              int num_inner, int num_outer, float (*w)[OUTER_BLOCK])
{
    const uint16_t *weight =
        p->w + head * p->w_stride_head + inner * p->w_stride_inner + outer * p->w_stride_outer;
    memset(w, 0, INNER_BLOCK * sizeof *w);
    for (int k = 0; k < num_inner; k++) {
        for (int n = 0; n < num_outer; n++) {
            w[k][n] = smla_bf16_to_float(weight[k * p->w_stride_inner + n * p->w_stride_outer]);
        }
    }
}

static void
unpack_tokens(const smla_projection_params *p, int64_t head, int64_t first, int64_t inner,
              int num_tokens, int num_inner, float (*x)[INNER_BLOCK])
{
    for (int token = 0; token < num_tokens; token++) {
        const uint16_t *row =
            p->x + (first + token) * p->x_stride_token + head * p->x_stride_head + inner;
        for (int k = 0; k < num_inner; k++) {
            x[token][k] = smla_bf16_to_float(row[k]);
        }
    }
}

/* One head, one block of outputs, one block of tokens. The weight is unpacked again for every block of
 * tokens: one conversion for TOKEN_BLOCK products. */
static void
project_block(const smla_projection_params *p, int64_t head, int64_t outer, int64_t first,
              int num_tokens)
{
    float x[TOKEN_BLOCK][INNER_BLOCK];
    float w[INNER_BLOCK][OUTER_BLOCK];
    float sums[TOKEN_BLOCK][OUTER_BLOCK] = {{0}};
    const int num_outer = block_size(p->outer_dim, outer, OUTER_BLOCK);
    for (int64_t inner = 0; inner < p->inner_dim; inner += INNER_BLOCK) {
        const int num_inner = block_size(p->inner_dim, inner, INNER_BLOCK);
        unpack_weight(p, head, inner, outer, num_inner, num_outer, w);
        unpack_tokens(p, head, first, inner, num_tokens, num_inner, x);
        accumulate(x, w, sums, num_tokens, num_inner);
    }
    for (int token = 0; token < num_tokens; token++) {
        uint16_t *out =
            p->out + (first + token) * p->out_stride_token + head * p->out_stride_head + outer;
        for (int n = 0; n < num_outer; n++) {
            out[n] = smla_float_to_bf16(sums[token][n]);
        }
    }
}

smla_status
smla_cpu_up_proj(const smla_projection_params *p, smla_error *error)
{
    (void)error;
    const int64_t token_blocks = (p->num_tokens + TOKEN_BLOCK - 1) / TOKEN_BLOCK;
    const int64_t outer_blocks = (p->outer_dim + OUTER_BLOCK - 1) / OUTER_BLOCK;
    const int64_t num_tasks = p->num_heads * outer_blocks * token_blocks;
#pragma omp parallel for schedule(static) if (num_tasks > 1)
    for (int64_t task = 0; task < num_tasks; task++) {
        const int64_t first = task % token_blocks * TOKEN_BLOCK;
        const int64_t outer = task / token_blocks % outer_blocks * OUTER_BLOCK;
        const int64_t head = task / token_blocks / outer_blocks;
        project_block(p, head, outer, first, block_size(p->num_tokens, first, TOKEN_BLOCK));
    }
    return SMLA_OK;
}
