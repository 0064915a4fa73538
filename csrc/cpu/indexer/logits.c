/* logits.c: indexer_logits. logits_kernel.c scores tiles of keys.
 *
 * A task is a block of tokens and some columns of their logits. Tokens of a block that follow each
 * other and have the same keys are a run: a tile of keys is read once for a run. No logit depends
 * on the tasks. Where nobody wants the columns behind the contexts, they have no tasks.
 */
#include <assert.h>
#include <math.h>
#include <string.h>

#include "core/fp_mode.h"
#include "core/logit_powers.h"
#include "core/params_indexer.h"
#include "cpu/cache/cache.h"
#include "cpu/cpu.h"
#include "cpu/indexer/score_tiles.h"
#include "cpu/isa.h"
#include "cpu/machine/thread_scratch.h"

enum {
    BLOCK_TOKENS = 8,
    TASK_COLUMNS = 8 * SMLA_LOGITS_KEYS,
    DIM = SMLA_INDEX_HEAD_DIM,
    MXFP4_SCALES = 4, /* scales per key and per head; fp8_index has one of 4 bytes */
};

/* ---- Tokens -------------------------------------------------------------------------------- */

/* The columns of a token that are scored: its length clamped to [0, N], or none. */
static int64_t
context_of(const smla_logits_params *p, int64_t token)
{
    const int64_t length = p->context_lens[token * p->context_lens_stride];
    return length < p->least_context ? 0 : length < p->num_columns ? length : p->num_columns;
}

int64_t
smla_cpu_longest_context(const smla_logits_params *p)
{
    int64_t longest = 0;
    for (int64_t token = 0; token < p->num_tokens && longest < p->num_columns; token++) {
        const int64_t context = context_of(p, token);
        longest = context > longest ? context : longest;
    }
    return longest;
}

/* What names a token's keys: its request, or the key of column 0. */
static int64_t
source_of(const smla_logits_params *p, int64_t token)
{
    if (p->has_pages) {
        return p->req_id_per_token[token * p->req_id_stride];
    }
    return p->starts == NULL ? 0 : p->starts[token * p->starts_stride];
}

/* Only tokens with keys need a good request id. No token has keys beside a block table without
 * columns. */
smla_status
smla_cpu_check_logits(const smla_logits_params *p, smla_error *error)
{
    const bool has_columns = p->num_columns > 0 && p->pages.num_blocks > 0;
    for (int64_t token = 0; has_columns && token < p->num_tokens; token++) {
        const int64_t request = source_of(p, token);
        const bool has_keys = p->context_lens[token * p->context_lens_stride] > 0;
        if (has_keys && (request < 0 || request >= p->num_reqs)) {
            return smla_fail_value(error, p->call.op,
                                   "`req_id_per_token` must be 0 to %lld (rows of `block_table`), "
                                   "got %lld at token %lld",
                                   (long long)p->num_reqs - 1, (long long)request,
                                   (long long)token);
        }
    }
    return SMLA_OK;
}

/* ---- Keys ---------------------------------------------------------------------------------- */

/* Finds the key of a column. false: there is none. */
static bool
find_key(const smla_logits_params *p, int64_t source, int64_t column, smla_kv_token *key)
{
    const smla_page_table *const pages = &p->pages;
    if (!p->has_pages) {
        const int64_t slot = source + column;
        *key = smla_kv_token_at(&p->kv, 0, slot < 0 ? 0 : slot);
        return slot >= 0 && slot < p->kv.block_size;
    }
    const int64_t block = column / pages->block_size;
    if (block >= pages->num_blocks) {
        return false;
    }
    const int64_t page =
        pages->block_table[source * pages->stride_req + block * pages->stride_block];
    if (page < 0 || page >= p->kv.num_pages) {
        return false;
    }
    *key = smla_kv_token_at(&p->kv, page, column % pages->block_size);
    return true;
}

/* Keys of a tile, a bit each. */
typedef struct tile_keys {
    uint64_t found;   /* the keys that exist */
    uint64_t lifted;  /* keys that are 2^64 times as large */
    uint64_t lowered; /* and as small */
} tile_keys;

/* x * 2^64. The bits of a subnormal number count units of 2^-149. */
static float
lift(float x)
{
    const uint32_t magnitude = smla_float_bits(x) & 0x7FFFFFFFu;
    const float count = (float)magnitude * 0x1p-85f;
    return magnitude < 0x00800000u ? copysignf(count, x) : x * 0x1p64f;
}

/* x * 2^-64, rounded once. The last bit of the sum with 2^23 is 2^-149 in the result. */
static float
lower(float x)
{
    const float sum = fabsf(x) * 0x1p85f + 0x1p23f;
    const float small = smla_bits_float(smla_float_bits(sum) - smla_float_bits(0x1p23f));
    return fabsf(x) < 0x1p-62f ? copysignf(small, x) : x * 0x1p-64f;
}

/* Multiplies a key's scales by 2^64 if all are small, or by 2^-64 if one is large, into `shifted`.
 * Returns the power, or 0. */
static int
shift_scales(const smla_kv_format_info *format, const uint8_t *scales, uint8_t *shifted)
{
    if (format->scale_type == SMLA_SCALE_FP32) {
        float scale;
        memcpy(&scale, scales, sizeof scale);
        const bool is_small = fabsf(scale) < 0x1p-74f;
        const float other = is_small ? lift(scale) : scale * 0x1p-64f;
        memcpy(shifted, &other, sizeof other);
        return is_small ? SMLA_LOGIT_SHIFT : fabsf(scale) > 0x1p90f ? -SMLA_LOGIT_SHIFT : 0;
    }
    const int power = smla_key_power(smla_largest_exponent(scales, format->num_scales));
    smla_shift_ue8m0(scales, format->num_scales, power, shifted);
    return power;
}

/* Decodes the keys of columns from `first` on as fp32 [count][128]. */
static tile_keys
read_keys(const smla_cpu_isa *isa, const smla_logits_params *p, int64_t source, int64_t first,
          int count, float *keys)
{
    tile_keys tile = {0, 0, 0};
    for (int n = 0; n < count; n++) {
        const uint64_t bit = (uint64_t)1 << n;
        uint8_t shifted[MXFP4_SCALES];
        smla_kv_token key;
        if (find_key(p, source, first + n, &key)) {
            const int power = shift_scales(p->kv.format, key.scales, shifted);
            key.scales = power != 0 ? shifted : key.scales;
            tile.lifted |= power > 0 ? bit : 0;
            tile.lowered |= power < 0 ? bit : 0;
            isa->cache->read_row(p->kv.format, key, 1.0f, SMLA_FLOAT_FP32, keys, (int64_t)n * DIM);
            tile.found |= bit;
        }
    }
    return tile;
}

/* ---- Scores -------------------------------------------------------------------------------- */

static uint8_t *
query_scales_of(const smla_logits_params *p, int64_t token, int64_t head)
{
    return (uint8_t *)p->q_scale + token * p->q_scale_stride_token + head * p->q_scale_stride_head;
}

/* smla_query_power of a head. */
static int
find_query_power(const smla_logits_params *p, int64_t token, int64_t head)
{
    return p->q_scale == NULL ? 0 : smla_query_power(query_scales_of(p, token, head), MXFP4_SCALES);
}

/* What a token's weights are multiplied with. */
typedef struct weight_powers {
    int divided;       /* smla_weight_power */
    bool are_ordinary; /* no weight is multiplied */
} weight_powers;

static weight_powers
find_weight_powers(const smla_logits_params *p, int64_t token)
{
    bool has_power = false;
    int largest = INT_MIN;
    for (int64_t head = 0; head < p->num_heads; head++) {
        const int power = find_query_power(p, token, head);
        const int exponent =
            smla_weight_exponent(p->weights[token * p->weights_stride_token + head], power);
        largest = exponent > largest ? exponent : largest;
        has_power |= power != 0;
    }
    const int divided = smla_weight_power(largest);
    return (weight_powers){divided, divided == 0 && !has_power};
}

/* x * 2^power, rounded once. */
static float
multiply_by_power(float x, int power)
{
    return power == 0 ? x : power == -SMLA_LOGIT_SHIFT ? lower(x) : (float)ldexp((double)x, power);
}

/* Decodes heads of a token as fp32 [count][128], and reads their weights. */
static void
read_heads(const smla_cpu_isa *isa, const smla_logits_params *p, int64_t token, int64_t head,
           int count, weight_powers powers, float *q, float *weights)
{
    static const float one = 1.0f;
    const smla_kv_format_info *const format =
        &smla_kv_formats[p->q_scale == NULL ? SMLA_ROW_FP8_INDEX : SMLA_ROW_MXFP4_INDEX];
    for (int h = 0; h < count; h++) {
        uint8_t *const row =
            (uint8_t *)p->q + token * p->q_stride_token + (head + h) * p->q_stride_head;
        uint8_t *scales =
            p->q_scale == NULL ? (uint8_t *)&one : query_scales_of(p, token, head + h);
        uint8_t shifted[MXFP4_SCALES];
        weights[h] = p->weights[token * p->weights_stride_token + head + h];
        if (!powers.are_ordinary) {
            const int power = find_query_power(p, token, head + h);
            weights[h] = multiply_by_power(weights[h], power - powers.divided);
            if (power != 0) {
                smla_shift_ue8m0(scales, MXFP4_SCALES, -power, shifted);
                scales = shifted;
            }
        }
        isa->cache->read_row(format, (smla_kv_token){row, scales}, 1.0f, SMLA_FLOAT_FP32, q,
                             (int64_t)h * DIM);
    }
}

static void
store_logit(const smla_logits_params *p, int64_t token, int64_t column, float logit)
{
    const int64_t at = token * p->out_stride_token + column;
    if (p->out_type == SMLA_FLOAT_BF16) {
        ((uint16_t *)p->out)[at] = smla_float_to_bf16(logit);
    } else {
        ((float *)p->out)[at] = logit;
    }
}

/* Stores the logits of `count` columns of a token from its scores. */
static void
score_token(const smla_cpu_isa *isa, const smla_logits_params *p, int64_t token, int64_t first,
            int count, weight_powers powers, const float *panel, tile_keys keys)
{
    float q[SMLA_LOGITS_HEADS * DIM] __attribute__((aligned(64)));
    float sums[SMLA_LOGITS_KEYS] __attribute__((aligned(64))) = {0};
    for (int64_t head = 0; head < p->num_heads && keys.found != 0; head += SMLA_LOGITS_HEADS) {
        const int64_t left = p->num_heads - head;
        const int heads = left < SMLA_LOGITS_HEADS ? (int)left : SMLA_LOGITS_HEADS;
        float weights[SMLA_LOGITS_HEADS];
        read_heads(isa, p, token, head, heads, powers, q, weights);
        isa->logits->add_heads(q, weights, heads, panel, sums);
    }
    const uint64_t shifted = powers.divided != 0 ? UINT64_MAX : keys.lifted | keys.lowered;
    for (int n = 0; n < count; n++) {
        float logit = sums[n];
        if (shifted >> n & 1) {
            const int lifted = keys.lifted >> n & 1 ? SMLA_LOGIT_SHIFT : 0;
            const int lowered = keys.lowered >> n & 1 ? SMLA_LOGIT_SHIFT : 0;
            logit = multiply_by_power(logit, powers.divided + lowered - lifted);
        }
        store_logit(p, token, first + n, keys.found >> n & 1 ? logit : -INFINITY);
    }
}

/* Memory of a thread. */
typedef struct tile_scratch {
    float keys[SMLA_LOGITS_KEYS * DIM] __attribute__((aligned(64)));
    float panel[SMLA_LOGITS_KEYS * DIM] __attribute__((aligned(64)));
} tile_scratch;

/* Scores a run, tokens from first_token to end_token - 1, in columns from `first` to end - 1. */
static void
score_run(const smla_cpu_isa *isa, const smla_logits_params *p, int64_t first_token,
          int64_t end_token, int64_t first, int64_t end, tile_scratch *scratch)
{
    int64_t longest = 0;
    for (int64_t token = first_token; token < end_token; token++) {
        const int64_t context = context_of(p, token);
        longest = context > longest ? context : longest;
    }
    longest = longest < end ? longest : end;
    weight_powers powers[BLOCK_TOKENS];
    for (int64_t token = first_token; token < end_token && longest > first; token++) {
        powers[token - first_token] = find_weight_powers(p, token);
    }
    if (longest > first) {
        assert(scratch != NULL); /* a call that has keys to score has scratch */
        memset(scratch->keys, 0, sizeof scratch->keys);
    }
    for (int64_t tile = first; tile < longest; tile += SMLA_LOGITS_KEYS) {
        const int64_t left = longest - tile;
        const int count = left < SMLA_LOGITS_KEYS ? (int)left : SMLA_LOGITS_KEYS;
        const tile_keys bits =
            read_keys(isa, p, source_of(p, first_token), tile, count, scratch->keys);
        isa->logits->pack_keys(scratch->keys, scratch->panel);
        for (int64_t token = first_token; token < end_token; token++) {
            const int64_t own = context_of(p, token) - tile;
            if (own > 0) {
                score_token(isa, p, token, tile, own < count ? (int)own : count,
                            powers[token - first_token], scratch->panel, bits);
            }
        }
    }
    for (int64_t token = first_token; token < end_token && !p->leaves_rest; token++) {
        const int64_t context = context_of(p, token);
        for (int64_t n = context > first ? context : first; n < end; n++) {
            store_logit(p, token, n, -INFINITY);
        }
    }
}

/* The tasks of a call. */
typedef struct task_grid {
    int64_t longest;     /* context */
    int64_t num_columns; /* columns that tasks have */
    int64_t blocks;      /* blocks of tokens */
    int64_t count;
} task_grid;

static task_grid
divide_logits(const smla_logits_params *p)
{
    task_grid tasks = {.longest = smla_cpu_longest_context(p),
                       .blocks = (p->num_tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS};
    tasks.num_columns = p->leaves_rest ? tasks.longest : p->num_columns;
    tasks.count = tasks.blocks * ((tasks.num_columns + TASK_COLUMNS - 1) / TASK_COLUMNS);
    return tasks;
}

smla_scratch_size
smla_cpu_logits_scratch(const smla_logits_params *p)
{
    const task_grid tasks = divide_logits(p);
    return (smla_scratch_size){smla_count_threads(tasks.count),
                               tasks.longest > 0 ? sizeof(tile_scratch) : 0};
}

smla_status
smla_cpu_score_keys(const smla_logits_params *p, const smla_thread_scratch *scratch,
                    smla_error *error)
{
    const smla_cpu_isa *isa = NULL;
    SMLA_TRY(smla_cpu_choose_isa(p->call.op, &isa, error));
    const task_grid tasks = divide_logits(p);
    smla_interrupt *const interrupt = smla_find_interrupt();
    const smla_fp_mode before = smla_fp_change(SMLA_FP_FLUSH);
#pragma omp parallel for schedule(dynamic) num_threads(smla_divide_scratch(scratch, tasks.count))
    for (int64_t task = 0; task < tasks.count; task++) {
        if (smla_is_ended(interrupt)) {
            continue;
        }
        const int64_t first = task / tasks.blocks * TASK_COLUMNS;
        const int64_t left = tasks.num_columns - first;
        const int64_t end = first + (left < TASK_COLUMNS ? left : TASK_COLUMNS);
        int64_t token = task % tasks.blocks * BLOCK_TOKENS;
        const int64_t last =
            token + BLOCK_TOKENS < p->num_tokens ? token + BLOCK_TOKENS : p->num_tokens;
        while (token < last) {
            int64_t next = token + 1;
            while (next < last && source_of(p, next) == source_of(p, token)) {
                next++;
            }
            score_run(isa, p, token, next, first, end, smla_own_scratch(scratch));
            token = next;
        }
    }
    smla_fp_change(before);
    return smla_check_ended(p->call.op, interrupt, error);
}

smla_status
smla_cpu_indexer_logits(const smla_logits_params *p, smla_error *error)
{
    SMLA_TRY(smla_cpu_check_logits(p, error));
    smla_thread_scratch scratch;
    SMLA_TRY(smla_open_scratch(&scratch, p->call.op, smla_cpu_logits_scratch(p), error));
    const smla_status status = smla_cpu_score_keys(p, &scratch, error);
    smla_close_scratch(&scratch);
    return status;
}
