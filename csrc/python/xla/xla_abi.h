/* xla_abi.h: what a handler of custom calls must know of XLA: the call frame, in plain C.
 *
 * JAX passes a frame to a registered function: the arrays, results and attributes of one call. This
 * file has the part of the frame's ABI that handlers read, under our own names. So the build needs
 * no header of jaxlib, and any jaxlib serves at run time. Every struct begins with its size. Inside
 * a major version XLA only appends fields; a change that moves a field raises the major version.
 * XLA checks a handler's version when the handler is registered. Source of the layout: openxla/xla,
 * xla/ffi/api/c_api.h.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum { SMLA_XLA_MAJOR = 0, SMLA_XLA_MINOR = 1 }; /* the version described here */

/* Most structs have a chain of extensions after their size. To ask for a handler's version, XLA
 * calls it with a frame that has the metadata extension and no call. */
enum { SMLA_XLA_EXTENSION_METADATA = 1 };

typedef struct smla_xla_extension {
    size_t struct_size;
    int type;
    struct smla_xla_extension *next;
} smla_xla_extension;

typedef struct smla_xla_version {
    size_t struct_size;
    smla_xla_extension *extensions;
    int major;
    int minor;
} smla_xla_version;

typedef struct smla_xla_metadata {
    size_t struct_size;
    smla_xla_version version; /* out: the version that the handler was written for */
} smla_xla_metadata;

typedef struct smla_xla_metadata_extension {
    smla_xla_extension base;
    smla_xla_metadata *metadata;
} smla_xla_metadata_extension;

/* ---- Errors: made by XLA's function, owned by XLA once returned; NULL is success ------------- */

typedef struct smla_xla_error smla_xla_error;

typedef enum smla_xla_code {
    SMLA_XLA_INVALID_ARGUMENT = 3,
    SMLA_XLA_RESOURCE_EXHAUSTED = 8,
    SMLA_XLA_INTERNAL = 13,
} smla_xla_code;

typedef struct smla_xla_error_args {
    size_t struct_size;
    smla_xla_extension *extensions;
    const char *message; /* copied */
    smla_xla_code code;
} smla_xla_error_args;

/* For an error that one of XLA's functions gave to the handler, which then owns it. */
typedef struct smla_xla_own_error_args {
    size_t struct_size;
    smla_xla_extension *extensions;
    smla_xla_error *error;
    const char *message; /* out: valid until the error is destroyed */
} smla_xla_own_error_args;

/* ---- What a call on a GPU asks XLA for; `context` is the frame's ----------------------------- */

typedef struct smla_xla_context smla_xla_context;

typedef struct smla_xla_stream_args {
    size_t struct_size;
    smla_xla_extension *extensions;
    smla_xla_context *context;
    void *stream; /* out: a CUstream */
} smla_xla_stream_args;

typedef struct smla_xla_device_args {
    size_t struct_size;
    smla_xla_extension *extensions;
    smla_xla_context *context;
    int32_t device; /* out: its number in this process */
} smla_xla_device_args;

typedef struct smla_xla_allocate_args {
    size_t struct_size;
    smla_xla_extension *extensions;
    smla_xla_context *context;
    size_t size;
    size_t alignment;
    void *data; /* out */
} smla_xla_allocate_args;

/* Memory that is freed here may still be used by work that the call has put on its stream: XLA
 * gives it to later work of this stream only. */
typedef struct smla_xla_free_args {
    size_t struct_size;
    smla_xla_extension *extensions;
    smla_xla_context *context;
    size_t size;
    void *data;
} smla_xla_free_args;

/* XLA's functions. struct_size says how many an older XLA has: get_device came last. */
typedef struct smla_xla_api {
    size_t struct_size;
    smla_xla_extension *extensions;
    smla_xla_version version;
    const void *internal;
    smla_xla_error *(*create_error)(smla_xla_error_args *args);
    void (*get_message)(smla_xla_own_error_args *args);
    void (*destroy_error)(smla_xla_own_error_args *args);
    void (*register_handler)(void);
    smla_xla_error *(*get_stream)(smla_xla_stream_args *args);
    void (*states[4])(void); /* types and states of handlers */
    smla_xla_error *(*allocate)(smla_xla_allocate_args *args);
    smla_xla_error *(*free)(smla_xla_free_args *args);
    void (*pools[2])(void);   /* XLA's threads */
    void (*futures[3])(void); /* results that come later */
    void (*get_run_id)(void);
    smla_xla_error *(*get_device)(smla_xla_device_args *args);
} smla_xla_api;

/* ---- Arrays: dense, the last dimension contiguous -------------------------------------------- */

/* The element types that operators take or are often given. */
typedef enum smla_xla_type {
    SMLA_XLA_PRED = 1,
    SMLA_XLA_S8 = 2,
    SMLA_XLA_S16 = 3,
    SMLA_XLA_S32 = 4,
    SMLA_XLA_S64 = 5,
    SMLA_XLA_U8 = 6,
    SMLA_XLA_U16 = 7,
    SMLA_XLA_U32 = 8,
    SMLA_XLA_U64 = 9,
    SMLA_XLA_F16 = 10,
    SMLA_XLA_F32 = 11,
    SMLA_XLA_F64 = 12,
    SMLA_XLA_BF16 = 16,
    SMLA_XLA_F8E4M3FN = 20,
} smla_xla_type;

typedef struct smla_xla_buffer {
    size_t struct_size;
    smla_xla_extension *extensions;
    int type; /* smla_xla_type, or one that is not listed there */
    void *data;
    int64_t rank;
    int64_t *dims;
} smla_xla_buffer;

enum { SMLA_XLA_IS_BUFFER = 1 };

typedef struct smla_xla_buffers { /* arguments or results */
    size_t struct_size;
    smla_xla_extension *extensions;
    int64_t size;
    int *kinds;   /* SMLA_XLA_IS_BUFFER */
    void **items; /* smla_xla_buffer * */
} smla_xla_buffers;

/* ---- Attributes: constants of the call site, by name ----------------------------------------- */

enum { SMLA_XLA_IS_SCALAR = 3, SMLA_XLA_IS_STRING = 4 };

typedef struct smla_xla_span { /* a string that need not end with 0 */
    const char *text;
    size_t length;
} smla_xla_span;

typedef struct smla_xla_scalar {
    int type; /* smla_xla_type */
    const void *value;
} smla_xla_scalar;

typedef struct smla_xla_attributes {
    size_t struct_size;
    smla_xla_extension *extensions;
    int64_t size;
    int *kinds;
    smla_xla_span **names;
    void **items; /* smla_xla_scalar * or smla_xla_span * */
} smla_xla_attributes;

/* ---- The call -------------------------------------------------------------------------------- */

typedef struct smla_xla_frame {
    size_t struct_size;
    smla_xla_extension *extensions;
    const smla_xla_api *api; /* may be NULL with the metadata extension */
    smla_xla_context *context;
    int stage; /* a single handler is called in the execution stage only */
    smla_xla_buffers arguments;
    smla_xla_buffers results;
    smla_xla_attributes attributes;
} smla_xla_frame;

typedef smla_xla_error *smla_xla_handler(smla_xla_frame *frame);
