/* test_compressor.c: save_partial_states and compress_norm_rope_store on every instruction set,
 * compared with doubles, and byte for byte with each other.
 */
#include "instruction_sets.h"

enum { DIM = 512, RATIO = 4, WIDTH = 2 * DIM, TOKENS = 11, SBS = 4, MAX_POS = 20 };

typedef struct step {
    array *kv, *score, *ape, *state, *table, *ids, *positions, *slots, *cache, *kv_slots;
    array *weight, *rope_table;
} step;

static array *
make_angles(int64_t count)
{
    array *const table = ARRAY(fp32, count, 64);
    for (int64_t t = 0; t < count; t++) {
        for (int i = 0; i < 32; i++) {
            ((float *)table->tensor.data)[t * 64 + i] = (float)cos((double)t * (i + 1) * 0.1);
            ((float *)table->tensor.data)[t * 64 + 32 + i] = (float)sin((double)t * (i + 1) * 0.1);
        }
    }
    return table;
}

/* One request of TOKENS tokens, whose pages are 2, 0, 1. */
static step
make_step(void)
{
    step s = {.kv = fill_normal(ARRAY(fp32, TOKENS, WIDTH), 2.0),
              .score = fill_normal(ARRAY(fp32, TOKENS, WIDTH), 2.0),
              .ape = fill_normal(ARRAY(fp32, RATIO, WIDTH), 1.0),
              .state = ARRAY(fp32, 3, SBS, 2 * WIDTH),
              .table = ARRAY(int32, 1, 3),
              .ids = ARRAY(int32, TOKENS),
              .positions = ARRAY(int64, TOKENS),
              .slots = ARRAY(int64, TOKENS),
              .cache = ARRAY(bf16, 4, DIM),
              .kv_slots = ARRAY(int64, TOKENS),
              .weight = fill_normal(ARRAY(fp32, DIM), 1.0),
              .rope_table = make_angles(MAX_POS)};
    for (int64_t t = 0; t < TOKENS; t++) {
        ((int32_t *)s.ids->tensor.data)[t] = 0;
        ((int64_t *)s.positions->tensor.data)[t] = t;
        ((int64_t *)s.slots->tensor.data)[t] = (t / SBS + 2) % 3 * SBS + t % SBS;
        ((int64_t *)s.kv_slots->tensor.data)[t] = (t + 1) % RATIO == 0 ? t / RATIO + 1 : -1;
    }
    for (int i = 0; i < 3; i++) {
        ((int32_t *)s.table->tensor.data)[i] = (i + 2) % 3;
    }
    return s;
}

static smla_status
save(const step *s)
{
    const smla_partial_states_args args = {
        .struct_size = sizeof args,
        .kv = &s->kv->tensor,
        .score = &s->score->tensor,
        .ape = &s->ape->tensor,
        .positions = &s->positions->tensor,
        .state = &s->state->tensor,
        .slot_mapping = &s->slots->tensor,
    };
    return smla_save_partial_states(&args, &error);
}

static smla_status
compress(const step *s, bool saves)
{
    const smla_compress_args args = {
        .struct_size = sizeof args,
        .state = &s->state->tensor,
        .block_table = &s->table->tensor,
        .req_id_per_token = &s->ids->tensor,
        .positions = &s->positions->tensor,
        .slot_mapping = &s->slots->tensor,
        .kv_cache = &s->cache->tensor,
        .kv_slot_mapping = &s->kv_slots->tensor,
        .norm_weight = &s->weight->tensor,
        .rope_table = &s->rope_table->tensor,
        .eps = 1e-6,
        .ratio = RATIO,
        .kv = saves ? &s->kv->tensor : NULL,
        .score = saves ? &s->score->tensor : NULL,
        .ape = saves ? &s->ape->tensor : NULL,
    };
    return smla_compress_norm_rope_store(&args, &error);
}

/* The pooled value of a channel of group g, and with `size` that of magnitudes. */
static double
pool_channel(const step *s, int64_t g, int64_t d, double *size)
{
    double weights = 0.0;
    double total = 0.0;
    *size = 0.0;
    for (int64_t t = g == 0 ? 0 : (g - 1) * RATIO; t < (g + 1) * RATIO; t++) {
        const int64_t channel = t < g * RATIO ? d : DIM + d;
        const double weight = exp(GET(s->score, t, channel) + GET(s->ape, t % RATIO, channel));
        weights += weight;
        total += weight * GET(s->kv, t, channel);
        *size += weight * fabs(GET(s->kv, t, channel));
    }
    *size /= weights;
    return total / weights;
}

/* The bound: one rounding to bf16, 2 % of it, and 2^-18 of the largest magnitude that is pooled. */
static void
expect_rows(const step *s)
{
    for (int64_t g = 0; g < TOKENS / RATIO; g++) {
        double x[DIM];
        double largest = 0.0;
        double sum = 0.0;
        for (int64_t d = 0; d < DIM; d++) {
            double size = 0.0;
            x[d] = pool_channel(s, g, d, &size);
            sum += x[d] * x[d];
            largest = fmax(largest, size * fabs(GET(s->weight, d)));
        }
        const double factor = 1.0 / sqrt(sum / DIM + 1e-6);
        for (int64_t d = 0; d < DIM; d++) {
            double y = x[d] * factor * GET(s->weight, d);
            if (d >= DIM - 64) {
                const int64_t pair = (d - (DIM - 64)) / 2;
                const int64_t other = d % 2 == 0 ? d + 1 : d - 1;
                const double z = x[other] * factor * GET(s->weight, other);
                const double cos = GET(s->rope_table, g * RATIO, pair);
                const double sin = GET(s->rope_table, g * RATIO, 32 + pair);
                y = d % 2 == 0 ? y * cos - z * sin : y * cos + z * sin;
            }
            EXPECT_NEAR(GET(s->cache, g + 1, d), y,
                        1.02 * 0x1p-8 * fabs(y) + 0x1p-18 * factor * largest);
        }
    }
    EXPECT(is_poison(slice(s->cache, 0, 0, 1, 1)) && is_poison(slice(s->cache, 0, 3, 4, 1)));
}

/* States are exact. */
static void
expect_states(const step *s)
{
    for (int64_t t = 0; t < TOKENS; t++) {
        const int64_t slot = (t / SBS + 2) % 3 * SBS + t % SBS;
        for (int64_t d = 0; d < WIDTH; d++) {
            const volatile float sum =
                (float)GET(s->score, t, d) + (float)GET(s->ape, t % RATIO, d);
            EXPECT_NEAR(GET(s->state, slot / SBS, slot % SBS, d), GET(s->kv, t, d), 0.0);
            EXPECT_NEAR(GET(s->state, slot / SBS, slot % SBS, WIDTH + d), (double)sum, 0.0);
        }
    }
}

static void
test_two_calls_and_one(void)
{
    const step s = make_step();
    EXPECT_OK(save(&s));
    expect_states(&s);
    EXPECT_OK(compress(&s, false));
    expect_rows(&s);
    step one = s;
    one.state = ARRAY(fp32, 3, SBS, 2 * WIDTH);
    one.cache = ARRAY(bf16, 4, DIM);
    EXPECT_OK(compress(&one, true));
    expect_states(&one);
    EXPECT_EQ(memcmp(one.cache->data, s.cache->data, s.cache->bytes), 0);
    EXPECT_EQ(memcmp(one.state->data, s.state->data, s.state->bytes), 0);
}

/* A group without any state is a row of zeros. */
static void
test_nothing_to_pool(void)
{
    const step s = make_step();
    for (int i = 0; i < 3; i++) {
        ((int32_t *)s.table->tensor.data)[i] = -1;
    }
    EXPECT_OK(compress(&s, true));
    for (int64_t d = 0; d < DIM; d++) {
        EXPECT_NEAR(GET(s.cache, 1, d), 0.0, 0.0);
        EXPECT_NEAR(GET(s.cache, 2, d), 0.0, 0.0);
    }
}

static void
test_bad_values(void)
{
    const step s = make_step();
    ((int64_t *)s.positions->tensor.data)[2] = -1;
    EXPECT_FAIL(save(&s), SMLA_ERROR_VALUE,
                "save_partial_states: `positions` must be >= 0, got -1 for token 2");
    EXPECT_FAIL(compress(&s, true), SMLA_ERROR_VALUE, "`positions` must be rows of `rope_table`");
    ((int64_t *)s.positions->tensor.data)[2] = 2;
    ((int32_t *)s.ids->tensor.data)[7] = 1;
    EXPECT_FAIL(compress(&s, true), SMLA_ERROR_VALUE,
                "`req_id_per_token` must name a row of `block_table` (0 to 0), got 1 at token 7");
    ((int32_t *)s.ids->tensor.data)[7] = 0;
    ((int32_t *)s.table->tensor.data)[1] = 3;
    EXPECT_FAIL(compress(&s, true), SMLA_ERROR_VALUE,
                "`block_table` must name pages of `state` (0 to 2) or be negative, got 3");
    ((int32_t *)s.table->tensor.data)[1] = 0;
    ((int64_t *)s.kv_slots->tensor.data)[3] = 4;
    EXPECT_FAIL(compress(&s, true), SMLA_ERROR_VALUE,
                "`kv_slot_mapping` must be below the 4 slots of `kv_cache`, got 4 at token 3");
    ((int64_t *)s.slots->tensor.data)[3] = 12;
    EXPECT_FAIL(save(&s), SMLA_ERROR_VALUE,
                "`slot_mapping` must be below the 12 slots of `state`, got 12 at token 3");
    EXPECT(is_poison(s.state) && is_poison(s.cache));
}

static void
tests(void)
{
    RUN(test_two_calls_and_one);
    RUN(test_nothing_to_pool);
    RUN(test_bad_values);
}

int
main(void)
{
    run_on_every_instruction_set(tests);
    return report("test_compressor");
}
