/* test_overlap_views.c: the search for shared bytes is compared with the bytes themselves, for
 * views of one buffer. Large views, of addresses without memory, have answers that are known.
 */
#include <assert.h>

#include "core/overlap.h"
#include "operators.h"

/* ---- Views without memory ------------------------------------------------------------------ */

enum { BASE = 1 << 20 };

typedef struct layout {
    int64_t start; /* bytes behind BASE */
    int bytes;     /* element size */
    int ndim;
    int64_t shape[MAX_NDIM];
    int64_t strides[MAX_NDIM]; /* bytes */
} layout;

typedef struct layout_tensor {
    DLTensor tensor;
    int64_t shape[MAX_NDIM];
    int64_t strides[MAX_NDIM];
} layout_tensor;

static const DLTensor *
tensor_of(layout_tensor *to, const layout *from)
{
    to->tensor =
        (DLTensor){.data = (uint8_t *)(uintptr_t)(BASE + from->start),
                   .device = cpu,
                   .ndim = from->ndim,
                   .dtype = {.code = kDLUInt, .bits = (uint8_t)(8 * from->bytes), .lanes = 1},
                   .shape = to->shape,
                   .strides = to->strides};
    for (int i = 0; i < from->ndim; i++) {
        to->shape[i] = from->shape[i];
        to->strides[i] = from->strides[i] / from->bytes;
    }
    return &to->tensor;
}

static smla_overlap
overlap_of(const layout *a, const layout *b)
{
    layout_tensor tensors[2];
    return smla_find_overlap(tensor_of(&tensors[0], a), tensor_of(&tensors[1], b));
}

static smla_overlap
own_overlap_of(const layout *a)
{
    layout_tensor tensor;
    return smla_find_own_overlap(tensor_of(&tensor, a));
}

/* ---- The bytes ----------------------------------------------------------------------------- */

enum { MOST_BYTES = 4096, ORIGIN = 1536 };

/* Marks the bytes of a view; false when one of its elements begins at one that began before. */
static bool
mark_bytes(const layout *view, bool *marks)
{
    static bool begun[MOST_BYTES];
    int64_t index[MAX_NDIM] = {0};
    int64_t count = 1;
    bool good = true;
    memset(begun, 0, sizeof begun);
    memset(marks, 0, MOST_BYTES);
    for (int i = 0; i < view->ndim; i++) {
        count *= view->shape[i];
    }
    assert(view->ndim >= 0 && view->ndim <= MAX_NDIM);
    for (int64_t n = 0; n < count; n++) {
        int64_t at = ORIGIN + view->start;
        for (int i = 0; i < view->ndim; i++) {
            at += index[i] * view->strides[i];
        }
        if (at < 0 || at + view->bytes > MOST_BYTES) {
            printf("a test marks byte %" PRId64 "\n", at);
            exit(2);
        }
        good = good && !begun[at];
        begun[at] = true;
        memset(marks + at, true, (size_t)view->bytes);
        for (int i = view->ndim - 1; i >= 0 && ++index[i] == view->shape[i]; i--) {
            index[i] = 0;
        }
    }
    return good;
}

typedef struct tally {
    int disjoint;
    int shared;
    int unknown;
    int own; /* views that overlap themselves */
} tally;

static void
compare(const layout *a, const layout *b, tally *seen)
{
    static bool marks[2][MOST_BYTES];
    const bool is_injective = mark_bytes(a, marks[0]);
    mark_bytes(b, marks[1]);
    bool shares = false;
    for (int i = 0; i < MOST_BYTES; i++) {
        shares = shares || (marks[0][i] && marks[1][i]);
    }
    const smla_overlap found = overlap_of(a, b);
    const smla_overlap own = own_overlap_of(a);
    EXPECT(found == SMLA_OVERLAP_UNKNOWN || (found == SMLA_OVERLAP_SOME) == shares);
    EXPECT(own == SMLA_OVERLAP_UNKNOWN || (own == SMLA_OVERLAP_NONE) == is_injective);
    EXPECT_EQ(overlap_of(b, a), found);
    seen->disjoint += !shares;
    seen->shared += shares;
    seen->own += !is_injective;
    seen->unknown += found == SMLA_OVERLAP_UNKNOWN || own == SMLA_OVERLAP_UNKNOWN;
}

/* ---- Views of a parent --------------------------------------------------------------------- */

/* A parent of up to four dimensions, whose last one is of bytes. */
static layout
make_parent(void)
{
    layout parent = {.bytes = 1, .ndim = 1 + (int)random_int(4)};
    int64_t total = 1;
    for (int i = parent.ndim - 1; i >= 0; i--) {
        parent.shape[i] = i == parent.ndim - 1 ? 4 * (1 + random_int(4)) : 1 + random_int(5);
        parent.strides[i] = total;
        total *= parent.shape[i];
    }
    return parent;
}

/* The same bytes as elements of 1, 2 or 4. */
static void
widen(layout *view)
{
    const int last = view->ndim - 1;
    view->bytes = 1 << random_int(3);
    view->shape[last] /= view->bytes;
    view->strides[last] *= view->bytes;
}

static void
cut(layout *view)
{
    const int dim = (int)random_int(view->ndim);
    const int64_t size = view->shape[dim];
    if (size == 0) {
        return;
    }
    const int64_t first = random_int(size);
    const int64_t step = 1 + random_int(3);
    const bool is_back = random_int(3) == 0;
    const int64_t most = (is_back ? first : size - 1 - first) / step + 1;
    view->start += first * view->strides[dim];
    view->shape[dim] = random_int(20) == 0 ? 0 : 1 + random_int(most);
    view->strides[dim] *= is_back ? -step : step;
}

static void
split(layout *view)
{
    const int dim = (int)random_int(view->ndim);
    const int64_t inner = 1 + random_int(4);
    if (view->ndim == 6 || view->shape[dim] % inner != 0) {
        return;
    }
    for (int i = view->ndim; i > dim; i--) {
        view->shape[i] = view->shape[i - 1];
        view->strides[i] = view->strides[i - 1];
    }
    view->ndim++;
    view->shape[dim] /= inner;
    view->strides[dim] *= inner;
    view->shape[dim + 1] = inner;
}

static void
swap(layout *view)
{
    const int a = (int)random_int(view->ndim);
    const int b = (int)random_int(view->ndim);
    const int64_t size = view->shape[a];
    const int64_t stride = view->strides[a];
    view->shape[a] = view->shape[b];
    view->strides[a] = view->strides[b];
    view->shape[b] = size;
    view->strides[b] = stride;
}

/* A dimension of one element gets more, or any stride. */
static void
repeat(layout *view)
{
    for (int i = 0; i < view->ndim; i++) {
        if (view->shape[i] == 1) {
            const bool is_more = random_int(2) == 0;
            view->shape[i] = is_more ? 2 : 1;
            view->strides[i] = is_more ? 0 : view->bytes * (random_int(2000) - 1000);
            return;
        }
    }
}

static layout
make_view(const layout *parent)
{
    layout view = *parent;
    widen(&view);
    for (int64_t n = random_int(6); n > 0; n--) {
        switch (random_int(8)) {
        case 0: split(&view); break;
        case 1: swap(&view); break;
        case 2: repeat(&view); break;
        default: cut(&view);
        }
    }
    return view;
}

/* Two views of one parent. In every third pair one of them begins anywhere, as a view of the flat
 * buffer does, so that its rows lie across the other's. */
static void
test_views_of_a_parent(void)
{
    tally seen = {0};
    for (int i = 0; i < 200000; i++) {
        const layout parent = make_parent();
        const layout a = make_view(&parent);
        layout b = make_view(&parent);
        if (i % 3 == 0) {
            b.start += random_int(200) - 100;
        }
        compare(&a, &b, &seen);
    }
    printf("  views: %d pairs disjoint, %d shared, %d views with repeated elements\n",
           seen.disjoint, seen.shared, seen.own);
    EXPECT_EQ(seen.unknown, 0);
    EXPECT(seen.disjoint > 50000 && seen.shared > 50000 && seen.own > 1000);
}

/* Strides of any size, which no order connects. */
static void
test_any_strides(void)
{
    tally seen = {0};
    for (int i = 0; i < 100000; i++) {
        layout views[2];
        for (int v = 0; v < 2; v++) {
            views[v] = (layout){.start = random_int(200) - 100,
                                .bytes = 1 << random_int(2),
                                .ndim = 1 + (int)random_int(4)};
            for (int d = 0; d < views[v].ndim; d++) {
                views[v].shape[d] = 1 + random_int(4);
                views[v].strides[d] = views[v].bytes * (random_int(101) - 50);
            }
        }
        compare(&views[0], &views[1], &seen);
    }
    printf("  any strides: %d pairs disjoint, %d shared, %d of views\n", seen.disjoint, seen.shared,
           seen.own);
    EXPECT_EQ(seen.unknown, 0); /* small arrays have few sums */
    EXPECT(seen.disjoint > 10000 && seen.shared > 10000 && seen.own > 10000);
}

/* ---- Large views --------------------------------------------------------------------------- */

enum { T = 1 << 24 };

#define V2(start, bytes, n0, s0, n1, s1) \
    {                                    \
        start, bytes, 2, {n0, n1},       \
        {                                \
            s0, s1                       \
        }                                \
    }
#define V3(start, bytes, n0, s0, n1, s1, n2, s2) \
    {                                            \
        start, bytes, 3, {n0, n1, n2},           \
        {                                        \
            s0, s1, s2                           \
        }                                        \
    }

static const struct {
    layout a, b;
    smla_overlap expected;
} large[] = {
    /* Queries of 16 heads of 192, 64 of them rotated, and the key, in rows of 16 * 192 + 576. */
    {V3(256, 2, T, 7296, 16, 384, 64, 2), V2(7168, 2, T, 7296, 64, 2), SMLA_OVERLAP_NONE},
    {V3(256, 2, T, 7296, 16, 384, 64, 2), V2(6144, 2, T, 7296, 512, 2), SMLA_OVERLAP_NONE},
    {V3(256, 2, T, 7296, 16, 384, 64, 2), V2(6142, 2, T, 7296, 512, 2), SMLA_OVERLAP_SOME},
    {V3(256, 2, T, 7296, 17, 384, 64, 2), V2(7168, 2, T, 7296, 64, 2), SMLA_OVERLAP_NONE},
    {V3(256, 2, T, 7296, 19, 384, 64, 2), V2(7168, 2, T, 7296, 64, 2), SMLA_OVERLAP_SOME},
    /* Columns that begin in one row and end in the next. */
    {V2(96, 2, T, 128, 32, 2), V2(32, 2, T, 128, 32, 2), SMLA_OVERLAP_NONE},
    {V2(96, 2, T, 128, 33, 2), V2(32, 2, T, 128, 32, 2), SMLA_OVERLAP_SOME},
    /* Every second and every fourth row; every second and every third. */
    {V2(0, 2, T, 200, 100, 2), V2(100, 2, T, 400, 50, 2), SMLA_OVERLAP_SOME},
    {V2(0, 2, T, 200, 50, 2), V2(100, 2, T, 400, 50, 2), SMLA_OVERLAP_NONE},
    {V2(0, 2, T, 200, 50, 2), V2(101, 1, T, 400, 99, 1), SMLA_OVERLAP_NONE},
    {V2(0, 2, T, 200, 50, 2), V2(101, 1, T, 400, 100, 1), SMLA_OVERLAP_SOME},
    {V2(0, 2, T, 200, 50, 2), V2(100, 2, T, 300, 50, 2), SMLA_OVERLAP_SOME},
    {V2(0, 2, T, 200, 25, 2), V2(50, 2, T, 300, 25, 2), SMLA_OVERLAP_NONE},
    {V2(0, 2, T, 200, 25, 2), V2(50, 2, T, 300, 26, 2), SMLA_OVERLAP_SOME},
    /* The only common row lies at the end of the one and the beginning of the other. */
    {V2(0, 2, T, 200, 1, 2), V2(200 * (T - 1L), 2, T, 300, 1, 2), SMLA_OVERLAP_SOME},
    {V2(0, 2, T, 200, 1, 2), V2(200 * (T - 1L) - 100, 2, T, 300, 1, 2), SMLA_OVERLAP_NONE},
    {V2(0, 2, T, 200, 1, 2), V2(200 * (T - 1L) - 400, 2, T, 300, 1, 2), SMLA_OVERLAP_SOME},
    {V2(0, 2, T, 200, 1, 2), V2(200 * (T - 1L) - 400, 2, 1, 300, 1, 2), SMLA_OVERLAP_SOME},
    /* Steps of two and of three along two axes of [T, 16, 32]: even rows, odd columns. */
    {V3(0, 2, T / 2, 2048, 8, 128, 32, 2), V3(64, 2, T / 3, 3072, 5, 192, 32, 2),
     SMLA_OVERLAP_SOME},
    {V3(0, 2, T / 2, 2048, 8, 128, 32, 2), V3(64, 2, T / 4, 4096, 8, 128, 32, 2),
     SMLA_OVERLAP_NONE},
    {V3(0, 2, T / 2, 2048, 8, 128, 16, 2), V3(32, 2, T / 3, 3072, 5, 192, 16, 2),
     SMLA_OVERLAP_NONE},
    /* A transposed view, one that runs backwards, one that repeats its rows. */
    {V3(256, 2, 64, 2, T, 7296, 16, 384), V2(7168, 2, 64, 2, T, 7296), SMLA_OVERLAP_NONE},
    {V2(128 * (T - 1L), 2, T, -128, 32, 2), V2(64, 4, T, 128, 16, 4), SMLA_OVERLAP_NONE},
    {V2(128 * (T - 1L), 2, T, -128, 33, 2), V2(64, 4, T, 128, 16, 4), SMLA_OVERLAP_SOME},
    {V3(64, 4, T, 0, 8, 128, 16, 4), V2(0, 2, T, 128, 32, 2), SMLA_OVERLAP_NONE},
    {V3(64, 4, T, 0, 8, 128, 17, 4), V2(0, 2, T, 128, 32, 2), SMLA_OVERLAP_SOME},
    {V3(64, 4, 0, 0, 8, 128, 17, 4), V2(0, 2, T, 128, 32, 2), SMLA_OVERLAP_NONE},
    /* Strides that share no divisor but 2: too many sums. Sizes that exceed memory. */
    {V2(0, 2, T, 2 * 1000003, 1, 2), V2(2, 2, T, 2 * 999983, 1, 2), SMLA_OVERLAP_UNKNOWN},
    {V2(0, 2, T, INT64_C(1) << 60, 1, 2), V2(2, 2, T, 2, 1, 2), SMLA_OVERLAP_UNKNOWN},
};

static void
test_large_views(void)
{
    for (size_t i = 0; i < sizeof large / sizeof large[0]; i++) {
        const smla_overlap found = overlap_of(&large[i].a, &large[i].b);
        const smla_overlap back = overlap_of(&large[i].b, &large[i].a);
        if (found != large[i].expected || back != large[i].expected) {
            fail_at(__FILE__, (int)i, "overlap of a large pair", found, large[i].expected);
        }
    }
}

static void
test_large_views_of_themselves(void)
{
    static const struct {
        layout view;
        smla_overlap expected;
    } cases[] = {
        {V2(0, 2, T, 128, 64, 2), SMLA_OVERLAP_NONE},
        {V2(0, 2, T, 126, 64, 2), SMLA_OVERLAP_SOME},
        {V2(0, 2, 64, 2, T, 128), SMLA_OVERLAP_NONE},
        {V2(0, 2, 64, 2, T, 126), SMLA_OVERLAP_SOME},
        {V2(0, 2, T, 0, 64, 2), SMLA_OVERLAP_SOME},
        {V2(0, 2, T, -128, 64, -2), SMLA_OVERLAP_NONE},
        {V2(0, 2, T, 4, T, 6), SMLA_OVERLAP_SOME},
        {V2(0, 2, T, 4, 2, 6), SMLA_OVERLAP_NONE}, /* even elements, then odd ones */
        {V2(0, 2, T, 4, 3, 6), SMLA_OVERLAP_SOME},
        {V3(0, 2, T, 2048, 8, 128, 64, 2), SMLA_OVERLAP_NONE},
        {V3(0, 2, T, 1920, 16, 128, 64, 2), SMLA_OVERLAP_SOME},
        {V2(0, 2, 999983, 2 * 1000003, 1000004, 2 * 999983), SMLA_OVERLAP_UNKNOWN},
        {V2(0, 2, 1, 0, 64, 2), SMLA_OVERLAP_NONE},
        {V2(0, 2, 0, 0, 64, 0), SMLA_OVERLAP_NONE},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const smla_overlap found = own_overlap_of(&cases[i].view);
        if (found != cases[i].expected) {
            fail_at(__FILE__, (int)i, "overlap of a large view", found, cases[i].expected);
        }
    }
}

/* ---- Every operator ------------------------------------------------------------------------ */

enum {
    GAP = 64, /* bytes between the rows of an inner dimension, and after each array's part */
    MOST_BUFFER_BYTES = 1 << 20, /* long vectors, which must be contiguous, would take more */
};

/* Gives `to` the shape of `from`, with gaps. Returns the bytes of a row of dimension 0. */
static int64_t
spread(layout_tensor *to, const DLTensor *from)
{
    const int64_t bytes = from->dtype.bits / 8;
    int64_t row = bytes;
    to->tensor = *from;
    to->tensor.shape = to->shape;
    to->tensor.strides = to->strides;
    for (int i = from->ndim - 1; i >= 1; i--) {
        to->shape[i] = from->shape[i];
        to->strides[i] = row / bytes;
        row = (to->shape[i] * row + 2 * GAP - 1) / GAP * GAP;
    }
    to->shape[0] = from->shape[0];
    return (row + GAP - 1) / GAP * GAP;
}

/* Copies the elements of one array to another of its shape. */
static void
copy_elements(const DLTensor *from, const DLTensor *to)
{
    const size_t bytes = from->dtype.bits / 8u;
    int64_t index[MAX_NDIM] = {0};
    assert(from->ndim >= 0 && from->ndim <= MAX_NDIM);
    for (bool more = !smla_is_empty(from); more;) {
        int64_t at = 0;
        int64_t there = 0;
        for (int i = 0; i < from->ndim; i++) {
            at += index[i] * smla_stride(from, i);
            there += index[i] * smla_stride(to, i);
        }
        memcpy((uint8_t *)to->data + there * (int64_t)bytes,
               (const uint8_t *)from->data + at * (int64_t)bytes, bytes);
        more = false;
        for (int i = from->ndim - 1; i >= 0 && !more; i--) {
            more = ++index[i] < from->shape[i];
            index[i] = more ? index[i] : 0;
        }
    }
}

/* An output and another array as columns of one buffer: in each row lie the one's elements, with
 * gaps, and then the other's. No operator says that they overlap. */
static void
test_columns_of_one_buffer(void)
{
    int num_accepted = 0;
    int num_pairs = 0;
    for (int i = 0; i < NUM_OPERATORS; i++) {
        const operator_case *op = &operators[i];
        size_t offsets[MAX_SLOTS];
        const any_args first = op->make();
        const int num_given = find_arrays(&first, op->args_bytes, offsets);
        free_arrays(op->name);
        for (int pair = 0; pair < num_given * num_given; pair++) {
            char name[32];
            const int which[2] = {pair / num_given, pair % num_given};
            any_args args = op->make();
            find_name(op, &args, offsets[which[0]], name);
            if (which[0] == which[1] || !is_written(op, name)) {
                free_arrays(op->name);
                continue;
            }
            layout_tensor moved[2];
            int64_t rows[2];
            int64_t count = 0;
            for (int v = 0; v < 2; v++) {
                const DLTensor *const given = *array_at(&args, offsets[which[v]]);
                rows[v] = given == NULL || given->ndim < 1 ? 0 : spread(&moved[v], given);
                count = rows[v] > 0 && given->shape[0] > count ? given->shape[0] : count;
            }
            const int64_t bytes = (count + 1) * (rows[0] + rows[1]);
            if (rows[0] > 0 && rows[1] > 0 && bytes <= MOST_BUFFER_BYTES) {
                const array *const buffer = ARRAY(uint8, bytes);
                const uintptr_t address = (uintptr_t)buffer->data;
                uint8_t *const start = buffer->data + (GAP - address % GAP) % GAP;
                for (int v = 0; v < 2; v++) {
                    const DLTensor *const given = *array_at(&args, offsets[which[v]]);
                    moved[v].tensor.data = start + v * rows[0];
                    moved[v].tensor.byte_offset = 0;
                    moved[v].strides[0] = (rows[0] + rows[1]) / (given->dtype.bits / 8);
                    copy_elements(given, &moved[v].tensor);
                    *array_at(&args, offsets[which[v]]) = &moved[v].tensor;
                }
                memset(&error, 0, sizeof error);
                const bool is_ok = op->call(&args, &error) == SMLA_OK;
                if (strstr(error.text, "overlap") != NULL || strstr(error.text, "told") != NULL) {
                    fail_at(op->name, pair, error.text, 1.0, 0.0);
                }
                num_accepted += is_ok;
                num_pairs++;
            }
            free_arrays(op->name);
        }
    }
    printf("  columns of one buffer: %d of %d pairs accepted\n", num_accepted, num_pairs);
    EXPECT(num_accepted > num_pairs / 2); /* some arrays must be contiguous */
}

/* ---- Texts --------------------------------------------------------------------------------- */

/* What cannot be told is not said to be shared. The arrays are far larger than their memory,
 * because a refused call reads and writes no element. */
static void
test_text_of_the_unknown(void)
{
    static const layout x_layout = V2(0, 2, T, 2 * 1000003, 1, 2);
    static const layout out_layout = V2(2, 1, T, 2 * 999983, 1, 1);
    static const layout own_layout = V2(0, 1, 999983, 1000003, 1000004, 999983);
    const array *const buffer = ARRAY(uint8, 64);
    layout_tensor x;
    layout_tensor out;
    smla_dynamic_per_tensor_quant_args args = {.struct_size = sizeof args,
                                               .x = tensor_of(&x, &x_layout),
                                               .out = tensor_of(&out, &out_layout),
                                               .scale = &ARRAY(fp32, 1)->tensor};
    x.tensor.data = buffer->data;
    x.tensor.dtype = bf16;
    out.tensor.data = buffer->data + 2;
    EXPECT_FAIL(smla_dynamic_per_tensor_quant(&args, &error), SMLA_ERROR_VALUE,
                "dynamic_per_tensor_quant: `out` must not overlap `x`, got strides by which they "
                "cannot be told apart");
    args.x = tensor_of(&x, &own_layout);
    args.out = tensor_of(&out, &own_layout);
    x.tensor.data = buffer->data;
    x.tensor.dtype = bf16;
    out.tensor.data = buffer->data;
    EXPECT_FAIL(smla_dynamic_per_tensor_quant(&args, &error), SMLA_ERROR_VALUE,
                "dynamic_per_tensor_quant: `out` must have elements that do not overlap (it is "
                "written), got strides by which they cannot be told apart");
}

int
main(void)
{
    RUN(test_views_of_a_parent);
    RUN(test_any_strides);
    RUN(test_large_views);
    RUN(test_large_views_of_themselves);
    RUN(test_columns_of_one_buffer);
    RUN(test_text_of_the_unknown);
    return report("test_overlap_views");
}
