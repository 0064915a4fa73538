/* backends.c: the backends of this build, and which backend serves a device. */
#include "core/backend.h"

static const smla_backend *const backends[] = {
    &smla_cpu_backend,
#ifdef SMLA_HAVE_CUDA
    &smla_cuda_backend,
#endif
};

enum { NUM_BACKENDS = sizeof backends / sizeof backends[0] };

smla_status
smla_find_backend(const char *op, DLDevice device, const smla_backend **backend, smla_error *error)
{
    for (int i = 0; i < NUM_BACKENDS; i++) {
        if (backends[i]->device_type == device.device_type) {
            *backend = backends[i];
            return backends[i]->check_device(op, device.device_id, error);
        }
    }
    if (device.device_type == kDLCUDA) {
        return smla_fail(
            error, SMLA_ERROR_RUNTIME,
            "%s: arrays must be on a device of this build (cpu), got cuda:%d: this is a CPU-only "
            "build; sparse_mla.build_info() says how to get CUDA",
            op, device.device_id);
    }
    return smla_fail(error, SMLA_ERROR_RUNTIME,
                     "%s: arrays must be on a device of this build (%s), got DLPack device type %d",
                     op, NUM_BACKENDS > 1 ? "cpu or cuda" : "cpu", (int)device.device_type);
}

int64_t
smla_kernels(smla_kernel_info *rows, int64_t capacity)
{
    int64_t count = 0;
    for (int i = 0; i < NUM_BACKENDS; i++) {
        const int64_t room = capacity > count ? capacity - count : 0;
        count += backends[i]->kernels(room > 0 ? rows + count : NULL, room);
    }
    return count;
}
