/* backend.h: the function table of a backend. Compiles as C and as CUDA. */
#pragma once

#include "core/error.h"
#include "core/operators.h"
#include "core/params.h"
#include "sparse_mla/attention.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Declared here, so that an edit of one family's params compiles no other family again. */
#define SMLA_DECLARE_PARAMS(name, args_type, params_type, family) \
    typedef struct params_type params_type;

SMLA_OPERATORS(SMLA_DECLARE_PARAMS)
typedef struct smla_projection_params smla_projection_params;
typedef struct smla_step_lists_params smla_step_lists_params;
typedef struct smla_paged_step_params smla_paged_step_params;
typedef struct smla_attention_params smla_attention_params;
typedef struct smla_attention_shape smla_attention_shape;
typedef struct smla_attention_run smla_attention_run;
typedef struct smla_attention_plan smla_attention_plan;
typedef struct smla_index_map smla_index_map;
typedef struct smla_key_ranges_params smla_key_ranges_params;
typedef struct smla_rope smla_rope;

/* Device memory that the host writes anew for every step: the builder's metadata. The host fills
 * the memory that `begin_write` lends. Then `end_write` sends it in the order of a stream.
 * Work that reads the device memory is started between `begin_use` and `end_use`, so that steps on
 * different streams cannot overtake each other. A backend embeds this struct in a larger one. */
typedef struct smla_mirror {
    void *device; /* the same address for the mirror's whole life */
    int64_t bytes;
    int64_t used_bytes; /* end_write sends so many, from the start; begin_write sets all of them */
} smla_mirror;

/* A point in the work of a stream. */
typedef struct smla_event smla_event;

/* Order between streams. A caller needs it if the producers of its arrays work on different
 * streams, or if it must know when memory is no longer in use. */
typedef struct smla_stream_ops {
    /* Whether the stream captures work into a graph instead of running it. */
    smla_status (*is_capturing)(const char *op, smla_stream stream, bool *answer,
                                smla_error *error);
    /* Makes an event that follows all work given to the stream so far. */
    smla_status (*record)(const char *op, smla_stream stream, smla_event **event,
                          smla_error *error);
    /* Makes work that is given to the stream from now on wait for the event. */
    smla_status (*wait)(const char *op, smla_stream stream, const smla_event *event,
                        smla_error *error);
    /* Whether the work before the event is done. Also true if the device has failed. */
    bool (*is_done)(const smla_event *event);
    /* Makes the host wait for the event. */
    void (*finish)(const smla_event *event);
    void (*destroy)(smla_event *event);
    smla_status (*fill_zero)(const char *op, smla_stream stream, void *memory, int64_t bytes,
                             smla_error *error);
} smla_stream_ops;

#define SMLA_OPERATOR_SLOT(name, args_type, params_type, family) \
    smla_status (*name)(const params_type *params, smla_error *error);

/* Every slot is required, unless it says "Optional". */
typedef struct smla_backend {
    const char *name;
    DLDeviceType device_type;
    /* SMLA_OK, or why the device cannot be used: bad number, too old, no driver. */
    smla_status (*check_device)(const char *op, int32_t device_id, smla_error *error);
    /* What kind of device it is, for estimates: major * 10 + minor of a GPU, else 0. */
    int32_t (*capability)(int32_t device_id);
    SMLA_OPERATORS(SMLA_OPERATOR_SLOT)
    /* Chunks of lightning_indexer: the bytes of logits that are worth keeping, and the number of
     * tokens that a chunk should be a multiple of. */
    int64_t chunk_logits_bytes;
    int64_t chunk_tokens;
    /* Finds the errors in array values that gather_kv_cache would find, and does no other work.
     * forward calls it for all chunks before the first chunk starts. Finds nothing if the values
     * are on a device. */
    smla_status (*check_gather)(const smla_gather_params *params, smla_error *error);
    /* Fills the lists of a DeepSeek V4 step. No value of its arrays is an error. */
    smla_status (*fill_step_lists)(const smla_step_lists_params *params, smla_error *error);
    /* Fills the arrays of a paged step. No value of its arrays is an error. */
    smla_status (*fill_paged_lists)(const smla_paged_step_params *params, smla_error *error);
    /* Whether prefills of this shape are estimated to take less time on their caches than on a
     * workspace to which `num_chunks` chunks of requests gather `num_rows` rows. */
    bool (*prefers_direct)(const smla_attention_shape *prefills, int64_t num_rows,
                           int64_t num_chunks);
    /* Never falls when num_tokens grows, so the size for the largest batch serves all batches. */
    int64_t (*attention_workspace_size)(const smla_attention_shape *shape);
    void (*plan_attention)(const smla_attention_shape *shape, smla_attention_plan *plan);
    /* The name in `kernels` of the kernel that a run starts; NULL if no kernel can run it. */
    const char *(*kernel_name)(const smla_attention_run *run);
    /* Writes which keys each token of a dense call sees. No value of its arrays is an error. */
    smla_status (*find_key_ranges)(const smla_key_ranges_params *params, smla_error *error);
    /* Every attention. The params have what plan_attention returned for the call's shape. */
    smla_status (*attend)(const smla_attention_params *params, smla_error *error);
    /* k_up_proj, v_up_proj, kv_up_proj and grouped_output_projection */
    smla_status (*projection)(const smla_projection_params *params, smla_error *error);
    /* Fills up to `capacity` rows, and returns how many rows there are. */
    int64_t (*kernels)(smla_kernel_info *rows, int64_t capacity);
    /* Memory of this device, aligned to at least 64 bytes. Its contents are undefined. NULL if
     * there is not enough memory. */
    void *(*allocate)(int32_t device_id, int64_t bytes);
    void *(*allocate_zeros)(int32_t device_id, int64_t bytes); /* the same, but zero */
    void (*release)(int32_t device_id, void *memory);
    /* A mirror that is zero on host and device; NULL if there is not enough memory. */
    smla_mirror *(*create_mirror)(int32_t device_id, int64_t bytes);
    void (*destroy_mirror)(smla_mirror *mirror);
    /* Lends the mirror's bytes on the host, whose contents are undefined. Nothing is sent unless
     * end_write follows. */
    smla_status (*begin_write)(const char *op, smla_mirror *mirror, smla_stream stream, void **host,
                               smla_error *error);
    smla_status (*end_write)(const char *op, smla_mirror *mirror, smla_stream stream,
                             smla_error *error);
    smla_status (*begin_use)(const char *op, smla_mirror *mirror, smla_stream stream,
                             smla_error *error);
    smla_status (*end_use)(const char *op, smla_mirror *mirror, smla_stream stream,
                           smla_error *error);
    /* Optional. NULL means that the work of every call is done when the call returns. */
    const smla_stream_ops *streams;
} smla_backend;

extern const smla_backend smla_cpu_backend;
#ifdef SMLA_HAVE_CUDA
extern const smla_backend smla_cuda_backend;
#endif

/* The backend of a device, or an error that says what this build has. */
smla_status smla_find_backend(const char *op, DLDevice device, const smla_backend **backend,
                              smla_error *error);

#ifdef __cplusplus
}
#endif
