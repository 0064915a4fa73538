/* instruction_sets.h: runs tests once per instruction set of the machine, for kernels that are
 * compiled for each one. It is included first, because it asks for POSIX, which has setenv.
 */
#pragma once

#define _POSIX_C_SOURCE 200809L // NOLINT(cert-dcl51-cpp)

#include "testing.h"

static inline void
run_on_every_instruction_set(void (*tests)(void))
{
    smla_kernel_info rows[64];
    enum { MOST = sizeof rows / sizeof rows[0] };
    const int64_t count = smla_kernels(rows, MOST);
    EXPECT(count <= MOST);
    for (int64_t i = 0; i < count && i < MOST; i++) {
        if (rows[i].available && strcmp(rows[i].device, "cpu") == 0) {
            printf("  instruction set %s\n", rows[i].arch);
            setenv("SPARSE_MLA_CPU_ISA", rows[i].arch, 1);
            tests();
        }
    }
    unsetenv("SPARSE_MLA_CPU_ISA");
}
