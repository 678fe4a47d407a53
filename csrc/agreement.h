// Before a collective: do all ranks mean the same one? What they say is compared on every rank, so all raise or none.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "dtype.h"
#include "message.h"
#include "operation.h"

namespace hpdl {

// What one rank is about to do. Plain bytes: it travels through MPI and lies in shared memory.
struct Call {
    char name[16];  // "all_reduce"
    std::int64_t count;
    std::int32_t root;  // -1 where there is none
    DType dtype;
    char zero[3];  // no padding: calls are compared byte by byte

    static Call of(const char* name, std::size_t count, DType dtype, int root = -1);
    bool operator==(const Call& other) const { return std::memcmp(this, &other, sizeof other) == 0; }
    std::string text() const;
};

// Throw std::invalid_argument with the numbers of all ranks unless all calls are equal.
void require_agreement(const std::vector<Call>& calls);

// All ranks exchange their calls, and a few bytes besides, through MPI. Completes when every rank has come.
class Agreement : public Operation {
  public:
    static constexpr std::size_t kNote = 120;  // bytes

    // note: at most kNote bytes for the other ranks. MPI hears of it at the first `advance`, when the caller is ready
    // to keep the memory if it does not complete.
    Agreement(const Group& group, const Call& call, const std::string& note);

    bool advance() override;

    // What every rank had to tell, in rank order; after completion.
    std::vector<std::string> notes() const;
    // What every rank meant, once all have come, also where they disagree.
    const std::vector<Call>& calls() const { return calls_; }

  private:
    struct Entry {
        Call call;
        std::uint32_t note_nbytes;
        char note[kNote];
    };

    void post();

    Group group_;
    bool posted_ = false;
    Entry mine_{};
    std::vector<Entry> all_;
    std::vector<Call> calls_;
    Handle request_;
};

// Two duplicates of a communicator, in which no message of the first can be received. All ranks must come.
class Duplicates : public Operation {
  public:
    Duplicates(const Mpi& mpi, Handle comm);

    bool advance() override;
    Handle first() const { return comms_[1]; }
    Handle second() const { return comms_[2]; }

  private:
    const Mpi* mpi_;
    Handle comms_[3];  // each is a duplicate of the one before
    int made_ = 0;
    Handle request_;
};

}  // namespace hpdl
