/* testing.h: what the C tests share: expectations, and arrays between a red zone and a page that
 * cannot be read.
 *
 * A program lists its tests in main:  RUN(test_a);  RUN(test_b);  return report("test_x");
 * With SMLA_FIRST_FAILURE in the environment it ends after the first test that fails.
 * Arrays live until the test that made them ends, and then their red zones are checked. New arrays
 * hold POISON, which shows the elements that no call has written. A call in EXPECT_FAIL must leave
 * the bytes of every array alone.
 */
#pragma once

#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "core/numeric.h"
#include "sparse_mla.h"

/* ---- Expectations -------------------------------------------------------------------------- */

enum { MAX_PRINTED = 10 }; /* failures per test that are printed */

static int failures; /* failures of the running test */
static int num_passed;
static int num_failed;
static smla_error error; /* the error of the last call */

static inline void
fail_at(const char *file, int line, const char *what, double actual, double expected)
{
    if (failures++ < MAX_PRINTED) {
        printf("%s:%d: %s: got %.10g, expected %.10g\n", file, line, what, actual, expected);
        fflush(stdout); /* because a sanitizer may end the program */
    }
}

static inline void
expect_near(const char *file, int line, const char *what, double actual, double expected,
            double bound)
{
    const bool is_same = actual == expected || (isnan(actual) && isnan(expected));
    if (!is_same && !(fabs(actual - expected) <= bound)) {
        fail_at(file, line, what, actual, expected);
    }
}

#define EXPECT(condition)                                      \
    do {                                                       \
        if (!(condition)) {                                    \
            fail_at(__FILE__, __LINE__, #condition, 0.0, 1.0); \
        }                                                      \
    } while (0)

/* For integers. They are compared as they are, and printed as doubles, exactly up to 2^53. */
#define EXPECT_EQ(actual, expected)                                                     \
    do {                                                                                \
        if ((actual) != (expected)) {                                                   \
            fail_at(__FILE__, __LINE__, #actual, (double)(actual), (double)(expected)); \
        }                                                                               \
    } while (0)

/* The two numbers are equal, both NaN, or at most `bound` apart. */
#define EXPECT_NEAR(actual, expected, bound) \
    expect_near(__FILE__, __LINE__, #actual, actual, expected, bound)

#define EXPECT_OK(call)                                                    \
    do {                                                                   \
        const smla_status status_ = (call);                                \
        if (status_ != SMLA_OK) {                                          \
            fail_at(__FILE__, __LINE__, #call, (double)status_, 0.0);      \
            printf("    %s: %s\n", smla_status_name(status_), error.text); \
        }                                                                  \
    } while (0)

/* The call fails with this status and a text that contains `part`, and writes nothing. */
#define EXPECT_FAIL(call, status, part)                                              \
    do {                                                                             \
        memset(&error, 0, sizeof error);                                             \
        const int arrays_ = num_arrays;                                              \
        const uint64_t before_ = hash_arrays(arrays_);                               \
        const smla_status status_ = (call);                                          \
        expect_failure(__FILE__, __LINE__, #call, status_, status, part);            \
        if (hash_arrays(arrays_) != before_) {                                       \
            fail_at(__FILE__, __LINE__, "bytes written by a failed call", 1.0, 0.0); \
        }                                                                            \
    } while (0)

static inline void
expect_failure(const char *file, int line, const char *call, smla_status actual,
               smla_status expected, const char *part)
{
    const bool is_terminated = memchr(error.text, '\0', sizeof error.text) != NULL;
    const bool good = actual == expected && error.status == expected && is_terminated &&
                      strstr(error.text, part) != NULL;
    if (!good) {
        fail_at(file, line, call, (double)actual, (double)expected);
        printf("    got \"%.*s\", expected \"%s\" in it\n", (int)sizeof error.text, error.text,
               part);
    }
}

/* ---- Arrays -------------------------------------------------------------------------------- */

enum { RED_ZONE = 256, MAX_ARRAYS = 4096, MAX_NDIM = 8, RED = 0xA5, POISON = 0xF7 };

#if defined(__x86_64__)
enum { PAGE = 4096 };
#else
enum { PAGE = 65536 }; /* the largest page size of other machines */
#endif

/* A DLTensor with its own shape and strides. Slices share the memory of the array they are of. */
typedef struct array {
    DLTensor tensor;
    int64_t shape[MAX_NDIM];
    int64_t strides[MAX_NDIM]; /* elements */
    uint8_t *memory; /* red zone, the bytes, up to 63 red bytes, guard page; NULL for slices */
    uint8_t *data;   /* the first of the bytes */
    size_t bytes;
} array;

static array *arrays[MAX_ARRAYS];
static int num_arrays;

static const DLDataType bf16 = {.code = kDLBfloat, .bits = 16, .lanes = 1};
static const DLDataType fp16 = {.code = kDLFloat, .bits = 16, .lanes = 1};
static const DLDataType fp32 = {.code = kDLFloat, .bits = 32, .lanes = 1};
static const DLDataType int32 = {.code = kDLInt, .bits = 32, .lanes = 1};
static const DLDataType int64 = {.code = kDLInt, .bits = 64, .lanes = 1};
static const DLDataType uint8 = {.code = kDLUInt, .bits = 8, .lanes = 1};
static const DLDataType e4m3 = {.code = kDLFloat8_e4m3fn, .bits = 8, .lanes = 1};
static const DLDevice cpu = {.device_type = kDLCPU, .device_id = 0};

static inline array *
remember_array(void)
{
    array *a = calloc(1, sizeof *a);
    if (a == NULL || num_arrays == MAX_ARRAYS) {
        printf("out of test arrays\n");
        exit(2);
    }
    arrays[num_arrays++] = a;
    return a;
}

/* Bytes in front of the guard page: the red zone and the array, whose bytes end near that page. */
static inline size_t
usable_bytes(const array *a)
{
    return (RED_ZONE + (a->bytes + 63) / 64 * 64 + PAGE - 1) / PAGE * PAGE;
}

/* The memory is not from the heap, because LeakSanitizer reads all of the heap, guard pages too. */
static inline void
map_memory(array *a)
{
    static int zeros = -1;
    const size_t usable = usable_bytes(a);
    zeros = zeros < 0 ? open("/dev/zero", O_RDWR) : zeros;
    a->memory = mmap(NULL, usable + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, zeros, 0);
    if (a->memory == MAP_FAILED || mprotect(a->memory + usable, PAGE, PROT_NONE) != 0) {
        printf("out of memory\n");
        exit(2);
    }
    a->data = a->memory + usable - (a->bytes + 63) / 64 * 64;
    memset(a->memory, RED, usable);
    memset(a->data, POISON, a->bytes);
}

static inline array *
new_array(DLDataType dtype, int ndim, const int64_t *shape)
{
    array *a = remember_array();
    int64_t count = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        a->shape[i] = shape[i];
        a->strides[i] = count;
        count *= shape[i];
    }
    a->bytes = (size_t)(count * dtype.bits / 8);
    map_memory(a);
    a->tensor = (DLTensor){.data = a->data,
                           .device = cpu,
                           .ndim = ndim,
                           .dtype = dtype,
                           .shape = a->shape,
                           .strides = a->strides};
    return a;
}

#define COUNT(...) ((int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)))

/* ARRAY(bf16, 4, 8, 576): a contiguous array. */
#define ARRAY(dtype, ...) new_array(dtype, COUNT(__VA_ARGS__), (int64_t[]){__VA_ARGS__})

/* Fills an array with zeros, which are good values of index arrays and of all others. */
static inline const DLTensor *
zeros(array *a)
{
    memset(a->data, 0, a->bytes);
    return &a->tensor;
}

#define ZEROS(dtype, ...) zeros(ARRAY(dtype, __VA_ARGS__))

static inline array *
view_of(const array *a)
{
    array *view = remember_array();
    *view = *a;
    view->memory = NULL;
    view->tensor.shape = view->shape;
    view->tensor.strides = view->strides;
    return view;
}

/* a[..., start:stop:step, ...] along `dim`; a negative step starts at the last element and goes
 * down. */
static inline array *
slice(const array *a, int dim, int64_t start, int64_t stop, int64_t step)
{
    array *view = view_of(a);
    const int64_t first = step > 0 ? start : stop - 1;
    const int64_t distance = step > 0 ? step : -step;
    view->shape[dim] = (stop - start + distance - 1) / distance;
    view->strides[dim] *= step;
    view->tensor.data =
        (uint8_t *)a->tensor.data + first * a->strides[dim] * (a->tensor.dtype.bits / 8);
    return view;
}

static inline array *
transpose(const array *a, int dim_0, int dim_1)
{
    array *view = view_of(a);
    view->shape[dim_0] = a->shape[dim_1];
    view->shape[dim_1] = a->shape[dim_0];
    view->strides[dim_0] = a->strides[dim_1];
    view->strides[dim_1] = a->strides[dim_0];
    return view;
}

/* A hash of the bytes of the first `count` arrays. */
static inline uint64_t
hash_arrays(int count)
{
    uint64_t hash = 0xCBF29CE484222325u; /* FNV-1a */
    for (int i = 0; i < count; i++) {
        for (size_t at = 0; arrays[i]->memory != NULL && at < arrays[i]->bytes; at++) {
            hash = (hash ^ arrays[i]->data[at]) * 0x100000001B3u;
        }
    }
    return hash;
}

static inline void
free_arrays(const char *test)
{
    for (int i = 0; i < num_arrays; i++) {
        array *a = arrays[i];
        const size_t end = a->memory == NULL ? 0 : usable_bytes(a);
        for (size_t at = 0; at < end; at++) {
            const uint8_t *const byte = a->memory + at;
            if (*byte != RED && (byte < a->data || byte >= a->data + a->bytes)) {
                fail_at(test, i, "red zone of array", (double)at, 0.0);
                break;
            }
        }
        if (end != 0) {
            (void)munmap(a->memory, end + PAGE);
        }
        free(a);
    }
    num_arrays = 0;
}

/* ---- Elements ------------------------------------------------------------------------------ */

static inline void *
element_at(const array *a, int ndim, const int64_t *index)
{
    int64_t offset = 0;
    for (int i = 0; i < ndim; i++) {
        if (ndim != a->tensor.ndim || index[i] < 0 || index[i] >= a->shape[i]) {
            printf("a test reads element %" PRId64 " of dimension %d\n", index[i], i);
            exit(2);
        }
        offset += index[i] * a->strides[i];
    }
    return (uint8_t *)a->tensor.data + offset * (a->tensor.dtype.bits / 8);
}

/* AT(a, i, j): address of an element; GET(a, i, j): its value. */
#define AT(a, ...)         element_at(a, COUNT(__VA_ARGS__), (int64_t[]){__VA_ARGS__})
#define GET(a, ...)        read_value((a)->tensor.dtype, AT(a, __VA_ARGS__))
#define SET(a, value, ...) write_value((a)->tensor.dtype, AT(a, __VA_ARGS__), value)

static inline double
read_value(DLDataType dtype, const void *element)
{
    uint64_t bits = 0;
    memcpy(&bits, element, dtype.bits / 8u); /* little-endian, as everywhere in the library */
    if (dtype.code == kDLBfloat) {
        return smla_bf16_to_float((uint16_t)bits);
    }
    if (dtype.code == kDLFloat8_e4m3fn) {
        return smla_e4m3_to_float((uint8_t)bits);
    }
    if (dtype.code == kDLFloat) {
        return dtype.bits == 16 ? smla_half_to_float((uint16_t)bits)
                                : smla_bits_float((uint32_t)bits);
    }
    if (dtype.code == kDLInt) {
        return dtype.bits == 64 ? (double)(int64_t)bits : (double)(int32_t)bits;
    }
    return (double)bits;
}

/* Does not write fp16: tests that need fp16 write its bits. */
static inline void
write_value(DLDataType dtype, void *element, double value)
{
    uint64_t bits;
    if (dtype.code == kDLBfloat) {
        bits = smla_float_to_bf16((float)value);
    } else if (dtype.code == kDLFloat8_e4m3fn) {
        bits = smla_float_to_e4m3((float)value);
    } else if (dtype.code == kDLFloat) {
        bits = smla_float_bits((float)value);
    } else {
        bits = (uint64_t)(int64_t)value;
    }
    memcpy(element, &bits, dtype.bits / 8u);
}

static uint64_t random_state = 1;

static inline uint64_t
random_bits(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

/* A random integer from 0 to n - 1. */
static inline int64_t
random_int(int64_t n)
{
    return (int64_t)(random_bits() >> 16) % n;
}

/* A sum of twelve uniform numbers, which is nearly normal. One in 50 is ten times as large, as
 * outliers of activations are. */
static inline double
random_normal(void)
{
    double sum = -6.0;
    for (int i = 0; i < 12; i++) {
        sum += (double)(random_bits() >> 11) * 0x1p-53;
    }
    return random_int(50) == 0 ? 10.0 * sum : sum;
}

/* Moves on to the next element in row-major order; the first element follows the last one. */
static inline void
next_index(const array *a, int64_t index[MAX_NDIM])
{
    for (int i = MAX_NDIM - 1; i >= 0; i--) {
        if (i >= a->tensor.ndim) {
            continue;
        }
        index[i]++;
        if (index[i] < a->shape[i]) {
            return;
        }
        index[i] = 0;
    }
}

static inline int64_t
count_elements(const array *a)
{
    int64_t count = 1;
    for (int i = 0; i < a->tensor.ndim; i++) {
        count *= a->shape[i];
    }
    return count;
}

/* Fills an array of any rank. */
static inline void
fill_values(array *a, double (*value)(void), double factor)
{
    int64_t index[MAX_NDIM] = {0};
    const int64_t count = count_elements(a);
    for (int64_t at = 0; at < count; at++) {
        write_value(a->tensor.dtype, element_at(a, a->tensor.ndim, index), factor * value());
        next_index(a, index);
    }
}

static inline double
one(void)
{
    return 1.0;
}

static inline array *
fill_normal(array *a, double factor)
{
    fill_values(a, random_normal, factor);
    return a;
}

static inline array *
fill(array *a, double value)
{
    fill_values(a, one, value);
    return a;
}

/* A vector of int32 or int64. */
static inline array *
vector(DLDataType dtype, int64_t count, const int64_t *values)
{
    array *a = ARRAY(dtype, count);
    for (int64_t i = 0; i < count; i++) {
        if (dtype.bits == 64) {
            ((int64_t *)a->tensor.data)[i] = values[i];
        } else {
            ((int32_t *)a->tensor.data)[i] = (int32_t)values[i];
        }
    }
    return a;
}

#define VECTOR(dtype, ...) vector(dtype, COUNT(__VA_ARGS__), (int64_t[]){__VA_ARGS__})

/* Whether every element still holds POISON. */
static inline bool
is_poison(const array *a)
{
    int64_t index[MAX_NDIM] = {0};
    const int64_t count = count_elements(a);
    for (int64_t at = 0; at < count; at++) {
        const uint8_t *bytes = element_at(a, a->tensor.ndim, index);
        for (int i = 0; i < a->tensor.dtype.bits / 8; i++) {
            if (bytes[i] != POISON) {
                return false;
            }
        }
        next_index(a, index);
    }
    return true;
}

/* ---- Running ------------------------------------------------------------------------------- */

static inline void
run_test(const char *name, void (*test)(void))
{
    failures = 0;
    random_state = 0x9E3779B97F4A7C15u;
    test();
    free_arrays(name);
    num_passed += failures == 0;
    num_failed += failures != 0;
    if (failures != 0) {
        printf("%s: %d failures\n", name, failures);
        if (getenv("SMLA_FIRST_FAILURE") != NULL) {
            exit(EXIT_FAILURE);
        }
    }
}

#define RUN(test) run_test(#test, test)

static inline int
report(const char *program)
{
    printf("%s: %d passed, %d failed\n", program, num_passed, num_failed);
    return num_failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
