/* interrupt.h: how a binding ends a long call of the CPU backend, such as Python on Ctrl-C.
 *
 * The thread that is going to call the library sets an interrupt of its own. During a long call,
 * that same thread asks the binding between two work items, about every 50 ms. If the binding wants
 * the call to end, no thread starts another work item, and the call fails. Its results are then
 * undefined. Threads that set no interrupt, such as those of C programs, are not concerned.
 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>

#include "core/error.h"

typedef struct smla_interrupt {
    bool (*wants_end)(void *context);
    void *context;
    int64_t ask_at_ns;    /* when to ask next; 0 before the first work item */
    atomic_bool is_ended; /* what the workers read */
} smla_interrupt;

/* Sets the interrupt of this thread's calls, or none (NULL). Returns the one that was set. */
smla_interrupt *smla_set_interrupt(smla_interrupt *interrupt);

/* The interrupt of this thread's calls, or NULL. */
smla_interrupt *smla_find_interrupt(void);

/* Asks the binding, if it is time to and the call has not ended. Only the thread that set the
 * interrupt may call this. */
void smla_ask(smla_interrupt *interrupt);

/* SMLA_OK, or the error of a call that was ended. `interrupt` may be NULL. */
smla_status smla_check_ended(const char *op, smla_interrupt *interrupt, smla_error *error);
