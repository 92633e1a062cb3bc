/* The C ABI of streampool: devices, pools, blocks, streams, statistics.
 *
 * Conventions
 *  - Every function returns an sp_status unless it says otherwise; SP_OK is 0. Results go through the last parameter
 *    and are written only on success. After a failure sp_last_error() says on this thread what went wrong.
 *  - Sizes and alignments are in bytes, times in seconds.
 *  - Every function may be called from any thread at any time; a handle may be used by several threads at once, but it
 *    must not be closed while another call on it is under way.
 *  - No function throws, prints, or waits for the device unless its comment says so. With option on_fault=abort a call
 *    that is told of a fault (see sp_fault_function) writes it to standard error and ends the process by abort().
 *  - The ABI only grows: structs start with struct_size, enums get new values at the end.
 */
#ifndef STREAMPOOL_STREAMPOOL_H_
#define STREAMPOOL_STREAMPOOL_H_

#include <stddef.h>
#include <stdint.h>

#define SP_VERSION_STRING "0.1.0"
#define SP_VERSION_MAJOR 0
#define SP_VERSION_MINOR 1
#define SP_VERSION_PATCH 0

#if defined(__GNUC__)
#define SP_API __attribute__((visibility("default")))
#else
#define SP_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* One device with its context, and one pool on it. Opaque. */
typedef struct sp_device sp_device;
typedef struct sp_pool sp_pool;

/* A CUstream (cudaStream_t), or what sp_stream_create gave. NULL and (sp_stream)1 are the device's legacy default
 * stream, (sp_stream)2 is the calling thread's per-thread default stream. */
typedef void* sp_stream;

/* A CUevent (cudaEvent_t). */
typedef void* sp_event;

typedef enum sp_status {
  SP_OK = 0,
  SP_ERROR_INVALID_ARGUMENT = 1,  /* NULL, unknown kind, option or value, bad alignment, a size that overflows */
  SP_ERROR_OUT_OF_MEMORY = 2,     /* device memory, or the pool's limit; sp_last_error() has the whole account */
  SP_ERROR_HOST_MEMORY = 3,       /* the process's own memory ran out */
  SP_ERROR_DOUBLE_FREE = 4,       /* this block is free already; nothing was changed */
  SP_ERROR_FOREIGN_FREE = 5,      /* no pool owns this address; nothing was changed */
  SP_ERROR_INTERIOR_FREE = 6,     /* the address is inside a block, not at its start; nothing was changed */
  SP_ERROR_WRONG_POOL = 7,        /* the block belongs to another pool; nothing was changed */
  SP_ERROR_TRAMPLED_RECORD = 8,   /* the pool's own record of the block was overwritten; it was not followed */
  SP_ERROR_STREAM = 9,            /* the stream is not one, or does not belong to the pool's device */
  SP_ERROR_CAPTURE = 10,          /* not possible while a capture is under way; the capture is still valid */
  SP_ERROR_DRIVER_NOT_FOUND = 11, /* no driver library, or no such device */
  SP_ERROR_DRIVER = 12,           /* the driver is too old, broken, or refused a call */
  SP_ERROR_DEVICE_LOST = 13,      /* a device fault or a context reset: every later call fails, frees are harmless */
  SP_ERROR_GOING_DOWN = 14,       /* the driver is being torn down, or this process is a forked child (use spawn) */
  SP_ERROR_POOL_CLOSED = 15,
  SP_ERROR_FAULT = 16,        /* option on_fault=raise, and a fault was found */
  SP_ERROR_INTERNAL = 17,     /* a bug in streampool; please report it */
  SP_ERROR_SIZE_MISMATCH = 18 /* the block has another size than the free says; nothing was changed */
} sp_status;

/* The name of a status, "SP_ERROR_DOUBLE_FREE"; never NULL. */
SP_API const char* sp_status_name(sp_status status);

/* What went wrong in the last failed call on this thread, in words; "" when none failed. Valid until the next failed
 * call on this thread. */
SP_API const char* sp_last_error(void);

/* The version of the library that was loaded, "0.1.0" (SP_VERSION_STRING is the header's). */
SP_API const char* sp_version(void);

/* -- devices ------------------------------------------------------------------------------------------------------- */

/* Opens "cuda:N", "sim:N", "cuda", "sim", or "auto": a GPU where there is one, else "sim:0". A driver that is there but
 * broken is an error and never hidden by falling back. Opening a device twice gives two handles to one device.
 * Errors: INVALID_ARGUMENT (no such name), DRIVER_NOT_FOUND, DRIVER. */
SP_API sp_status sp_device_open(const char* name, sp_device** out);

/* Gives the handle back. Pools on the device stay valid. NULL is allowed. */
SP_API sp_status sp_device_close(sp_device* device);

/* "cuda:0", "sim:0"; valid until the device is closed. NULL when device is NULL. */
SP_API const char* sp_device_name(const sp_device* device);

/* A stream of the device that waits for no other. For programs without the CUDA runtime, and for the simulated device.
 * Destroy it only after every pool that knows it has forgotten it (sp_forget_stream) or was closed.
 * Errors: INVALID_ARGUMENT, DRIVER, DEVICE_LOST, GOING_DOWN. */
SP_API sp_status sp_stream_create(sp_device* device, sp_stream* out);
SP_API sp_status sp_stream_destroy(sp_device* device, sp_stream stream);

/* -- pools --------------------------------------------------------------------------------------------------------- */

/* Makes a pool of one kind of memory: "device", "pinned" (page-locked host memory) or "managed". `name` labels its
 * statistics; NULL is "default". `options` is "name=value:name=value", for example "mode=debug:limit=2GiB", over the
 * environment variable STREAMPOOL_OPTIONS, over the mode's preset; NULL is "".
 * Errors: INVALID_ARGUMENT (names the option, the value and what is allowed), OUT_OF_MEMORY (option initial), DRIVER,
 * HOST_MEMORY. */
SP_API sp_status sp_pool_create(sp_device* device, const char* kind, const char* name, const char* options,
                                sp_pool** out);

/* Closes the pool: live blocks stay valid until they are freed with sp_free on the same handle, new ones are refused.
 * Memory goes back to the driver when nothing lives in it and its work is done. Errors: FAULT (the pool is closed all
 * the same), DRIVER, DEVICE_LOST. */
SP_API sp_status sp_pool_close(sp_pool* pool);

/* Closes the pool if it is open, and gives the handle up: it must not be used again. Blocks that live keep their memory
 * for the rest of the process. NULL is allowed. */
SP_API sp_status sp_pool_destroy(sp_pool* pool);

/* -- blocks -------------------------------------------------------------------------------------------------------- */

/* A block of `size` bytes for use on `stream`, aligned to `alignment`: a power of two up to 2 MiB, or 0 for the usual
 * 256. Size 0 gives a valid, unique block of no bytes. Device memory may still be written by work queued earlier on the
 * same stream, so touch it only in stream order; pinned and managed memory is handed out only when nothing queued
 * touches it. May wait up to option wait_timeout for queued work when memory is short. Errors: INVALID_ARGUMENT,
 * OUT_OF_MEMORY, HOST_MEMORY, STREAM, CAPTURE, DRIVER, DEVICE_LOST, GOING_DOWN, POOL_CLOSED, FAULT. */
SP_API sp_status sp_alloc(sp_pool* pool, size_t size, size_t alignment, sp_stream stream, void** out);

/* Frees a block in stream order: work queued on `stream` so far, and on every recorded stream, may still touch it. If
 * `stream` is not the one it was allocated on, the caller says that `stream` is ordered after all other use. NULL is
 * allowed and does nothing. Never waits.
 * Errors: DOUBLE_FREE, FOREIGN_FREE, INTERIOR_FREE, WRONG_POOL, TRAMPLED_RECORD (nothing was changed), STREAM,
 * INVALID_ARGUMENT, DEVICE_LOST and GOING_DOWN (the block is gone all the same). */
SP_API sp_status sp_free(sp_pool* pool, void* ptr, sp_stream stream);

/* The same for callers that keep the size they asked for: another size is an error, and changes nothing.
 * Errors as sp_free, and SIZE_MISMATCH. */
SP_API sp_status sp_free_sized(sp_pool* pool, void* ptr, size_t size, sp_stream stream);

/* Frees a block without naming a stream: its own streams' work queued so far may still touch it. Makes no driver call,
 * so it is fit for destructors and host callbacks. NULL is allowed and does nothing. Never waits. Errors as sp_free,
 * without STREAM. */
SP_API sp_status sp_release(sp_pool* pool, void* ptr);

/* Work queued on `stream` until the block is freed may touch the block. `ptr` is any address inside it.
 * Errors: FOREIGN_FREE, WRONG_POOL (no live block of this pool there), STREAM, INVALID_ARGUMENT. */
SP_API sp_status sp_record_stream(sp_pool* pool, const void* ptr, sp_stream stream);

/* The precise form: only the work that `event`, recorded by the caller, covers may touch the block. The event must
 * outlive the block's memory being reused. Errors as sp_record_stream. */
SP_API sp_status sp_record_event(sp_pool* pool, const void* ptr, sp_event event);

/* -- streams ------------------------------------------------------------------------------------------------------- */

/* A promise that `stream` lives until sp_forget_stream and that captures on it are declared; calls that name it then
 * make no driver call. Not for the per-thread default stream. Errors: STREAM, CAPTURE, INVALID_ARGUMENT, DRIVER. */
SP_API sp_status sp_register_stream(sp_pool* pool, sp_stream stream);

/* Ends the promise: call it before the stream is destroyed. Errors: STREAM (not registered), INVALID_ARGUMENT, DRIVER.
 */
SP_API sp_status sp_forget_stream(sp_pool* pool, sp_stream stream);

/* -- the pool's memory --------------------------------------------------------------------------------------------- */

/* Takes memory from the driver in advance until `size` bytes are free in the pool. Errors as sp_alloc. */
SP_API sp_status sp_reserve(sp_pool* pool, size_t size);

/* Returns free memory to the driver as long as `keep_bytes` stay reserved, to 2 MiB; `released` (may be NULL) gets the
 * bytes that went back. Errors: DRIVER, DEVICE_LOST, GOING_DOWN, INVALID_ARGUMENT. */
SP_API sp_status sp_trim(sp_pool* pool, size_t keep_bytes, size_t* released);

/* Debug mode: checks guards and freed memory now, waiting up to `timeout` seconds for queued work. `faults` (may be
 * NULL) gets the number found by this check. Errors: INVALID_ARGUMENT, FAULT (option on_fault=raise), DRIVER,
 * DEVICE_LOST. */
SP_API sp_status sp_check(sp_pool* pool, double timeout, uint64_t* faults);

/* A fault, as a function of sp_set_fault_function is told of it. Texts are valid during the call. */
typedef struct sp_fault_t {
  size_t struct_size;    /* of the library's struct: what lies beyond is not there */
  const char* kind;      /* "overrun", "write_after_free", ...: docs/faults/KIND.md */
  const char* text;      /* what happened, in one line */
  const char* note;      /* what else is known of it, or "" */
  uint64_t number;       /* running, in the process */
  uint64_t count;        /* 1, or more where option max_repeats counts repeats from the same lines */
  uint64_t first;        /* address of the first bad byte, or what was freed */
  uint64_t last;         /* address of the last bad byte */
  uint64_t bad_bytes;    /* 0: misuse at a call */
  uint64_t block;        /* address of the block that was hit; 0: none is known */
  uint64_t block_size;   /* as it was asked for */
  uint64_t block_serial; /* the pool's running number of the allocation */
} sp_fault_t;

/* Called once for each fault, on the thread whose call of this pool is told of it, before that call does anything (a
 * wrong free: after it was refused): sp_alloc, sp_check, sp_pool_close, and a free that fails. No lock is held: the
 * function may use the pool, and faults found meanwhile are told when it has returned. Several threads may call it at
 * once. It must not close the pool, and must not let an exception out. */
typedef void (*sp_fault_function)(sp_pool* pool, const sp_fault_t* fault, void* user);

/* Sets the function that a pool with option on_fault=callback calls; NULL: none, and faults are kept until there is
 * one. Errors: INVALID_ARGUMENT (the pool has another on_fault). */
SP_API sp_status sp_set_fault_function(sp_pool* pool, sp_fault_function function, void* user);

/* in_use + rounding + guards + quarantined + pending + cached = reserved, whenever the pool is quiet. All in bytes, but
 * for the counts. */
typedef struct sp_stats_t {
  size_t struct_size; /* set by the caller: sizeof(sp_stats_t) as it was compiled */
  uint64_t in_use;    /* requested bytes of live blocks */
  uint64_t rounding;  /* what size classes and alignment add to them */
  uint64_t guards;
  uint64_t quarantined;
  uint64_t pending;  /* freed, and queued work may still touch it */
  uint64_t cached;   /* free */
  uint64_t reserved; /* held from the driver */
  uint64_t in_use_peak;
  uint64_t reserved_peak;
  uint64_t limit;       /* of reserved; UINT64_MAX: none */
  uint64_t live_blocks; /* count */
  uint64_t allocations; /* count, since the pool was made */
  uint64_t frees;       /* count */
  uint64_t failures;    /* count of allocations that ended out of memory */
  uint64_t faults;      /* count, in debug mode */
} sp_stats_t;

/* Fills at most stats->struct_size bytes and sets struct_size to what was filled, so that older programs work with
 * newer libraries and the other way round. Errors: INVALID_ARGUMENT. */
SP_API sp_status sp_stats(sp_pool* pool, sp_stats_t* stats);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* STREAMPOOL_STREAMPOOL_H_ */
