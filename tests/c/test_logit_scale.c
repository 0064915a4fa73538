/* test_logit_scale.c: how attention's checks combine scales. The quotient of two fp32 numbers is
 * rounded once to fp32; a product of three is rounded twice, in a fixed order. Scales here are ones
 * for which any other order gives other bits.
 */
#include "core/attention/params_attention.h"
#include "ops/check_attention.h"

#include "operators.h"

/* A scale near 1 with all bits of a double. */
static double
random_scale(void)
{
    return 0.01 + (double)(random_bits() >> 11) * 0x1p-53;
}

/* a / b of fp32, rounded once: a double's 53 bits are enough (2 * 24 + 2) that the second rounding
 * of the quotient changes nothing. */
static float
divide_once(float a, float b)
{
    return (float)((double)a / (double)b);
}

static any_args
make_call(bool is_e4m3)
{
    any_args call = make_sparse_mla_dsv4();
    call.dsv4.swa_kv_cache = ZEROS(e4m3, 2, 4, 512);
    call.dsv4.compressed_kv_cache = ZEROS(e4m3, 3, 4, 512);
    if (is_e4m3) {
        call.dsv4.query = ZEROS(e4m3, 3, 2, 512);
    }
    return call;
}

static smla_attention_params
check_call(const any_args *call)
{
    smla_attention_params params = {.source = SMLA_KEYS_LISTS};
    const smla_backend *backend = NULL;
    EXPECT_OK(smla_check_sparse_mla_dsv4(&call->dsv4, &params, &backend, &error));
    return params;
}

enum { NUM_DRAWS = 500 };

static float
logit_scale_of(const any_args *call, float kv_scale)
{
    const smla_attention_params params = check_call(call);
    EXPECT(smla_read_scale(&params.logits.kv_scale[0]) == kv_scale);
    EXPECT(smla_read_scale(&params.logits.kv_scale[1]) == kv_scale);
    return smla_read_logit_scale(&params.logits);
}

/* Both scales are numbers, doubles that are no fp32: each is rounded, then their quotient is. */
static void
test_numbers(void)
{
    int num_late = 0;
    int num_inverse = 0;
    int num_first_only = 0;
    int num_second_only = 0;
    any_args calls[2] = {make_call(false), make_call(true)};
    for (int i = 0; i < NUM_DRAWS; i++) {
        any_args *const call = &calls[i % 2];
        const double a = random_scale();
        const double b = random_scale();
        const float want = divide_once((float)a, (float)b);
        call->dsv4.bmm1_scale = (smla_scale_arg){.value = a};
        call->dsv4.bmm2_scale = (smla_scale_arg){.value = b};
        EXPECT(logit_scale_of(call, (float)b) == want);
        num_late += (float)(a / b) != want;
        num_inverse += (float)a * (1.0f / (float)b) != want;
        num_first_only += (float)((float)a / b) != want;
        num_second_only += (float)(a / (float)b) != want;
    }
    /* The scales tell each other order from this one. */
    EXPECT(num_late > NUM_DRAWS / 10 && num_inverse > NUM_DRAWS / 10);
    EXPECT(num_first_only > NUM_DRAWS / 10 && num_second_only > NUM_DRAWS / 10);
}

/* One of them, or both, in arrays: the quotient is that of the numbers, and an array's scale is
 * read by the call, not by the check. */
static void
test_arrays(void)
{
    for (int given = 1; given < 4; given++) {
        any_args calls[2] = {make_call(false), make_call(true)};
        array *const first = ARRAY(fp32, 1);
        array *const second = ARRAY(fp32, 1);
        for (int i = 0; i < NUM_DRAWS / 5; i++) {
            any_args *const call = &calls[i % 2];
            const float a = (float)random_scale();
            const float b = (float)random_scale();
            SET(first, (double)a, 0);
            SET(second, (double)b, 0);
            call->dsv4.bmm1_scale = given & 1 ? (smla_scale_arg){.tensor = &first->tensor}
                                              : (smla_scale_arg){.value = a};
            call->dsv4.bmm2_scale = given & 2 ? (smla_scale_arg){.tensor = &second->tensor}
                                              : (smla_scale_arg){.value = b};
            const smla_attention_params params = check_call(call);
            EXPECT(smla_read_logit_scale(&params.logits) == divide_once(a, b));
            SET(first, (double)(2 * a), 0);
            SET(second, (double)(4 * b), 0);
            const float later = divide_once(given & 1 ? 2 * a : a, given & 2 ? 4 * b : b);
            EXPECT(smla_read_logit_scale(&params.logits) == later);
            EXPECT(smla_read_scale(&params.logits.kv_scale[0]) == (given & 2 ? 4 * b : b));
            EXPECT(smla_read_scale(&params.logits.kv_scale[1]) == (given & 2 ? 4 * b : b));
        }
        free_arrays("test_arrays");
    }
}

/* Without bmm2_scale nothing is divided. */
static void
test_one_scale(void)
{
    any_args calls[2] = {make_call(true), make_sparse_mla_dsv4()};
    array *const scale = ARRAY(fp32, 1);
    for (int i = 0; i < NUM_DRAWS / 5; i++) {
        any_args *const call = &calls[i % 2];
        const double a = random_scale();
        call->dsv4.bmm1_scale = (smla_scale_arg){.value = a};
        EXPECT(logit_scale_of(call, 1.0f) == (float)a);
        SET(scale, a, 0);
        call->dsv4.bmm1_scale = (smla_scale_arg){.tensor = &scale->tensor};
        EXPECT(logit_scale_of(call, 1.0f) == (float)a);
    }
}

/* sparse_attention's scales: each is rounded to fp32, and so is their product. */
static void
test_attention(void)
{
    int num_late = 0;
    any_args call = make_sparse_attention();
    call.attention.q = ZEROS(e4m3, 3, 2, 512);
    call.attention.out = ZEROS(bf16, 3, 2, 512);
    call.attention.q_pe = NULL;
    call.attention.kv_cache = ZEROS(e4m3, 2, 4, 512);
    call.attention.extra_kv_cache = NULL;
    call.attention.extra_indices = NULL;
    call.attention.extra_topk_length = NULL;
    for (int i = 0; i < NUM_DRAWS; i++) {
        const double a = random_scale() - 0.5;
        const double b = random_scale();
        smla_attention_params params = {.source = SMLA_KEYS_LISTS};
        const smla_backend *backend = NULL;
        call.attention.softmax_scale = a;
        call.attention.q_scale = (smla_scale_arg){.value = b};
        call.attention.kv_scale = (smla_scale_arg){.value = random_scale()};
        EXPECT_OK(smla_check_sparse_attention(&call.attention, &params, &backend, &error));
        const float want = (float)((double)(float)a * (double)(float)b);
        EXPECT(smla_read_logit_scale(&params.logits) == want);
        num_late += (float)(a * b) != want;
    }
    EXPECT(num_late > NUM_DRAWS / 10);
}

int
main(void)
{
    RUN(test_numbers);
    RUN(test_arrays);
    RUN(test_one_scale);
    RUN(test_attention);
    return report("test_logit_scale");
}
