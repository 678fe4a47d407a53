#include "mpi.h"

#include <dlfcn.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <stdexcept>

namespace hpdl {

namespace {

template <typename Function>
void find(void* library, Function*& function, const char* name) {
    function = reinterpret_cast<Function*>(dlsym(library, name));
    if (!function) throw std::runtime_error(std::string("the loaded MPI library has no ") + name);
}

constexpr std::size_t kSmall = 2046;                  // bytes, below every MPI's limit for sending without asking
constexpr std::size_t kPiece = std::size_t{1} << 30;  // bytes, because MPI counts them with an int
constexpr int kLarge = kSmall + 1;                    // in a tag, in place of a count: the message is announced

// dtype in the low 4 bits; above them, in 11 bits, the count of a small message, or kLarge: the count of a large one is
// in its announcement.
int tag_of(const Buffer& buffer) {
    const int count = buffer.nbytes() > kSmall ? kLarge : static_cast<int>(buffer.count);
    return static_cast<int>(buffer.dtype) | count << 4;
}
static_assert(((kLarge << 4) | 15) <= kLargestTag);

}  // namespace

Mpi::Mpi(const std::string& loaded_by, int rank, const Constants& description) : constants(description), rank_(rank) {
    if (constants.status_nbytes > sizeof(Status)) throw std::runtime_error("MPI_Status is larger than expected");
    if (constants.tag_offset > sizeof(Status) - sizeof(int))
        throw std::runtime_error("the tag lies beyond the end of MPI_Status");
    // dlsym on this handle also searches the libraries that it is linked with: exactly the MPI that mpi4py calls. The
    // handle is never closed, as mpi4py never unloads it.
    void* library = dlopen(loaded_by.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (!library) throw std::runtime_error(loaded_by + " is not loaded");
    find(library, Isend, "MPI_Isend");
    find(library, Irecv, "MPI_Irecv");
    find(library, Iprobe, "MPI_Iprobe");
    find(library, Test, "MPI_Test");
    find(library, Cancel, "MPI_Cancel");
    find(library, Iallgather, "MPI_Iallgather");
    find(library, Comm_idup, "MPI_Comm_idup");
    find(library, Allreduce, "MPI_Allreduce");
    find(library, Reduce_scatter_block, "MPI_Reduce_scatter_block");
    find(library, Reduce, "MPI_Reduce");
    find(library, Bcast, "MPI_Bcast");
    find(library, Allgather, "MPI_Allgather");
    find(library, Alltoall, "MPI_Alltoall");
    find(library, Gather, "MPI_Gather");
    find(library, Scatter, "MPI_Scatter");
    find(library, Error_string, "MPI_Error_string");
    find(library, Error_class, "MPI_Error_class");
    find(library, Finalized, "MPI_Finalized");
}

void Mpi::check(int code, const char* call) const {
    if (code == 0) return;  // MPI_SUCCESS is 0 in every MPI
    char text[4096] = "";
    int length = 0;
    Error_string(code, text, &length);
    throw MpiError(std::string(call) + " failed on rank " + std::to_string(rank_) + ": " + text);
}

bool Mpi::is_truncation(int code) const {
    int kind = 0;
    return code != 0 && Error_class(code, &kind) == 0 && kind == constants.error_truncate;
}

bool Mpi::is_over() const {
    int over = 0;
    return Finalized(&over) != 0 || over;
}

void Mpi::require_tag(int tag) const {
    if ((tag < 0 && tag != constants.any_tag) || tag > kLargestTag)
        throw std::logic_error("the tag " + std::to_string(tag) + " is not from 0 to " + std::to_string(kLargestTag));
}

Handle Mpi::send(const void* data, std::size_t nbytes, int dst, int tag, Handle comm) const {
    require_tag(tag);
    Handle request = constants.request_null;
    check(Isend(data, static_cast<int>(nbytes), constants.byte, dst, tag, comm, &request), "MPI_Isend");
    return request;
}

Handle Mpi::receive(void* data, std::size_t nbytes, int src, int tag, Handle comm) const {
    require_tag(tag);
    Handle request = constants.request_null;
    check(Irecv(data, static_cast<int>(nbytes), constants.byte, src, tag, comm, &request), "MPI_Irecv");
    return request;
}

bool Mpi::is_done(Handle& request, const char* call) const {
    Status status{};
    int done = 0;
    check(Test(&request, &done, &status), call);
    return done;
}

int Mpi::tag(const Status& status) const {
    int tag;
    std::memcpy(&tag, status.bytes + constants.tag_offset, sizeof tag);
    return tag;
}

// -- messages ---------------------------------------------------------------------------------------------------------

Message::Message(const Group& group, const Buffer& buffer, int peer, bool receives)
    : group_(group), buffer_(buffer), peer_(peer), receives_(receives), large_(buffer.nbytes() > kSmall) {
    if (peer < 0 || peer >= group.size)  // MPI would take some numbers for "any rank" or for "nobody"
        throw std::invalid_argument("no rank " + std::to_string(peer) + " among " + std::to_string(group.size));
    if (large_)
        announcement_.reset(new char[kSmall]);  // a small message may come instead
    else if (receives && buffer.nbytes() < sizeof(Announcement))
        announcement_.reset(new char[sizeof(Announcement)]);  // as may the announcement of a large one
}

Message Message::send(Group& group, const Buffer& buffer, int dst) {
    Message message(group, buffer, dst, false);
    if (!message.large_) {
        message.post(buffer.data, buffer.nbytes(), group.comm, tag_of(buffer));
    } else {
        const Announcement announcement{buffer.count, static_cast<int>(group.announced++ % kReservedTag)};
        std::memcpy(message.announcement_.get(), &announcement, sizeof announcement);
        message.post(message.announcement_.get(), sizeof announcement, group.comm, tag_of(buffer));
        message.post_elements();
    }
    return message;
}

Message Message::receive(const Group& group, const Buffer& buffer, int src) {
    Message message(group, buffer, src, true);
    // Any tag, so that a message of another dtype or count arrives and is named, instead of waiting for ever.
    const int any = group.mpi->constants.any_tag;
    if (!message.announcement_) {
        message.post(buffer.data, buffer.nbytes(), group.comm, any);
    } else {
        const std::size_t room = message.large_ ? kSmall : sizeof(Announcement);
        message.post(message.announcement_.get(), room, group.comm, any);
    }
    return message;
}

void Message::post_elements() {
    Announcement announcement;
    std::memcpy(&announcement, announcement_.get(), sizeof announcement);
    for (std::size_t at = 0; at < buffer_.nbytes(); at += kPiece) {
        post(buffer_.data + at, std::min(kPiece, buffer_.nbytes() - at), group_.inner, announcement.tag);
    }
}

void Message::post(void* data, std::size_t nbytes, Handle comm, int tag) {
    parts_.push_back(receives_ ? group_.mpi->receive(data, nbytes, peer_, tag, comm)
                               : group_.mpi->send(data, nbytes, peer_, tag, comm));
}

bool Message::advance() {
    if (failure_) std::rethrow_exception(failure_);
    try {
        return test_parts();
    } catch (...) {
        failure_ = std::current_exception();
        throw;
    }
}

bool Message::test_parts() {
    for (; done_ < parts_.size(); done_++, progress_++) {
        Status status{};
        int finished = 0;
        const int code = group_.mpi->Test(&parts_[done_], &finished, &status);
        if (code == 0 && !finished) return false;
        if (receives_ && done_ == 0) {
            require_match(code, status);
            if (large_)
                post_elements();
            else if (announcement_)
                std::copy_n(announcement_.get(), buffer_.nbytes(), buffer_.data);
        } else {
            group_.mpi->check(code, receives_ ? "MPI_Irecv" : "MPI_Isend");
        }
    }
    return true;
}

void Message::require_match(int code, const Status& status) {
    const bool truncated = group_.mpi->is_truncation(code);
    if (!truncated) group_.mpi->check(code, "MPI_Irecv");
    const int tag = group_.mpi->tag(status);
    const bool large = tag >> 4 == kLarge;  // then what has come is its announcement, also if a small one was expected
    Buffer sent{nullptr, static_cast<std::size_t>(tag >> 4), static_cast<DType>(tag & 15)};
    const char* came = announcement_ ? announcement_.get() : buffer_.data;
    if (large && !truncated) std::memcpy(&sent.count, came, sizeof sent.count);
    if (large == large_ && !truncated && sent.count == buffer_.count && sent.dtype == buffer_.dtype) return;
    done_ = parts_.size();
    sent_ = sent;
    throw std::invalid_argument("rank " + std::to_string(group_.rank) + " expects " +
                                describe(buffer_.count, buffer_.dtype) + " from rank " + std::to_string(peer_) +
                                ", which sent " + describe(sent.count, sent.dtype));
}

bool Message::cancel() {
    for (; done_ < parts_.size(); done_++) {
        Status status{};
        int finished = 0;
        // Only receives are cancelled: MPI has deprecated the cancelling of sends, which need the peer's help.
        if (receives_ && cancelled_ <= done_) {
            group_.mpi->Cancel(&parts_[done_]);
            cancelled_ = done_ + 1;
        }
        if (group_.mpi->Test(&parts_[done_], &finished, &status) == 0 && !finished) return false;
    }
    return true;
}

// -- MPI's own collectives -------------------------------------------------------------------------------------------

namespace mpi {

namespace {

// Elements as MPI counts them.
struct Elements {
    Handle dtype;
    int count;
};

Elements of(Handle dtype, std::size_t count) {
    if (count > INT_MAX) throw std::invalid_argument(std::to_string(count) + " elements: MPI counts with an int");
    return {dtype, static_cast<int>(count)};
}

// What is only moved goes as bytes if MPI does not know its dtype.
Elements moved(const Group& group, const Buffer& x) {
    const Handle dtype = group.mpi->constants.dtypes[static_cast<int>(x.dtype)];
    return dtype ? of(dtype, x.count) : of(group.mpi->constants.byte, x.nbytes());
}

Elements added(const Group& group, const Buffer& x, const char* call) {
    require_addable(x, call);
    const Handle dtype = group.mpi->constants.dtypes[static_cast<int>(x.dtype)];
    if (!dtype) throw std::invalid_argument(std::string(call) + " does not know " + name_of(x.dtype));
    return of(dtype, x.count);
}

bool is_root(const Group& group, int root) {
    require_root(root, group.size);
    return root == group.rank;
}

const void* in_place(const Group& group, const Buffer& x, const Buffer& out) {
    return x.data == out.data ? reinterpret_cast<const void*>(group.mpi->constants.in_place) : x.data;
}

}  // namespace

void all_reduce(const Group& group, const Buffer& x, const Buffer& out) {
    const Mpi& mpi = *group.mpi;
    const Elements e = added(group, x, "MPI_Allreduce");
    require_rows(x, out, 1, 0, true, "all_reduce");
    mpi.check(mpi.Allreduce(in_place(group, x, out), out.data, e.count, e.dtype, mpi.constants.sum, group.comm),
              "MPI_Allreduce");
}

void reduce_scatter(const Group& group, const Buffer& x, const Buffer& out) {
    const Mpi& mpi = *group.mpi;
    const Elements e = added(group, out, "MPI_Reduce_scatter_block");
    require_rows(x, out, group.size, -1, true, "reduce_scatter");
    mpi.check(mpi.Reduce_scatter_block(x.data, out.data, e.count, e.dtype, mpi.constants.sum, group.comm),
              "MPI_Reduce_scatter_block");
}

void all_gather(const Group& group, const Buffer& x, const Buffer& out) {
    const Mpi& mpi = *group.mpi;
    const Elements e = moved(group, x);
    require_rows(out, x, group.size, -1, false, "all_gather");
    mpi.check(mpi.Allgather(x.data, e.count, e.dtype, out.data, e.count, e.dtype, group.comm), "MPI_Allgather");
}

void all_to_all(const Group& group, const Buffer& x, const Buffer& out) {
    const Mpi& mpi = *group.mpi;
    require_rows(x, out, 1, 0, false, "all_to_all");
    const Buffer row{x.data, x.count / group.size, x.dtype};
    require_rows(x, row, group.size, 0, false, "all_to_all");
    const Elements e = moved(group, row);
    mpi.check(mpi.Alltoall(in_place(group, x, out), e.count, e.dtype, out.data, e.count, e.dtype, group.comm),
              "MPI_Alltoall");
}

void broadcast(const Group& group, const Buffer& x, int root) {
    const Mpi& mpi = *group.mpi;
    is_root(group, root);
    const Elements e = moved(group, x);
    mpi.check(mpi.Bcast(x.data, e.count, e.dtype, root, group.comm), "MPI_Bcast");
}

void reduce(const Group& group, const Buffer& x, const Buffer& out, int root) {
    const Mpi& mpi = *group.mpi;
    const Elements e = added(group, x, "MPI_Reduce");
    const bool receives = is_root(group, root);
    require_addable(x, "reduce");
    if (receives) require_rows(x, out, 1, 0, true, "reduce");
    const void* from = receives ? in_place(group, x, out) : x.data;
    mpi.check(mpi.Reduce(from, out.data, e.count, e.dtype, mpi.constants.sum, root, group.comm), "MPI_Reduce");
}

void gather(const Group& group, const Buffer& x, const Buffer& out, int root) {
    const Mpi& mpi = *group.mpi;
    const Elements e = moved(group, x);
    if (is_root(group, root)) require_rows(out, x, group.size, -1, false, "gather");
    mpi.check(mpi.Gather(x.data, e.count, e.dtype, out.data, e.count, e.dtype, root, group.comm), "MPI_Gather");
}

void scatter(const Group& group, const Buffer& x, const Buffer& out, int root) {
    const Mpi& mpi = *group.mpi;
    const Elements e = moved(group, out);
    if (is_root(group, root)) require_rows(x, out, group.size, -1, false, "scatter");
    mpi.check(mpi.Scatter(x.data, e.count, e.dtype, out.data, e.count, e.dtype, root, group.comm), "MPI_Scatter");
}

}  // namespace mpi

}  // namespace hpdl
