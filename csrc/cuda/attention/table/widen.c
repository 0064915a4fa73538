/* widen.c: which prefills over FP8 rows widen the rows of their caches first, and read those. They
 * do so where the caller's workspace has room for these rows behind all that attention may need
 * otherwise, so only where it was asked for by attention_workspace_size(num_keys=).
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

/* Whether the rows of caches are widened for so many tokens. Tiles of 32 heads or fewer gain
 * nothing, because attention over wide rows always computes 64. */
static bool
pays(const smla_attention_shape *shape, int64_t num_tokens)
{
    const int64_t tiles = shape->num_heads / 64 + (shape->num_heads % 64 > 32);
    const int64_t num_listed = num_tokens * (shape->topk + shape->extra_topk);
    const int64_t most = num_listed * tiles * SAVED_PS_PER_KEY;
    const int64_t saved =
        tiles == 1 ? most / (HALVING_ROWS + shape->num_keys) * HALVING_ROWS : most;
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
