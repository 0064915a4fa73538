/* test_cuda_projection.c: how csrc/cuda/projection/projection_cublas.c finds cuBLAS, how it calls
 * cuBLAS, and which products it leaves to a kernel. A fake cuBLAS in this file multiplies.
 */
#define _GNU_SOURCE // NOLINT(cert-dcl51-cpp)
#include <dlfcn.h>
#include <stdlib.h>

static void *test_dlopen(const char *path, int flags);
static void *test_dlsym(void *library, const char *name);
static char *test_dlerror(void);
static int test_dladdr(const void *address, Dl_info *info);
static char *test_getenv(const char *name);

#define getenv test_getenv
#include "cuda/host/device.c" // NOLINT(bugprone-suspicious-include)
#define dlopen  test_dlopen
#define dlsym   test_dlsym
#define dlerror test_dlerror
#define dladdr  test_dladdr
#define lock    cublas_lock /* testing.h and runtime.h have these names, too */
#define report  report_cublas
#include "cuda/projection/projection_cublas.c" // NOLINT(bugprone-suspicious-include)
#undef dlopen
#undef dlsym
#undef dlerror
#undef dladdr
#undef lock
#undef report
#undef getenv

#include "fake_cuda/runtime.h"

static smla_projection_params launched; /* the kernel's last params */

cudaError_t
smla_cuda_launch_projection(const smla_projection_params *params)
{
    launched = *params;
    return answer("kernel");
}

/* ---- A library ----------------------------------------------------------------------------- */

enum { NO_SUPPORT = 15 };

struct cublasContext {
    int device_id;
};

static int num_handles; /* live handles */

/* Calls are recorded together with those of the runtime. The one that fail_call names fails. */
static int
create_fake(cublas_handle *handle)
{
    const int code = (int)answer("create");
    if (code == CUBLAS_SUCCESS) {
        *handle = calloc(1, sizeof **handle);
        (*handle)->device_id = fake.current;
        num_handles++;
    }
    return code;
}

static int
destroy_fake(cublas_handle handle)
{
    num_handles--;
    free(handle);
    return (int)answer("destroy");
}

static int
set_fake_mode(cublas_handle handle, int mode)
{
    EXPECT(handle != NULL);
    EXPECT_EQ(mode, CUBLAS_NO_REDUCED_PRECISION_REDUCTION);
    return (int)answer("mode");
}

static cudaStream_t fake_stream;

static int
set_fake_stream(cublas_handle handle, cudaStream_t stream)
{
    EXPECT(handle != NULL);
    fake_stream = stream;
    return (int)answer("stream");
}

static int
set_fake_workspace(cublas_handle handle, void *workspace, size_t bytes)
{
    EXPECT(handle != NULL && workspace == NULL && bytes == 0);
    return (int)answer("workspace");
}

static const char *
fake_status_name(int status)
{
    return status == NO_SUPPORT ? "CUBLAS_STATUS_NOT_SUPPORTED" : "another status";
}

/* Element (row, column) of op(matrix). */
static double
element(const uint16_t *matrix, int operation, int64_t ld, int64_t row, int64_t column)
{
    const int64_t at = operation == CUBLAS_AS_IS ? row + column * ld : column + row * ld;
    return (double)smla_bf16_to_float(matrix[at]);
}

static int
multiply_fake(cublas_handle handle, int op_a, int op_b, int64_t m, int64_t n, int64_t k,
              const void *alpha, const void *a, cudaDataType_t a_type, int64_t a_ld,
              long long a_stride, const void *b, cudaDataType_t b_type, int64_t b_ld,
              long long b_stride, const void *beta, void *c, cudaDataType_t c_type, int64_t c_ld,
              long long c_stride, int64_t batch_count, int compute_type, int algorithm)
{
    const int code = (int)answer("gemm");
    EXPECT(handle != NULL && handle->device_id == fake.current);
    EXPECT(a_type == CUDA_R_16BF && b_type == CUDA_R_16BF && c_type == CUDA_R_16BF);
    EXPECT_EQ(compute_type, CUBLAS_COMPUTE_FP32);
    EXPECT_EQ(algorithm, CUBLAS_DEFAULT_ALGORITHM);
    EXPECT(*(const float *)alpha == 1.0f && *(const float *)beta == 0.0f);
    EXPECT(a_ld >= (op_a == CUBLAS_AS_IS ? m : k));
    EXPECT(b_ld >= (op_b == CUBLAS_AS_IS ? k : n));
    EXPECT(c_ld >= m);
    EXPECT(a_stride >= 0 && b_stride >= 0 && c_stride >= 0);
    for (int64_t i = 0; i < m * n * batch_count && code == CUBLAS_SUCCESS; i++) {
        const int64_t batch = i / (m * n);
        const int64_t row = i % m;
        const int64_t column = i / m % n;
        double sum = 0.0;
        for (int64_t j = 0; j < k; j++) {
            sum += element((const uint16_t *)a + batch * a_stride, op_a, a_ld, row, j) *
                   element((const uint16_t *)b + batch * b_stride, op_b, b_ld, j, column);
        }
        ((uint16_t *)c)[batch * c_stride + row + column * c_ld] = smla_float_to_bf16((float)sum);
    }
    return code;
}

static const char *missing; /* a function that the library lacks */

static void *
test_dlsym(void *library, const char *name)
{
    static const struct {
        const char *name;
        void *function;
    } functions[] = {
        {"cublasCreate_v2", (void *)create_fake},
        {"cublasDestroy_v2", (void *)destroy_fake},
        {"cublasSetMathMode", (void *)set_fake_mode},
        {"cublasSetStream_v2", (void *)set_fake_stream},
        {"cublasSetWorkspace_v2", (void *)set_fake_workspace},
        {"cublasGemmStridedBatchedEx_64", (void *)multiply_fake},
        {"cublasGetStatusName", (void *)fake_status_name},
    };
    EXPECT(library == (void *)&num_handles);
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        if (strcmp(functions[i].name, name) == 0) {
            return missing != NULL && strcmp(missing, name) == 0 ? NULL : functions[i].function;
        }
    }
    return NULL;
}

/* ---- Where the library is ------------------------------------------------------------------ */

static const char *present; /* the one path that can be opened; "+" in front: loaded already */
static const char *self;    /* the file that the code was loaded from, or NULL */
static char tried[8 * PATH_BYTES];
static const char *variable; /* SPARSE_MLA_CUBLAS */

static void *
test_dlopen(const char *path, int flags)
{
    const bool only_loaded = (flags & RTLD_NOLOAD) != 0;
    const bool is_loaded_already = present != NULL && present[0] == '+';
    const size_t length = strlen(tried);
    EXPECT_EQ(flags & ~RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL);
    snprintf(tried + length, sizeof tried - length, "%s%s ", only_loaded ? "+" : "", path);
    const bool is_here = present != NULL && strcmp(present + is_loaded_already, path) == 0;
    return is_here && (is_loaded_already || !only_loaded) ? (void *)&num_handles : NULL;
}

static char *
test_dlerror(void)
{
    static char text[] = "no such file";
    return text;
}

static int
test_dladdr(const void *address, Dl_info *info)
{
    EXPECT(address != NULL);
    info->dli_fname = self != NULL && self[0] == '\0' ? NULL : self;
    return self != NULL;
}

static char *
test_getenv(const char *name)
{
    static char text[64];
    if (variable == NULL || strcmp(name, "SPARSE_MLA_CUBLAS") != 0) {
        return NULL;
    }
    snprintf(text, sizeof text, "%s", variable);
    return text;
}

/* The state of a process that has not multiplied yet, with a library on its path. */
static void
start(void)
{
    reset_fake();
    for (int i = 0; i < SMLA_CUDA_MAX_DEVICES; i++) {
        num_handles -= handles[i] != NULL;
        free(handles[i]);
        handles[i] = NULL;
    }
    EXPECT_EQ(num_handles, 0);
    cublas.status_name = NULL;
    missing = NULL;
    variable = NULL;
    present = "libcublas.so.13";
    self = "/site/sparse_mla/_C.so";
    tried[0] = '\0';
}

static void
expect_tried(const char *expected)
{
    if (strcmp(tried, expected) != 0) {
        fail_at(__FILE__, __LINE__, "files tried", 0.0, 1.0);
        printf("    got \"%s\"\n    expected \"%s\"\n", tried, expected);
    }
    tried[0] = '\0';
}

/* ---- Products ------------------------------------------------------------------------------ */

enum { ROOM = 512 };

static uint16_t x_memory[ROOM];
static uint16_t w_memory[ROOM];
static uint16_t out_memory[ROOM];

/* Sizes and strides. Arrays begin in the middle of their memory, as strides may be negative. */
typedef struct layout {
    int64_t num_tokens, num_heads, inner, outer;
    int64_t x_token, x_head;
    int64_t w_inner, w_head, w_outer;
    int64_t out_token, out_head;
    bool is_kernel;
} layout;

static smla_projection_params
params_of(const layout *l)
{
    return (smla_projection_params){
        .call = {.op = "k_up_proj",
                 .stream = {.device_id = 0, .handle = (void *)&fake_default_stream}},
        .num_tokens = l->num_tokens,
        .num_heads = l->num_heads,
        .inner_dim = l->inner,
        .outer_dim = l->outer,
        .x = x_memory + ROOM / 2,
        .x_stride_token = l->x_token,
        .x_stride_head = l->x_head,
        .w = w_memory + ROOM / 2,
        .w_stride_inner = l->w_inner,
        .w_stride_head = l->w_head,
        .w_stride_outer = l->w_outer,
        .out = out_memory + ROOM / 2,
        .out_stride_token = l->out_token,
        .out_stride_head = l->out_head,
    };
}

static const layout compact = {3, 2, 4, 5, 8, 4, 10, 5, 1, 10, 5, false};

static void
expect_product(const smla_projection_params *p, int row)
{
    const uint16_t *const x = p->x;
    const uint16_t *const w = p->w;
    for (int64_t i = 0; i < p->num_tokens * p->num_heads * p->outer_dim; i++) {
        const int64_t token = i / p->outer_dim / p->num_heads;
        const int64_t head = i / p->outer_dim % p->num_heads;
        const int64_t n = i % p->outer_dim;
        double sum = 0.0;
        for (int64_t k = 0; k < p->inner_dim; k++) {
            sum += (double)smla_bf16_to_float(
                       x[token * p->x_stride_token + head * p->x_stride_head + k]) *
                   (double)smla_bf16_to_float(
                       w[k * p->w_stride_inner + head * p->w_stride_head + n * p->w_stride_outer]);
        }
        const uint16_t got = p->out[token * p->out_stride_token + head * p->out_stride_head + n];
        if (got != smla_float_to_bf16((float)sum)) {
            fail_at(__FILE__, __LINE__, "row of the table", (double)row, -1.0);
            return;
        }
    }
}

static void
test_layouts(void)
{
    static const layout layouts[] = {
        {3, 2, 4, 5, 8, 4, 10, 5, 1, 10, 5, false},  /* all compact */
        {3, 2, 4, 5, 8, 4, 1, 4, 8, 10, 5, false},   /* w transposed */
        {3, 2, 4, 5, 8, 4, 1, 20, 4, 10, 5, false},  /* w transposed, without gaps */
        {3, 2, 4, 5, 4, 12, 10, 5, 1, 5, 15, false}, /* heads first */
        {3, 2, 4, 5, 20, 9, 17, 6, 1, 13, 6, false}, /* gaps */
        {3, 2, 4, 5, 8, 0, 5, 0, 1, 10, 5, false},   /* one x and one w for all heads */
        {1, 2, 4, 5, 0, 4, 10, 5, 1, 0, 5, false},   /* one token: strides mean nothing */
        {1, 2, 4, 5, -7, 4, 10, 5, 1, -3, 5, false}, /* one token: strides mean nothing */
        {3, 2, 1, 5, 2, 1, -9, 5, 1, 10, 5, false},  /* sums of one term */
        {3, 2, 1, 5, 2, 1, 0, 10, 2, 10, 5, false},  /* sums of one term, gaps in w */
        {3, 2, 4, 1, 8, 4, 2, 1, -9, 2, 1, false},   /* one output */
        {3, 2, 4, 1, 8, 4, 1, 4, 0, 2, 1, false},    /* one output, w without gaps */
        {3, 2, 1, 1, 2, 1, 0, 1, 0, 2, 1, false},    /* one of everything */
        {3, 2, 4, 5, 4, 12, 5, 20, 1, 5, 15, false}, /* heads first, w without gaps */
        {3, 1, 4, 5, 6, 0, 6, 0, 1, 7, 0, false},    /* kv_up_proj: one head */
        {3, 1, 4, 5, 6, 0, 1, 0, 4, 7, 0, false},    /* kv_up_proj, w transposed */
        {3, 1, 4, 5, 6, 0, 12, 0, 2, 7, 0, true},    /* kv_up_proj, w with gaps everywhere */
        {3, 2, 4, 5, 8, 4, 20, 10, 2, 10, 5, true},  /* w with no unit stride */
        {3, 2, 4, 5, 8, 4, 4, 20, 1, 10, 5, true},   /* w whose rows overlap */
        {3, 2, 4, 5, 8, 4, 1, 20, 3, 10, 5, true},   /* w whose columns overlap */
        {3, 2, 4, 5, 8, 4, -10, 5, 1, 10, 5, true},  /* w backwards */
        {3, 2, 4, 5, 8, 4, 10, 5, -1, 10, 5, true},  /* w backwards along its outputs */
        {3, 2, 4, 5, 8, 4, 10, -5, 1, 10, 5, true},  /* w's heads backwards */
        {3, 2, 4, 5, -8, 4, 10, 5, 1, 10, 5, true},  /* x backwards */
        {3, 2, 4, 5, 8, -4, 10, 5, 1, 10, 5, true},  /* x's heads backwards */
        {3, 2, 4, 5, 0, 4, 10, 5, 1, 10, 5, true},   /* one x for all tokens */
        {3, 2, 4, 5, 3, 40, 10, 5, 1, 10, 5, true},  /* x whose tokens overlap */
        {3, 2, 4, 5, 8, 4, 10, 5, 1, 4, 40, true},   /* out whose tokens overlap */
        {3, 2, 4, 5, 8, 4, 10, 5, 1, -10, 5, true},  /* out backwards */
        {3, 2, 0, 5, 8, 4, 10, 5, 1, 10, 5, true},   /* sums of no terms */
    };
    start();
    for (int i = 0; i < ROOM; i++) {
        x_memory[i] = smla_float_to_bf16((float)(i * 37 % 61 - 30));
        w_memory[i] = smla_float_to_bf16((float)(i * 23 % 53 - 26));
    }
    for (int i = 0; i < (int)(sizeof layouts / sizeof layouts[0]); i++) {
        const smla_projection_params p = params_of(&layouts[i]);
        memset(out_memory, POISON, sizeof out_memory);
        forget_calls();
        EXPECT_OK(smla_cuda_projection(&p, &error));
        if (layouts[i].is_kernel) {
            EXPECT_EQ(count_calls("kernel") - count_calls("gemm"), 1);
            EXPECT(launched.x == p.x && launched.w_stride_outer == p.w_stride_outer);
        } else {
            EXPECT_EQ(count_calls("gemm") - count_calls("kernel"), 1);
            expect_product(&p, i);
        }
    }
}

static void
test_one_handle_per_device(void)
{
    start();
    fake.num_devices = 2;
    smla_projection_params p = params_of(&compact);
    fake_stream = NULL;
    EXPECT_OK(smla_cuda_projection(&p, &error));
    EXPECT_CALLS("create~ mode~ stream~ workspace~ gemm~ ");
    EXPECT(fake_stream == (cudaStream_t)&fake_default_stream);
    expect_tried("+libcublas.so.13 +libcublas.so.12 libcublas.so.13 ");
    EXPECT_OK(smla_cuda_projection(&p, &error));
    EXPECT_CALLS("stream~ workspace~ gemm~ ");
    fake.current = p.call.stream.device_id = 1;
    EXPECT_OK(smla_cuda_projection(&p, &error));
    EXPECT_CALLS("create@1~ mode@1~ stream@1~ workspace@1~ gemm@1~ ");
    EXPECT_EQ(num_handles, 2);
    fake.current = p.call.stream.device_id = 0;
    EXPECT_OK(smla_cuda_projection(&p, &error));
    EXPECT_CALLS("stream~ workspace~ gemm~ ");
    expect_tried("");
    EXPECT_EQ(fake_mode, cudaStreamCaptureModeGlobal);
}

/* After each failed call the lock is free, and captures are as they were. */
static void
test_calls_that_fail(void)
{
    static const struct {
        const char *call;
        int code;
        smla_status status;
        const char *text;
    } failing[] = {
        {"create", CUBLAS_NOT_INITIALIZED, SMLA_ERROR_MEMORY,
         "k_up_proj: cublasCreate failed: another status: is there device memory left?"},
        {"create", CUBLAS_ALLOC_FAILED, SMLA_ERROR_MEMORY, "is there device memory left?"},
        {"create", 2, SMLA_ERROR_RUNTIME, "k_up_proj: cublasCreate failed: another status"},
        {"mode", NO_SUPPORT, SMLA_ERROR_RUNTIME,
         "k_up_proj: cublasSetMathMode failed: CUBLAS_STATUS_NOT_SUPPORTED"},
        {"stream", 7, SMLA_ERROR_RUNTIME, "cublasSetStream failed"},
        {"workspace", 7, SMLA_ERROR_RUNTIME, "cublasSetWorkspace failed"},
        {"gemm", 13, SMLA_ERROR_RUNTIME, "cublasGemmStridedBatchedEx failed"},
    };
    const smla_projection_params p = params_of(&compact);
    for (size_t i = 0; i < sizeof failing / sizeof failing[0]; i++) {
        start();
        fail_call(failing[i].call, 0, failing[i].code);
        EXPECT_FAIL(smla_cuda_projection(&p, &error), failing[i].status, failing[i].text);
        const bool has_hint = strstr(error.text, "memory left") != NULL;
        EXPECT_EQ(has_hint, failing[i].status == SMLA_ERROR_MEMORY);
        const bool has_handle = i > 3;
        EXPECT_EQ(num_handles, has_handle);
        EXPECT_EQ(fake_mode, cudaStreamCaptureModeGlobal);
        EXPECT_OK(smla_cuda_projection(&p, &error));
        EXPECT_EQ(num_handles, 1);
        EXPECT_EQ(count_calls("create"), has_handle ? 1 : 2);
    }
    start();
    const layout backwards = {3, 2, 4, 5, -8, 4, 10, 5, 1, 10, 5, true};
    const smla_projection_params q = params_of(&backwards);
    fail_call("kernel", 0, cudaErrorMemoryAllocation);
    EXPECT_FAIL(smla_cuda_projection(&q, &error), SMLA_ERROR_MEMORY,
                "k_up_proj: cudaLaunchKernelExC failed: out of memory");
}

/* ---- Loading ------------------------------------------------------------------------------- */

#define LOADED   "+libcublas.so.13 +libcublas.so.12 "
#define ON_PATH  LOADED "libcublas.so.13 libcublas.so.12 "
#define WHEEL_13 "/site/sparse_mla/../nvidia/cu13/lib/libcublas.so.13"
#define WHEEL_12 "/site/sparse_mla/../nvidia/cublas/lib/libcublas.so.12"

static void
test_places(void)
{
    static const struct {
        const char *present;
        const char *tried;
    } places[] = {
        {"+libcublas.so.13", "+libcublas.so.13 "},
        {"+libcublas.so.12", LOADED},
        {"libcublas.so.13", LOADED "libcublas.so.13 "},
        {"libcublas.so.12", ON_PATH},
        {WHEEL_13, ON_PATH WHEEL_13 " "},
        {WHEEL_12, ON_PATH WHEEL_13 " " WHEEL_12 " "},
    };
    const smla_projection_params p = params_of(&compact);
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        start();
        present = places[i].present;
        EXPECT_OK(smla_cuda_projection(&p, &error));
        expect_tried(places[i].tried);
    }
    start();
    variable = ""; /* counts as not set */
    EXPECT_OK(smla_cuda_projection(&p, &error));
    expect_tried(LOADED "libcublas.so.13 ");
}

static void
test_no_library(void)
{
    static char long_path[PATH_BYTES + 8];
    const smla_projection_params p = params_of(&compact);
    memset(long_path, 'x', sizeof long_path - 1);
    memcpy(long_path + sizeof long_path - 5, "/_C", 4);
    const char *const selves[] = {NULL, "", "no_folder", long_path};
    for (size_t i = 0; i < sizeof selves / sizeof selves[0]; i++) {
        start();
        present = NULL;
        self = selves[i];
        EXPECT_FAIL(smla_cuda_projection(&p, &error), SMLA_ERROR_RUNTIME,
                    "k_up_proj: cuBLAS must be found on CUDA devices, got none: tried "
                    "libcublas.so.13 and libcublas.so.12, loaded by the process");
        expect_tried(ON_PATH);
        EXPECT_CALLS("");
        present = "libcublas.so.12"; /* installed meanwhile */
        EXPECT_OK(smla_cuda_projection(&p, &error));
    }
    start();
    present = NULL;
    EXPECT_FAIL(smla_cuda_projection(&p, &error), SMLA_ERROR_RUNTIME, "got none");
    expect_tried(ON_PATH WHEEL_13 " " WHEEL_12 " ");
}

static void
test_a_path_that_is_named(void)
{
    const smla_projection_params p = params_of(&compact);
    start();
    variable = present = "/mine/libcublas.so";
    EXPECT_OK(smla_cuda_projection(&p, &error));
    expect_tried("/mine/libcublas.so ");
    start();
    variable = "/none";
    EXPECT_FAIL(smla_cuda_projection(&p, &error), SMLA_ERROR_RUNTIME,
                "k_up_proj: SPARSE_MLA_CUBLAS must be the path of libcublas.so, got /none: no such "
                "file");
    expect_tried("/none ");
}

static void
test_a_library_that_is_too_old(void)
{
    static const char *const names[] = {
        "cublasCreate_v2",     "cublasDestroy_v2",      "cublasSetMathMode",
        "cublasSetStream_v2",  "cublasSetWorkspace_v2", "cublasGemmStridedBatchedEx_64",
        "cublasGetStatusName",
    };
    const smla_projection_params p = params_of(&compact);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        for (int is_named = 0; is_named < 2; is_named++) {
            start();
            variable = is_named ? "libcublas.so.13" : NULL;
            missing = names[i];
            EXPECT_FAIL(smla_cuda_projection(&p, &error), SMLA_ERROR_RUNTIME,
                        "k_up_proj: cuBLAS must be of CUDA 12 or newer, got a library without");
            EXPECT(strstr(error.text, names[i]) != NULL);
            EXPECT_CALLS("");
            missing = NULL;
            EXPECT_OK(smla_cuda_projection(&p, &error));
        }
    }
}

int
main(void)
{
    RUN(test_layouts);
    RUN(test_one_handle_per_device);
    RUN(test_calls_that_fail);
    RUN(test_places);
    RUN(test_no_library);
    RUN(test_a_path_that_is_named);
    RUN(test_a_library_that_is_too_old);
    return report("test_cuda_projection");
}
