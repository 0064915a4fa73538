/* projection_cublas.c: projections of bf16, out[t,h,n] = sum_k x[t,h,k] w(k,h,n), through cuBLAS:
 * one batched product per call, with a matrix per head, bf16 in and out, fp32 in between.
 *
 * A build does not need cuBLAS: the library is looked for at the first projection. This file
 * declares the few functions and constants of its stable C interface that it uses, as its
 * documentation gives them.
 *
 * Each device has one handle, made at the first projection on it and kept until the process ends
 * (when the driver may be gone already). A handle serves one thread at a time, so a call holds a
 * lock while it sets the stream and starts the product, which takes microseconds on the host.
 *
 * The handles have no workspace. cuBLAS would allocate one behind the caller's back, once more for
 * every captured graph, and streams and graphs that run at the same time would share it. Without a
 * workspace a product does not split its sums among blocks either, so each element is summed in one
 * order: the same bits on every run. Batches of heads fill the device without splits.
 *
 * What cuBLAS cannot express is left to projection.cu: rows that overlap, repeat or run backwards,
 * weights with no contiguous dimension, and sums of no terms.
 */
#define _GNU_SOURCE /* for dladdr, NOLINT(cert-dcl51-cpp) */
#include <dlfcn.h>
#include <library_types.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/params_projection.h"
#include "cuda/host/cuda.h"

/* ---- cuBLAS, as far as it is needed -------------------------------------------------------- */

typedef struct cublasContext *cublas_handle;

/* cublasStatus_t, cublasMath_t, cublasOperation_t, cublasComputeType_t, cublasGemmAlgo_t */
enum { CUBLAS_SUCCESS = 0, CUBLAS_NOT_INITIALIZED = 1, CUBLAS_ALLOC_FAILED = 3 };
enum { CUBLAS_NO_REDUCED_PRECISION_REDUCTION = 16 };
enum { CUBLAS_AS_IS = 0, CUBLAS_TRANSPOSED = 1 };
enum { CUBLAS_COMPUTE_FP32 = 68 };
enum { CUBLAS_DEFAULT_ALGORITHM = -1 };

/* Matrices are column-major: C[m, n] = alpha op(A)[m, k] op(B)[k, n] + beta C, per batch. */
typedef int (*cublas_gemm)(cublas_handle handle, int op_a, int op_b, int64_t m, int64_t n,
                           int64_t k, const void *alpha, const void *a, cudaDataType_t a_type,
                           int64_t a_ld, long long a_stride, const void *b, cudaDataType_t b_type,
                           int64_t b_ld, long long b_stride, const void *beta, void *c,
                           cudaDataType_t c_type, int64_t c_ld, long long c_stride,
                           int64_t batch_count, int compute_type, int algorithm);

/* The process's cuBLAS and its handles. The lock guards both. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static cublas_handle handles[SMLA_CUDA_MAX_DEVICES];
static struct {
    int (*create)(cublas_handle *handle);
    int (*destroy)(cublas_handle handle);
    int (*set_math_mode)(cublas_handle handle, int mode);
    int (*set_stream)(cublas_handle handle, cudaStream_t stream);
    int (*set_workspace)(cublas_handle handle, void *workspace, size_t bytes);
    cublas_gemm gemm;
    /* Found last; if it is not NULL, all others are found, too. */
    const char *(*status_name)(int status);
} cublas;

/* ---- Loading ------------------------------------------------------------------------------- */

static const char *const sonames[] = {"libcublas.so.13", "libcublas.so.12"};
enum { NUM_SONAMES = sizeof sonames / sizeof sonames[0] };

/* Paths in the NVIDIA wheels, seen from the folder that this package is installed in. */
static const char *const wheel_paths[] = {"nvidia/cu13/lib/libcublas.so.13",
                                          "nvidia/cublas/lib/libcublas.so.12"};

enum { PATH_BYTES = 4096 };

/* Writes "<folder that holds the package>/<path>" to `text`; this library is in the package. */
static bool
find_beside_package(const char *path, char *text)
{
    Dl_info self;
    const bool is_known = dladdr(sonames, &self) != 0 && self.dli_fname != NULL;
    const char *const slash = is_known ? strrchr(self.dli_fname, '/') : NULL;
    return slash != NULL && snprintf(text, PATH_BYTES, "%.*s/../%s", (int)(slash - self.dli_fname),
                                     self.dli_fname, path) < PATH_BYTES;
}

/* Opens the cuBLAS that the process has loaded already (for PyTorch, CuPy, JAX), else that of the
 * system, else that of the NVIDIA wheels. */
static void *
open_anywhere(void)
{
    void *library = NULL;
    for (int i = 0; library == NULL && i < NUM_SONAMES; i++) {
        library = dlopen(sonames[i], RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    }
    for (int i = 0; library == NULL && i < NUM_SONAMES; i++) {
        library = dlopen(sonames[i], RTLD_NOW | RTLD_LOCAL);
    }
    for (int i = 0; library == NULL && i < NUM_SONAMES; i++) {
        char path[PATH_BYTES];
        if (find_beside_package(wheel_paths[i], path)) {
            library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        }
    }
    return library;
}

static smla_status
find_functions(const char *op, void *library, smla_error *error)
{
    const smla_cuda_symbol functions[] = {
        {"cublasCreate_v2", (void *)&cublas.create},
        {"cublasDestroy_v2", (void *)&cublas.destroy},
        {"cublasSetMathMode", (void *)&cublas.set_math_mode},
        {"cublasSetStream_v2", (void *)&cublas.set_stream},
        {"cublasSetWorkspace_v2", (void *)&cublas.set_workspace},
        {"cublasGemmStridedBatchedEx_64", (void *)&cublas.gemm},
        {"cublasGetStatusName", (void *)&cublas.status_name},
    };
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        void *const symbol = dlsym(library, functions[i].name);
        if (symbol == NULL) {
            return smla_fail(error, SMLA_ERROR_RUNTIME,
                             "%s: cuBLAS must be of CUDA 12 or newer, got a library without %s "
                             "(SPARSE_MLA_CUBLAS names the file to load)",
                             op, functions[i].name);
        }
        memcpy(functions[i].function, (const void *)&symbol, sizeof symbol);
    }
    return SMLA_OK;
}

static smla_status
load_cublas(const char *op, smla_error *error)
{
    const char *path = getenv("SPARSE_MLA_CUBLAS");
    const bool is_named = path != NULL && path[0] != '\0';
    /* The user's choice of what to load: NOLINTNEXTLINE(clang-analyzer-optin.taint.*) */
    void *const library = is_named ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : open_anywhere();
    if (library == NULL && is_named) {
        return smla_fail(error, SMLA_ERROR_RUNTIME,
                         "%s: SPARSE_MLA_CUBLAS must be the path of libcublas.so, got %s: %s", op,
                         path, dlerror());
    }
    if (library == NULL) {
        return smla_fail(
            error, SMLA_ERROR_RUNTIME,
            "%s: cuBLAS must be found on CUDA devices, got none: tried %s and %s, loaded by the "
            "process, on the library path, and in the NVIDIA wheels beside this package; `pip "
            "install nvidia-cublas`, import torch first, or set SPARSE_MLA_CUBLAS to its path",
            op, sonames[0], sonames[1]);
    }
    return find_functions(op, library, error);
}

/* ---- Handles ------------------------------------------------------------------------------- */

static smla_status
report(const char *op, const char *call, int code, smla_error *error)
{
    if (code == CUBLAS_SUCCESS) {
        return SMLA_OK;
    }
    const bool is_memory = code == CUBLAS_ALLOC_FAILED || code == CUBLAS_NOT_INITIALIZED;
    return smla_fail(error, is_memory ? SMLA_ERROR_MEMORY : SMLA_ERROR_RUNTIME,
                     "%s: %s failed: %s%s", op, call, cublas.status_name(code),
                     is_memory ? ": is there device memory left?" : "");
}

/* The current device's handle. Its math mode keeps the sums of a product in fp32 until the end. */
static smla_status
find_handle(const char *op, int32_t device_id, cublas_handle *handle, smla_error *error)
{
    *handle = handles[device_id];
    if (*handle != NULL) {
        return SMLA_OK;
    }
    if (cublas.status_name == NULL) {
        SMLA_TRY(load_cublas(op, error));
    }
    SMLA_TRY(report(op, "cublasCreate", cublas.create(handle), error));
    const int code = cublas.set_math_mode(*handle, CUBLAS_NO_REDUCED_PRECISION_REDUCTION);
    if (code != CUBLAS_SUCCESS) {
        (void)cublas.destroy(*handle);
        return report(op, "cublasSetMathMode", code, error);
    }
    handles[device_id] = *handle;
    return SMLA_OK;
}

/* ---- The product --------------------------------------------------------------------------- */

/* One operand of a head, as cuBLAS reads it. */
typedef struct cublas_matrix {
    int operation; /* CUBLAS_AS_IS or CUBLAS_TRANSPOSED */
    int64_t ld;
} cublas_matrix;

/* Describes a matrix whose element (row, column) is at row * row_stride + column * column_stride.
 * False where neither stride is 1, or rows or columns overlap. The stride of a single row or column
 * means nothing. */
static bool
describe_matrix(int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride,
                cublas_matrix *matrix)
{
    const bool is_column_major =
        (rows <= 1 || row_stride == 1) && (columns <= 1 || column_stride >= rows);
    const bool is_row_major =
        (columns <= 1 || column_stride == 1) && (rows <= 1 || row_stride >= columns);
    if (is_column_major) {
        *matrix =
            (cublas_matrix){.operation = CUBLAS_AS_IS, .ld = columns <= 1 ? rows : column_stride};
    } else {
        *matrix =
            (cublas_matrix){.operation = CUBLAS_TRANSPOSED, .ld = rows <= 1 ? columns : row_stride};
    }
    return is_column_major || is_row_major;
}

/* Row-major out[t, n] = x[t, k] w[k, n] is column-major out'[n, t] = w'[n, k] x'[k, t]. */
typedef struct cublas_product {
    cublas_matrix w;
    cublas_matrix x;
    cublas_matrix out;
} cublas_product;

static bool
describe_product(const smla_projection_params *p, cublas_product *product)
{
    return p->inner_dim > 0 && p->x_stride_head >= 0 && p->w_stride_head >= 0 &&
           describe_matrix(p->outer_dim, p->inner_dim, p->w_stride_outer, p->w_stride_inner,
                           &product->w) &&
           describe_matrix(p->inner_dim, p->num_tokens, 1, p->x_stride_token, &product->x) &&
           describe_matrix(p->outer_dim, p->num_tokens, 1, p->out_stride_token, &product->out) &&
           product->out.operation == CUBLAS_AS_IS;
}

/* Multiplies by cuBLAS. The workspace is removed after the stream is set, because setting the
 * stream restores the handle's workspace. */
static smla_status
multiply(const smla_projection_params *p, const cublas_product *product, smla_error *error)
{
    const float one = 1.0f;
    const float zero = 0.0f;
    cublas_handle handle = NULL;
    SMLA_TRY(find_handle(p->call.op, p->call.stream.device_id, &handle, error));
    SMLA_TRY(report(p->call.op, "cublasSetStream",
                    cublas.set_stream(handle, (cudaStream_t)p->call.stream.handle), error));
    SMLA_TRY(
        report(p->call.op, "cublasSetWorkspace", cublas.set_workspace(handle, NULL, 0), error));
    const int code =
        cublas.gemm(handle, product->w.operation, product->x.operation, p->outer_dim, p->num_tokens,
                    p->inner_dim, &one, p->w, CUDA_R_16BF, product->w.ld, p->w_stride_head, p->x,
                    CUDA_R_16BF, product->x.ld, p->x_stride_head, &zero, p->out, CUDA_R_16BF,
                    product->out.ld, p->out_stride_head, p->num_heads, CUBLAS_COMPUTE_FP32,
                    CUBLAS_DEFAULT_ALGORITHM);
    return report(p->call.op, "cublasGemmStridedBatchedEx", code, error);
}

smla_status
smla_cuda_projection(const smla_projection_params *p, smla_error *error)
{
    cublas_product product;
    if (!describe_product(p, &product)) {
        return smla_cuda_status(p->call.op, "cudaLaunchKernelExC", smla_cuda_launch_projection(p),
                                error);
    }
    /* The first products allocate memory, for a handle and for code that is loaded on first use. */
    const enum cudaStreamCaptureMode former = smla_cuda_relax_captures();
    pthread_mutex_lock(&lock);
    const smla_status status = multiply(p, &product, error);
    pthread_mutex_unlock(&lock);
    smla_cuda_restore_captures(former);
    return status;
}
