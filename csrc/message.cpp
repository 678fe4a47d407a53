#include "message.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace hpdl {

namespace {

constexpr std::size_t kSmall = 2047;                  // bytes, below every MPI's limit for sending without asking
constexpr std::size_t kPiece = std::size_t{1} << 30;  // bytes, because MPI counts them with an int
constexpr int kLarge = 1 << 14;                       // in a tag: the message is announced

// dtype in the low 3 bits; above them the count of a small message, which fits into 11 bits; kLarge. The count of a
// large one is in its announcement. So every tag is at most kLargestTag.
int tag_of(const Buffer& buffer) {
    if (buffer.nbytes() > kSmall) return static_cast<int>(buffer.dtype) | kLarge;
    return static_cast<int>(buffer.dtype) | static_cast<int>(buffer.count) << 3;
}

}  // namespace

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
    const bool large = tag & kLarge;  // then what has come is its announcement, also if a small one was expected
    Buffer sent{nullptr, static_cast<std::size_t>((tag & ~kLarge) >> 3), static_cast<DType>(tag & 7)};
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

}  // namespace hpdl
