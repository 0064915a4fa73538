/* widen.c: which prefills over FP8 rows make wider rows first, and read those. A call widens the
 * rows of its caches to f16 where the caller's workspace has room for them behind all that
 * attention may need otherwise, so only where it was asked for by
 * attention_workspace_size(num_keys=). A layer gathers the rows of its requests as bf16.
 */
#include "cuda/attention/table/schedule.h"
#include "cuda/attention/table/wide_rows.h"

/* Times that decide, measured on an H200 (sm90/sparse_bf16/README.md). */
enum {
    SAVED_PS_PER_KEY = 40,       /* per query token, key of its lists, and 64 heads */
    WIDEN_PS_PER_ROW = 511,      /* 656 bytes in, 1152 out */
    WIDEN_PS_PER_CALL = 8000000, /* three launches more */
    /* With one tile of heads, each row is read once per token. With so many rows, half of the
     * time that is saved is lost to reads that miss L2. */
    HALVING_ROWS = 26000,
};

/* Tiles of 64 heads. 32 heads or fewer count as none: they gain nothing, because attention over
 * wider rows always computes 64. */
static int64_t
count_wide_tiles(const smla_attention_shape *shape)
{
    return shape->num_heads / 64 + (shape->num_heads % 64 > 32);
}

/* What is left of the time that products over so many wider rows save, after reads that miss L2. */
static int64_t
find_saved(int64_t products_saved, int64_t tiles, int64_t num_rows)
{
    return tiles == 1 ? products_saved / (HALVING_ROWS + num_rows) * HALVING_ROWS : products_saved;
}

/* Whether the rows of caches are widened for so many tokens. */
static bool
pays(const smla_attention_shape *shape, int64_t num_tokens)
{
    const int64_t tiles = count_wide_tiles(shape);
    const int64_t num_listed = num_tokens * (shape->topk + shape->extra_topk);
    const int64_t saved = find_saved(num_listed * tiles * SAVED_PS_PER_KEY, tiles, shape->num_keys);
    return shape->num_heads > 32 && saved > shape->num_keys * WIDEN_PS_PER_ROW + WIDEN_PS_PER_CALL;
}

/* Whether this kernel's calls may widen their rows. */
static bool
may_widen(const smla_attention_kernel *kernel)
{
    return kernel != NULL &&
           (kernel->launch == smla_attend_sm90_fp8_64 || kernel->launch == smla_attend_sm90_v4_64);
}

int64_t
smla_add_wide_bytes(const smla_attention_shape *shape, int64_t bytes)
{
    const smla_cuda_device *const device = smla_cuda_find_device(shape->device_id);
    const smla_kernel_call call = {.formats = SMLA_ROWS_FP8, /* any that may be widened */
                                   .source = SMLA_KEYS_LISTS,
                                   .num_heads = shape->num_heads,
                                   .columns = SMLA_UNSPLIT};
    const bool is_open = device != NULL && shape->num_splits == 0 && shape->num_keys != 0;
    return is_open && pays(shape, shape->num_tokens) && may_widen(smla_find_kernel(device, &call))
               ? bytes + smla_wide_bytes(shape->num_keys)
               : bytes;
}

bool
smla_wants_wide_rows(const smla_attention_shape *shape, const smla_attention_run *run)
{
    const int64_t wide_bytes = smla_wide_bytes(shape->num_keys);
    return wide_bytes != 0 && shape->room > wide_bytes && may_widen(run->kernel) &&
           run->num_splits == 1 && pays(shape, run->num_tokens);
}

/* ---- Gathered rows --------------------------------------------------------------------------- */

/* Times that decide between the FP8 rows of caches and bf16 rows that a layer gathers first. */
typedef struct gather_times {
    smla_kv_set formats;
    bool is_direct_elsewhere; /* the choice where Hopper's kernel for these rows does not run */
    bool misses_l2;           /* gathered rows are read from memory, too (HALVING_ROWS) */
    int64_t ps_per_token;     /* extra time of the FP8 kernel, per query token and 64 heads */
    int64_t ps_per_key;       /* more of it, per key of the token's list */
    int64_t ps_per_row;       /* gathered, 1152 or 1024 bytes out */
    int64_t ps_per_chunk;     /* launches more */
} gather_times;

/* An H200's times: of fp8_ds_mla those of benchmarks/RESULTS.md, of fp8_v4 those of
 * sm90/sparse_bf16/README.md. A chunk of fp8_v4 has two gathers and one kernel that combines
 * lists. */
static const gather_times all_gather_times[] = {
    {SMLA_ROWS_FP8, false, false, 0, 38, 650, 8000000},
    {SMLA_ROWS_V4, true, true, 40000, 10, 500, 16000000},
};

/* The extra time of prefills that read FP8 rows, so many in all. */
static int64_t
find_loss(const gather_times *times, const smla_attention_shape *prefills, int64_t num_rows)
{
    const int64_t tiles = count_wide_tiles(prefills);
    const int64_t loss =
        prefills->num_tokens * tiles * (times->ps_per_token + prefills->topk * times->ps_per_key);
    return times->misses_l2 ? find_saved(loss, tiles, num_rows) : loss;
}

bool
smla_cuda_prefers_direct(const smla_attention_shape *prefills, int64_t num_rows, int64_t num_chunks)
{
    const smla_cuda_device *const device = smla_cuda_find_device(prefills->device_id);
    const smla_kernel_call call = {.formats = smla_join_formats(prefills->formats[0],
                                                                prefills->formats[1]),
                                   .source = SMLA_KEYS_LISTS,
                                   .needs = prefills->needs,
                                   .num_heads = prefills->num_heads,
                                   .columns = SMLA_UNSPLIT};
    const smla_attention_kernel *const kernel =
        device == NULL ? NULL : smla_find_kernel(device, &call);
    for (size_t i = 0; i < sizeof all_gather_times / sizeof all_gather_times[0]; i++) {
        const gather_times *const times = &all_gather_times[i];
        if (times->formats == call.formats) {
            return kernel == NULL || kernel->arch < 90
                       ? times->is_direct_elsewhere
                       : find_loss(times, prefills, num_rows) <
                             num_rows * times->ps_per_row + num_chunks * times->ps_per_chunk;
        }
    }
    return true; /* gathers of other rows have not been timed */
}
