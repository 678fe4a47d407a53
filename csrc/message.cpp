#include "message.h"

#include <algorithm>

namespace hpdl {

namespace {

constexpr std::size_t kPiece = std::size_t{1} << 30;  // bytes
constexpr std::size_t kTagCounts = std::size_t{1} << 25;

std::size_t piece_count(const Buffer& buffer) { return std::max<std::size_t>(1, (buffer.nbytes() + kPiece - 1) / kPiece); }

std::size_t piece_nbytes(const Buffer& buffer, std::size_t i) { return std::min(kPiece, buffer.nbytes() - i * kPiece); }

}  // namespace

int tag_of(std::size_t count, DType dtype) {
    return static_cast<int>(dtype) | static_cast<int>(count % kTagCounts) << 3;
}

Message Message::send(const Group& group, const Buffer& buffer, int to) {
    Message message(group, buffer, to);
    const int tag = tag_of(buffer.count, buffer.dtype);
    for (std::size_t i = 0; i < piece_count(buffer); i++) {
        message.pieces_.push_back(group.mpi->constants.request_null);
        group.mpi->check(group.mpi->Isend(buffer.data + i * kPiece, static_cast<int>(piece_nbytes(buffer, i)),
                                          group.mpi->constants.byte, to, tag, group.comm, &message.pieces_.back()),
                         "MPI_Isend");
    }
    return message;
}

Message Message::receive(const Group& group, const Buffer& buffer, int source) {
    Message message(group, buffer, source);
    message.receives_ = true;
    for (std::size_t i = 0; i < piece_count(buffer); i++) {
        message.pieces_.push_back(group.mpi->constants.request_null);
        // Any tag, so that a message of another dtype or count arrives here and is named, instead of waiting for ever.
        group.mpi->check(group.mpi->Irecv(buffer.data + i * kPiece, static_cast<int>(piece_nbytes(buffer, i)),
                                          group.mpi->constants.byte, source, group.mpi->constants.any_tag, group.comm,
                                          &message.pieces_.back()),
                         "MPI_Irecv");
    }
    return message;
}

bool Message::advance() {
    for (; done_ < pieces_.size(); done_++, progress_++) {
        Status status{};
        int arrived = 0;
        const int code = group_.mpi->Test(&pieces_[done_], &arrived, &status);
        if (code == 0 && !arrived) return false;
        if (receives_) {
            require_match(code, status, piece_nbytes(buffer_, done_));
        } else {
            group_.mpi->check(code, "MPI_Isend");
        }
    }
    return true;
}

void Message::require_match(int code, const Status& status, std::size_t nbytes) const {
    const bool truncated = group_.mpi->is_truncation(code);
    if (!truncated) group_.mpi->check(code, "MPI_Irecv");
    const int tag = group_.mpi->tag(status);
    const std::size_t received = group_.mpi->nbytes(status);
    if (!truncated && tag == tag_of(buffer_.count, buffer_.dtype) && received == nbytes) return;
    const DType dtype = static_cast<DType>(tag & 7);
    std::size_t count = static_cast<std::size_t>(tag) >> 3;
    // The tag knows the count modulo 2^25; a message too long for its receiver had more, a shorter one tells its bytes.
    if (!truncated && pieces_.size() == 1) count = received / item_size(dtype);
    throw std::invalid_argument("rank " + std::to_string(group_.rank) + " expects " +
                                describe(buffer_.count, buffer_.dtype) + " from rank " + std::to_string(peer_) +
                                ", which sent " + describe(count, dtype));
}

bool Message::cancel() {
    for (; done_ < pieces_.size(); done_++) {
        Status status{};
        int finished = 0;
        // Only receives are cancelled: MPI has deprecated the cancelling of sends, which need the peer's help.
        if (receives_ && cancelled_ <= done_) group_.mpi->Cancel(&pieces_[cancelled_++]);
        if (group_.mpi->Test(&pieces_[done_], &finished, &status) == 0 && !finished) return false;
    }
    return true;
}

}  // namespace hpdl
