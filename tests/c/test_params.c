/* test_params.c: what operators' checks tell a backend that shows in no result of the CPU: how much
 * work there is, and the name of the cache's format in an error of a backend without a kernel.
 */
#include "core/attention/params_attention.h"
#include "core/params_projection.h"
#include "ops/check_attention.h"

#include "operators.h"

static void
test_format_of_the_cache(void)
{
    any_args call = make_sparse_attention();
    call.attention.extra_kv_cache = NULL;
    call.attention.extra_indices = NULL;
    call.attention.extra_topk_length = NULL;
    smla_attention_params params = {.source = SMLA_KEYS_LISTS};
    const smla_backend *backend = NULL;
    EXPECT_OK(smla_check_sparse_attention(&call.attention, &params, &backend, &error));
    EXPECT_EQ(params.keys.num_lists, 1);
    EXPECT(params.call.kv_format != NULL &&
           params.call.kv_format == params.keys.lists[0].kv.format);
}

/* More heads would project the same rows again. */
static void
test_a_linear_layer_is_one_head(void)
{
    const any_args call = make_fp8_linear();
    smla_fp8_linear_params params;
    const smla_backend *backend = NULL;
    EXPECT_OK(smla_check_fp8_linear(&call.linear, &params, &backend, &error));
    EXPECT_EQ(params.project.num_heads, 1);
}

int
main(void)
{
    RUN(test_format_of_the_cache);
    RUN(test_a_linear_layer_is_one_head);
    return report("test_params");
}
