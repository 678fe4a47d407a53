#include "shm.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "reduce.h"

namespace hpdl {

namespace {

[[noreturn]] void fail(const std::string& what, int reason) {
    throw std::runtime_error("cannot " + what + ": " + std::strerror(reason));
}

constexpr std::size_t kReduceAtOnce = std::size_t{4} << 20;  // bytes, some 1 ms: between two looks at signals
constexpr std::size_t kMatters = 64 * kKiB;                  // bytes, from which on it matters how they are staged

Buffer part_between(const Buffer& x, std::size_t begin, std::size_t end) {
    begin = std::min(x.count, begin);
    return x.part(begin, std::min(x.count, end) - begin);
}

std::size_t whole_lines(std::size_t nbytes) { return (nbytes + kLine - 1) / kLine * kLine; }

// Slice i of x in `parts` slices of whole cache lines, the last ones shorter or empty.
Buffer slice_of(const Buffer& x, int parts, int i) {
    const std::size_t line = kLine / item_size(x.dtype);
    const std::size_t each = ((x.count + parts - 1) / parts + line - 1) / line * line;
    return part_between(x, i * each, (i + 1) * each);
}

// Row i of x, which has `rows` rows.
Buffer row_of(const Buffer& x, int rows, int i) { return x.part(i * (x.count / rows), x.count / rows); }

void copy(const Buffer& to, const char* from) {
    if (to.count > 0 && to.data != from) std::memcpy(to.data, from, to.nbytes());
}

}  // namespace

// -- the memory ------------------------------------------------------------------------------------------------------

std::shared_ptr<SharedMemory> SharedMemory::create(std::size_t nbytes) {
    const int file = memfd_create("hpdl", MFD_CLOEXEC);
    const std::string name = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file);
    if (file < 0) fail("create shared memory", errno);
    std::shared_ptr<SharedMemory> memory(new SharedMemory(file, nbytes, name));
    if (ftruncate(file, static_cast<off_t>(nbytes)) != 0)
        fail("size shared memory to " + std::to_string(nbytes) + " bytes", errno);
    memory->map();
    return memory;
}

std::shared_ptr<SharedMemory> SharedMemory::open(const std::string& name, std::size_t nbytes) {
    const int file = ::open(name.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) fail("open the shared memory " + name, errno);
    std::shared_ptr<SharedMemory> memory(new SharedMemory(file, nbytes, name));
    struct stat found;
    if (fstat(file, &found) != 0) fail("look at the shared memory " + name, errno);
    // Pages beyond the end could be mapped, but not touched: a SIGBUS.
    if (static_cast<std::size_t>(found.st_size) < nbytes)
        throw std::runtime_error("cannot open the shared memory " + name + ": it has " + std::to_string(found.st_size) +
                                 " bytes, expected " + std::to_string(nbytes));
    memory->map();
    return memory;
}

SharedMemory::SharedMemory(int file, std::size_t nbytes, std::string name)
    : nbytes_(nbytes), name_(std::move(name)), file_(file) {}

SharedMemory::~SharedMemory() {
    if (data_) munmap(data_, nbytes_);
    seal();
}

void SharedMemory::map() {
    void* data = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (data == MAP_FAILED) fail("map " + std::to_string(nbytes_) + " bytes of shared memory", errno);
    data_ = static_cast<char*>(data);
}

void SharedMemory::require_inside(std::size_t offset, std::size_t nbytes) const {
    if (offset <= nbytes_ && nbytes <= nbytes_ - offset) return;
    throw std::invalid_argument(std::to_string(nbytes) + " bytes from " + std::to_string(offset) +
                                " on reach beyond the end of " + std::to_string(nbytes_) + " bytes of shared memory");
}

void SharedMemory::reserve(std::size_t offset, std::size_t nbytes) {
    require_inside(offset, nbytes);
    if (file_ < 0) throw std::runtime_error("cannot reserve shared memory that is sealed");
    if (nbytes > 0 && fallocate(file_, 0, static_cast<off_t>(offset), static_cast<off_t>(nbytes)) != 0)
        fail("reserve " + std::to_string(nbytes) + " bytes of shared memory", errno);
    std::memset(data_ + offset, 0, nbytes);
}

void SharedMemory::seal() {
    if (file_ < 0) return;
    close(file_);
    file_ = -1;
}

// -- the group --------------------------------------------------------------------------------------------------------

std::size_t ShmGroup::nbytes_for(int size) {
    if (size < 1 || size > kMaxRanks)
        throw std::invalid_argument(std::to_string(size) + " ranks on one machine: from 1 to 1,024 can share memory");
    return seats_nbytes_for(size) + (static_cast<std::size_t>(size) + 1) * kArea;  // an outbox and the inboxes of all
}

ShmGroup::ShmGroup(std::shared_ptr<SharedMemory> memory, int rank, int size, bool takes_turns)
    : memory_(std::move(memory)), seats_(nullptr), rank_(rank), size_(size), takes_turns_(takes_turns) {
    static_assert(sizeof(Cell) == 4096, "a cell is a page");
    if (rank < 0 || rank >= size)
        throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(size));
    if (!memory_ || memory_->nbytes() < nbytes_for(size))
        throw std::invalid_argument(std::to_string(size) + " ranks need " + std::to_string(nbytes_for(size)) +
                                    " bytes of shared memory");
    seats_ = reinterpret_cast<Seat*>(memory_->data());
    if (rank == 0 && size > 1 && !takes_turns) choice_ = &Choice::of(size);
}

void ShmGroup::add(std::shared_ptr<SharedMemory> memory, std::size_t part) {
    if (!memory || memory->nbytes() / size_ < part)
        throw std::invalid_argument(std::to_string(size_) + " parts of " + std::to_string(part) +
                                    " bytes need shared memory of that size");
    segments_.push_back({std::move(memory), part});
}

// Elements of a chunk, in whole cache lines; parts: ranks that share it.
std::size_t ShmGroup::chunk_length(DType dtype, int parts) const {
    const std::size_t nbytes = kPaths[path_].chunk / parts;
    return (nbytes - nbytes % kLine) / item_size(dtype);
}

// Chunks of x, at least one: an empty tensor has a barrier, too.
int ShmGroup::chunks_in(const Buffer& x, int parts) const {
    const std::size_t each = chunk_length(x.dtype, parts);
    return static_cast<int>(std::max<std::size_t>(1, (x.count + each - 1) / each));
}

Buffer ShmGroup::chunk_of(const Buffer& x, int i, int parts) const {
    const std::size_t each = chunk_length(x.dtype, parts);
    return part_between(x, i * each, (i + 1) * each);
}

void ShmGroup::put(char* to, const Buffer& from) const { copy(kPaths[path_].way, to, from); }

// Chunk k is staged behind the chunk before it, which others may still be reading, around a ring as long as the path
// says, or three such chunks.
void ShmGroup::place(int k, std::size_t nbytes) {
    nbytes = whole_lines(nbytes);
    const std::size_t parts = broadcasts_ ? kBroadcastParts : 1;
    const std::size_t ring = std::max(kPaths[path_].ring / parts, 3 * nbytes);
    std::size_t begin = latest_.end + nbytes > ring ? 0 : latest_.end;
    if (begin < latest_.end && latest_.begin < begin + nbytes)  // the one before went around a longer ring
        begin = latest_.end + nbytes > kRing / parts ? 0 : latest_.end;
    latest_ = {begin, begin + nbytes};
    places_[k & 3] = begin + (broadcasts_ ? kRing : 0);
}

char* ShmGroup::inbox(int rank, int k) const {
    return memory_->data() + seats_nbytes_for(size_) + rank * kArea + places_[k & 3];
}

// -- barriers and proposals ------------------------------------------------------------------------------------------

ShmGroup::Proposal ShmGroup::propose(const Call& call, const Buffer& x) const {
    for (std::size_t i = 0; i < segments_.size(); i++) {
        const Segment& segment = segments_[i];
        const auto begin = reinterpret_cast<std::uintptr_t>(segment.memory->data() + rank_ * segment.part);
        const auto at = reinterpret_cast<std::uintptr_t>(x.data);
        if (at >= begin && at - begin <= segment.part && x.nbytes() <= segment.part - (at - begin))
            return {call, static_cast<std::int64_t>(at - begin), static_cast<std::int32_t>(i), path_, false};
    }
    return {call, 0, -1, path_, false};
}

// Before the first step, which comes before the first barrier: it may write to this rank's cell and inbox only.
void ShmGroup::start(const Call& call, const Buffer& x) {
    if (!steps_.are_done())
        throw std::runtime_error("an earlier collective did not complete: the ranks are out of step");
    nbytes_ = x.nbytes();
    broadcasts_ = false;
    latest_ = staged_[0];
    calls_.clear();
    compared_ = false;
    first_barrier_ = barriers_ + 1;
    Proposal& mine = cell_of(rank_).proposal = propose(call, x);
    if (nbytes_ >= kMatters && size_ > 1 && mine.segment < 0) take_pages();
    if (rank_ == 0 && nbytes_ >= kMatters && takes_turns_) mine.path = kFewestBarriers;
    if (choice_ && nbytes_ >= kMatters) mine.path = choice_->path();
}

// Those of this rank's rings, at once: else each would be taken when it is first written, for some microseconds. Where
// the system cannot (before Linux 5.14), that is what happens.
void ShmGroup::take_pages() {
    const std::size_t ring = kPaths[path_].ring, page = 4096, part = ring / size_ / page * page;
    if (pages_ >= ring) return;
    pages_ = ring;
#if defined(MADV_POPULATE_WRITE)
    char* const rings = memory_->data() + seats_nbytes_for(size_);
    madvise(rings + rank_ * kArea, ring, MADV_POPULATE_WRITE);
    madvise(rings + size_ * kArea + rank_ * part, part, MADV_POPULATE_WRITE);
#endif
}

void ShmGroup::reach_barrier() {
    barriers_++;
    present_ = 0;
    // Release: a rank that sees the number sees everything that this rank has written before.
    seats_[rank_].cells[barriers_ & 1].barrier.store(barriers_, std::memory_order_release);
}

bool ShmGroup::is_complete() {
    for (; present_ < size_; present_++) {
        if (seats_[present_].cells[barriers_ & 1].barrier.load(std::memory_order_acquire) < barriers_) return false;
    }
    return true;
}

std::vector<int> ShmGroup::missing() const {
    std::vector<int> ranks;
    for (int r = 0; r < size_; r++) {
        if (seats_[r].cells[barriers_ & 1].barrier.load(std::memory_order_acquire) < barriers_) ranks.push_back(r);
    }
    return ranks;
}

void ShmGroup::compare_calls() {
    compared_ = true;
    const Call& mine = cell_of(rank_).proposal.call;
    bool same = true;
    for (int r = 0; r < size_; r++) same = same && cell_of(r).proposal.call == mine;
    told_ = cell_of(0).proposal.path;
    if (same) return;
    steps_ = {};  // this collective is over, on every rank alike
    for (int r = 0; r < size_; r++) calls_.push_back(cell_of(r).proposal.call);
    require_consensus(calls_);
}

bool ShmGroup::advance() {
    if (steps_.are_done()) return true;
    // One step for each call, so that a rank that waits looks at its clock between the steps of a long collective.
    if (!is_complete()) return false;
    if (!compared_) compare_calls();
    steps_.go_on();
    progress_++;
    if (steps_.are_done() && has_staged_) {
        has_staged_ = false;
        if (told_ == kMeasure)
            steps_ = measure();
        else if (told_ == kProbe)
            steps_ = probe(1);
        else if (told_ != path_)
            steps_ = take(told_);
    }
    return steps_.are_done();
}

void ShmGroup::end_staging() {
    staged_[broadcasts_] = latest_;
    has_staged_ = true;
}

// Rank 0 reads what each of the others has just written.
ShmGroup::Steps ShmGroup::probe(std::size_t times) {
    for (std::size_t i = 0; i < times; i++) {
        if (rank_ != 0) std::memset(seats_[rank_].cells[(barriers_ + 1) & 1].note, 1, sizeof Cell::note);
        co_await Barrier(*this);
        if (choice_) time_notes();
    }
}

void ShmGroup::time_notes() const {
    char here[sizeof Cell::note];
    std::memset(here, 0, sizeof here);          // so that it is in this core's cache, as in each probe
    asm volatile("" : : "r"(here) : "memory");  // else nothing would be written, and below nothing read
    std::int64_t slowest = 0;
    const std::int64_t began = now_ns();
    for (int r = 1; r < size_; r++) {
        const std::int64_t before = now_ns();
        std::memcpy(here, seats_[r].cells[barriers_ & 1].note, sizeof here);
        asm volatile("" : : "r"(here) : "memory");
        slowest = std::max(slowest, now_ns() - before);
    }
    choice_->probed(slowest, now_ns() - began);
}

// From now on, in new places: nobody may still read what lies in the old ones.
ShmGroup::Steps ShmGroup::take(std::uint8_t path) {
    co_await Barrier(*this);
    follow(path);
}

void ShmGroup::follow(std::uint8_t path) {
    path_ = path;
    staged_[0] = staged_[1] = {};
}

// Sums of kTrial bytes, each written before and read after it, as in a step: what a store past the caches saves, a load
// may pay. Rank 0 says at a barrier before each which path it takes, and at the last which one is chosen. Probes come
// before, between two paths, and after.
ShmGroup::Steps ShmGroup::measure() {
    std::vector<float> memory(2 * kTrial / sizeof(float));
    const Buffer all{reinterpret_cast<char*>(memory.data()), memory.size(), DType::float32};
    const Buffer x = all.part(0, kTrial / sizeof(float));
    char* const other = all.data + kTrial;
    for (Steps steps = probe(kProbes); !steps.are_done(); steps.go_on()) co_await std::suspend_always();
    if (choice_) choice_->begin();
    for (;;) {
        if (choice_) {
            const std::size_t next = choice_->next();
            Proposal& proposal = seats_[0].cells[(barriers_ + 1) & 1].proposal;
            proposal.tries = next < kPaths.size();
            proposal.path = proposal.tries ? static_cast<std::uint8_t>(next) : choice_->best();
        }
        co_await Barrier(*this);
        const Proposal& proposal = seats_[0].cells[barriers_ & 1].proposal;
        const bool tries = proposal.tries;
        if (proposal.path != path_) {
            follow(proposal.path);
            for (Steps steps = probe(kProbes); !steps.are_done(); steps.go_on()) co_await std::suspend_always();
            if (choice_) choice_->compare();
        }
        if (!tries) break;
        broadcasts_ = false;
        latest_ = staged_[0];
        const std::int64_t began = now_ns();
        std::memcpy(x.data, other, kTrial);
        stage_for_sum(x, 0);
        co_await Barrier(*this);
        add_staged(x, 0);
        co_await Barrier(*this);
        collect_sums(x, 0);
        staged_[0] = latest_;
        std::memcpy(other, x.data, kTrial);
        if (choice_) choice_->took(now_ns() - began);
    }
    for (Steps steps = probe(kProbes); !steps.are_done(); steps.go_on()) co_await std::suspend_always();
    if (choice_) {
        seats_[0].cells[(barriers_ + 1) & 1].proposal.path = choice_->end();
    }
    co_await Barrier(*this);
    follow(seats_[0].cells[barriers_ & 1].proposal.path);
}

void ShmGroup::start_barrier(const Call& call) {
    start(call, Buffer{nullptr, static_cast<std::size_t>(call.count), call.dtype});
    steps_ = rest();
}

ShmGroup::Steps ShmGroup::rest() { co_await Barrier(*this); }

// -- all_reduce: small, in shared memory, or anywhere ----------------------------------------------------------------

void ShmGroup::start_all_reduce(const Buffer& x) {
    require_addable(x, "all_reduce");
    start(Call::of("all_reduce", x.count, x.dtype), x);
    steps_ = x.nbytes() <= sizeof(Cell::note) ? add_notes(x) : all_reduce(x);
}

// sum = the elements at source(0) + source(1) + ..., of all ranks; `also`, if not null, is where it goes as well.
template <typename Source>
void ShmGroup::add_all(Source source, const Buffer& sum, char* also) const {
    char* sources[kMaxRanks];
    for (int r = 0; r < size_; r++) sources[r] = source(r);
    char* const to[] = {sum.data, also};
    loops().sum(sum.dtype, {sources, static_cast<std::size_t>(size_)}, {to, also ? 2u : 1u}, sum.count);
}

// Small: everybody adds everything. One barrier.
ShmGroup::Steps ShmGroup::add_notes(Buffer x) {
    copy(Way::stores, cell_of(rank_).note, x);
    co_await Barrier(*this);
    add_all([this](int r) { return cell_of(r).note; }, x);
}

// Large: where the tensors are is known after the first barrier, and decides how to go on.
//
// In shared memory, each rank loads one slice from all tensors, adds in registers, and stores to all tensors.
//
// Anywhere, chunks go through the inboxes. Rank s adds slice s of a chunk, and three chunks are under way at once:
//
//     step k    copy chunk k to my inbox | add my slice of chunk k-1 to the outbox | copy chunk k-2 from the outbox
ShmGroup::Steps ShmGroup::all_reduce(Buffer x) {
    if (cell_of(rank_).proposal.segment < 0) stage_for_sum(chunk_of(x, 0), 0);
    co_await Barrier(*this);
    int shared = 0;
    for (int r = 0; r < size_; r++) shared += cell_of(r).proposal.segment >= 0;
    if (shared == size_) {
        const std::size_t at_once = kReduceAtOnce / item_size(x.dtype);
        const Buffer slice = slice_of(x, size_, rank_);
        for (std::size_t at = 0; at < slice.count; at += at_once) {
            if (at > 0) co_await std::suspend_always();
            add_shared(x, part_between(slice, at, at + at_once));
        }
        co_await Barrier(*this);
        co_return;
    }
    if (shared > 0) {  // ranks whose tensors are shared have not staged anything yet: all begin again
        latest_ = staged_[0];
        stage_for_sum(chunk_of(x, 0), 0);
        co_await Barrier(*this);
    }
    const int chunks = chunks_in(x);
    for (int k = 1; k < chunks + 2; k++) {
        if (k > 1) co_await Barrier(*this);
        if (k < chunks) stage_for_sum(chunk_of(x, k), k);
        if (k <= chunks) add_staged(chunk_of(x, k - 1), k - 1);
        if (k >= 2) collect_sums(chunk_of(x, k - 2), k - 2);
    }
    end_staging();
}

void ShmGroup::add_shared(const Buffer& x, const Buffer& part) const {
    char* tensors[kMaxRanks];
    for (int r = 0; r < size_; r++) {
        const Proposal& proposal = cell_of(r).proposal;
        const Segment& segment = segments_[proposal.segment];
        tensors[r] = segment.memory->data() + r * segment.part + proposal.offset + (part.data - x.data);
    }
    const Sources all(tensors, size_);
    loops().sum(x.dtype, all, all, part.count);
}

void ShmGroup::stage_for_sum(const Buffer& chunk, int k) {
    place(k, chunk.nbytes());
    for (int s = 0; s < size_; s++) {
        const Buffer slice = slice_of(chunk, size_, s);
        if (s != rank_) put(inbox(rank_, k) + (slice.data - chunk.data), slice);  // its own is read where it is
    }
}

void ShmGroup::add_staged(const Buffer& chunk, int k) const {
    const Buffer here = slice_of(chunk, size_, rank_);
    const std::ptrdiff_t at = here.data - chunk.data;
    const bool at_once = kPaths[path_].way == Way::stores;  // an ordinary store is all that the loops know
    add_all([=, this](int r) { return r == rank_ ? here.data : inbox(r, k) + at; }, here,
            at_once ? outbox(k) + at : nullptr);
    if (!at_once) put(outbox(k) + at, here);
}

void ShmGroup::collect_sums(const Buffer& chunk, int k) const {
    for (int s = 0; s < size_; s++) {
        const Buffer slice = slice_of(chunk, size_, s);
        if (s != rank_) copy(slice, outbox(k) + (slice.data - chunk.data));
    }
}

Parts all_reduce_in_memory(ShmGroup& group, const Buffer& x) {
    require_addable(x, "all_reduce");
    const auto begin = [&group, x] {
        group.start_all_reduce(x);
        return std::shared_ptr<Operation>(std::shared_ptr<void>(), &group);  // which somebody else owns
    };
    return {{begin}, false};
}

// -- the other collectives -------------------------------------------------------------------------------------------

// Chunk k is staged in step k, and used in step k+1. Tensors in shared memory are staged, too: others could read them
// where they are, but their owner's next stores would wait for those, and a step in which 1 MiB is produced, broadcast
// and consumed took 3.7 times as long.
//
// row: what is cut into chunks, of which `parts` share the size of a chunk; each rank stages `pieces` of them.
template <typename Stage, typename Use>
ShmGroup::Steps ShmGroup::in_chunks(Buffer row, int parts, int pieces, Stage stage, Use use) {
    const int chunks = chunks_in(row, parts);
    for (int k = 0; k <= chunks; k++) {
        if (k > 0) co_await Barrier(*this);
        if (k < chunks) {
            place(k, pieces * whole_lines(chunk_of(row, k, parts).nbytes()));
            stage(k);
        }
        if (k > 0) use(k - 1);
    }
    end_staging();
}

void ShmGroup::start_broadcast(const Buffer& x, int root) {
    require_root(root, size_);
    start(Call::of("broadcast", x.count, x.dtype, root), x);
    broadcasts_ = true;
    latest_ = staged_[1];
    // A short tensor, too, is read while the rest is copied in, if that does not cost turns on a core.
    int parts = kBroadcastParts;
    while (path_ != kFewestBarriers && parts < 4 * kBroadcastParts && chunks_in(x, parts) < 4) parts *= 2;
    const auto stage = [=, this](int k) {
        if (rank_ == root) put(inbox(root, k), chunk_of(x, k, parts));
    };
    const auto use = [=, this](int k) {
        if (rank_ != root) copy(chunk_of(x, k, parts), inbox(root, k));
    };
    steps_ = in_chunks(x, parts, 1, stage, use);
}

void ShmGroup::start_all_gather(const Buffer& x, const Buffer& out) {
    gather(Call::of("all_gather", x.count, x.dtype), x, out, true);
}

void ShmGroup::start_gather(const Buffer& x, const Buffer& out, int root) {
    require_root(root, size_);
    gather(Call::of("gather", x.count, x.dtype, root), x, out, rank_ == root);
}

void ShmGroup::gather(const Call& call, const Buffer& x, const Buffer& out, bool receives) {
    if (receives) require_rows(out, x, size_, rank_, false, call.name);
    start(call, x);
    const auto stage = [=, this](int k) { put(inbox(rank_, k), chunk_of(x, k)); };
    const auto use = [=, this](int k) {
        for (int r = 0; receives && r < size_; r++)
            copy(chunk_of(row_of(out, size_, r), k), r == rank_ ? chunk_of(x, k).data : inbox(r, k));
    };
    steps_ = in_chunks(x, 1, 1, stage, use);
}

void ShmGroup::start_reduce(const Buffer& x, const Buffer& out, int root) {
    require_root(root, size_);
    require_addable(x, "reduce");
    if (rank_ == root) require_rows(out, x, 1, 0, true, "reduce");
    start(Call::of("reduce", x.count, x.dtype, root), x);
    const auto stage = [=, this](int k) {
        if (rank_ != root) put(inbox(rank_, k), chunk_of(x, k));
    };
    const auto use = [=, this](int k) {
        if (rank_ != root) return;
        add_all([=, this](int r) { return r == rank_ ? chunk_of(x, k).data : inbox(r, k); }, chunk_of(out, k));
    };
    steps_ = in_chunks(x, 1, 1, stage, use);
}

// x has a row for each rank; the rows of a chunk stand in the inbox one after the other. Its own row stays where it is.
void ShmGroup::stage_rows(const Buffer& x, int k) const {
    for (int r = 0; r < size_; r++) {
        const Buffer row = chunk_of(row_of(x, size_, r), k, size_);
        if (r != rank_) put(inbox(rank_, k) + r * whole_lines(row.nbytes()), row);
    }
}

// Chunk k of what rank `src` has for this rank; mine: this rank's own row, which is as long.
char* ShmGroup::row_from(int src, int k, const Buffer& mine) const {
    const Buffer row = chunk_of(mine, k, size_);
    return src == rank_ ? row.data : inbox(src, k) + rank_ * whole_lines(row.nbytes());
}

void ShmGroup::start_reduce_scatter(const Buffer& x, const Buffer& out) {
    require_rows(x, out, size_, rank_, true, "reduce_scatter");
    start(Call::of("reduce_scatter", x.count, x.dtype), x);
    const Buffer mine = row_of(x, size_, rank_);
    const auto use = [=, this](int k) {
        add_all([=, this](int r) { return row_from(r, k, mine); }, chunk_of(out, k, size_));
    };
    steps_ = in_chunks(mine, size_, size_, [=, this](int k) { stage_rows(x, k); }, use);
}

void ShmGroup::start_all_to_all(const Buffer& x, const Buffer& out) {
    require_rows(x, out, 1, 0, false, "all_to_all");
    require_rows(out, row_of(out, size_, 0), size_, 0, false, "all_to_all");
    start(Call::of("all_to_all", x.count, x.dtype), x);
    const Buffer mine = row_of(x, size_, rank_);
    const auto use = [=, this](int k) {
        for (int r = 0; r < size_; r++) copy(chunk_of(row_of(out, size_, r), k, size_), row_from(r, k, mine));
    };
    steps_ = in_chunks(mine, size_, size_, [=, this](int k) { stage_rows(x, k); }, use);
}

void ShmGroup::start_scatter(const Buffer& x, const Buffer& out, int root) {
    require_root(root, size_);
    if (rank_ == root) require_rows(x, out, size_, rank_, false, "scatter");
    // All ranks compare the row: the root alone has an x.
    start(Call::of("scatter", out.count, out.dtype, root), rank_ == root ? x : out);
    const auto stage = [=, this](int k) {
        if (rank_ == root) stage_rows(x, k);
    };
    const Buffer mine = rank_ == root ? row_of(x, size_, rank_) : out;
    const auto use = [=, this](int k) { copy(chunk_of(out, k, size_), row_from(root, k, mine)); };
    steps_ = in_chunks(mine, size_, size_, stage, use);
}

}  // namespace hpdl
