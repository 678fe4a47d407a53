#include "ring.h"

#include <algorithm>

#include "consensus.h"
#include "reduce.h"

namespace hpdl {

namespace {

constexpr std::size_t kLongestSegment = std::size_t{1} << 30;  // bytes

// Of `count` elements in p chunks as equal as can be, the longer ones first: as collectives/chunks.py cuts them.
std::size_t chunk_begin(std::size_t count, int p, int i) {
    return i * (count / p) + std::min<std::size_t>(i, count % p);
}

int modulo(long i, int p) { return static_cast<int>((i % p + p) % p); }

}  // namespace

Ring::Ring(const Group& group, const Buffer& x, std::size_t segment, bool traced) : group_(group), x_(x), work_(x) {
    require_addable(x, "all_reduce");
    if (x.dtype == DType::bfloat16 || x.dtype == DType::float16) {
        wide_.resize(x.count);
        loops().widen(x.dtype, x.data, wide_.data(), x.count);
        work_ = {reinterpret_cast<char*>(wide_.data()), x.count, DType::float32};
    }
    const std::size_t longest = (work_.count + group.size - 1) / group.size;
    segment_ = std::max<std::size_t>(1, std::min(segment, kLongestSegment) / item_size(work_.dtype));
    segments_ = static_cast<long>((longest + segment_ - 1) / segment_);
    messages_ = 2L * (group.size - 1) * segments_;
    arriving_.resize(kAhead * std::min(segment_, longest) * item_size(work_.dtype));
    std::fill_n(receives_, kAhead, group.mpi->constants.request_null);
    std::fill_n(sends_, kAhead, group.mpi->constants.request_null);
    if (!traced || messages_ == 0) return;
    sent_steps_.assign(2 * (group.size - 1), {true, 0, 0, 0});
    received_steps_.assign(2 * (group.size - 1), {false, 0, 0, 0});
}

// Segment `segment` of chunk `chunk`; the last ones of a shorter chunk are empty.
Buffer Ring::piece(int chunk, long segment) const {
    const std::size_t begin = chunk_begin(work_.count, group_.size, chunk);
    const std::size_t end = chunk_begin(work_.count, group_.size, chunk + 1);
    const std::size_t from = std::min(end, begin + segment * segment_), to = std::min(end, from + segment_);
    return work_.part(from, to - from);
}

// In step i, reduce-scatter and all-gather one after the other, rank r sends chunk r-i-1 and receives chunk r-i-2.
Buffer Ring::sent_piece(long message) const {
    return piece(modulo(group_.rank - message / segments_ - 1, group_.size), message % segments_);
}

Buffer Ring::received_piece(long message) const {
    return piece(modulo(group_.rank - message / segments_ - 2, group_.size), message % segments_);
}

// All-gather message q overwrites what message q - (p-1) * segments has sent: that must be over. And not too far ahead.
bool Ring::may_receive() const {
    return posted_ < messages_ && posted_ < received_ + kAhead && posted_ - messages_ / 2 < sent_;
}

void Ring::post_receive() {
    const Buffer piece = received_piece(posted_);
    const long slot = posted_ % kAhead;
    char* to = posted_ < messages_ / 2 ? arriving_.data() + slot * (arriving_.size() / kAhead) : piece.data;
    receives_[slot] = group_.mpi->receive(to, piece.nbytes(), src(), kReservedTag, group_.inner);
    begun(received_steps_, posted_++, piece.nbytes());
}

void Ring::post_send() {
    const Buffer piece = sent_piece(sending_);
    sends_[sending_ % kAhead] = group_.mpi->send(piece.data, piece.nbytes(), dst(), kReservedTag, group_.inner);
    begun(sent_steps_, sending_++, piece.nbytes());
}

// What has arrived in the reduce-scatter is the sum of the ranks before this one.
void Ring::take(long message) {
    if (message >= messages_ / 2) return;
    const Buffer piece = received_piece(message);
    char* const sources[2] = {arriving_.data() + message % kAhead * (arriving_.size() / kAhead), piece.data};
    char* const total = piece.data;
    loops().sum(work_.dtype, Sources(sources), {&total, 1}, piece.count);
}

bool Ring::advance() {
    while (may_receive()) post_receive();
    // Of the messages of the first step nothing had to be received; the others are ready when their piece has come.
    while (sending_ < messages_ && sending_ < received_ + segments_ && sending_ < sent_ + kAhead) post_send();
    if (received_ < posted_ && group_.mpi->is_done(receives_[received_ % kAhead], "MPI_Irecv")) {
        ended(received_steps_, received_);
        take(received_++);
        progress_++;
    }
    if (sent_ < sending_ && group_.mpi->is_done(sends_[sent_ % kAhead], "MPI_Isend")) {
        ended(sent_steps_, sent_++);
        progress_++;
    }
    if (received_ < messages_ || sent_ < messages_) return false;
    finish();
    return true;
}

void Ring::begun(std::vector<Transfer>& steps, long message, std::size_t nbytes) {
    if (steps.empty()) return;
    Transfer& step = steps[message / segments_];
    if (message % segments_ == 0) step.t0_ns = now_ns();
    step.nbytes += nbytes;
}

void Ring::ended(std::vector<Transfer>& steps, long message) {
    if (!steps.empty()) steps[message / segments_].t1_ns = now_ns();
}

std::vector<Ring::Transfer> Ring::transfers() const {
    std::vector<Transfer> all(sent_steps_);
    all.insert(all.end(), received_steps_.begin(), received_steps_.end());
    std::stable_sort(all.begin(), all.end(), [](const Transfer& a, const Transfer& b) { return a.t0_ns < b.t0_ns; });
    return all;
}

void Ring::finish() {
    if (done_) return;
    done_ = true;
    if (!wide_.empty()) loops().narrow(x_.dtype, wide_.data(), x_.data, x_.count);
}

Parts all_reduce_by_messages(const Group& group, const Call& call, const Buffer& x, std::size_t segment, bool traced) {
    require_addable(x, "all_reduce");
    const auto compare = [=] { return std::make_shared<Consensus>(group, call, ""); };
    // Not earlier than the part begins: the task before this one may write to x.
    const auto ring = [=] { return std::make_shared<Ring>(group, x, segment, traced); };
    return {{compare, ring}, true};
}

}  // namespace hpdl
