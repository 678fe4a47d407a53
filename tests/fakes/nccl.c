/* A library with NCCL's functions and no GPU, for tests of hpdl_lab/comm/nccl*.py: ranks are processes of one machine
 * that meet in a file. It keeps what matters of the real one: nothing blocks; groups run one after another in a stream,
 * moved by a thread of their own; in a group all transfers move at once; a send ends only when its receiver has taken
 * everything; a group that comes before the last one was issued is refused. So are 16-bit sums, since the caller
 * promises to widen them.
 *
 * `fake_*` are the levers of the tests.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { kSuccess = 0, kSystemError = 2, kInvalidArgument = 4, kInProgress = 7 };
enum { kRanks = 8, kChunk = 16384, kOps = 64, kPolls = 2 };

typedef struct {
    char internal[128];
} UniqueId;
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking, cluster, min_blocks, max_blocks;
} Config;

typedef struct {
    _Atomic uint64_t written, taken;
    char data[kChunk];
} Mailbox;

typedef struct {
    _Atomic int joined;
    Mailbox boxes[kRanks][kRanks]; /* [source][dest] */
} Place;

typedef struct {
    Place* place;
    int rank, size, state, polls, aborted;
} Comm;

typedef struct {
    Comm* comm;
    char* data;
    size_t nbytes, done;
    int peer, sends, last_taken;
} Transfer;
typedef struct {
    Comm* comm;
    const char* own;
    char* parts;
    void* out;
    size_t count;
    int dtype;
} Sum;
typedef struct Group {
    Transfer transfers[kOps];
    Sum sums[8];
    int n, n_sums;
    long ticket;
    struct Group* next;
} Group;

static Group *building, *first, *last;
static int depth, fail_code, version = 23203;
static long tickets, finished;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the groups */
static pthread_cond_t issued = PTHREAD_COND_INITIALIZER; /* another group */
static char fail_name[64], last_error[256];

static size_t item(int dtype) { return (size_t[]){1, 1, 4, 4, 8, 8, 2, 4, 8, 2}[dtype]; }

/* -- levers -- */
void fake_fail(const char* name, int code, const char* text) {
    snprintf(fail_name, sizeof fail_name, "%s", name);
    snprintf(last_error, sizeof last_error, "%s", text);
    fail_code = code;
}
void fake_version(int code) { version = code; }
long fake_ticket(void) { return tickets; }
int fake_aborted(Comm* comm) { return comm->aborted; }

static int failing(const char* name) {
    if (!fail_code || strcmp(name, fail_name)) return 0;
    int code = fail_code;
    fail_code = 0;
    return code;
}

/* -- moving bytes -- */
static int step(Transfer* t) { /* true when it has ended */
    if (t->comm->aborted) return 1;
    Comm* c = t->comm;
    Mailbox* box = t->sends ? &c->place->boxes[c->rank][t->peer] : &c->place->boxes[t->peer][c->rank];
    const size_t left = t->nbytes - t->done, n = left < kChunk ? left : kChunk;
    const int full = atomic_load(&box->written) != atomic_load(&box->taken);
    if (t->sends) {
        if (full) return 0;
        if (left == 0) return 1;
        memcpy(box->data, t->data + t->done, n);
        t->done += n;
        atomic_fetch_add(&box->written, 1);
        return 0;
    }
    if (left == 0) return 1;
    if (!full) return 0;
    memcpy(t->data + t->done, box->data, n);
    t->done += n;
    atomic_fetch_add(&box->taken, 1);
    return t->done == t->nbytes;
}

#define ADD(T)                                                                                         \
    for (size_t i = 0; i < s->count; i++) {                                                            \
        T sum = 0;                                                                                     \
        for (int r = 0; r < s->comm->size; r++)                                                        \
            sum += ((const T*)(r == s->comm->rank ? s->own : s->parts + r * s->count * sizeof(T)))[i]; \
        ((T*)s->out)[i] = sum;                                                                         \
    }

static void add(Sum* s) {
    switch (s->dtype) {
        case 1: ADD(uint8_t) break;
        case 2: ADD(int32_t) break;
        case 4: ADD(int64_t) break;
        case 7: ADD(float) break;
        case 8: ADD(double) break;
    }
    free((void*)s->own);
    free(s->parts);
}

/* Transfers between the same two ranks keep their order: only the first of each pair and direction moves. */
static int blocked(const Group* g, int k) {
    for (int i = 0; i < k; i++) {
        const Transfer *a = &g->transfers[i], *b = &g->transfers[k];
        if (a->nbytes != (size_t)-1 && a->peer == b->peer && a->sends == b->sends && a->comm == b->comm) return 1;
    }
    return 0;
}

static void progress_locked(void) {
    while (first) {
        int left = 0;
        for (int k = 0; k < first->n; k++) {
            if (first->transfers[k].nbytes == (size_t)-1) continue;
            if (!blocked(first, k) && step(&first->transfers[k]))
                first->transfers[k].nbytes = -1;
            else
                left++;
        }
        if (left) return;
        for (int k = 0; k < first->n_sums; k++) add(&first->sums[k]);
        finished = first->ticket;
        Group* done = first;
        first = first->next;
        if (!first) last = NULL;
        free(done);
    }
}

static void progress(void) {
    pthread_mutex_lock(&lock);
    progress_locked();
    pthread_mutex_unlock(&lock);
}

static void* run(void* unused) { /* the GPU */
    for (;;) {
        pthread_mutex_lock(&lock);
        while (!first) pthread_cond_wait(&issued, &lock); /* its naps would strike later tests, whose ranks spin */
        progress_locked();
        pthread_mutex_unlock(&lock);
        usleep(200);
    }
    return unused;
}

int fake_done(long ticket) {
    progress();
    return finished >= ticket || tickets == 0;
}

/* -- NCCL -- */
int ncclGetVersion(int* v) {
    *v = version;
    return kSuccess;
}
const char* ncclGetErrorString(int code) {
    return code == kSystemError       ? "unhandled system error"
           : code == kInvalidArgument ? "invalid argument"
           : code == 5                ? "invalid usage"
           : code == 6                ? "remote process exited or there was a network error"
                                      : "error";
}
const char* ncclGetLastError(void* comm) {
    (void)comm;
    return last_error;
}

int ncclGetUniqueId(UniqueId* id) {
    static int made;
    int code = failing("ncclGetUniqueId");
    if (code) return code;
    const char* folder = getenv("FAKE_NCCL_DIR");
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "%s/%d-%d", folder ? folder : "/tmp", (int)getpid(), made++);
    int fd = open(id->internal, O_CREAT | O_EXCL | O_RDWR, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(Place)) != 0) return kSystemError;
    close(fd);
    return kSuccess;
}

int ncclCommInitRankConfig(Comm** made, int size, UniqueId id, int rank, const Config* config) {
    int code = failing("ncclCommInitRankConfig");
    if (code) return code;
    if (config->magic != 0xcafebeef || config->blocking != 0 || size > kRanks) return kInvalidArgument;
    int fd = open(id.internal, O_RDWR);
    if (fd < 0) return kSystemError;
    Comm* c = calloc(1, sizeof *c);
    c->place = mmap(NULL, sizeof(Place), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    c->rank = rank;
    c->size = size;
    atomic_fetch_add(&c->place->joined, 1);
    *made = c;
    static pthread_t gpu;
    if (!gpu) pthread_create(&gpu, NULL, run, NULL);
    return kInProgress;
}

int ncclCommGetAsyncError(Comm* c, int* state) {
    int code = failing("ncclCommGetAsyncError");
    if (code) c->state = code;
    progress();
    *state = c->state;
    if (c->state == kSuccess && (atomic_load(&c->place->joined) < c->size || c->polls-- > 0)) *state = kInProgress;
    return kSuccess;
}

int ncclCommAbort(Comm* c) {
    c->aborted = 1;
    progress();
    return kSuccess;
}

int ncclGroupStart(void) {
    if (depth++ == 0) building = calloc(1, sizeof *building);
    return kSuccess;
}

int ncclGroupEnd(void) {
    if (--depth) return kSuccess;
    for (int k = 0; k < building->n; k++)
        if (building->transfers[k].comm->polls > 0) return kInvalidArgument; /* the last group has not been issued */
    pthread_mutex_lock(&lock);
    building->ticket = ++tickets;
    for (int k = 0; k < building->n; k++) building->transfers[k].comm->polls = kPolls;
    if (last)
        last->next = building;
    else
        first = building;
    last = building;
    pthread_cond_signal(&issued);
    pthread_mutex_unlock(&lock);
    return failing("ncclGroupEnd") ? kSystemError : kInProgress;
}

static int transfer(Comm* c, const void* data, size_t nbytes, int peer, int sends) {
    if (building->n == kOps || peer < 0 || peer >= c->size || peer == c->rank || nbytes == 0) return kInvalidArgument;
    building->transfers[building->n++] = (Transfer){c, (char*)data, nbytes, 0, peer, sends, 0};
    return kSuccess;
}

static int sum_of(Comm* c, const void* own, void* out, size_t count, int dtype) { /* receives all others' parts */
    if (dtype != 1 && dtype != 2 && dtype != 4 && dtype != 7 && dtype != 8) return kInvalidArgument;
    const size_t nbytes = count * item(dtype);
    char* copy = malloc(nbytes);
    char* parts = malloc(nbytes * c->size);
    memcpy(copy, own, nbytes);
    building->sums[building->n_sums++] = (Sum){c, copy, parts, out, count, dtype};
    int code = kSuccess;
    for (int r = 0; r < c->size; r++)
        if (r != c->rank && !code) code = transfer(c, parts + r * nbytes, nbytes, r, 0);
    return code;
}

int ncclSend(const void* x, size_t count, int dtype, int peer, Comm* c, void* stream) {
    (void)stream;
    int code = failing("ncclSend");
    return code ? code : transfer(c, x, count * item(dtype), peer, 1);
}

int ncclRecv(void* x, size_t count, int dtype, int peer, Comm* c, void* stream) {
    (void)stream;
    return transfer(c, x, count * item(dtype), peer, 0);
}

int ncclBroadcast(const void* x, void* out, size_t count, int dtype, int root, Comm* c, void* stream) {
    (void)stream;
    if (c->rank != root) return transfer(c, out, count * item(dtype), root, 0);
    int code = kSuccess;
    for (int r = 0; r < c->size; r++)
        if (r != root && !code) code = transfer(c, x, count * item(dtype), r, 1);
    return code;
}

int ncclReduce(const void* x, void* out, size_t count, int dtype, int op, int root, Comm* c, void* stream) {
    (void)stream;
    if (op != 0) return kInvalidArgument;
    return c->rank == root ? sum_of(c, x, out, count, dtype) : transfer(c, x, count * item(dtype), root, 1);
}

int ncclAllReduce(const void* x, void* out, size_t count, int dtype, int op, Comm* c, void* stream) {
    (void)stream;
    int code = failing("ncclAllReduce");
    if (code || op != 0) return code ? code : kInvalidArgument;
    code = sum_of(c, x, out, count, dtype);
    const char* copy = building->n_sums ? building->sums[building->n_sums - 1].own : NULL; /* x may become the sum */
    for (int r = 0; r < c->size; r++)
        if (r != c->rank && !code) code = transfer(c, copy, count * item(dtype), r, 1);
    return code;
}

int ncclReduceScatter(const void* x, void* out, size_t count, int dtype, int op, Comm* c, void* stream) {
    (void)stream;
    if (op != 0) return kInvalidArgument;
    const size_t nbytes = count * item(dtype);
    int code = sum_of(c, (const char*)x + c->rank * nbytes, out, count, dtype);
    for (int r = 0; r < c->size; r++)
        if (r != c->rank && !code) code = transfer(c, (const char*)x + r * nbytes, nbytes, r, 1);
    return code;
}

int ncclAllGather(const void* x, void* out, size_t count, int dtype, Comm* c, void* stream) {
    (void)stream;
    const size_t nbytes = count * item(dtype);
    int code = kSuccess;
    memcpy((char*)out + c->rank * nbytes, x, nbytes);
    for (int r = 0; r < c->size && !code; r++) {
        if (r == c->rank) continue;
        code = transfer(c, x, nbytes, r, 1);
        if (!code) code = transfer(c, (char*)out + r * nbytes, nbytes, r, 0);
    }
    return code;
}
