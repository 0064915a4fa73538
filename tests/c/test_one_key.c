/* test_one_key.c: sparse_attention of tokens that see one key: out is that key's value, and lse is
 * its logit.
 *
 * All tests run once per instruction set of the machine.
 */
#include "instruction_sets.h"

#include "attention_calls.h"

/* Puts a key into one column of a token's list; the other columns name none. */
static void
set_one_key(const array *indices, int64_t token, int64_t column, int64_t slot, int64_t slots)
{
    for (int64_t k = 0; k < indices->shape[1]; k++) {
        SET(indices, k % 3 == 0 ? (double)slots : -1.0, token, k);
    }
    SET(indices, (double)slot, token, column);
}

/* out is the value of a cache row times the sink's factor, rounded to bf16 once. Without a sink it
 * has every bit of a bf16 row's value. */
static void
expect_value(const attention_inputs *in, const key_list *list, int64_t token, int64_t slot,
             const outputs *o)
{
    const uint8_t *row = row_of(list->kv, slot);
    for (int64_t head = 0; head < in->q->shape[1]; head++) {
        double factor = 1.0;
        if (in->attn_sink != NULL) {
            factor = 1.0 / (1.0 + exp(GET(in->attn_sink, head) - GET(o->lse, token, head)));
        }
        for (int i = 0; i < NOPE; i++) {
            const double value = factor * row_value(list->kv, row, i);
            const double out = GET(o->out, token, head, i);
            const double half_step = ldexp(1.0, value == 0.0 ? -134 : ilogb(value) - 8);
            EXPECT_NEAR(out, value, fmax(half_step, 0x1p-134) + 0x1p-20 * fabs(value));
            EXPECT(factor == 0.0 || signbit(out) == signbit(value));
            if (in->attn_sink == NULL && !is_fp8(list->kv)) {
                EXPECT(out == value);
            }
        }
    }
}

/* Four tokens with one key each, in list `l`, at four columns. */
static void
attend_one_key(attention_inputs in, int l, int num_splits)
{
    const outputs o = make_outputs(4, in.q->shape[1]);
    int64_t slots[4];
    for (int64_t token = 0; token < 4; token++) {
        const int64_t topk = in.lists[l].indices->shape[1];
        const int64_t column = token * (topk - 1) / 3;
        slots[token] = random_int(num_slots(in.lists[l].kv));
        set_one_key(in.lists[l].indices, token, column, slots[token], num_slots(in.lists[l].kv));
    }
    attend(&in, num_splits, &o);
    expect_attention(&in, o.out, o.lse, o.max_logits);
    for (int64_t token = 0; token < 4; token++) {
        expect_value(&in, &in.lists[l], token, slots[token], &o);
    }
}

static void
test_one_key(void)
{
    static const int64_t heads[] = {1, 5, 16, 64, 128};
    static const int64_t topk[] = {2048, 64, 7, 1, 130};
    static const int splits[] = {1, 2, 5};
    for (int i = 0; i < 10; i++) {
        attention_inputs in = make_inputs(i % 2 == 0 ? uint8 : bf16, 4, heads[i % 5], topk[i % 5]);
        attend_one_key(in, 0, splits[i % 3]);
        array *sink = fill_normal(ARRAY(fp32, heads[i % 5]), 2.0);
        SET(sink, i % 4 == 0 ? -INFINITY : INFINITY, heads[i % 5] / 2);
        in.attn_sink = sink;
        attend_one_key(in, 0, splits[i % 3]);
        free_arrays("test_one_key");
    }
}

static void
test_one_key_in_two_lists(void)
{
    for (int i = 0; i < 8; i++) {
        attention_inputs in = make_inputs(i % 2 == 0 ? uint8 : bf16, 4, 17, 100);
        in.lists[1] = (key_list){.kv = make_cache(i < 4 ? bf16 : uint8, 3, 7),
                                 .indices = random_slots(4, 300, 21)};
        const int l = i / 2 % 2;
        for (int64_t k = 0; k < 4 * in.lists[1 - l].indices->shape[1]; k++) {
            const int64_t width = in.lists[1 - l].indices->shape[1];
            SET(in.lists[1 - l].indices, -1.0, k / width, k % width);
        }
        attend_one_key(in, l, 1 + i % 3);
        free_arrays("test_one_key_in_two_lists");
    }
}

/* Values are signed zeros, subnormals and the largest bf16 numbers; the query has RoPE alone. */
static void
test_one_key_of_any_bits(void)
{
    for (int num_splits = 1; num_splits <= 2; num_splits++) {
        attention_inputs in = make_inputs(bf16, 4, 5, 100);
        for (int64_t row = 0; row < 4 * 5; row++) {
            for (int64_t i = 0; i < NOPE; i++) {
                SET(in.q, 0.0, row / 5, row % 5, i);
            }
        }
        for (int64_t slot = 0; slot < 44; slot++) {
            uint16_t *row = (uint16_t *)row_of(in.lists[0].kv, slot);
            for (int i = 0; i < NOPE; i++) {
                row[i] = (uint16_t)(random_int(i % 7 == 0 ? 0x80 : 0x7F80) | random_int(2) << 15);
            }
            row[0] = 0x8000;
        }
        attend_one_key(in, 0, num_splits);
        free_arrays("test_one_key_of_any_bits");
    }
}

/* FP8 scales of any size and mantissa. */
static void
test_one_key_under_any_scale(void)
{
    for (int exponent = -30; exponent <= 30; exponent += 10) {
        attention_inputs in = make_inputs(uint8, 4, 5, 100);
        in.softmax_scale = pow(10.0, -fmax(exponent, 0));
        for (int64_t slot = 0; slot < 44; slot++) {
            for (int tile = 0; tile < NOPE / TILE; tile++) {
                const double scale = (double)random_int(1 << 20) * 1e-7 * pow(10.0, exponent);
                write_value(fp32, row_of(in.lists[0].kv, slot) + SCALES_AT + 4 * (ptrdiff_t)tile,
                            scale);
            }
        }
        attend_one_key(in, 0, 1 + exponent % 4 / 2);
        free_arrays("test_one_key_under_any_scale");
    }
}

/* A logit of NaN or +inf gives results of NaN, and a logit of -inf counts as no key. */
static void
test_one_key_that_is_not_finite(void)
{
    const double last[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 6; i++) {
        const attention_inputs in = make_inputs(i % 2 == 0 ? uint8 : bf16, 1, 2, 100);
        const outputs o = make_outputs(1, 2);
        uint8_t *row = row_of(in.lists[0].kv, 3);
        set_one_key(in.lists[0].indices, 0, 70, 3, 44);
        SET(in.q, 1.0, 0, 0, ROW - 1);
        SET(in.q, 2.0, 0, 1, ROW - 1);
        write_value(bf16, row + (i % 2 == 0 ? FP8_ROW : 2 * ROW) - 2, last[i / 2]);
        attend(&in, 1 + i % 2, &o);
        for (int64_t head = 0; head < 2; head++) {
            if (i / 2 < 2) {
                EXPECT(isnan(GET(o.lse, 0, head)) && isnan(GET(o.max_logits, 0, head)));
                EXPECT(isnan(GET(o.out, 0, head, 0)) && isnan(GET(o.out, 0, head, NOPE - 1)));
            } else {
                EXPECT(GET(o.lse, 0, head) == -INFINITY);
                EXPECT(GET(o.max_logits, 0, head) == -INFINITY);
                EXPECT(GET(o.out, 0, head, 0) == 0.0 && GET(o.out, 0, head, NOPE - 1) == 0.0);
            }
        }
        free_arrays("test_one_key_that_is_not_finite");
    }
}

static void
run_tests(void)
{
    RUN(test_one_key);
    RUN(test_one_key_in_two_lists);
    RUN(test_one_key_of_any_bits);
    RUN(test_one_key_under_any_scale);
    RUN(test_one_key_that_is_not_finite);
}

int
main(void)
{
    run_on_every_instruction_set(run_tests);
    return report("test_one_key");
}
