/* test_reshape.c: reshape_and_cache, byte for byte, on every instruction set. Rows and caches end
 * at a guard page.
 */
#include "instruction_sets.h"

#include "reference.h"

enum { TOKENS = 7, PAGES = 3, PAGE_TOKENS = 4, HEADS = 3 };

/* Random bits: numbers of all sizes, infinities and NaN. */
static array *
fill_bits(array *a)
{
    for (size_t i = 0; i < a->bytes; i++) {
        a->data[i] = (uint8_t)random_int(256);
    }
    return a;
}

/* Keys or values, and their pages. */
typedef struct part {
    const array *rows;
    const array *cache;
    const array *scale; /* [HEADS], or NULL: the cache has copies */
} part;

/* The pages of a token of `dim` elements per head, which may lie in a wider row. */
static part
make_part(DLDataType dtype, DLDataType stored, int64_t dim, int64_t gap)
{
    const array *const wide = fill_bits(ARRAY(stored, PAGES, PAGE_TOKENS, HEADS, dim + gap));
    part p = {.rows = fill_bits(ARRAY(dtype, TOKENS, HEADS, dim)),
              .cache = slice(wide, 3, gap, dim + gap, 1)};
    if (stored.bits == 8) {
        array *const scale = ARRAY(fp32, HEADS);
        for (int head = 0; head < HEADS; head++) {
            SET(scale, 0.3 + head, head);
        }
        p.scale = scale;
    }
    return p;
}

static void
expect_row(const part *p, int64_t token, int64_t slot)
{
    const size_t size = p->rows->tensor.dtype.bits / 8u;
    for (int64_t head = 0; head < HEADS; head++) {
        for (int64_t i = 0; i < p->rows->shape[2]; i++) {
            const uint8_t *const got =
                AT(p->cache, slot / PAGE_TOKENS, slot % PAGE_TOKENS, head, i);
            if (p->scale == NULL) {
                EXPECT_EQ(memcmp(got, AT(p->rows, token, head, i), size), 0);
            } else {
                /* A quotient of two floats, rounded to a float, as no double would be. */
                const float x = (float)GET(p->rows, token, head, i);
                EXPECT_EQ(*got, nearest_e4m3((double)(x / (float)GET(p->scale, head))));
            }
        }
    }
}

static void
check_write(const part *k, const part *v)
{
    static const int64_t wanted[TOKENS] = {0, 11, -1, 5, 7, -9, 2};
    array *const slots = ARRAY(int64, TOKENS);
    memcpy(slots->data, wanted, sizeof wanted);
    const smla_reshape_and_cache_args args = {
        .struct_size = sizeof args,
        .k = &k->rows->tensor,
        .v = &v->rows->tensor,
        .k_cache = &k->cache->tensor,
        .v_cache = &v->cache->tensor,
        .slot_mapping = &slots->tensor,
        .k_scale.tensor = k->scale == NULL ? NULL : &k->scale->tensor,
        .v_scale.tensor = v->scale == NULL ? NULL : &v->scale->tensor,
    };
    EXPECT_OK(smla_reshape_and_cache(&args, &error));
    for (int token = 0; token < TOKENS; token++) {
        if (wanted[token] >= 0) {
            expect_row(k, token, wanted[token]);
            expect_row(v, token, wanted[token]);
        }
    }
}

static void
test_writes(void)
{
    static const int64_t dims[][2] = {{8, 8}, {24, 16}, {40, 72}, {128, 64}, {576, 512}};
    const DLDataType dtypes[] = {bf16, fp16, fp32};
    for (int i = 0; i < 3 * 5 * 2; i++) {
        const DLDataType dtype = dtypes[i % 3];
        const int64_t *const dim = dims[i / 3 % 5];
        const int64_t gap = i < 15 ? 0 : 3;
        const part k = make_part(dtype, uint8, dim[0], gap);
        const part v = make_part(dtype, uint8, dim[1], gap);
        check_write(&k, &v);
        const part k_copy = make_part(dtype, dtype, dim[0], gap);
        const part v_copy = make_part(dtype, dtype, dim[1], gap);
        check_write(&k_copy, &v_copy);
        free_arrays("test_writes");
    }
}

static void
run_kernel_tests(void)
{
    RUN(test_writes);
}

int
main(void)
{
    run_on_every_instruction_set(run_kernel_tests);
    return report("test_reshape");
}
